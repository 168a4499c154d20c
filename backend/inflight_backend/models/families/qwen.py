"""Qwen2 to Qwen3, dense and mixtures of experts."""

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import (
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    RoutingConfig,
    WeightNames,
)
from inflight_backend.models.families.registry import (
    qwen_windows,
    read_activation,
    read_plain,
    register_family,
)


@register_family("Qwen2ForCausalLM", "qwen2")
def qwen2(reader: JsonReader) -> ModelConfig:
    """Biases on query, key and value."""
    model = read_plain(reader, bias=False, windows=qwen_windows(reader), needs_kv_heads=True)
    return model.with_attention(lambda *_: {"has_qkv_bias": True})


@register_family("Qwen3ForCausalLM", "qwen3")
def qwen3(reader: JsonReader) -> ModelConfig:
    """Query and key are normed per head before they turn; ``attention_bias`` puts a bias on all
    four projections."""
    return read_plain(
        reader,
        qk_norm="head",
        windows=qwen_windows(reader),
        needs_kv_heads=True,
        needs_head_dim=True,
    )


@register_family("Qwen2MoeForCausalLM", "qwen2_moe")
def qwen2_moe(reader: JsonReader) -> ModelConfig:
    """Experts in some layers, and one that all tokens pass, behind a gate."""
    size = reader.integer("shared_expert_intermediate_size")
    shared = MlpConfig(size, read_activation(reader))
    model = qwen2(reader)
    has_bias = reader.boolean("qkv_bias", default=True)
    model = model.with_attention(lambda *_: {"has_qkv_bias": has_bias})
    return with_experts(reader, model, shared)


@register_family("Qwen3MoeForCausalLM", "qwen3_moe")
def qwen3_moe(reader: JsonReader) -> ModelConfig:
    """Experts in some layers of a Qwen3; where windows are on, all layers slide."""
    return with_experts(reader, qwen3(reader.with_values(max_window_layers=0)), None)


def with_experts(reader: JsonReader, model: ModelConfig, shared: MlpConfig | None) -> ModelConfig:
    """``model`` with experts in every ``decoder_sparse_step``-th layer but ``mlp_only_layers``."""
    moe = MoeConfig(
        reader.integer(reader.first_of("num_experts", "num_local_experts")),
        reader.integer("num_experts_per_tok"),
        reader.integer("moe_intermediate_size"),
        RoutingConfig(is_normalized=reader.boolean("norm_topk_prob", default=False)),
        activation=read_activation(reader),
        shared=shared,
        has_shared_gate=shared is not None,
    )
    step = reader.integer("decoder_sparse_step", default=1)
    dense = set(reader.integers("mlp_only_layers"))

    def change(index: int, layer: LayerConfig) -> LayerConfig:
        is_sparse = index not in dense and (index + 1) % step == 0
        return replace(layer, mlp=moe) if is_sparse else layer

    names = replace(model.names, shared="shared_expert.")
    return replace(model.with_layers(change), names=names)


@register_family("MixtralForCausalLM", "mixtral", rope_theta=1e6)
def mixtral(reader: JsonReader) -> ModelConfig:
    """Experts in all layers, weights normalised."""
    window = reader.integer("sliding_window") if "sliding_window" in reader else None
    num_layers = reader.integer("num_hidden_layers", maximum=1024)
    model = read_plain(reader, bias=False, windows=(window,) * num_layers)
    moe = MoeConfig(
        reader.integer("num_local_experts"),
        reader.integer("num_experts_per_tok"),
        reader.integer("intermediate_size"),
        RoutingConfig(is_normalized=True),
        activation=read_activation(reader),
    )
    names = mixtral_names(model.names)
    return replace(model.with_layers(lambda _, layer: replace(layer, mlp=moe)), names=names)


def mixtral_names(names: WeightNames) -> WeightNames:
    """The experts' tensors as Mixtral calls them."""
    return replace(
        names,
        mlp="block_sparse_moe.",
        expert_gate="w1",
        expert_up="w3",
        expert_down="w2",
        correction="e_score_correction_bias",
    )


@register_family("MiniMaxM2ForCausalLM", "minimax_m2", rope_theta=5e6)
def minimax_m2(reader: JsonReader) -> ModelConfig:
    """Norms over all heads, half of a head turns, scores by sigmoid with a correction."""
    # Files of transformers 5 have the share of a head in their rope section, if it is not all.
    is_old = "rotary_dim" in reader and "rope_parameters" not in reader
    dim = reader.integer("rotary_dim") if is_old else None
    model = read_plain(reader, bias=False, qk_norm="full", rotary_dim=dim, is_partial=True)
    moe = MoeConfig(
        reader.integer("num_local_experts"),
        reader.integer("num_experts_per_tok"),
        reader.integer("intermediate_size"),
        RoutingConfig("sigmoid", is_normalized=True, norm_eps=1e-20, has_correction=True),
        activation=read_activation(reader),
    )
    names = mixtral_names(model.names)
    return replace(model.with_layers(lambda _, layer: replace(layer, mlp=moe)), names=names)
