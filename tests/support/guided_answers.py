"""Compiles guides with the demo's tokenizer and follows texts by the masks the engine would get."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
from support.triton_harness import wait_until
from tokenizers import Tokenizer

from inflight_backend.guided.compiler import GuideCompiler, PendingGuide
from inflight_backend.guided.guide import Guide, GuideType
from inflight_backend.guided.masks import AnswerGuides
from inflight_scheduler import LlmRequest
from inflight_server.serve.settings import DEMO_MODEL

TOKENIZER = DEMO_MODEL / "tokenizer.json"
VOCAB_SIZE, END = 270, 1  # some ids more than the tokenizer has
REGEX, SCHEMA, EBNF = GuideType.REGEX, GuideType.JSON_SCHEMA, GuideType.EBNF_GRAMMAR


MANY_WAYS = json.dumps(
    {
        "$ref": "#/$defs/n",
        "$defs": {
            "n": {
                "anyOf": [
                    {"type": "array", "items": {"$ref": "#/$defs/n"}},
                    *(
                        {
                            "type": "array",
                            "prefixItems": [{"const": number}],
                            "items": {"$ref": "#/$defs/n"},
                        }
                        for number in range(60)
                    ),
                ]
            }
        },
    }
)
"""A schema whose texts can be read in ever more ways, the longer they are."""


def make_compiler() -> GuideCompiler:
    """One with nothing in its cache."""
    return GuideCompiler(TOKENIZER.read_text, VOCAB_SIZE, END)


@lru_cache
def shared_compiler() -> GuideCompiler:
    """One for all tests that do not count what is compiled."""
    return make_compiler()


@lru_cache
def tokenizer() -> Any:
    """The demo's."""
    return Tokenizer.from_file(str(TOKENIZER))


def tokens(text: str) -> list[int]:
    """Ids of ``text``."""
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def compile_guide(guide: Guide, compiler: GuideCompiler | None = None) -> PendingGuide:
    """Wait until ``guide`` is compiled or refused."""
    pending = (compiler or shared_compiler()).start(guide)
    wait_until(lambda: pending.is_settled)
    return pending


class Answer:
    """An answer to a guided request, token by token."""

    def __init__(self, guide: Guide, compiler: GuideCompiler | None = None) -> None:
        pending = compile_guide(guide, compiler)
        self.guides = AnswerGuides(VOCAB_SIZE)
        self.guides.tokenizer_end_id = END
        self.request = LlmRequest(1, [5], 100_000, end_id=END)
        self.guides.add(1, pending.take(), pending.recompile)

    def allowed(self) -> set[int]:
        """The tokens that may come next."""
        [row] = self.guides.masks([(0, self.request)], {})
        bits = np.unpackbits(row[2:].view(np.uint8), bitorder="little")
        return {int(token) for token in bits.nonzero()[0]}

    def add(self, token: int) -> None:
        """Let the answer go on with ``token``."""
        self.request.add_new_token(token)


def accepts(guide: Guide, text: str) -> bool:
    """True if ``text``, and the end behind it, is what the guide allows."""
    answer = Answer(guide)
    for token in tokens(text):
        if token not in answer.allowed():
            return False
        answer.add(token)
    return END in answer.allowed()
