"""A part of the recorder's ring, which can be replayed without those before it.

Everything is held as plain tuples of numbers wherever it is many: the garbage collector, a pause of
which is a pause of everybody, does not look into those. Into every `Iteration` and `Arrival` it
does, as a tuple with names may be more than a tuple; so they are made again when the ring is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, TypeAlias

from inflight_scheduler.recording.beams import Moves
from inflight_scheduler.recording.likeness import Likeness
from inflight_scheduler.recording.records import (
    Arrival,
    Chunk,
    Decision,
    Drafts,
    End,
    Growth,
    Iteration,
    RequestState,
)
from inflight_scheduler.recording.texts import CacheMark

PlainIteration: TypeAlias = tuple[Any, ...]
"""The fields of an `Iteration`; of each list in it the fields of all entries, one after another."""


@dataclass(slots=True)
class Segment:
    """``states``: the fields of each `RequestState`, one after another. ``size``: it is as long as
    so many of the shortest."""

    states: tuple[Any, ...]
    is_running: bool
    cache: CacheMark | None
    size: int
    max_iterations: int
    max_numbers: int
    num_numbers: int = 0
    _iterations: list[PlainIteration] = field(default_factory=list)

    def add(self, iteration: Iteration) -> None:
        """One more iteration."""
        self._iterations.append(plain(iteration))
        self.num_numbers += _num_numbers(iteration)

    @property
    def is_full(self) -> bool:
        """True when the next iteration needs another segment."""
        is_long = len(self._iterations) >= self.max_iterations
        return is_long or self.num_numbers >= self.max_numbers

    @property
    def plain_iterations(self) -> tuple[PlainIteration, ...]:
        """All that were added, to be read with `named`."""
        return tuple(self._iterations)

    @property
    def iterations(self) -> tuple[Iteration, ...]:
        """All that were added."""
        return tuple(map(named, self._iterations))

    @property
    def active(self) -> tuple[RequestState, ...]:
        """Who was active when it began."""
        return tuple(map(RequestState._make, _rows(self.states, len(RequestState._fields))))


def plain(iteration: Iteration) -> PlainIteration:
    """``iteration`` without names."""
    decision = iteration.decision
    return (
        *iteration[:3],
        _flat([(*arrival[:-1], *arrival.likeness) for arrival in iteration.arrivals]),
        *((None, (), ()) if decision is None else (_flat(decision.context), *decision[1:])),
        iteration.num_free_blocks,
        _flat(iteration.ends),
        iteration.has_failed,
        _flat([(growth.request_id, *growth.likeness) for growth in iteration.growths]),
        *iteration[9:11],
        _flat(iteration.drafts),
        iteration.is_settled,
        _flat([(each.request_id, len(each.parents), *each.parents) for each in iteration.moves]),
        *iteration[14:],
    )


def named(fields: PlainIteration) -> Iteration:
    """The iteration that `plain` was given."""
    arrivals, context, generation, paused, num_free_blocks, ends, has_failed, growths = fields[3:11]
    rows = _rows(arrivals, len(Arrival._fields) + 1)
    decision = None
    if context is not None:
        decision = Decision(tuple(map(Chunk._make, _rows(context, 2))), generation, paused)
    return Iteration._make(
        (
            *fields[:3],
            tuple([Arrival._make((*row[:-2], Likeness(*row[-2:]))) for row in rows]),
            decision,
            num_free_blocks,
            tuple(map(End._make, _rows(ends, 2))),
            has_failed,
            tuple([Growth(row[0], Likeness(*row[1:])) for row in _rows(growths, 3)]),
            *fields[11:13],
            tuple(map(Drafts._make, _rows(fields[13], 4))),
            fields[14],
            tuple(_moves(fields[15])),
            *fields[16:],
        )
    )


def _moves(flat: tuple[Any, ...]) -> Iterator[Moves]:
    numbers = iter(flat)
    for request_id in numbers:
        yield Moves(request_id, tuple(islice(numbers, next(numbers))))


def _flat(rows: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(rows))


def _rows(flat: tuple[Any, ...], width: int) -> Iterator[tuple[Any, ...]]:
    return zip(*[iter(flat)] * width, strict=True)


def _num_numbers(iteration: Iteration) -> int:
    """Ids held by the record, but for who generates, which many share."""
    number = 8 + 6 * len(iteration.arrivals) + 2 * len(iteration.ends)
    number += 4 * len(iteration.drafts) + 3 * len(iteration.growths)
    number += sum(2 + len(moves.parents) for moves in iteration.moves)
    if iteration.decision is not None:
        number += 2 * len(iteration.decision.context) + len(iteration.decision.paused)
    return number
