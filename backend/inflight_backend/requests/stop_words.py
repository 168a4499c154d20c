"""Finds stop words, given as token ids, at the end of answers.

A word counts where all its tokens are generated ones (a word begun by the prompt does not). The
tokens of the word belong to the answer, as in TensorRT-LLM; text leaves the word out (see
`triton.stop_text`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inflight_scheduler import FinishReason, LlmRequest

Word = tuple[int, ...]


class StopWordWatch:
    """Ends requests at their stop words; free of cost while no request has any."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}

    def add(self, request: LlmRequest, words: Iterable[Word]) -> None:
        """Watch ``request`` from now on, until it has finished."""
        by_last_token: dict[int, list[Word]] = {}
        for word in words:
            by_last_token.setdefault(word[-1], []).append(word)
        if by_last_token:
            watched = _Watched(request, by_last_token, request.num_drawn_tokens)
            self._watched[request.request_id] = watched

    def forget(self, request: LlmRequest) -> None:
        """Do not watch ``request`` any more: it has ended, perhaps with an error."""
        self._watched.pop(request.request_id, None)

    def check(self) -> None:
        """Look at the tokens that came since the last call."""
        for request_id, watched in list(self._watched.items()):
            request = watched.request
            num_tokens = request.num_drawn_tokens
            ends = range(watched.num_seen + 1, num_tokens + 1)
            end = next(filter(watched.has_word_at, ends), None)
            if end is not None:
                _finish(request, end)
            watched.num_seen = num_tokens
            if request.is_finished:
                del self._watched[request_id]


@dataclass(slots=True)
class _Watched:
    """A request, its stop words by their last token, and how many tokens were looked at."""

    request: LlmRequest
    words: dict[int, list[Word]]
    num_seen: int

    def has_word_at(self, end: int) -> bool:
        """True if a word of generated tokens ends before ``end``."""
        tokens, start = self.request.tokens, self.request.orig_prompt_len
        return any(
            end - len(word) >= start and tuple(tokens[end - len(word) : end]) == word
            for word in self.words.get(tokens[end - 1], ())
        )


def _finish(request: LlmRequest, end: int) -> None:
    """The answer ends at ``end``, whatever else the last step has brought.

    An end id that ends the word, too, stays the reason.
    """
    ended_here = end == request.num_tokens and request.finish_reason is not FinishReason.LENGTH
    if request.is_finished and ended_here:
        return
    request.drop_pending_tokens()
    del request.tokens[end:]
    if request.is_finished:
        request.finish_reason = FinishReason.STOP_WORDS
    else:
        request.finish(FinishReason.STOP_WORDS)
