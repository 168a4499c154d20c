"""The most likely token of each row of logits [N, V]: `reference.greedy`.

Numbers are compared as integers in their order, at whose ends stands what is not finite.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from inflight_kernels.cpu.intrinsics import FAST, array_at, finish_piece, take_next
from inflight_kernels.cpu.threads import Kernel

_PART = 1024
"""Numbers of which a maximum is found at once; where it stands is looked up in the best part."""
_FEW = 1 << 18
"""Numbers that one thread is done with before others have begun."""


def greedy(logits: Tensor) -> Tensor:
    """As `reference.greedy`; of several best ones the first."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    numbers = num_rows, logits.data_ptr(), logits.stride(0), size, tokens.data_ptr()
    _kernel(logits.dtype == torch.bfloat16)(*numbers, is_small=logits.numel() < _FEW)
    return tokens


@njit(inline="always")
def _order(bits, sign):
    """Of a float's bits: those without the sign, negative where it is set; ``sign``: its place."""
    is_negative = (bits >> sign) & 1
    return ((bits & ((1 << sign) - 1)) ^ -is_negative) + is_negative


@njit(**FAST)
def _find_best(row, sign, infinity):
    """The place of the largest number; -1 where one is NaN or +infinity, or none is finite."""
    best, least, best_start = -infinity, infinity, 0
    for start in range(0, len(row), _PART):
        most = -infinity
        for index in range(start, min(start + _PART, len(row))):
            order = _order(np.int64(row[index]), sign)
            most, least = max(most, order), min(least, order)
        if most > best:
            best, best_start = most, start
    if best == -infinity or best >= infinity or least < -infinity:
        return -1
    place = best_start
    while _order(np.int64(row[place]), sign) != best:
        place += 1
    return place


@njit(**FAST)
def _run(pointer, like, size, sign, infinity):
    """``like`` and ``size``: the integer that has a number's bits, and its bytes."""
    numbers = carray(pointer, 7, types.int64)
    num_rows, logits, stride, num_columns = numbers[2], numbers[3], numbers[4], numbers[5]
    tokens = array_at(numbers[6], num_rows, np.int64(0))
    while True:
        piece = take_next(numbers.ctypes.data)
        if piece >= num_rows:
            break
        row = array_at(logits + piece * stride * size, num_columns, like)
        tokens[piece] = _find_best(row, sign, infinity)
        finish_piece(numbers.ctypes.data)
    return num_rows


def _run_float32(pointer):
    return _run(pointer, np.int32(0), 4, 31, 0x7F800000)


def _run_bfloat16(pointer):
    return _run(pointer, np.uint16(0), 2, 15, 0x7F80)


@cache
def _kernel(is_bfloat16: bool) -> Kernel:
    return Kernel(_run_bfloat16 if is_bfloat16 else _run_float32, 5)
