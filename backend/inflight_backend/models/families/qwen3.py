"""Qwen3 (dense): query and key are normed per head before they turn; head_dim is written."""

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.families.registry import (
    DecoderOptions,
    read_layer_windows,
    register_family,
)


@register_family("Qwen3ForCausalLM", "qwen3")
def read_options(reader: JsonReader) -> DecoderOptions:
    """``attention_bias`` puts a bias on all four projections."""
    has_bias = reader.boolean("attention_bias", default=False)
    return DecoderOptions(
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
        sliding_windows=read_layer_windows(reader),
        is_head_dim_required=True,
    )
