"""Qwen2 and Qwen2.5: biases on query, key and value; the upper layers may slide."""

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.families.registry import (
    DecoderOptions,
    read_layer_windows,
    register_family,
)


@register_family("Qwen2ForCausalLM", "qwen2")
def read_options(reader: JsonReader) -> DecoderOptions:
    """The biases are fixed, no key speaks of them."""
    return DecoderOptions(has_qkv_bias=True, sliding_windows=read_layer_windows(reader))
