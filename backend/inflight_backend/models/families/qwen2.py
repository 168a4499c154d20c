"""Qwen2 and Qwen2.5: biases on query, key and value; the upper layers may slide."""

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.families.traits import DecoderOptions, read_layer_windows

ARCHITECTURE = "Qwen2ForCausalLM"
MODEL_TYPE = "qwen2"


def read_traits(reader: JsonReader) -> DecoderOptions:
    """The biases are fixed, no key speaks of them."""
    return DecoderOptions(has_qkv_bias=True, sliding_windows=read_layer_windows(reader))
