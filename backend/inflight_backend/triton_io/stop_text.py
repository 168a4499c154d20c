"""Cuts text at a stop word; holds back what may still become one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from copy import copy

Word = tuple[int, ...]


class StopText:
    """Ends a text before the first of ``words`` in it, or behind it, however it comes in pieces."""

    def __init__(self, words: Iterable[str], *, keeps_word: bool = False) -> None:
        """``keeps_word``: the text ends behind the word; of two in one place the first counts."""
        self._words = tuple(words)
        self._keeps_word = keeps_word
        self._first_letters = frozenset(word[0] for word in self._words)
        self._held = ""
        self.is_hit = False

    def fork(self) -> StopText:
        """A copy with the same state."""
        return copy(self)

    def push(self, piece: str, *, is_final: bool) -> str:
        """Add text; returns what can leave now. After a hit nothing does."""
        if self.is_hit:
            return ""
        if not self._held and self._first_letters.isdisjoint(piece):  # nearly always
            return piece
        text = self._held + piece
        found = [word for word in self._words if word in text]
        if found:
            self.is_hit, self._held = True, ""
            first = min(found, key=text.find)
            return text[: text.find(first) + (len(first) if self._keeps_word else 0)]
        num_held = 0 if is_final else self._num_open(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _num_open(self, text: str) -> int:
        """Characters at the end of ``text`` that a word begins with, at most."""
        longest = 0
        for word in self._words:
            place = text.find(word[0], max(len(text) - len(word) + 1, 0))
            while place >= 0 and not word.startswith(text[place:]):
                place = text.find(word[0], place + 1)
            if place >= 0:
                longest = max(longest, len(text) - place)
        return longest


class StopTokens:
    """Keeps the tokens of stop words from being decoded: the request ends with the first one."""

    def __init__(self, words: Iterable[Word]) -> None:
        self._words = sorted(words)  # what begins alike stands together: no table of beginnings
        self._longest = max(map(len, self._words))
        self._held: list[int] = []

    @property
    def held(self) -> Sequence[int]:
        """The tokens kept back: a stop word may begin with them; in the end, the stop word."""
        return self._held

    def push(self, ids: Sequence[int], *, is_final: bool) -> list[int]:
        """Add generated tokens; returns those that are surely no part of a stop word."""
        self._held.extend(ids)
        held = self._held
        num_held = self._longest_end(is_whole=is_final)
        certain = held[: len(held) - num_held]
        self._held = held[len(held) - num_held :]
        return certain

    def _longest_end(self, *, is_whole: bool) -> int:
        """Tokens at the end of those held that a word begins with, at most; or that are one."""
        held, words = self._held, self._words
        for size in range(min(self._longest, len(held)), 0, -1):
            end = tuple(held[len(held) - size :])
            place = bisect_left(words, end)
            if place < len(words) and end == (words[place] if is_whole else words[place][:size]):
                return size
        return 0
