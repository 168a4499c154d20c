"""Mistral: a Llama whose layers may see the last ``sliding_window`` tokens only: all, or some."""

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.families.registry import (
    DecoderOptions,
    register_family,
    windows_by_type,
)

_DEFAULT_WINDOW = 4096  # of configurations that do not write the key; ``null`` means none


@register_family("MistralForCausalLM", "mistral")
def read_options(reader: JsonReader) -> DecoderOptions:
    """One window, for all layers or for those that ``layer_types`` names (Ministral)."""
    num_layers = reader.integer("num_hidden_layers", maximum=1024)
    window = None
    if not reader.is_null("sliding_window"):
        window = reader.integer("sliding_window", default=_DEFAULT_WINDOW)
    windows = windows_by_type(reader, window) or (window,) * num_layers
    return DecoderOptions(sliding_windows=windows)
