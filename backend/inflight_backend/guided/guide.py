"""Kinds of guides, which restrict the answer of a request.

Names are those of TensorRT-LLM's wire (`guided_decoding_guide_type`, see the guided decoding page
of tensorrtllm_backend's documentation).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

TYPE_FIELD, GUIDE_FIELD = "guided_decoding_guide_type", "guided_decoding_guide"


class GuideType(Enum):
    """Kinds of guides, with their names on the wire."""

    JSON = "json"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF_GRAMMAR = "ebnf_grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Guide:
    """A guide as it was sent; ``text`` is empty for JSON."""

    type: GuideType
    text: str = ""
