"""Texts made up so that they agree as the recorded ones did; no token of those is known.

Each text is a list of pieces, and a piece goes on as an earlier text does, or as no other one::

    text 0   . . . . . . .         own
    text 1   0 0 0 0 . .           like text 0 for 4 tokens, then its own
    text 2   1 1 1 1 1 1 .         like text 1 for 6
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter

from inflight_recorder.errors import RecordingError
from inflight_recorder.likeness import NO_LIKENESS, Likeness

MAX_STEPS = 10_000
STEPS_PER_TOKEN = 64
"""Pieces that are looked at for one answer, and for each token in it: where one leans on the next
a way through all texts there may be takes fewer. A recording that needs more was not made by us."""


class _Piece:
    """From ``start`` to ``end`` a text goes on as the text ``source`` does, or (None) as no other.

    ``time`` orders the pieces of all texts: a piece leans on earlier ones only. The ``parent`` is
    the one of the source that this one mostly leans on, and ``far`` one some parents on, such that
    a way through very many takes a few steps. It leads there for places in the ``window``.
    """

    __slots__ = ("depth", "end", "far", "parent", "source", "start", "time", "window")

    def __init__(
        self, start: int, end: int, source: int | None, time: int, parent: _Piece | None = None
    ) -> None:
        self.start, self.end, self.source, self.time = start, end, source, time
        self.parent = parent
        self.depth, self.far, self.window = 0, self, (start, end)
        if parent is None:
            return
        self.depth, self.far = parent.depth + 1, parent
        windows = [(start, end), (parent.start, parent.end)]
        middle = parent.far
        if parent.depth - middle.depth == middle.depth - middle.far.depth:
            self.far = middle.far
            windows += [parent.window, middle.window]
        starts, ends = zip(*windows, strict=True)
        self.window = max(starts), min(ends)

    def next_for(self, first: int, last: int) -> _Piece | None:
        """Where the tokens of these places come from in turn, if that is one piece we know of."""
        parent = self.parent
        if parent is not None and self.window[0] <= first and last <= self.window[1]:
            return self.far
        return parent if parent and parent.start <= first and last <= parent.end else None


_end = attrgetter("end")


class TextBook:
    """Texts made up so that they agree as far as they are said to, and no further."""

    def __init__(self, num_texts: int = 0) -> None:
        """``num_texts`` were there before; of those nothing is known unless it is told."""
        self._num_texts = num_texts
        self._pieces: dict[int, list[_Piece]] = {}
        self._time = 0

    def add(self, likeness: Likeness = NO_LIKENESS) -> int:
        """A new text; its number."""
        number, self._num_texts = self._num_texts, self._num_texts + 1
        self.extend(number, likeness, 0)
        return number

    def extend(self, number: int, likeness: Likeness, start: int) -> None:
        """From ``start`` on the text goes on like the other one, and behind that like none.

        `RecordingError` if there is no such text.
        """
        if likeness.length <= start:
            return
        if not 0 <= likeness.number < self._num_texts:
            raise RecordingError(f"there is no text {likeness.number} to be like")
        pieces = self._pieces.setdefault(number, [])
        place = pieces[-1].end if pieces else 0
        if start > place:
            pieces.append(_Piece(place, start, None, self._tick()))
            place = start
        if likeness.length > place:  # else all of it was known before
            parent = self._parent(likeness.number, place, likeness.length)
            time = self._tick()
            pieces.append(_Piece(place, likeness.length, likeness.number, time, parent))

    def beginning(self, number: int) -> Likeness:
        """Whose tokens the text begins with, and how many of them that one still has there."""
        first = next(iter(self._pieces.get(number, ())), None)
        if first is None or first.source is None:
            return NO_LIKENESS
        others = self._pieces.get(first.source, ())
        later = (piece.start for piece in others if piece.time > first.time)
        return Likeness(first.source, min(first.end, next(later, first.end)))

    def _parent(self, number: int, start: int, end: int) -> _Piece | None:
        """Of the first and the last pieces of a text the one that has most of these places."""
        pieces = self._pieces.get(number, ())
        best, longest = None, 0
        for piece in (*pieces[:4], *pieces[max(len(pieces) - 4, 4) :]):
            num_common = min(piece.end, end) - max(piece.start, start)
            if piece.source is not None and num_common > longest:
                best, longest = piece, num_common
        return best

    def tokens(self, number: int, start: int, end: int) -> list[int]:
        """Tokens ``start .. end - 1``; equal numbers are equal tokens."""
        result: list[int] = []
        pending = [(number, start, end, self._time + 1)] if start < end else []
        num_steps = -STEPS_PER_TOKEN * (end - start)
        while pending:
            text, first, last, before = pending.pop()
            pieces = self._pieces.get(text, ())
            index = bisect_right(pieces, first, key=_end)
            num_steps += 1
            if index == len(pieces) or pieces[index].time >= before:
                result += [_own_token(text)] * (last - first)
                continue
            piece = pieces[index]
            until = min(piece.end, last)
            if until < last:
                pending.append((text, until, last, before))
            if piece.source is None:
                result += [_own_token(text)] * (until - first)
                continue
            while (following := piece.next_for(first, until)) is not None:
                piece = following
                num_steps += 1
            if num_steps > MAX_STEPS:
                raise RecordingError("the texts lean on one another in too many pieces")
            assert piece.source is not None, "it would be nobody's parent"
            pending.append((piece.source, first, until, piece.time))
        return result

    def _tick(self) -> int:
        self._time += 1
        return self._time


def _own_token(number: int) -> int:
    """Tokens are compared at the same place of texts that agree up to there, so one token does for
    all places of a text; 31 bits of it, for a `TextIndex` that gets made-up texts."""
    return number & 0x7FFFFFFF
