"""Gemma 4: layers of two kinds, whose last ones read the cache of others."""

from dataclasses import replace
from functools import partial

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import (
    AttentionConfig,
    LayerConfig,
    ModelConfig,
    MoeConfig,
    RoutingConfig,
)
from inflight_backend.models.families.gemma.gemma import SANDWICH
from inflight_backend.models.families.registry import (
    read_activation,
    read_plain,
    register_family,
    windows_by_type,
)
from inflight_backend.models.families.rope import read_rope


@register_family("Gemma4ForCausalLM", "gemma4_text")
def gemma4(reader: JsonReader) -> ModelConfig:
    """Norms without the 1, scores that are not scaled, norms of values, a number for each layer;
    layers without a window have heads of another size and may take keys for values. The small ones
    have inputs for each layer, and last layers that read another's cache; one has experts."""
    model = read_plain(
        reader,
        names=SANDWICH,
        tied=True,
        activation=read_activation(reader, "hidden_activation", "gelu_pytorch_tanh"),
        windows=windows_by_type(reader, reader.integer("sliding_window", default=512)),
        qk_norm="head",
        rope=False,
        needs_head_dim=True,
        has_own_layers=True,
    )
    model = model.with_attention(partial(_gemma4_attention, reader))
    moe = None
    if reader.boolean("enable_moe_block", default=False):
        moe = MoeConfig(
            reader.integer("num_experts"),
            reader.integer("top_k_experts"),
            reader.integer("moe_intermediate_size"),
            RoutingConfig(is_normalized=True, has_input_norm=True, has_expert_scales=True),
            activation=model.layers[0].mlp.activation,
        )
    model = model.with_layers(lambda _, layer: replace(layer, has_scalar=True, experts_beside=moe))
    key = "final_logit_softcapping"
    model = replace(
        model,
        block="sandwich",
        embedding_scale=model.hidden_size**0.5,
        layer_input_size=reader.integer("hidden_size_per_layer_input", default=0, minimum=0),
        final_softcap=reader.number(key) if key in reader else None,
    )
    return with_shared_caches(reader, model)


def _gemma4_attention(
    reader: JsonReader, index: int, attention: AttentionConfig
) -> dict[str, object]:
    """Sizes of heads by kind of layer, or written for each; keys of ``per_layer_config`` are the
    numbers of layers, with zeros in front or not."""
    sections = reader.section("per_layer_config")
    key = next((each for each in sections if each.isdigit() and int(each) == index), str(index))
    own, is_local = sections.section(key), attention.window is not None
    head_dim, num_kv_heads = attention.head_dim, attention.num_kv_heads
    if not is_local:
        head_dim = reader.integer("global_head_dim", default=head_dim)
        num_kv_heads = reader.integer("num_global_key_value_heads", default=num_kv_heads)
    head_dim = own.integer("head_dim", default=head_dim)
    kind = "sliding_attention" if is_local else "full_attention"
    return {
        "head_dim": head_dim,
        "num_kv_heads": own.integer("num_key_value_heads", default=num_kv_heads),
        "scale": 1.0,
        "rope": read_rope(reader, head_dim, kind_of_layer=kind),
        "has_value_norm": True,
        "is_value_key": not is_local and reader.boolean("attention_k_eq_v", default=False),
    }


def with_shared_caches(reader: JsonReader, model: ModelConfig) -> ModelConfig:
    """``model`` whose last ``num_kv_shared_layers`` read the cache of the last one before them that
    has a window, or none, as they have; their feed-forward layers may be twice as wide."""
    first = model.num_layers - reader.integer("num_kv_shared_layers", default=0, minimum=0)
    if first == model.num_layers:
        return model
    sources = {layer.attention.window: index for index, layer in enumerate(model.layers[:first])}
    is_wide = reader.boolean("use_double_wide_mlp", default=False)

    def change(index: int, layer: LayerConfig) -> LayerConfig:
        if index < first:
            return layer
        source = sources.get(layer.attention.window)
        if source is None:
            reader.fail("num_kv_shared_layers", f"leaves no layer whose cache layer {index} reads")
        attention = replace(
            layer.attention, kv_source=source, has_value_norm=False, is_value_key=False
        )
        mlp = replace(layer.mlp, size=layer.mlp.size * 2) if is_wide else layer.mlp
        return replace(layer, attention=attention, mlp=mlp)

    numbers = "|".join(map(str, range(first, model.num_layers)))
    unused = rf"(.*\.)?layers\.({numbers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
    return replace(model.with_layers(change), ignored=(unused,))
