"""Compiles guides with the demo's tokenizer and follows texts by the masks the engine would get."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from support.manager_harness import WAIT
from support.triton_harness import wait_until
from tokenizers import Tokenizer

from inflight_backend.guided import matchers
from inflight_backend.guided.compiler import GuidedDecodingConfig, GuideService, PendingGuide
from inflight_backend.guided.guide import Guide, GuideType
from inflight_backend.guided.masks import GuidedAnswer, MaskMaker
from inflight_scheduler import LlmRequest
from inflight_server.serve.settings import DEMO_MODEL

TOKENIZER = DEMO_MODEL / "tokenizer.json"
VOCAB_SIZE, END = 270, 1  # some ids more than the tokenizer has
JSON = Guide(GuideType.JSON)
REGEX, SCHEMA, EBNF = GuideType.REGEX, GuideType.JSON_SCHEMA, GuideType.EBNF_GRAMMAR
TAG = GuideType.STRUCTURAL_TAG


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


def make_service(**settings: Any) -> GuideService:
    """One with nothing in its cache; ``settings`` of a `GuidedDecodingConfig`."""
    return GuideService(GuidedDecodingConfig(**settings), DEMO_MODEL, VOCAB_SIZE)


@lru_cache
def shared_service() -> GuideService:
    """One for all tests that do not count what is compiled."""
    return make_service()


@lru_cache
def tokenizer() -> Any:
    """The demo's."""
    return Tokenizer.from_file(str(TOKENIZER))


def tokens(text: str) -> list[int]:
    """Ids of ``text``."""
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def compile_guide(guide: Guide, service: GuideService | None = None) -> PendingGuide:
    """Wait until ``guide`` is compiled or refused."""
    pending = (service or shared_service()).start(guide, lambda: None)
    wait_until(lambda: pending.is_settled)
    return pending


def mask_maker() -> MaskMaker:
    """One for the demo's tokens."""
    made = MaskMaker(VOCAB_SIZE)
    made.tokenizer_end_id = END
    return made


class Answer:
    """An answer to a guided request, token by token."""

    def __init__(self, guide: Guide, service: GuideService | None = None) -> None:
        self.request = LlmRequest(1, [5], 100_000, end_id=END)
        self.state = GuidedAnswer(compile_guide(guide, service).take())
        self._mask_maker = mask_maker()

    def allowed(self) -> set[int]:
        """The tokens that may come next."""
        [row] = self._mask_maker.masks([(0, self.request, self.state)], {})
        return self.allowed_by(row)

    @staticmethod
    def allowed_by(row: npt.NDArray[np.int32]) -> set[int]:
        """The tokens with a bit in a row of masks."""
        bits = np.unpackbits(row[2:].view(np.uint8), bitorder="little")
        return {int(token) for token in bits.nonzero()[0]}

    def goes_on(self, token: int) -> bool:
        """Let the answer go on with ``token`` if it may come next."""
        if token not in self.allowed():
            return False
        self.request.add_new_token(token)
        return True


class HeldCompiler:
    """`GuideService` compiles when ``go_on`` is set; ``begun`` has the texts of guides whose turn
    came, ``error`` is raised in place of a compilation."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun: list[str] = []
        self.error: BaseException | None = None
        self._to_grammar = matchers.to_grammar

    def to_grammar(self, guide: Guide, special: Mapping[str, int]) -> str:
        """In place of the function of that name."""
        self.begun.append(guide.text)
        assert self.go_on.wait(WAIT)
        if self.error is not None:
            raise self.error
        return self._to_grammar(guide, special)


def accepts(guide: Guide, text: str) -> bool:
    """True if ``text``, and the end behind it, is what the guide allows."""
    answer = Answer(guide)
    return all(map(answer.goes_on, tokens(text))) and END in answer.allowed()
