"""Cohere 1 and 2, StableLM and Nemotron: LayerNorm, and most with parallel branches."""

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.families.registry import (
    layer_norm,
    read_plain,
    register_family,
    windows_by_type,
)


@register_family("NemotronForCausalLM", "nemotron", hidden_act="relu2", partial_rotary_factor=0.5)
def nemotron(reader: JsonReader) -> ModelConfig:
    """LayerNorm whose weights have 1 added, no gate, squared ReLU, half of a head turns."""
    norm = replace(layer_norm(reader, "norm_eps"), offset=1.0)
    return read_plain(reader, norm=norm, gated=False, is_partial=True)


@register_family("StableLmForCausalLM", "stablelm", partial_rotary_factor=0.25)
def stablelm(reader: JsonReader) -> ModelConfig:
    """LayerNorm; 2-12B has parallel branches and a norm for each head."""
    model = read_plain(reader, norm=layer_norm(reader, "layer_norm_eps"), is_partial=True)
    has_bias = reader.boolean("use_qkv_bias", default=False)
    has_head_norms = reader.boolean("qk_layernorm", default=False)
    head_norm = replace(model.norm, has_bias=False)
    model = model.with_attention(
        lambda *_: {
            "has_qkv_bias": has_bias,
            "qk_norm": "per_head_list" if has_head_norms else None,
            "qk_norm_kind": head_norm,
        }
    )
    is_parallel = reader.boolean("use_parallel_residual", default=False)
    names = replace(model.names, query_norm="q_layernorm", key_norm="k_layernorm")
    return replace(model, block="parallel" if is_parallel else "pre", names=names)


@register_family("CohereForCausalLM", "cohere", rope_theta=5e5)
def cohere(reader: JsonReader) -> ModelConfig:
    """LayerNorm without bias, parallel branches, neighbours turn together, a scale of logits."""
    norm = layer_norm(reader, "layer_norm_eps", has_bias=False)
    model = read_plain(reader, norm=norm, tied=True, is_interleaved=True)
    has_norm = reader.boolean("use_qk_norm", default=False)
    model = model.with_attention(lambda *_: {"qk_norm": "per_head" if has_norm else None})
    return replace(
        model, block="parallel", logit_scale=reader.number("logit_scale", default=0.0625)
    )


@register_family("Cohere2ForCausalLM", "cohere2")
def cohere2(reader: JsonReader) -> ModelConfig:
    """Cohere whose layers without a window do not turn."""
    every = reader.integer("sliding_window_pattern", default=4)
    windows = windows_by_type(
        reader,
        reader.integer("sliding_window", default=4096),
        lambda layer: "full_attention" if (layer + 1) % every == 0 else "sliding_attention",
    )
    return cohere(reader).with_attention(
        lambda index, attention: {
            "window": windows[index],
            "rope": attention.rope if windows[index] is not None else None,
        }
    )
