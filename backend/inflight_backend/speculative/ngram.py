"""Prompt lookup: drafts the tokens that followed when the last tokens occurred before.

The method of Saxena, "Prompt Lookup Decoding" (`apoorvumang/prompt-lookup-decoding`). An index of
pairs of tokens grows with the text, so a guess costs the tokens that are new and a few places that
are compared, not the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

_PAIR = 2
_MAX_PLACES = 16  # compared for one guess, the latest first


class NgramIndex:
    """The places behind each pair of tokens of one text, which may only grow."""

    __slots__ = ("_last_place", "_max_size", "_place_before", "_tokens")

    def __init__(self, tokens: Sequence[int], max_size: int) -> None:
        """``tokens`` is the text itself, not a copy; ``max_size`` of its tokens are compared."""
        self._tokens = tokens
        self._max_size = max_size
        self._last_place: dict[tuple[int, int], int] = {}
        # Of each place from 0 on: the one before it behind the same pair, 0 for none.
        self._place_before: list[int] = [0, 0]

    def guess(self, num_tokens: int) -> list[int]:
        """At most ``num_tokens`` tokens that may come next; empty if the end of the text is new.

        Of all earlier places that match, that with the most tokens in common counts (up to the
        maximum), and of these the latest. A guess that reaches the end of the text continues with
        itself, as a text that repeats itself would.
        """
        tokens = self._tokens
        length = len(tokens)
        if length <= _PAIR:
            return []
        self._grow(length)
        place = self._find(length)
        if place == 0:
            return []
        drafts: list[int] = []
        for index in range(place, place + num_tokens):
            drafts.append(tokens[index] if index < length else drafts[index - length])
        return drafts

    def _grow(self, length: int) -> None:
        """Enter all places before the end of the text."""
        tokens, last, before = self._tokens, self._last_place, self._place_before
        for place in range(len(before), length):
            pair = (tokens[place - 2], tokens[place - 1])
            before.append(last.get(pair, 0))
            last[pair] = place

    def _find(self, length: int) -> int:
        """The best earlier place, 0 for none."""
        tokens = self._tokens
        place = self._last_place.get((tokens[length - 2], tokens[length - 1]), 0)
        best, best_size, num_compared = 0, 0, 0
        while place and num_compared < _MAX_PLACES and best_size < self._max_size:
            size = self._size_at(place, length)
            if size > best_size:
                best, best_size = place, size
            place = self._place_before[place]
            num_compared += 1
        return best

    def _size_at(self, place: int, length: int) -> int:
        """How many tokens before ``place`` are those before ``length``, up to the maximum."""
        tokens, size = self._tokens, _PAIR
        while size < min(self._max_size, place) and (
            tokens[place - size - 1] == tokens[length - size - 1]
        ):
            size += 1
        return size
