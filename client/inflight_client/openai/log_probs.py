"""Log probabilities as OpenAI's clients read them: one form for chats, another for completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

TokenText = Callable[[int], str]


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


def for_chat(rows: Iterable[TokenLogProbs], token_text: TokenText) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""

    def entry(token_id: int, log_prob: float) -> dict[str, Any]:
        text = token_text(token_id)
        return {"token": text, "logprob": log_prob, "bytes": _bytes(text)}

    content = [
        {**entry(row.token_id, row.log_prob), "top_logprobs": [entry(*each) for each in row.top]}
        for row in rows
    ]
    return {"content": content, "refusal": None}


def for_completion(
    rows: Sequence[TokenLogProbs], token_text: TokenText, offset: int, *, has_top: bool
) -> dict[str, Any]:
    """``logprobs`` of a completion's choice; ``offset``: characters of the answer before these.

    The chosen token is among the likeliest even where it is not one of them, as OpenAI has it.
    """
    texts = [token_text(row.token_id) for row in rows]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [row.log_prob for row in rows],
        "top_logprobs": [_likeliest(row, token_text) for row in rows] if has_top else None,
        "text_offset": offsets,
    }


def _likeliest(row: TokenLogProbs, token_text: TokenText) -> dict[str, float]:
    """By text; of tokens with one text (halves of characters) the likeliest counts."""
    found: dict[str, float] = {}
    for token_id, log_prob in [*row.top, (row.token_id, row.log_prob)]:
        found.setdefault(token_text(token_id), log_prob)
    return found


def _bytes(text: str) -> list[int] | None:
    """The bytes of a token's text; None for half a character, which has no text of its own."""
    return None if "\ufffd" in text else list(text.encode())
