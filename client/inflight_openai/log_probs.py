"""Log probabilities as OpenAI's clients read them: one form for chats, another for completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from inflight_openai.tokens import Token, TokenOf

_CONTINUING = bytes(range(0x80, 0xC0))  # in UTF-8, never at the beginning of a character


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """A token of an answer, and the likeliest ``(token id, log probability)`` in its place."""

    token_id: int
    log_prob: float
    top: Sequence[tuple[int, float]] = ()


def read_log_probs(
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    top_ids: Sequence[int],
    top_log_probs: Sequence[float],
    num_top: int,
) -> list[TokenLogProbs]:
    """What a response says; the last two sequences have ``num_top`` values for each token."""
    tops = list(zip(top_ids, top_log_probs, strict=True))
    return [
        TokenLogProbs(token_id, log_prob, tops[i * num_top : (i + 1) * num_top])
        for i, (token_id, log_prob) in enumerate(zip(token_ids, log_probs, strict=True))
    ]


def for_chat(rows: Iterable[TokenLogProbs], token_of: TokenOf) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""

    def entry(token_id: int, log_prob: float) -> dict[str, Any]:
        text, data = token_of(token_id)
        return {"token": text, "logprob": log_prob, "bytes": None if data is None else list(data)}

    content = [
        {**entry(row.token_id, row.log_prob), "top_logprobs": [entry(*each) for each in row.top]}
        for row in rows
    ]
    return {"content": content, "refusal": None}


class TokenPlaces:
    """Where the tokens of an answer begin in its text; those of one character where that does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = 0

    def take(self, tokens: Iterable[Token]) -> list[int]:
        """The places of the next ``tokens``."""
        places = []
        for text, data in tokens:
            if data is None or data[:1] not in _CONTINUING:
                self._place += len(self._decoder.decode(b"", final=True))  # it remains a part
            places.append(self._place)
            self._place += len(text if data is None else self._decoder.decode(data))
        return places


def for_completion(
    rows: Sequence[TokenLogProbs], token_of: TokenOf, places: TokenPlaces, *, has_top: bool
) -> dict[str, Any]:
    """``logprobs`` of a completion's choice; ``places`` has seen the tokens before these.

    The chosen token is among the likeliest even where it is not one of them, as OpenAI has it.
    """
    tokens = [token_of(row.token_id) for row in rows]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [row.log_prob for row in rows],
        "top_logprobs": [_likeliest(row, token_of) for row in rows] if has_top else None,
        "text_offset": places.take(tokens),
    }


def _likeliest(row: TokenLogProbs, token_of: TokenOf) -> dict[str, float]:
    """By text; of tokens with one text (halves of characters) the likeliest counts."""
    found: dict[str, float] = {}
    for token_id, log_prob in [*row.top, (row.token_id, row.log_prob)]:
        found.setdefault(token_of(token_id).text, log_prob)
    return found
