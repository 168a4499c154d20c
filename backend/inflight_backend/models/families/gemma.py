"""Gemma 1 to 4: embeddings are scaled, and most norms stand before and behind a branch."""

from dataclasses import replace
from functools import partial

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import (
    AttentionConfig,
    LayerConfig,
    ModelConfig,
    MoeConfig,
    NormConfig,
    RoutingConfig,
    WeightNames,
)
from inflight_backend.models.families.llama import with_ropes_by_window
from inflight_backend.models.families.registry import (
    read_activation,
    read_plain,
    register_family,
    windows_by_type,
)
from inflight_backend.models.families.rope import read_rope

_SANDWICH = WeightNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)


@register_family("GemmaForCausalLM", "gemma")
def gemma(reader: JsonReader) -> ModelConfig:
    """GELU by tanh is meant whatever ``hidden_act`` says, as in transformers."""
    return _read(reader, WeightNames(), "gelu_tanh")


def _read(
    reader: JsonReader,
    names: WeightNames,
    activation: str,
    windows: tuple[int | None, ...] = (),
    qk_norm: str | None = None,
) -> ModelConfig:
    norm = NormConfig(eps=reader.number("rms_norm_eps", default=1e-6), offset=1.0)
    model = read_plain(
        reader,
        norm=norm,
        names=names,
        tied=True,
        activation=activation,
        windows=windows,
        qk_norm=qk_norm,
        rope=not qk_norm,  # Gemma 3 has two
        needs_head_dim=True,
    )
    return replace(model, embedding_scale=model.hidden_size**0.5)


@register_family("Gemma2ForCausalLM", "gemma2")
def gemma2(reader: JsonReader) -> ModelConfig:
    """Norms before and behind both branches, soft caps, every other layer slides."""
    windows = windows_by_type(
        reader,
        reader.integer("sliding_window", default=4096),
        lambda layer: "full_attention" if layer % 2 else "sliding_attention",
    )
    return _sandwich(reader, windows, None)


@register_family("Gemma3ForCausalLM", "gemma3_text")
def gemma3(reader: JsonReader) -> ModelConfig:
    """No soft caps, norms of heads, two ropes, five of six layers slide."""
    every = reader.integer("sliding_window_pattern", default=6)
    windows = windows_by_type(
        reader,
        reader.integer("sliding_window", default=4096),
        lambda layer: "full_attention" if (layer + 1) % every == 0 else "sliding_attention",
    )
    model = _sandwich(reader, windows, "head")
    return with_ropes_by_window(reader, model, local_theta="rope_local_base_freq")


@register_family("Gemma4ForCausalLM", "gemma4_text")
def gemma4(reader: JsonReader) -> ModelConfig:
    """Norms without the 1, scores that are not scaled, norms of values, a number for each layer;
    layers without a window have heads of another size and may take keys for values. The small ones
    have inputs for each layer, and last layers that read another's cache; one has experts."""
    model = read_plain(
        reader,
        names=_SANDWICH,
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
    return _with_shared_caches(reader, model)


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


def _with_shared_caches(reader: JsonReader, model: ModelConfig) -> ModelConfig:
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


def _sandwich(
    reader: JsonReader, windows: tuple[int | None, ...], qk_norm: str | None
) -> ModelConfig:
    activation = read_activation(reader, "hidden_activation", "gelu_pytorch_tanh")
    model = _read(reader, _SANDWICH, activation, windows, qk_norm)
    scale = reader.number("query_pre_attn_scalar", default=256.0) ** -0.5
    softcap, final = (
        reader.number(key) if key in reader else None
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    )
    model = model.with_attention(lambda *_: {"scale": scale, "softcap": softcap})
    return replace(model, block="sandwich", final_softcap=final)
