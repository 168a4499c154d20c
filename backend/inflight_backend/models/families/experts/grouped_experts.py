"""Experts as DeepSeek V3 routes them, over plain attention: GLM-4.5, Solar, dots1, EXAONE, AFM."""

from collections.abc import Sequence
from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import (
    MlpConfig,
    ModelConfig,
    MoeConfig,
    RoutingConfig,
    WeightNames,
)
from inflight_backend.models.families.experts.plain_experts import with_moe
from inflight_backend.models.families.llama import without_rope_outside_windows
from inflight_backend.models.families.registry import (
    read_activation,
    read_plain,
    register_family,
    windows_by_type,
)


def layers_behind(model: ModelConfig) -> tuple[str, ...]:
    """Patterns of the tensors of a layer behind the last one, which predicts a token more."""
    return (rf"(.*\.)?layers\.{model.num_layers}\..*",)


def dense_layers(reader: JsonReader, default: int) -> Sequence[int]:
    """Those without experts: of ``mlp_layer_types``, else the first ``first_k_dense_replace``, or
    ``default``."""
    if kinds := reader.texts("mlp_layer_types"):
        return [index for index, kind in enumerate(kinds) if kind == "dense"]
    return range(reader.integer("first_k_dense_replace", default=default, minimum=0))


def deepseek_routing(reader: JsonReader) -> RoutingConfig:
    """Sigmoid scores with a correction, by groups (DeepSeek V3)."""
    return RoutingConfig(
        "sigmoid",
        is_normalized=reader.boolean("norm_topk_prob", default=True),
        norm_eps=1e-20,
        has_correction=True,
        num_groups=reader.integer("n_group", default=1),
        num_chosen_groups=reader.integer("topk_group", default=1),
        group_score="top2",
        scale=reader.number("routed_scaling_factor", default=1.0),
    )


def deepseek_experts(reader: JsonReader, routing: RoutingConfig) -> MoeConfig:
    """``n_routed_experts`` and ``n_shared_experts`` of ``moe_intermediate_size``."""
    size, activation = reader.integer("moe_intermediate_size"), read_activation(reader)
    key = reader.first_of("n_shared_experts", "num_shared_experts")
    num_shared = reader.integer(key, default=0, minimum=0)
    return MoeConfig(
        reader.integer(reader.first_of("n_routed_experts", "num_experts", "num_local_experts")),
        reader.integer("num_experts_per_tok"),
        size,
        routing,
        activation=activation,
        shared=MlpConfig(size * num_shared, activation) if num_shared else None,
    )


@register_family("Glm4MoeForCausalLM", "glm4_moe", partial_rotary_factor=0.5)
def glm4_moe(reader: JsonReader) -> ModelConfig:
    """DeepSeek V3's routing over plain attention, half of a head turns."""
    has_norm = reader.boolean("use_qk_norm", default=False)
    model = read_plain(reader, qk_norm="head" if has_norm else None, is_partial=True)
    model = model.with_attention(lambda *_: {"has_output_bias": False})
    moe = deepseek_experts(reader, deepseek_routing(reader))
    model = with_moe(model, moe, dense_layers(reader, 1))
    return replace(model, ignored=layers_behind(model))


@register_family("SolarOpenForCausalLM", "solar_open", rope_theta=1e6)
def solar_open(reader: JsonReader) -> ModelConfig:
    """GLM-4.5's experts in all layers."""
    model = read_plain(reader.with_defaults(intermediate_size=1), is_partial=True)
    model = model.with_attention(lambda *_: {"has_output_bias": False})
    return with_moe(model, deepseek_experts(reader, deepseek_routing(reader)))


@register_family("Dots1ForCausalLM", "dots1", norm_topk_prob=False)
def dots1(reader: JsonReader) -> ModelConfig:
    """DeepSeek V3's routing with norms of heads."""
    window = reader.integer("sliding_window") if "sliding_window" in reader else None
    model = read_plain(reader, qk_norm="head", windows=windows_by_type(reader, window))
    moe = deepseek_experts(reader, deepseek_routing(reader))
    return with_moe(model, moe, dense_layers(reader, 0))


@register_family("ExaoneMoeForCausalLM", "exaone_moe", routed_scaling_factor=2.5)
def exaone_moe(reader: JsonReader) -> ModelConfig:
    """DeepSeek V3's routing with norms of heads; layers without a window do not turn."""
    model = without_rope_outside_windows(reader, read_plain(reader, qk_norm="head"))
    moe = deepseek_experts(reader, deepseek_routing(reader))
    names = replace(model.names, correction="e_score_correction_bias")
    return replace(with_moe(model, moe, dense_layers(reader, 1)), names=names)


@register_family("AfmoeForCausalLM", "afmoe")
def afmoe(reader: JsonReader) -> ModelConfig:
    """Norms before and behind both branches, gates of heads, full layers that do not turn; scores
    by sigmoid with a correction."""
    every = reader.integer("global_attn_every_n_layers", default=4)
    windows = windows_by_type(
        reader,
        reader.integer("sliding_window", default=1024),
        lambda layer: "full_attention" if (layer + 1) % every == 0 else "sliding_attention",
    )
    names = WeightNames(
        attention_output_norm="post_attention_layernorm",
        mlp_norm="pre_mlp_layernorm",
        attention_gate="gate_proj",
        router="router.gate",
        correction="expert_bias",
    )
    if reader.boolean("attention_bias", default=False):
        reader.fail("attention_bias", "true is not supported")
    model = read_plain(reader, names=names, qk_norm="head", windows=windows)
    model = model.with_attention(
        lambda _, attention: {
            "has_gate": True,
            "rope": attention.rope if attention.window is not None else None,
        }
    )
    routing = RoutingConfig(
        "sigmoid",
        is_normalized=True,
        norm_eps=1e-20,
        has_correction=True,
        scale=reader.number("route_scale", default=1.0),
    )
    moe = deepseek_experts(reader, routing)
    model = with_moe(model, moe, range(reader.integer("num_dense_layers", default=1, minimum=0)))
    is_scaled = reader.boolean("mup_enabled", default=False)
    scale = model.hidden_size**0.5 if is_scaled else 1.0
    return replace(model, block="sandwich", embedding_scale=scale)
