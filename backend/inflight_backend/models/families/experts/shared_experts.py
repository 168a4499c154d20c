"""Experts beside one that all tokens pass: ERNIE 4.5, Hunyuan, Llama 4."""

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
from inflight_backend.models.families.experts.plain_experts import with_moe
from inflight_backend.models.families.glm import ernie, hunyuan
from inflight_backend.models.families.registry import (
    layer_kinds,
    read_activation,
    read_plain,
    register_family,
)
from inflight_backend.models.families.rope import without_scale


@register_family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", rope_theta=5e5)
def ernie_moe(reader: JsonReader) -> ModelConfig:
    """A correction decides which experts are chosen; layers at the ends may have none."""
    model = ernie(reader)
    size = reader.integer("moe_intermediate_size")
    num_shared = reader.integer("moe_num_shared_experts", default=0, minimum=0)
    has_bias = reader.boolean("use_bias", default=False)
    activation = read_activation(reader)
    moe = MoeConfig(
        reader.integer("moe_num_experts"),
        reader.integer("moe_k"),
        size,
        RoutingConfig(is_normalized=True, norm_eps=0.0, has_correction=True),
        activation=activation,
        shared=MlpConfig(size * num_shared, activation, has_bias=has_bias) if num_shared else None,
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
    return replace(model.with_layers(change), names=names, has_head_bias=has_bias)


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
    activation = read_activation(reader)
    moe = MoeConfig(
        reader.integer("num_experts"),
        top_k,
        size,
        RoutingConfig(is_normalized=True),
        activation=activation,
        shared=MlpConfig(size, activation),
    )
    names = replace(model.names, router="gate.wg", shared="shared_mlp.")
    return with_moe(replace(model, names=names), moe)


def _is_list(reader: JsonReader, key: str) -> bool:
    return reader.is_list(key)


@register_family("Llama4ForCausalLM", "llama4_text", rope_theta=5e5)
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
    kinds = layer_kinds(
        reader,
        "chunked_attention",
        "full_attention",
        default=lambda layer: "chunked_attention" if turning[layer] else "full_attention",
    )
    has_norm = reader.boolean("use_qk_norm", default=True)
    temperature = None
    if reader.boolean("attn_temperature_tuning", default=True):
        scale = reader.number("attn_scale", default=0.1)
        temperature = (scale, float(reader.integer("floor_scale", default=8192)), 1.0)
    if has_norm:  # behind the turning, so that its scale has no effect
        model = model.with_attention(lambda _, each: {"rope": without_scale(each.rope)})
    model = model.with_attention(
        lambda index, attention: {
            "rope": attention.rope if turning[index] else None,
            "chunk": chunk if kinds[index] == "chunked_attention" else None,
            "qk_norm": "plain" if turning[index] and has_norm else None,
            "temperature": None if turning[index] else temperature,
        }
    )
    every = reader.integer("interleave_moe_layer_step", default=1)
    sparse = reader.integers("moe_layers") or range(every - 1, model.num_layers, every)
    activation = read_activation(reader)
    moe = MoeConfig(
        reader.integer("num_local_experts"),
        reader.integer("num_experts_per_tok"),
        size,
        RoutingConfig("sigmoid_of_chosen", scales_input=True),
        activation=activation,
        shared=MlpConfig(size, activation),
    )
    return model.with_layers(
        lambda index, layer: replace(layer, mlp=moe) if index in sparse else layer
    )
