"""Gemma 1 to 3: embeddings are scaled, and most norms stand before and behind a branch."""

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import (
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

SANDWICH = WeightNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)


@register_family("GemmaForCausalLM", "gemma")
def gemma(reader: JsonReader) -> ModelConfig:
    """GELU by tanh is meant where the first files say "gelu"."""
    activation = read_activation(reader, default=(tanh := "gelu_pytorch_tanh"))
    return _read(reader, WeightNames(), tanh if activation == "gelu" else activation)


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


@register_family("Gemma3ForCausalLM", "gemma3_text", rope_theta=1e6)
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


def _sandwich(
    reader: JsonReader, windows: tuple[int | None, ...], qk_norm: str | None
) -> ModelConfig:
    activation = read_activation(reader, "hidden_activation", "gelu_pytorch_tanh")
    model = _read(reader, SANDWICH, activation, windows, qk_norm)
    scale = reader.number("query_pre_attn_scalar", default=256.0) ** -0.5
    softcap, final = (
        reader.number(key) if key in reader else None
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    )
    model = model.with_attention(lambda *_: {"scale": scale, "softcap": softcap})
    return replace(model, block="sandwich", final_softcap=final)
