"""Mixtures of experts that are not of another family's line."""

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
from inflight_backend.models.families.llama import (
    ernie,
    hunyuan,
    with_multipliers,
    without_rope_outside_windows,
)
from inflight_backend.models.families.registry import (
    read_plain,
    register_family,
    windows_by_type,
)


def with_moe(model: ModelConfig, moe: MoeConfig, first_dense: int = 0) -> ModelConfig:
    """``model`` with experts in all layers from ``first_dense`` on."""

    def change(index: int, layer: LayerConfig) -> LayerConfig:
        return layer if index < first_dense else replace(layer, mlp=moe)

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
    moe = MoeConfig(
        reader.integer("num_local_experts"),
        reader.integer("num_experts_per_tok"),
        reader.integer("intermediate_size"),
        RoutingConfig("softmax_of_chosen"),
        shared=MlpConfig(size) if size else None,
    )
    return with_moe(model, moe)


@register_family("GptOssForCausalLM", "gpt_oss")
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


def layers_behind(model: ModelConfig) -> tuple[str, ...]:
    """Patterns of the tensors of a layer behind the last one, which predicts a token more."""
    return (rf"(.*\.)?layers\.{model.num_layers}\..*",)


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
    size = reader.integer("moe_intermediate_size")
    key = reader.first_of("n_shared_experts", "num_shared_experts")
    num_shared = reader.integer(key, default=0, minimum=0)
    return MoeConfig(
        reader.integer(reader.first_of("n_routed_experts", "num_experts", "num_local_experts")),
        reader.integer("num_experts_per_tok"),
        size,
        routing,
        shared=MlpConfig(size * num_shared) if num_shared else None,
    )


@register_family("Glm4MoeForCausalLM", "glm4_moe")
def glm4_moe(reader: JsonReader) -> ModelConfig:
    """DeepSeek V3's routing over plain attention, half of a head turns."""
    has_norm = reader.boolean("use_qk_norm", default=False)
    model = read_plain(reader, qk_norm="head" if has_norm else None, is_partial=True)
    model = model.with_attention(lambda *_: {"has_output_bias": False})
    moe = deepseek_experts(reader, deepseek_routing(reader))
    model = with_moe(model, moe, reader.integer("first_k_dense_replace", default=1, minimum=0))
    return replace(model, ignored=layers_behind(model))


@register_family("SolarOpenForCausalLM", "solar_open")
def solar_open(reader: JsonReader) -> ModelConfig:
    """GLM-4.5's experts in all layers."""
    model = read_plain(reader.with_defaults(intermediate_size=1), is_partial=True)
    model = model.with_attention(lambda *_: {"has_output_bias": False})
    return with_moe(model, deepseek_experts(reader, deepseek_routing(reader)))


@register_family("Dots1ForCausalLM", "dots1")
def dots1(reader: JsonReader) -> ModelConfig:
    """DeepSeek V3's routing with norms of heads."""
    window = reader.integer("sliding_window") if "sliding_window" in reader else None
    model = read_plain(reader, qk_norm="head", windows=windows_by_type(reader, window))
    moe = deepseek_experts(reader, deepseek_routing(reader))
    return with_moe(model, moe, reader.integer("first_k_dense_replace", default=0, minimum=0))


@register_family("ExaoneMoeForCausalLM", "exaone_moe")
def exaone_moe(reader: JsonReader) -> ModelConfig:
    """DeepSeek V3's routing with norms of heads; layers without a window do not turn."""
    model = without_rope_outside_windows(reader, read_plain(reader, qk_norm="head"))
    moe = deepseek_experts(reader, deepseek_routing(reader))
    names = replace(model.names, correction="e_score_correction_bias")
    model = with_moe(model, moe, reader.integer("first_k_dense_replace", default=1, minimum=0))
    return replace(model, names=names)


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
    model = with_moe(model, moe, reader.integer("num_dense_layers", default=1, minimum=0))
    is_scaled = reader.boolean("mup_enabled", default=False)
    scale = model.hidden_size**0.5 if is_scaled else 1.0
    return replace(model, block="sandwich", embedding_scale=scale)


@register_family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe")
def ernie_moe(reader: JsonReader) -> ModelConfig:
    """A correction decides which experts are chosen; layers at the ends may have none."""
    model = ernie(reader)
    size = reader.integer("moe_intermediate_size")
    num_shared = reader.integer("moe_num_shared_experts", default=0, minimum=0)
    moe = MoeConfig(
        reader.integer("moe_num_experts"),
        reader.integer("moe_k"),
        size,
        RoutingConfig(is_normalized=True, norm_eps=0.0, has_correction=True),
        shared=MlpConfig(size * num_shared) if num_shared else None,
    )
    first = reader.integer("moe_layer_start_index", default=1, minimum=0)
    last = reader.integer("moe_layer_end_index", default=-1, minimum=-1)
    last = model.num_layers - 1 if last < 0 else last
    every = reader.integer("moe_layer_interval", default=1)

    def change(index: int, layer: LayerConfig) -> LayerConfig:
        is_sparse = first <= index <= last and (index + 1) % every == 0
        return replace(layer, mlp=moe) if is_sparse else layer

    names = replace(
        model.names, correction="moe_statics.e_score_correction_bias", is_correction_row=True
    )
    return replace(model.with_layers(change), names=names)


@register_family("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe")
def hunyuan_moe(reader: JsonReader) -> ModelConfig:
    """Hunyuan with experts and one that all tokens pass."""
    model = hunyuan(reader)
    size = reader.integer("intermediate_size")
    top_k = (
        reader.integers("moe_topk")[0]
        if _is_list(reader, "moe_topk")
        else (reader.integer("moe_topk"))
    )
    moe = MoeConfig(
        reader.integer("num_experts"),
        top_k,
        size,
        RoutingConfig(is_normalized=True),
        shared=MlpConfig(size),
    )
    names = replace(model.names, router="gate.wg", shared="shared_mlp.")
    return with_moe(replace(model, names=names), moe)


def _is_list(reader: JsonReader, key: str) -> bool:
    return reader.is_list(key)


@register_family("Llama4ForCausalLM", "llama4_text")
def llama4(reader: JsonReader) -> ModelConfig:
    """Chunks of positions in layers that turn, plain norms of heads there, queries that grow in the
    others; the weight of an expert multiplies its input."""
    size = reader.integer("intermediate_size")
    dense = reader.with_values(intermediate_size=reader.integer("intermediate_size_mlp"))
    names = WeightNames(
        mlp="feed_forward.",
        router="router",
        expert_layout="transposed",
        expert_gate="experts.gate_up_proj",
        expert_down="experts.down_proj",
        shared="shared_expert.",
    )
    model = read_plain(dense, names=names, is_interleaved=True)
    turning = reader.integers("no_rope_layers") or [
        int((layer + 1) % 4 != 0) for layer in range(model.num_layers)
    ]
    chunk = reader.integer("attention_chunk_size", default=8192)
    has_norm = reader.boolean("use_qk_norm", default=True)
    temperature = None
    if reader.boolean("attn_temperature_tuning", default=True):
        scale = reader.number("attn_scale", default=0.1)
        temperature = (scale, float(reader.integer("floor_scale", default=8192)), 1.0)
    model = model.with_attention(
        lambda index, attention: {
            "rope": attention.rope if turning[index] else None,
            "chunk": chunk if turning[index] else None,
            "qk_norm": "plain" if turning[index] and has_norm else None,
            "temperature": None if turning[index] else temperature,
        }
    )
    every = reader.integer("interleave_moe_layer_step", default=1)
    sparse = reader.integers("moe_layers") or range(every - 1, model.num_layers, every)
    moe = MoeConfig(
        reader.integer("num_local_experts"),
        reader.integer("num_experts_per_tok"),
        size,
        RoutingConfig("sigmoid_of_chosen", scales_input=True),
        shared=MlpConfig(size),
    )
    return model.with_layers(
        lambda index, layer: replace(layer, mlp=moe) if index in sparse else layer
    )


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
        RoutingConfig(is_normalized=True),
    )
    return with_moe(model, moe)
