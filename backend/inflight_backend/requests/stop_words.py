"""Finds stop words, given as token ids, at the end of answers.

A word counts where all its tokens are generated ones (a word begun by the prompt does not). The
tokens of the word belong to the answer, as in TensorRT-LLM; text leaves the word out (see
`triton.stop_text`).
"""

from __future__ import annotations

from collections.abc import Iterable

from inflight_scheduler import FinishReason, LlmRequest

Word = tuple[int, ...]


class WordFinder:
    """Finds the end of any of ``words`` in a growing list of tokens."""

    __slots__ = ("_by_last_token",)

    def __init__(self, words: Iterable[Word]) -> None:
        self._by_last_token: dict[int, list[Word]] = {}
        for word in words:
            self._by_last_token.setdefault(word[-1], []).append(word)

    def longest_at(self, tokens: list[int], end: int, start: int) -> int:
        """Length of the longest word that ends before ``end`` and begins at ``start`` or later;
        0 if there is none."""
        longest = 0
        for word in self._by_last_token.get(tokens[end - 1], ()):
            first = end - len(word)
            if first >= start and len(word) > longest and tuple(tokens[first:end]) == word:
                longest = len(word)
        return longest


class StopWordWatch:
    """Ends requests at their stop words; free of cost while no request has any."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[LlmRequest, WordFinder, int]] = {}

    def add(self, request: LlmRequest, words: Iterable[Word]) -> None:
        """Watch ``request`` from now on, until it has finished."""
        if finder_words := tuple(words):
            finder = WordFinder(finder_words)
            self._watched[request.request_id] = (request, finder, request.num_drawn_tokens)

    def forget(self, request: LlmRequest) -> None:
        """Do not watch ``request`` any more: it has ended, perhaps with an error."""
        self._watched.pop(request.request_id, None)

    def check(self) -> None:
        """Look at the tokens that came since the last call."""
        for request_id, (request, finder, num_seen) in list(self._watched.items()):
            num_tokens = request.num_drawn_tokens
            for end in range(num_seen + 1, num_tokens + 1):
                if finder.longest_at(request.tokens, end, request.orig_prompt_len):
                    _finish(request, end)
                    break
            if request.is_finished:
                del self._watched[request_id]
            else:
                self._watched[request_id] = (request, finder, num_tokens)


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
