"""GLM-4: neighbours turn together in half of a head, gate and up are fused."""

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig, WeightNames
from inflight_backend.models.families.registry import read_plain, register_family

_NAMES = WeightNames(gate_up="gate_up_proj")


@register_family("GlmForCausalLM", "glm")
def glm(reader: JsonReader) -> ModelConfig:
    """Biases on query, key and value."""
    model = read_plain(reader, names=_NAMES, is_interleaved=True, is_partial=True)
    return model.with_attention(lambda *_: {"has_output_bias": False})


@register_family("Glm4ForCausalLM", "glm4")
def glm4(reader: JsonReader) -> ModelConfig:
    """Norms before and behind both branches."""
    return replace(glm(reader), block="sandwich")
