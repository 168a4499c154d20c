"""Log probabilities as OpenAI's clients read them: one form for chats, another for completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from inflight_client.openai.tokens import Token, TokenOf


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


def for_completion(
    rows: Sequence[TokenLogProbs], token_of: TokenOf, offset: int, *, has_top: bool
) -> dict[str, Any]:
    """``logprobs`` of a completion's choice; ``offset``: characters of the answer before these.

    The chosen token is among the likeliest even where it is not one of them, as OpenAI has it.
    """
    tokens = [token_of(row.token_id) for row in rows]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [row.log_prob for row in rows],
        "top_logprobs": [_likeliest(row, token_of) for row in rows] if has_top else None,
        "text_offset": _offsets(tokens, offset),
    }


def _offsets(tokens: Sequence[Token], offset: int) -> list[int]:
    """Where each of ``tokens`` begins; those of one character begin where that stands."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets = []
    for text, data in tokens:
        offsets.append(offset)
        offset += len(text if data is None else decoder.decode(data))
    return offsets


def _likeliest(row: TokenLogProbs, token_of: TokenOf) -> dict[str, float]:
    """By text; of tokens with one text (halves of characters) the likeliest counts."""
    found: dict[str, float] = {}
    for token_id, log_prob in [*row.top, (row.token_id, row.log_prob)]:
        found.setdefault(token_of(token_id).text, log_prob)
    return found
