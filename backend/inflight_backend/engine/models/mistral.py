"""Mistral: a Llama whose layers may all see the last ``sliding_window`` tokens only."""

from inflight_backend.engine.json_reader import JsonReader
from inflight_backend.engine.models.traits import ModelTraits

ARCHITECTURE = "MistralForCausalLM"
_DEFAULT_WINDOW = 4096  # of configurations that do not write the key; ``null`` means none


def read_traits(reader: JsonReader) -> ModelTraits:
    """One window for all layers."""
    num_layers = reader.integer("num_hidden_layers", maximum=1024)
    window = None
    if not reader.is_null("sliding_window"):
        window = reader.integer("sliding_window", default=_DEFAULT_WINDOW)
    return ModelTraits(sliding_windows=(window,) * num_layers)
