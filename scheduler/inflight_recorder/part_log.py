"""Which texts agree, in the order in which that became known; what cannot matter is left out.

A part (`TextPart`) says that a text goes on like an earlier one, so it leans only on parts before
it. What is known of some texts is therefore found in one walk from the newest part to the oldest::

    3 like 1  needed, as 3 is          a b c x       (3)
    2 like 0  not needed: left out     a y           (2)
    1 like 0  needed, as 3 is          a b c         (1)

The log walks so when it has doubled, a few parts with each new text, since nobody shall wait for
all. The knowledge of a moment is a place in a list that only grows: whoever remembers one keeps the
list, also when the log goes on with a shorter one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

from inflight_recorder.likeness import Likeness
from inflight_recorder.records import TextPart

MIN_PARTS = 4096
"""Parts that are remembered before any is left out."""

_PART_SIZE = len(TextPart._fields)
_PARTS_PER_STEP = 8  # a new text makes one or two, so a walk ends long before the log has doubled


class PartMark(NamedTuple):
    """A moment: the first ``length`` numbers of ``numbers`` were known."""

    numbers: array[int]
    length: int

    def needed(self, text_numbers: set[int]) -> tuple[TextPart, ...]:
        """The parts of these texts and of all texts that those lean on, in their order."""
        numbers = self.numbers[: self.length]
        needed = set(text_numbers)
        found = []
        for place in range(len(numbers) - _PART_SIZE, -1, -_PART_SIZE):
            part = TextPart._make(numbers[place : place + _PART_SIZE])
            if part.number in needed:
                needed.add(part.source)
                found.append(part)
        return tuple(reversed(found))


class PartLog:
    """The parts that are known. ``is_named``: whether a later text can be like this one.

    A text that cannot be named any more and is not active or cached is never asked for again.
    """

    def __init__(self, is_named: Callable[[int], bool]) -> None:
        self._is_named = is_named
        # The fields of each part, one after another: no objects for the garbage collector.
        self._numbers = array("q")
        self._walk_at = MIN_PARTS
        self._place = 0  # of the walk: the parts before it are still to be looked at
        self._len_at_start = 0
        self._needed: set[int] = set()
        self._reversed = array("q")  # what the walk has found, each part from its end

    @property
    def num_parts(self) -> int:
        """All that are remembered."""
        return len(self._numbers) // _PART_SIZE

    @property
    def wants_walk(self) -> bool:
        """True when the log has doubled, and no walk is on its way."""
        return self._place == 0 and self.num_parts >= self._walk_at

    def add(self, number: int, found: Likeness, start: int) -> None:
        """From ``start`` on the text ``number`` goes on like another one, if ``found`` says so."""
        if found.length > start:
            self._numbers.extend((number, found.number, found.length, start))

    def mark(self) -> PartMark:
        """This moment."""
        return PartMark(self._numbers, len(self._numbers))

    def begin_walk(self, in_use: set[int]) -> None:
        """Leave out what neither ``in_use`` (active or cached now) nor what is named leans on."""
        self._place = self._len_at_start = len(self._numbers)
        self._needed = in_use

    def walk_on(self) -> None:
        """A few parts more, if a walk is on its way; to be called with each new text."""
        if self._place == 0:
            return
        first = max(self._place - _PARTS_PER_STEP * _PART_SIZE, 0)
        for place in range(self._place - _PART_SIZE, first - 1, -_PART_SIZE):
            number, source, length, start = self._numbers[place : place + _PART_SIZE]
            if number in self._needed or self._is_named(number):
                self._needed.add(source)
                self._reversed.extend((start, length, source, number))
        self._place = first
        if first == 0:
            self._end_walk()

    def _end_walk(self) -> None:
        numbers, self._reversed = self._reversed, array("q")
        self._walk_at = max(MIN_PARTS, 2 * (len(numbers) // _PART_SIZE))
        numbers.reverse()
        numbers.extend(self._numbers[self._len_at_start :])
        self._numbers = numbers
        self._needed = set()
