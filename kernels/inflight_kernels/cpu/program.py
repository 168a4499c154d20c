"""Kernels that run one after another, handed to all threads at once.

A thread goes on to the next stage once all pieces of the stage are done, whoever has done them: one
that comes late holds nobody up, and finds its way through stages where nothing is left to take.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, types

from inflight_kernels.cpu.intrinsics import array_at, call, pause, read_shared
from inflight_kernels.cpu.threads import Stage, compile_function, parallel

_SPINS = 2_000
"""How often a thread looks whether a stage is over before it lets others have its core."""
_ROWS = 2
"""Column of the number of rows."""


class Program:
    """Some stages, of which each may read what those before it have written.

    ``numbers`` [stages, columns] int64 is what kernels get: two counters, then the integers of the
    stage, the number of rows first; floats behind them. They may be changed between two runs, which
    are not to overlap.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._kernels = {each.kernel for each in stages}  # hold the compiled code
        widths = [2 + len(each.integers) + len(each.floats) for each in stages]
        self.numbers: npt.NDArray[np.int64] = np.zeros((len(stages), max(widths)), np.int64)
        for row, (_, integers, floats) in zip(self.numbers, stages, strict=True):
            end = 2 + len(integers)
            row[2:end] = integers
            row.view(np.float64)[end : end + len(floats)] = floats
        self._functions = np.array([each.kernel.address for each in stages], np.int64)
        self._header = np.array(
            [
                len(stages),
                self._functions.ctypes.data,
                self.numbers.ctypes.data,
                self.numbers.strides[0],
                ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value,
            ],
            np.int64,
        )

    def run(self, num_rows: int | npt.NDArray[np.int64], *, is_small: bool = False) -> None:
        """Every stage, of so many rows (or each of its own), on all threads or on this one
        alone."""
        self.numbers[:, :_ROWS] = 0
        self.numbers[:, _ROWS] = num_rows
        header = self._header.ctypes.data
        if is_small:
            _compiled().ctypes(header)
        else:
            parallel()(_compiled().address, header, torch.get_num_threads(), 0)


def _run_stages(pointer):
    num_stages, functions, numbers, stride, yield_core = carray(pointer, 5, types.int64)
    addresses = array_at(functions, num_stages, np.int64(0))
    for stage in range(num_stages):
        num_pieces = call(addresses[stage], numbers)
        looks = 0
        while read_shared(numbers + 8) < num_pieces:
            looks += 1
            if looks < _SPINS:
                pause()
            else:
                call(yield_core, 0)
        numbers += stride
    return 0


@cache
def _compiled() -> Any:
    return compile_function(_run_stages)
