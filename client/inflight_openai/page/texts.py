"""The texts of the last requests, for a front whose operator wants them on the page."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from inflight_openai.triton_client import Piece

MAX_REQUESTS = 256
MAX_PROMPT_TOKENS = 4096
"""Of a prompt, its last ones."""

MAX_CHARACTERS = 20_000
"""Of an answer; the rest is left out."""


@dataclass
class _Texts:
    prompt: array[int]
    answers: dict[int, str] = field(default_factory=dict)


class TextLog:
    """Prompts and answers by the server's names of requests; the oldest are forgotten."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._texts: OrderedDict[str, _Texts] = OrderedDict()

    async def follow(
        self,
        pieces: AsyncGenerator[Piece, None],
        names: Sequence[str],
        prompts: Sequence[Sequence[int]],
        num_answers: int,
    ) -> AsyncGenerator[Piece, None]:
        """``pieces`` of ``num_answers`` answers to each of ``prompts``, noted as they pass."""
        for name, prompt in zip(names, prompts, strict=True):
            self._texts[name] = _Texts(array("q", prompt[-MAX_PROMPT_TOKENS:]))
        while len(self._texts) > MAX_REQUESTS:
            self._texts.popitem(last=False)
        async with aclosing(pieces):
            async for piece in pieces:
                known = self._texts.get(names[piece.index // num_answers])
                if known is not None:
                    own = known.answers.get(piece.index, "")
                    known.answers[piece.index] = (own + piece.text)[:MAX_CHARACTERS]
                yield piece

    def find(self, name: str) -> dict[str, str] | None:
        """``prompt`` (its end) and ``answer`` (several one under the other) of a request of this
        front."""
        known = self._texts.get(name)
        if known is None:
            return None
        answers = [known.answers[index] for index in sorted(known.answers)]
        return {"prompt": self._decode(known.prompt.tolist()), "answer": "\n\n".join(answers)}
