"""A part of the recorder's ring, which can be replayed without those before it.

Everything is held as bytes: they are small, their size is known, and the garbage collector, a pause
of which is a pause of everybody, does not look into them. A tuple of numbers it would visit at
least once, with each of its numbers; and tuples with names for ever.
"""

from __future__ import annotations

import marshal
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from inflight_recorder.beams import Moves
from inflight_recorder.likeness import Likeness
from inflight_recorder.records import (
    Arrival,
    Chunk,
    Decision,
    Drafts,
    End,
    Growth,
    Iteration,
    RequestState,
)
from inflight_recorder.texts import CacheMark

_VERSION = 2  # of marshal: the last one that does not look for objects it has seen before


def pack_ids(ids: Iterable[int]) -> bytes:
    """Ids of requests, eight bytes each."""
    return array("Q", ids).tobytes()


def pack_iteration(fields: tuple[Any, ...]) -> bytes:
    """``fields`` are those of an `Iteration`, in its order.

    Of each list the fields of all entries, one after another; a likeness is two of them. Instead of
    the decision stand its context chunks in such a list, or None; who generates: None for who did
    before, packed ids, or the changes (see `RankedGenerations.changes_since`); and the paused ids.
    """
    return marshal.dumps(fields, _VERSION)


class Unpacker:
    """Gives iterations their names again; for those of one recorder, in their order, from the
    first one of a segment on."""

    def __init__(self) -> None:
        self._ids = array("Q")
        self._generation: tuple[int, ...] = ()

    def iteration(self, packed: bytes) -> Iteration:
        """What `pack_iteration` was given."""
        fields = marshal.loads(packed)
        arrivals, context, generation, paused, num_free_blocks, ends, has_failed = fields[3:10]
        growths, is_by_default, has_lost, drafts, is_settled, moves, has_forgotten = fields[10:]
        if generation is not None:
            self._change(generation)
        rows = _rows(arrivals, len(Arrival._fields) + 1)
        decision = None
        if context is not None:
            decision = Decision(
                tuple(map(Chunk._make, _rows(context, 2))), self._generation, paused
            )
        return Iteration._make(
            (
                *fields[:3],
                tuple([Arrival._make((*row[:-2], Likeness(*row[-2:]))) for row in rows]),
                decision,
                num_free_blocks,
                tuple(map(End._make, _rows(ends, 2))),
                has_failed,
                tuple([Growth(row[0], Likeness(*row[1:])) for row in _rows(growths, 3)]),
                is_by_default,
                has_lost,
                tuple(map(Drafts._make, _rows(drafts, 4))),
                is_settled,
                tuple(map(Moves._make, _rows(moves, 2))),
                has_forgotten,
            )
        )

    def _change(self, generation: bytes | tuple[int, ...]) -> None:
        if isinstance(generation, bytes):
            self._ids = array("Q", generation)
        else:
            changes = iter(generation)
            for place in changes:
                if place < 0:
                    del self._ids[~place]
                else:
                    self._ids.insert(place, next(changes))
        self._generation = tuple(self._ids)


def pack_states(states: Iterable[tuple[Any, ...]]) -> bytes:
    """The fields of each `RequestState`."""
    return marshal.dumps(flat(states), _VERSION)


@dataclass(slots=True)
class Segment:
    """``states``: see `pack_states`. ``size``: it is as long as so many of the shortest."""

    states: bytes
    is_running: bool
    cache: CacheMark | None
    size: int
    max_iterations: int
    max_bytes: int
    num_bytes: int = 0
    packed: list[bytes] = field(default_factory=list)

    def add(self, iteration: bytes) -> None:
        """One more, which `pack_iteration` has made; the first one must say who generates."""
        self.num_bytes += len(iteration) + _OVERHEAD
        self.packed.append(iteration)

    @property
    def is_full(self) -> bool:
        """True when the next iteration needs another segment."""
        return len(self.packed) >= self.max_iterations or self.num_bytes >= self.max_bytes

    @property
    def iterations(self) -> tuple[Iteration, ...]:
        """All that were added."""
        return tuple(map(Unpacker().iteration, self.packed))

    @property
    def active(self) -> tuple[RequestState, ...]:
        """Who was active when it began."""
        states = marshal.loads(self.states)
        return tuple(map(RequestState._make, _rows(states, len(RequestState._fields))))


_OVERHEAD = 48  # bytes of the object that holds an iteration


def flat(rows: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The fields of all ``rows``, one after another."""
    return tuple(chain.from_iterable(rows))


def _rows(fields: tuple[Any, ...], width: int) -> Iterator[tuple[Any, ...]]:
    return zip(*[iter(fields)] * width, strict=True)
