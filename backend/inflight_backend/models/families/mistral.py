"""Mistral: a Llama whose layers may see the last ``sliding_window`` tokens only: all, or some."""

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.families.registry import (
    read_plain,
    register_family,
    windows_by_type,
)
from inflight_backend.models.families.rope import rope_section

_DEFAULT_WINDOW = 4096  # of configurations that do not write the key; ``null`` means none


@register_family("MistralForCausalLM", "mistral")
@register_family("MinistralForCausalLM", "ministral")
def mistral(reader: JsonReader) -> ModelConfig:
    """One window, for all layers or for those that ``layer_types`` names (Ministral)."""
    num_layers = reader.integer("num_hidden_layers", maximum=1024)
    window = None
    if not reader.is_null("sliding_window"):
        window = reader.integer("sliding_window", default=_DEFAULT_WINDOW)
    windows = windows_by_type(reader, window) or (window,) * num_layers
    return read_plain(reader, windows=windows, bias=False, needs_kv_heads=True)


@register_family("Ministral3ForCausalLM", "ministral3", rope_theta=1e6)
def ministral3(reader: JsonReader) -> ModelConfig:
    """Queries grow with the logarithm of how often they are past the original length."""
    model = mistral(reader) if "sliding_window" in reader else read_plain(reader, bias=False)
    return with_temperature(reader, model)


def with_temperature(reader: JsonReader, model: ModelConfig) -> ModelConfig:
    """``model`` whose queries grow past the original length, if the rotary embedding says so."""
    section = rope_section(reader)
    if "llama_4_scaling_beta" not in section:
        return model
    span = float(section.integer("original_max_position_embeddings"))
    temperature = (section.number("llama_4_scaling_beta"), span, 0.0)
    return model.with_attention(lambda *_: {"temperature": temperature})
