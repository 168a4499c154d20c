"""Ranks as threads of one process: what they tell one another without `torch.distributed`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from inflight_backend.models.parallel.collectives import Collectives
from inflight_backend.models.parallel.place import Place

_Result = TypeVar("_Result")
_WAIT_SECONDS = 60.0


class Meeting:
    """Where the threads of one model meet; aborted as soon as one of them fails."""

    def __init__(self, first: Place) -> None:
        self.barriers = [threading.Barrier(first.tensor_size) for _ in range(first.pipeline_size)]
        self.given: list[Any] = [None] * first.size
        self.sent = [SimpleQueue[Tensor | None]() for _ in range(first.size)]

    def abort(self) -> None:
        for barrier in self.barriers:
            barrier.abort()
        for queue in self.sent:
            queue.put(None)


class ThreadCollectives(Collectives):
    """Of one of the threads."""

    def __init__(self, place: Place, meeting: Meeting) -> None:
        self.place, self._meeting = place, meeting
        first = place.stage * place.tensor_size
        self._stage = range(first, first + place.tensor_size)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """What all ranks of the stage give."""
        barrier = self._meeting.barriers[self.place.stage]
        self._meeting.given[self.place.rank] = x
        barrier.wait(_WAIT_SECONDS)
        found = [self._meeting.given[rank] for rank in self._stage]
        barrier.wait(_WAIT_SECONDS)
        return found

    def add(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def join_columns(self, x: Tensor, num_columns: int) -> Tensor:
        return torch.cat(self._exchange(x), 1)

    def share(self, tokens: Tensor) -> Tensor:
        return self._exchange(tokens)[0]

    def to_next_stage(self, x: Tensor) -> None:
        self._meeting.sent[(self.place.rank + self.place.tensor_size) % self.place.size].put(x)

    def from_previous_stage(self, x: Tensor) -> Tensor:
        found = self._meeting.sent[self.place.rank].get(timeout=_WAIT_SECONDS)
        if found is None:
            raise threading.BrokenBarrierError
        assert found.shape == x.shape
        return found


def run_ranks(first: Place, function: Callable[[Collectives], _Result]) -> list[_Result]:
    """``function`` on all ranks of a model, whose first one is ``first``, at once."""
    meeting = Meeting(first)

    def run(rank: int) -> _Result:
        place = Place(rank, first.tensor_size, first.pipeline_size, first.splits_experts)
        try:
            return function(ThreadCollectives(place, meeting))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(first.size) as pool:
        futures = [pool.submit(run, rank) for rank in range(first.size)]
    errors = [error for each in futures if (error := each.exception()) is not None]
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return [each.result() for each in futures]
