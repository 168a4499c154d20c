"""Gemma 1 to 3: weights of norms have 1 added, embeddings are scaled."""

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import (
    AttentionConfig,
    ModelConfig,
    NormConfig,
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
    """Dense: norms without the 1, scores that are not scaled, norms of values, a number for each
    layer; layers without a window have heads of another size and may take keys for values."""
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if reader.integer(key, default=0, minimum=0):
            reader.fail(key, "other than 0 is not supported")
    if reader.boolean("enable_moe_block", default=False):
        reader.fail("enable_moe_block", "true is not supported")
    windows = windows_by_type(reader, reader.integer("sliding_window", default=512))
    model = read_plain(
        reader,
        names=_SANDWICH,
        tied=True,
        activation=read_activation(reader, "hidden_activation", "gelu_pytorch_tanh"),
        windows=windows,
        qk_norm="head",
        rope=False,
        needs_head_dim=True,
        has_own_layers=True,
    )
    is_value_key = reader.boolean("attention_k_eq_v", default=False)

    def change(index: int, attention: AttentionConfig) -> dict[str, object]:
        own = reader.section("per_layer_config").section(str(index))
        is_local = attention.window is not None
        head_dim, num_kv_heads = attention.head_dim, attention.num_kv_heads
        if not is_local:
            head_dim = reader.integer("global_head_dim", default=head_dim)
            key = "num_global_key_value_heads"
            num_kv_heads = reader.integer(key, default=num_kv_heads)
        head_dim = own.integer("head_dim", default=head_dim)
        kind = "sliding_attention" if is_local else "full_attention"
        return {
            "head_dim": head_dim,
            "num_kv_heads": own.integer("num_key_value_heads", default=num_kv_heads),
            "scale": 1.0,
            "rope": read_rope(reader, head_dim, kind_of_layer=kind),
            "has_value_norm": True,
            "is_value_key": is_value_key and not is_local,
        }

    model = model.with_attention(change)
    model = model.with_layers(lambda _, layer: replace(layer, has_scalar=True))
    key = "final_logit_softcapping"
    return replace(
        model,
        block="sandwich",
        embedding_scale=model.hidden_size**0.5,
        final_softcap=reader.number(key) if key in reader else None,
    )


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
