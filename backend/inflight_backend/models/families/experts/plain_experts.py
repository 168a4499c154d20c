"""Mixtures of experts that are not of another family's line."""

from collections.abc import Container
from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import (
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    NormConfig,
    RoutingConfig,
    WeightNames,
)
from inflight_backend.models.families.llama import with_multipliers
from inflight_backend.models.families.registry import (
    read_activation,
    read_plain,
    register_family,
    windows_by_type,
)


def with_moe(model: ModelConfig, moe: MoeConfig, dense: Container[int] = ()) -> ModelConfig:
    """``model`` with experts in all layers but those of the numbers ``dense``."""

    def change(index: int, layer: LayerConfig) -> LayerConfig:
        return layer if index in dense else replace(layer, mlp=moe)

    return model.with_layers(change)


@register_family("OlmoeForCausalLM", "olmoe")
def olmoe(reader: JsonReader) -> ModelConfig:
    """Norms over all heads, bounded queries, keys and values."""
    model = read_plain(reader, qk_norm="full")
    clip = reader.number("clip_qkv") if "clip_qkv" in reader else None
    model = model.with_attention(lambda *_: {"clip": clip})
    moe = MoeConfig(
        reader.integer("num_experts"),
        reader.integer("num_experts_per_tok"),
        reader.integer("intermediate_size"),
        RoutingConfig(is_normalized=reader.boolean("norm_topk_prob", default=False)),
        activation=read_activation(reader),
    )
    return with_moe(model, moe)


_GRANITE_NAMES = WeightNames(
    mlp="",
    router="block_sparse_moe.router.layer",
    expert_layout="stacked",
    expert_gate="block_sparse_moe.input_linear.weight",
    expert_down="block_sparse_moe.output_linear.weight",
    shared="shared_mlp.",
    shared_gate_up="input_linear",
    shared_down="output_linear",
)


@register_family("GraniteMoeForCausalLM", "granitemoe")
@register_family("GraniteMoeSharedForCausalLM", "granitemoeshared")
def granite_moe(reader: JsonReader) -> ModelConfig:
    """Granite with experts whose weights are the softmax of the chosen scores."""
    model = with_multipliers(reader, read_plain(reader, names=_GRANITE_NAMES))
    size = reader.integer("shared_intermediate_size", default=0, minimum=0)
    activation = read_activation(reader)
    moe = MoeConfig(
        reader.integer("num_local_experts"),
        reader.integer("num_experts_per_tok"),
        reader.integer("intermediate_size"),
        RoutingConfig("softmax_of_chosen"),
        activation=activation,
        shared=MlpConfig(size, activation) if size else None,
    )
    return with_moe(model, moe)


@register_family("GraniteMoeHybridForCausalLM", "granitemoehybrid")
def granite_hybrid(reader: JsonReader) -> ModelConfig:
    """Granite 4 without recurrences (micro, 1b, 350m): what all tokens pass is all there is, or
    stands beside experts."""
    kinds = reader.texts(key := reader.first_of("layer_types", "layers_block_type"))
    if set(kinds) - {"attention", "full_attention"}:
        reader.fail(key, "holds layers of Mamba, which are not supported")
    if reader.integer("num_local_experts", default=8, minimum=0):
        model = granite_moe(reader)
    else:
        names = WeightNames(mlp="shared_mlp.", gate_up="input_linear", down="output_linear")
        size = reader.integer("shared_intermediate_size", default=1024)
        dense = read_plain(reader.with_values(intermediate_size=size), names=names)
        model = with_multipliers(reader, dense)
    turns = reader.text("position_embedding_type", default="nope") == "rope"
    return model if turns else model.with_attention(lambda *_: {"rope": None})


@register_family("GptOssForCausalLM", "gpt_oss", rope_theta=1.5e5)
def gpt_oss(reader: JsonReader) -> ModelConfig:
    """Sinks, every other layer slides, experts with biases and a clamped activation."""
    names = WeightNames(
        router="router",
        expert_layout="interleaved",
        expert_gate="experts.gate_up_proj",
        expert_down="experts.down_proj",
    )
    windows = windows_by_type(
        reader,
        reader.integer("sliding_window", default=128),
        lambda layer: "full_attention" if layer % 2 else "sliding_attention",
    )
    has_bias = reader.boolean("attention_bias", default=True)
    model = read_plain(reader, names=names, bias=has_bias, windows=windows)
    model = model.with_attention(lambda *_: {"has_sinks": True})
    moe = MoeConfig(
        reader.integer("num_local_experts"),
        reader.integer("num_experts_per_tok"),
        reader.integer("intermediate_size"),
        RoutingConfig("softmax_of_chosen"),
        activation="clamped_swiglu",
        has_bias=True,
        has_router_bias=True,
    )
    return with_moe(model, moe)


@register_family("DbrxForCausalLM", "dbrx")
def dbrx(reader: JsonReader) -> ModelConfig:
    """LayerNorm without bias, experts stored side by side."""
    attention, experts = reader.section("attn_config"), reader.section("ffn_config")
    reader = reader.with_names(
        hidden_size="d_model", num_attention_heads="n_heads", num_hidden_layers="n_layers",
        max_position_embeddings="max_seq_len",
    )  # fmt: skip
    size = experts.integer("ffn_hidden_size")
    values: dict[str, object] = {
        "num_key_value_heads": attention.integer("kv_n_heads"),
        "intermediate_size": size,
    }
    if "rope_theta" in attention:
        values["rope_theta"] = attention.number("rope_theta")
    names = WeightNames(
        prefix="transformer.",
        layers="blocks.",
        embedding="wte",
        final_norm="norm_f",
        input_norm="norm_attn_norm.norm_1",
        mlp_norm="norm_attn_norm.norm_2",
        attention="norm_attn_norm.attn.",
        qkv="Wqkv",
        output="out_proj",
        mlp="ffn.",
        router="router.layer",
        expert_layout="joined",
        expert_gate="experts.mlp.w1",
        expert_up="experts.mlp.v1",
        expert_down="experts.mlp.w2",
    )
    model = read_plain(
        reader.with_values(**values), norm=NormConfig("layer", 1e-5), names=names, bias=False
    )
    clip = attention.number("clip_qkv") if "clip_qkv" in attention else None
    model = model.with_attention(lambda *_: {"clip": clip})
    moe = MoeConfig(
        experts.integer("moe_num_experts"),
        experts.integer("moe_top_k"),
        size,
        RoutingConfig(is_normalized=_is_normalized(experts)),
        read_activation(experts.section("ffn_act_fn"), "name"),
    )
    return with_moe(model, moe)


def _is_normalized(experts: JsonReader) -> bool:
    """Weights are divided by their sum, or by nothing where the file says null."""
    key = "moe_normalize_expert_weights"
    if experts.is_null(key):
        return False
    if (norm := experts.number(key, default=1.0)) != 1:
        experts.fail(key, f"must be 1 or null, not {norm}")
    return True
