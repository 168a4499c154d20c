"""The families we serve: a module each, with nothing in it but what is special about it.

To add one, write the module and put it into the table below.
"""

from __future__ import annotations

from collections.abc import Callable

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.families import llama, mistral, qwen2, qwen3
from inflight_backend.models.families.traits import DecoderOptions

_FAMILIES = (llama, mistral, qwen2, qwen3)

ARCHITECTURE_TO_TRAITS: dict[str, Callable[[JsonReader], DecoderOptions]] = {
    family.ARCHITECTURE: family.read_traits for family in _FAMILIES
}
ARCHITECTURE_TO_MODEL_TYPE = {family.ARCHITECTURE: family.MODEL_TYPE for family in _FAMILIES}
"""What ``model_type`` says: transformers goes by it, whatever ``architectures`` says."""
