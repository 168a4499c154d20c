"""What a client gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["length", "stop", "timed_out", "cancelled"]
"""``length``: the answer has ``max_tokens`` tokens; ``stop``: it came to its end id or a stop word;
``timed_out``, ``cancelled``: it was ended from outside."""


@dataclass(frozen=True, slots=True)
class GenerateChunk:
    """What one response of a stream adds to the answer.

    A prompt of text is answered with ``text``, a prompt of token ids with ``token_ids``; the other
    one is empty. ``index``: which of ``n`` answers this belongs to.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A whole answer; ``text`` or ``token_ids`` is filled, as in `GenerateChunk`.

    ``finish`` is None when the server did not say why the answer ended.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None
