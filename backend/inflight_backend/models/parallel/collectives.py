"""What the ranks of one model tell one another during a step: the only place of collectives.

All ranks see the same plans, so they meet here in the same order. On GPUs NCCL carries them, and
they are recorded with the steps; on CPUs gloo does, and between processes of one machine the memory
that they share.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from inflight_backend.log import get_logger
from inflight_backend.models.parallel.place import ALONE, Place
from inflight_backend.models.parallel.shared_memory import SharedMemory

_logger = get_logger(__name__)


class Collectives:
    """Those of a model that runs on one device: nothing is told to anybody."""

    place = ALONE

    def add(self, x: Tensor) -> Tensor:
        """The sum of what the ranks of a stage have, of one shape; ``x`` may be overwritten."""
        return x

    def join_columns(self, x: Tensor, num_columns: int) -> Tensor:
        """x [N, n], the columns of each rank of a stage -> [N, num_columns]. All have as many but
        the last, which may have fewer."""
        return x

    def share(self, tokens: Tensor) -> Tensor:
        """What the first rank of a stage has; that of the others is only a place for it."""
        return tokens

    def least(self, number: int) -> int:
        """The least number that a rank has."""
        return number

    def to_next_stage(self, x: Tensor) -> None:
        """Send hidden states; from the last stage to the first."""
        raise AssertionError("there is one stage")

    def from_previous_stage(self, x: Tensor) -> Tensor:
        """Hidden states, in the place of ``x``; those of the last stage for the first."""
        raise AssertionError("there is one stage")


NO_COLLECTIVES = Collectives()

MAX_UNDER_WAY = 8
"""Hidden states that a stage may have sent and the next one not received."""


@dataclass(frozen=True, slots=True)
class _Groups:
    stage: Any
    everybody: Any
    back: Any


class GroupCollectives(Collectives):
    """Those of a process group (`torch.distributed`), which has been made."""

    def __init__(self, place: Place, timeout: timedelta | None = None) -> None:
        """Every rank of the group calls it, and with the same sizes. ``timeout``: for ranks to
        reach one another; None: as torch has it."""
        self.place = place
        firsts = range(0, place.size, place.tensor_size)
        stages = [
            dist.new_group(list(range(first, first + place.tensor_size)), timeout=timeout)
            for first in firsts
        ]
        # What the last stage sends to the first has a way of its own: NCCL keeps the order of what
        # two ranks send and receive in a group, and both may send first.
        back = dist.new_group(timeout=timeout) if place.pipeline_size > 1 else None
        self._groups = _Groups(stages[place.stage], dist.group.WORLD, back)
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        self._first_of_stage = place.stage * place.tensor_size
        self._next = (place.rank + place.tensor_size) % place.size
        self._previous = (place.rank - place.tensor_size) % place.size
        self._counts_on = "cuda" if dist.get_backend() == "nccl" else "cpu"
        self._memory: SharedMemory | None = None
        if self._counts_on == "cpu" and place.tensor_size > 1:
            self._memory = SharedMemory.meet(place, self._groups.stage)
            if self._memory is None and place.rank == 0:
                _logger.info("the ranks share no memory: they add up through sockets, more slowly")

    def wait_for(self, timeout: timedelta) -> None:
        """How long each collective waits for the slowest rank from now on."""
        groups = self._groups
        for group in (groups.stage, groups.everybody, groups.back):
            if group is not None:
                dist.distributed_c10d._set_pg_timeout(timeout, group)

    def give_up(self) -> None:
        """Have those return that wait for a rank in shared memory, with an error; from any thread.
        Those of gloo do so by themselves; of NCCL see `ranks.meeting.give_up`."""
        if self._memory is not None:
            self._memory.give_up()

    def close(self) -> None:
        """Let go of connections and shared memory, which else stay until Python's garbage collector
        comes; nothing may be asked of it any more."""
        del self._groups
        self._memory = None
        self._under_way.clear()

    def add(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        if self.place.tensor_size == 1:
            return x
        x = x.contiguous()
        if self._memory is None:
            dist.all_reduce(x, group=self._groups.stage)
        else:
            flat = x.view(-1)
            for place, parts in self._memory.exchange(flat):
                torch.sum(parts, 0, out=flat[place])
        return x

    def join_columns(self, x: Tensor, num_columns: int) -> Tensor:
        """See `Collectives`."""
        size = self.place.tensor_size
        if size == 1:
            return x
        most = -(-num_columns // size)
        padded = torch.nn.functional.pad(x, (0, most - x.shape[1])).contiguous()
        parts = padded.new_empty((size, *padded.shape))
        if self._memory is None:
            dist.all_gather(list(parts.unbind()), padded, group=self._groups.stage)
        else:
            flat = parts.view(size, -1)
            for columns, found in self._memory.exchange(padded.view(-1)):
                flat[:, columns] = found
        return parts.transpose(0, 1).reshape(len(x), size * most)[:, :num_columns].contiguous()

    def share(self, tokens: Tensor) -> Tensor:
        """See `Collectives`."""
        if self._memory is not None:
            flat = tokens.view(-1)
            for place, parts in self._memory.exchange(flat):
                flat[place] = parts[0]
        elif self.place.tensor_size > 1:
            dist.broadcast(tokens, self._first_of_stage, group=self._groups.stage)
        return tokens

    def least(self, number: int) -> int:
        """See `Collectives`."""
        found = torch.tensor([number], device=self._counts_on)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._groups.everybody)
        return int(found)

    def to_next_stage(self, x: Tensor) -> None:
        """See `Collectives`. It does not wait for the next stage, which may be about to send."""
        if len(self._under_way) == MAX_UNDER_WAY:
            self._under_way.popleft()[0].wait()
        x, group = x.contiguous(), self._groups.everybody
        if self.place.is_last_stage:
            group = self._groups.back
        self._under_way.append((dist.isend(x, self._next, group=group), x))

    def from_previous_stage(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        is_first = self.place.is_first_stage
        group = self._groups.back if is_first else self._groups.everybody
        dist.recv(x, self._previous, group=group)
        return x
