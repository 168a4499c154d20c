"""Rows of a matrix that are named, one after another; a piece of work is a row."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from inflight_kernels.cpu.intrinsics import FAST, array_at, finish_piece, take_next
from inflight_kernels.cpu.threads import Kernel, Stage

ROWS_COLUMN = 3
"""Where a `Program` has the address of the numbers of rows, int64."""


def take_rows_stage(x: Tensor, rows: Tensor, out: Tensor) -> Stage:
    """``x[rows]`` of x [T, size] and rows [N] int64 into ``out`` [N, size]; all are contiguous."""
    numbers = (len(rows), rows.data_ptr(), x.data_ptr(), out.data_ptr(), x.shape[1])
    return Stage(_kernel(x.dtype == torch.bfloat16), numbers)


@njit(**FAST)
def _run(pointer, width, like):
    """``width``: bytes of a number like ``like``."""
    numbers = carray(pointer, 7, types.int64)
    num_rows, size = numbers[2], numbers[6]
    rows = array_at(numbers[3], num_rows, np.int64(0))
    while True:
        row = take_next(numbers.ctypes.data)
        if row >= num_rows:
            break
        x = array_at(numbers[4] + rows[row] * size * width, size, like)
        array_at(numbers[5] + row * size * width, size, like)[:] = x
        finish_piece(numbers.ctypes.data)
    return num_rows


def _run_float32(pointer):
    return _run(pointer, 4, np.float32(0))


def _run_bfloat16(pointer):
    return _run(pointer, 2, np.uint16(0))


@cache
def _kernel(is_bfloat16: bool) -> Kernel:
    return Kernel(_run_bfloat16 if is_bfloat16 else _run_float32, 5)
