"""Processes of one machine wait for one another, at counters in memory that they share."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, types

from inflight_kernels.cpu.intrinsics import call, finish_piece, pause, read_shared
from inflight_kernels.cpu.threads import compile_function

_SPINS = 2_000
"""How often a process looks before it lets others have its core, between two looks then."""
_SLEEP_US = 50
_LINE = 8
"""Numbers of a cache line: each counter has one of its own."""


def page_size(num_processes: int) -> int:
    """Bytes that a `Barrier` needs."""
    return 8 * _LINE * (1 + num_processes)


class Barrier:
    """That of process ``own`` of ``num_processes``, which all have ``page`` in their memory: bytes
    that were 0 when the first of them came."""

    def __init__(self, page: npt.NDArray[np.uint8], own: int, num_processes: int) -> None:
        self._page = page.view(np.int64)
        sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
        self._numbers = np.array([self._page.ctypes.data, own, num_processes, sleep, 0])

    def wait(self) -> bool:
        """Until all have called it as often as this one has; who returns sees what the others wrote
        before. False once one has said `give_up`."""
        self._numbers[4] += 1
        _compiled().ctypes(self._numbers.ctypes.data)
        return not self._page[0]

    def give_up(self) -> None:
        """Let all go that wait, now and from now on; any thread may say so."""
        self._page[0] = 1


def _wait(pointer):
    page, own, num_processes, sleep, number = carray(pointer, 5, types.int64)
    line = np.int64(8 * _LINE)
    finish_piece(page + line * (1 + own) - 8)  # it counts behind the address
    for process in range(num_processes):
        looks = 0
        while read_shared(page + line * (1 + process)) < number and read_shared(page) == 0:
            looks += 1
            if looks < _SPINS:
                pause()
            else:
                call(sleep, _SLEEP_US)
    return 0


@cache
def _compiled() -> Any:
    return compile_function(_wait)
