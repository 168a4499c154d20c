"""Qwen3-Next, Qwen3.5 and 3.6: most layers have a recurrence in place of attention."""

from __future__ import annotations

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import (
    DeltaConfig,
    DeltaNames,
    MlpConfig,
    ModelConfig,
    NormConfig,
)
from inflight_backend.models.families.qwen import with_experts
from inflight_backend.models.families.registry import (
    layer_kinds,
    read_activation,
    read_plain,
    register_family,
)


def _read(reader: JsonReader) -> ModelConfig:
    every = reader.integer("full_attention_interval", default=4)
    kinds = layer_kinds(
        reader,
        "full_attention",
        "linear_attention",
        default=lambda layer: "linear_attention" if (layer + 1) % every else "full_attention",
    )
    if read_activation(reader) not in ("silu", "swish"):  # of the convolutions, too
        reader.fail("hidden_act", "other than silu is not supported")
    norm = NormConfig(eps=reader.number("rms_norm_eps"), offset=1.0)
    shared = reader.with_defaults(partial_rotary_factor=0.25)
    model = read_plain(shared, norm=norm, qk_norm="head", is_partial=True, needs_head_dim=True)
    delta = DeltaConfig(
        num_key_heads=reader.integer("linear_num_key_heads"),
        num_value_heads=reader.integer("linear_num_value_heads"),
        key_dim=reader.integer("linear_key_head_dim"),
        value_dim=reader.integer("linear_value_head_dim"),
        conv_size=reader.integer("linear_conv_kernel_dim", default=4, minimum=2),
        norm_eps=norm.eps,
    )
    if delta.num_value_heads % delta.num_key_heads:
        reader.fail("linear_num_key_heads", "must divide linear_num_value_heads")
    return model.with_attention(
        lambda index, _: {
            "has_gate": True,
            "delta": delta if kinds[index] == "linear_attention" else None,
        }
    )


def _with_experts(reader: JsonReader, model: ModelConfig) -> ModelConfig:
    size = reader.integer("shared_expert_intermediate_size")
    shared = MlpConfig(size, read_activation(reader))
    return with_experts(reader.with_defaults(norm_topk_prob=True), model, shared)


@register_family("Qwen3NextForCausalLM", "qwen3_next")
def qwen3_next(reader: JsonReader) -> ModelConfig:
    """Three of four layers are gated delta rules, the others have gates of heads; experts, and one
    that all tokens pass, in all layers but ``mlp_only_layers``."""
    model = _with_experts(reader, _read(reader))
    joined = DeltaNames(inputs=("in_proj_qkvz",), gates=("in_proj_ba",))
    return replace(model, names=replace(model.names, delta=joined))


@register_family("Qwen3_5ForCausalLM", "qwen3_5_text")
def qwen3_5(reader: JsonReader) -> ModelConfig:
    """Qwen3-Next without experts."""
    return _read(reader)


@register_family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text")
def qwen3_5_moe(reader: JsonReader) -> ModelConfig:
    """Qwen3-Next with the projections of a recurrence in linears of their own."""
    # There are no dense layers.
    model = _read(reader.with_defaults(intermediate_size=1))
    return _with_experts(reader, model)
