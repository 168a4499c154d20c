"""Memory that the ranks of a stage share where they are processes of one machine, on CPUs.

A step has two sums a layer, of a few thousand numbers each: through sockets every one of them would
take longer than the linear before it.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from inflight_backend.models.parallel.place import Place
from inflight_kernels.cpu.threads import is_available

_PART_BYTES = 1 << 20
"""What a rank tells the others at once. It has two such places and writes them in turn, so that
nobody still reads what it writes."""
_FILE_NAME = "inflight ranks"
_TOKEN_BYTES = 64
"""At the beginning, for the number by which a rank knows that it has found the right memory."""


class SharedMemory:
    """Made by all ranks of a stage at once, see `meet`; then each calls `exchange` in the same
    order."""

    def __init__(self, memory: mmap.mmap, place: Place) -> None:
        from inflight_kernels.cpu.barrier import Barrier  # it needs numba

        size, self._own, self._turn = place.tensor_size, place.tensor_rank, 0
        content = np.frombuffer(memory, np.uint8)
        parts = content[-2 * size * _PART_BYTES :]
        self._barrier = Barrier(content[_TOKEN_BYTES : -len(parts)], self._own, size)
        self._parts = torch.from_numpy(parts).view(2, size, _PART_BYTES)

    @classmethod
    def meet(cls, place: Place, group: Any) -> SharedMemory | None:
        """None where the ranks of ``group`` cannot share memory: they are on several machines or
        in several containers, or one has no compiled kernels."""
        if not _agree(is_available(), group):
            return None
        from inflight_kernels.cpu.barrier import page_size

        size = place.tensor_size
        num_bytes = _TOKEN_BYTES + page_size(size) + 2 * size * _PART_BYTES
        first = place.stage * size
        own_file, memory, note = None, None, torch.zeros(3, dtype=torch.int64)
        if place.rank == first:
            with suppress(OSError, AttributeError):  # a sandbox or a Python without such files
                own_file, memory = _create(num_bytes)
                token = int.from_bytes(memory[:8], "little")
                note = torch.tensor([os.getpid(), own_file, token])
        dist.broadcast(note, first, group=group)
        if place.rank != first:
            process, file, token = note.tolist()
            memory = _find(process, file, token, num_bytes)
        is_shared = _agree(memory is not None, group)
        if own_file is not None:
            os.close(own_file)  # the memory stays, for as long as somebody has it
        return cls(memory, place) if is_shared and memory is not None else None

    def exchange(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Places in x [n], and what all ranks have there [ranks, length], to be read before the
        next one is asked for. `RuntimeError` once a rank is lost."""
        most = _PART_BYTES // x.element_size()
        for start in range(0, len(x), most):
            place = slice(start, min(start + most, len(x)))
            parts = self._parts[self._turn].view(x.dtype)[:, : place.stop - start]
            self._turn = 1 - self._turn
            parts[self._own].copy_(x[place])
            if not self._barrier.wait():
                raise RuntimeError("a rank is lost")
            yield place, parts

    def give_up(self) -> None:
        """Have those return that wait for a rank, with an error; from any thread."""
        self._barrier.give_up()


def _agree(is_so: bool, group: Any) -> bool:
    """Whether it is so on all ranks."""
    number = torch.tensor([int(is_so)])
    dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
    return bool(number)


def _create(num_bytes: int) -> tuple[int, mmap.mmap]:
    """Memory of zeros behind a random token, and the file by which others find it; `OSError`."""
    file = os.memfd_create(_FILE_NAME)
    try:
        os.ftruncate(file, num_bytes)
        memory = mmap.mmap(file, num_bytes)
    except OSError:
        os.close(file)
        raise
    memory[:8] = secrets.randbits(62).to_bytes(8, "little")
    return file, memory


def _find(process: int, file: int, token: int, num_bytes: int) -> mmap.mmap | None:
    """The memory that another process has open as ``file``, if it is on this machine."""
    path = f"/proc/{process}/fd/{file}"
    with suppress(OSError, ValueError):
        if not os.readlink(path).startswith(f"/memfd:{_FILE_NAME}"):
            return None  # a number means another process in another container
        found = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(found, num_bytes)
        finally:
            os.close(found)
        if int.from_bytes(memory[:8], "little") == token:
            return memory
    return None
