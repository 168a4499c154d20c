"""RMS norm, with and without a sum before it, the gated SiLU, and what products of quantised
weights read: rows of x [T, dim].

Meaning and rounding are those of `inflight_kernels.reference`; a piece of work is a row.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from inflight_kernels import reference
from inflight_kernels.cpu.intrinsics import (
    FAST,
    array_at,
    exp,
    finish_piece,
    get,
    nearest,
    put,
    rounded,
    take_next,
)
from inflight_kernels.cpu.threads import Kernel, Stage

_FEW = 32_768
"""Numbers that one thread is done with before others have begun."""
_EXACT = {**FAST, "fastmath": False}
"""Of quotients that are to be rounded: many are halves, which a reciprocal would miss."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`, of x [T, dim] or [dim]."""
    if weight.dtype != x.dtype:  # it has an offset in it
        return reference.rms_norm(x, weight, eps)
    x, out = x.contiguous(), torch.empty_like(x)
    rms_norm_stage(x, weight, eps, out).run(is_small=x.numel() < _FEW)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `reference.add_rms_norm`."""
    if weight.dtype != x.dtype:
        return reference.add_rms_norm(x, residual, weight, eps)
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    add_rms_norm_stage(x, residual, weight, eps, out, total).run(is_small=x.numel() < _FEW)
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `reference.silu_mul`."""
    gate_up = gate_up.contiguous()
    num_rows, size = gate_up.shape
    out = torch.empty(num_rows, size // 2, dtype=gate_up.dtype)
    silu_mul_stage(gate_up, out).run(is_small=out.numel() < _FEW)
    return out


# The same into memory that is given. All tensors are contiguous.


def rms_norm_stage(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Stage:
    """`rms_norm`."""
    return _norm_stage(x, 0, weight, eps, out, 0)


def add_rms_norm_stage(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, total: Tensor
) -> Stage:
    """`add_rms_norm`, whose answers are ``out`` and ``total``."""
    return _norm_stage(x, residual.data_ptr(), weight, eps, out, total.data_ptr())


def silu_mul_stage(gate_up: Tensor, out: Tensor) -> Stage:
    """`silu_mul`."""
    numbers = (len(out), gate_up.data_ptr(), out.data_ptr(), out.shape[1])
    return Stage(_silu_kernel(out.dtype == torch.bfloat16), numbers)


def quantize_stage(x: Tensor, numbers: Tensor, scales: Tensor) -> Stage:
    """`reference.quantize_int8` of x [T, columns]: 128 more than the numbers, as uint8, and their
    scales float32 [T, 1]; all are contiguous."""
    pointers = (x.data_ptr(), numbers.data_ptr(), scales.data_ptr())
    return Stage(_quantize_kernel(x.dtype == torch.bfloat16), (len(x), *pointers, x.shape[1]))


def group_sums_stage(x: Tensor, group_size: int, out: Tensor) -> Stage:
    """Sums of each group of so many columns of x [T, columns], of which the last may be shorter,
    into ``out`` float32 [T, groups]; both are contiguous."""
    numbers = (len(x), x.data_ptr(), out.data_ptr(), x.shape[1], group_size)
    return Stage(_sums_kernel(x.dtype == torch.bfloat16), numbers)


def select_columns_stage(x: Tensor, columns: Tensor, out: Tensor) -> Stage:
    """``x[:, columns]``, columns int32 [n], into ``out`` [T, n]; all are contiguous."""
    numbers = (len(x), x.data_ptr(), columns.data_ptr(), out.data_ptr(), x.shape[1], out.shape[1])
    return Stage(_columns_kernel(x.dtype == torch.bfloat16), numbers)


def _norm_stage(
    x: Tensor, residual: int, weight: Tensor, eps: float, out: Tensor, total: int
) -> Stage:
    size = x.shape[-1]
    pointers = (x.data_ptr(), residual, weight.data_ptr(), out.data_ptr(), total)
    kernel = _norm_kernel(x.dtype == torch.bfloat16)
    return Stage(kernel, (x.numel() // size, *pointers, size), (eps,))


@njit(**FAST)
def _norm_row(x, residual, has_residual, weight, out, total, eps, like):
    squares = np.float32(0.0)
    if has_residual:
        for i in range(len(x)):
            put(total, i, get(x, i) + get(residual, i))
        x = total
    for i in range(len(x)):
        number = get(x, i)
        squares += number * number
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(len(x)) + np.float32(eps))
    for i in range(len(x)):
        put(out, i, rounded(get(x, i) * scale, like) * get(weight, i))


@njit(**FAST)
def _norm_rows(pointer, size, like):
    """``size``: bytes of a number like ``like``."""
    numbers, eps = carray(pointer, 9, types.int64), carray(pointer, 10, types.float64)[9]
    num_rows, dim = numbers[2], numbers[8]
    weight = array_at(numbers[5], dim, like)
    while True:
        row = take_next(numbers.ctypes.data)
        if row >= num_rows:
            break
        start = row * dim * size
        x, out = array_at(numbers[3] + start, dim, like), array_at(numbers[6] + start, dim, like)
        if numbers[4] != 0:
            residual = array_at(numbers[4] + start, dim, like)
            total = array_at(numbers[7] + start, dim, like)
            _norm_row(x, residual, True, weight, out, total, eps, like)
        else:
            _norm_row(x, x, False, weight, out, x, eps, like)
        finish_piece(numbers.ctypes.data)
    return num_rows


def _norm_float32(pointer):
    return _norm_rows(pointer, 4, np.float32(0))


def _norm_bfloat16(pointer):
    return _norm_rows(pointer, 2, np.uint16(0))


@cache
def _norm_kernel(is_bfloat16: bool) -> Kernel:
    return Kernel(_norm_bfloat16 if is_bfloat16 else _norm_float32, 7, 1)


@njit(**FAST)
def _gate_row(gate, up, out, like):
    for i in range(len(out)):
        number = get(gate, i)
        silu = number / (np.float32(1.0) + exp(-number))
        put(out, i, rounded(silu, like) * get(up, i))


@njit(**FAST)
def _gate_rows(pointer, size, like):
    numbers = carray(pointer, 6, types.int64)
    num_rows, dim = numbers[2], numbers[5]
    while True:
        row = take_next(numbers.ctypes.data)
        if row >= num_rows:
            break
        start = numbers[3] + 2 * row * dim * size
        gate, up = array_at(start, dim, like), array_at(start + dim * size, dim, like)
        _gate_row(gate, up, array_at(numbers[4] + row * dim * size, dim, like), like)
        finish_piece(numbers.ctypes.data)
    return num_rows


def _silu_float32(pointer):
    return _gate_rows(pointer, 4, np.float32(0))


def _silu_bfloat16(pointer):
    return _gate_rows(pointer, 2, np.uint16(0))


@cache
def _silu_kernel(is_bfloat16: bool) -> Kernel:
    return Kernel(_silu_bfloat16 if is_bfloat16 else _silu_float32, 4)


@njit(**FAST)
def _largest(x):
    found = np.float32(1e-12)
    for column in range(len(x)):
        found = max(found, abs(get(x, column)))
    return found


@njit(
    nogil=True, error_model="numpy"
)  # not by a reciprocal: quotients may lie between two integers
def _quantize_row(x, largest, numbers):
    """The scale of the row."""
    scale = largest / np.float32(127)
    for column in range(len(x)):
        numbers[column] = np.uint8(np.int32(nearest(get(x, column) / scale)) + np.int32(128))
    return scale


@njit(**_EXACT)
def _quantize(pointer, size, like):
    """``size``: bytes of a number like ``like``. A piece is a row."""
    numbers = carray(pointer, 7, types.int64)
    num_rows, columns = numbers[2], numbers[6]
    scales = array_at(numbers[5], num_rows, np.float32(0))
    while True:
        row = take_next(numbers.ctypes.data)
        if row >= num_rows:
            break
        x = array_at(numbers[3] + row * columns * size, columns, like)
        of_row = array_at(numbers[4] + row * columns, columns, np.uint8(0))
        scales[row] = _quantize_row(x, _largest(x), of_row)
        finish_piece(numbers.ctypes.data)
    return num_rows


def _quantize_float32(pointer):
    return _quantize(pointer, 4, np.float32(0))


def _quantize_bfloat16(pointer):
    return _quantize(pointer, 2, np.uint16(0))


@cache
def _quantize_kernel(is_bfloat16: bool) -> Kernel:
    return Kernel(_quantize_bfloat16 if is_bfloat16 else _quantize_float32, 5)


@njit(**FAST)
def _sum_groups(pointer, size, like):
    """``size``: bytes of a number like ``like``. A piece is a row."""
    numbers = carray(pointer, 7, types.int64)
    num_rows, columns, group_size = numbers[2], numbers[5], numbers[6]
    num_groups = (columns + group_size - 1) // group_size
    while True:
        row = take_next(numbers.ctypes.data)
        if row >= num_rows:
            break
        x = array_at(numbers[3] + row * columns * size, columns, like)
        out = array_at(numbers[4] + row * num_groups * 4, num_groups, np.float32(0))
        for group in range(num_groups):
            total = np.float32(0)
            for column in range(group * group_size, min((group + 1) * group_size, columns)):
                total += get(x, column)
            out[group] = total
        finish_piece(numbers.ctypes.data)
    return num_rows


def _sum_groups_float32(pointer):
    return _sum_groups(pointer, 4, np.float32(0))


def _sum_groups_bfloat16(pointer):
    return _sum_groups(pointer, 2, np.uint16(0))


@cache
def _sums_kernel(is_bfloat16: bool) -> Kernel:
    return Kernel(_sum_groups_bfloat16 if is_bfloat16 else _sum_groups_float32, 5)


@njit(**FAST)
def _select_columns(pointer, size, like):
    """``size``: bytes of a number like ``like``. A piece is a row."""
    numbers = carray(pointer, 8, types.int64)
    num_rows, of_x, count = numbers[2], numbers[6], numbers[7]
    columns = array_at(numbers[4], count, np.int32(0))
    while True:
        row = take_next(numbers.ctypes.data)
        if row >= num_rows:
            break
        x = array_at(numbers[3] + row * of_x * size, of_x, like)
        out = array_at(numbers[5] + row * count * size, count, like)
        for place in range(count):
            out[place] = x[columns[place]]
        finish_piece(numbers.ctypes.data)
    return num_rows


def _select_columns_float32(pointer):
    return _select_columns(pointer, 4, np.float32(0))


def _select_columns_bfloat16(pointer):
    return _select_columns(pointer, 2, np.uint16(0))


@cache
def _columns_kernel(is_bfloat16: bool) -> Kernel:
    return Kernel(_select_columns_bfloat16 if is_bfloat16 else _select_columns_float32, 6)


ROWS_COLUMN = 3
"""Where a `Program` has the address of the numbers of rows, int64."""


def take_rows_stage(x: Tensor, rows: Tensor, out: Tensor) -> Stage:
    """``x[rows]`` of x [T, size] and rows [N] int64 into ``out`` [N, size]; all are contiguous."""
    numbers = (len(rows), rows.data_ptr(), x.data_ptr(), out.data_ptr(), x.shape[1])
    return Stage(_take_kernel(x.dtype == torch.bfloat16), numbers)


@njit(**FAST)
def _take_rows(pointer, width, like):
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


def _take_float32(pointer):
    return _take_rows(pointer, 4, np.float32(0))


def _take_bfloat16(pointer):
    return _take_rows(pointer, 2, np.uint16(0))


@cache
def _take_kernel(is_bfloat16: bool) -> Kernel:
    return Kernel(_take_bfloat16 if is_bfloat16 else _take_float32, 5)
