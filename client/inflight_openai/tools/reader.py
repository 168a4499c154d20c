"""Splits an answer into thoughts, text and calls of tools, piece by piece as it arrives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Part:
    """The next part of an answer: ``text`` of a thought or of the content, or of the arguments
    (JSON) of the call with number ``index``, which begins where ``name`` is not empty."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    index: int = 0
    name: str = ""


class Reader(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> Iterator[Part]:
        """The parts that ``text``, the next of the answer, completes."""

    def finish(self) -> Iterator[Part]:
        """What was held back, at the end of the answer."""


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a marker."""
    return max((_overlap(text, marker) for marker in markers), default=0)


def _overlap(text: str, marker: str) -> int:
    sizes = range(min(len(text), len(marker) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)


class PlainReader:
    """An answer that is content only."""

    def feed(self, text: str) -> Iterator[Part]:
        """See `Reader`."""
        if text:
            yield Part("content", text)

    def finish(self) -> Iterator[Part]:
        """See `Reader`."""
        yield from ()


class ThoughtReader:
    """Thoughts between two marks at the beginning of an answer; ``rest`` reads what follows.

    Blanks around both are left out.
    """

    def __init__(self, begin: str, end: str, rest: Reader, *, is_inside: bool) -> None:
        """``is_inside``: the prompt ends within thoughts, so that the answer has no ``begin``."""
        self._begin, self._end, self._rest = begin, end, rest
        self._state = "inside" if is_inside else "before"
        self._held = ""
        self._has_thought = False

    def feed(self, text: str) -> Iterator[Part]:
        """See `Reader`."""
        if self._state == "rest":
            yield from self._rest.feed(text)
            return
        text, self._held = self._held + text, ""
        if self._state == "before":
            start = text.lstrip()
            if self._begin.startswith(start) and start != self._begin:
                self._held = text
                return
            if not start.startswith(self._begin):
                self._state = "rest"
                yield from self._rest.feed(text)
                return
            text, self._state = start.removeprefix(self._begin), "inside"
        if self._state == "inside":
            thought, has_end, text = text.partition(self._end)
            if not has_end:
                size = held_back(thought, (self._end,))
                kept = len(thought[: len(thought) - size].rstrip())
                thought, self._held = thought[:kept], thought[kept:]
            yield from self._thought(thought.rstrip() if has_end else thought)
            if not has_end:
                return
            self._state = "behind"
        self._held = text.lstrip()
        if self._held:
            text, self._held, self._state = self._held, "", "rest"
            yield from self._rest.feed(text)

    def finish(self) -> Iterator[Part]:
        """See `Reader`."""
        if self._state == "inside":
            yield from self._thought(self._held.rstrip())
        elif self._held:
            yield from self._rest.feed(self._held)
        yield from self._rest.finish()

    def _thought(self, text: str) -> Iterator[Part]:
        text = text if self._has_thought else text.lstrip()
        if text:
            self._has_thought = True
            yield Part("reasoning", text)


class JsonScanner:
    """Follows the text of one JSON object, and finds where the values of its own keys are."""

    def __init__(self) -> None:
        self.text = ""
        self.is_done = False
        self._values: dict[str, tuple[int, int]] = {}
        """Key of the object -> where its value begins and ends; -1: it has not ended."""
        self._depth = 0
        self._string_start = -1  # of the string that is being read
        self._is_escape = False
        self._key = ""
        self._is_value = False  # behind the colon of a key of the object

    def feed(self, text: str) -> str:
        """Read on; what stands behind the object."""
        start = len(self.text)
        self.text += text
        for place in range(start, len(self.text)):
            self._read(self.text[place], place)
            if self.is_done:
                rest = self.text[place + 1 :]
                self.text = self.text[: place + 1]
                return rest
        return ""

    def value(self, key: str) -> str | None:
        """The text of the value so far; None before it begins."""
        if key not in self._values:
            return None
        start, end = self._values[key]
        return self.text[start:] if end < 0 else self.text[start:end]

    def has_ended(self, key: str) -> bool:
        """Whether the whole value is there."""
        return self._values.get(key, (0, -1))[1] >= 0

    def _read(self, letter: str, place: int) -> None:
        is_outer = self._depth == 1
        if self._string_start >= 0:
            self._read_string(letter, place)
            return
        if is_outer and self._is_value and not letter.isspace():
            self._values.setdefault(self._key, (place, -1))
        if letter == '"':
            self._string_start = place + 1
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            if is_outer:
                self._end_value(place)
            self._depth -= 1
            self.is_done = self._depth <= 0
        elif letter == ":" and is_outer:
            self._is_value = True
        elif letter == "," and is_outer:
            self._end_value(place)

    def _read_string(self, letter: str, place: int) -> None:
        if self._is_escape or letter == "\\":
            self._is_escape = not self._is_escape
        elif letter == '"':
            if self._depth == 1 and not self._is_value:
                self._key = self.text[self._string_start : place]
            self._string_start = -1

    def _end_value(self, place: int) -> None:
        """The value of the last key ends before ``place``, but for blanks."""
        if self._is_value and self._key in self._values:
            start, _ = self._values[self._key]
            self._values[self._key] = (start, start + len(self.text[start:place].rstrip()))
        self._is_value = False
