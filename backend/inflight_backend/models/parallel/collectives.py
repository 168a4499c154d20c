"""What the ranks of one model tell one another during a step: the only place of collectives.

All ranks see the same plans, so they meet here in the same order. On GPUs NCCL carries them, and
they are recorded with the steps; on CPUs gloo does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from inflight_backend.models.parallel.place import ALONE, Place


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


@dataclass(frozen=True, slots=True)
class _Groups:
    stage: Any
    everybody: Any


class GroupCollectives(Collectives):
    """Those of a process group (`torch.distributed`), which has been made."""

    def __init__(self, place: Place) -> None:
        """Every rank of the group calls it, and with the same sizes."""
        self.place = place
        stages = [
            dist.new_group(list(range(stage * place.tensor_size, (stage + 1) * place.tensor_size)))
            for stage in range(place.pipeline_size)
        ]
        self._groups = _Groups(stages[place.stage], dist.group.WORLD)
        self._first_of_stage = place.stage * place.tensor_size
        self._next = (place.rank + place.tensor_size) % place.size
        self._previous = (place.rank - place.tensor_size) % place.size
        self._counts_on = "cuda" if dist.get_backend() == "nccl" else "cpu"

    def add(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        if self.place.tensor_size > 1:
            x = x.contiguous()
            dist.all_reduce(x, group=self._groups.stage)
        return x

    def join_columns(self, x: Tensor, num_columns: int) -> Tensor:
        """See `Collectives`."""
        size = self.place.tensor_size
        if size == 1:
            return x
        most = -(-num_columns // size)
        padded = torch.nn.functional.pad(x, (0, most - x.shape[1])).contiguous()
        parts = padded.new_empty((size, *padded.shape))
        dist.all_gather(list(parts.unbind()), padded, group=self._groups.stage)
        return parts.transpose(0, 1).reshape(len(x), -1)[:, :num_columns].contiguous()

    def share(self, tokens: Tensor) -> Tensor:
        """See `Collectives`."""
        if self.place.tensor_size > 1:
            dist.broadcast(tokens, self._first_of_stage, group=self._groups.stage)
        return tokens

    def least(self, number: int) -> int:
        """See `Collectives`."""
        found = torch.tensor([number], device=self._counts_on)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._groups.everybody)
        return int(found)

    def to_next_stage(self, x: Tensor) -> None:
        """See `Collectives`."""
        dist.send(x.contiguous(), self._next)

    def from_previous_stage(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        dist.recv(x, self._previous)
        return x
