"""Norms, alone or where a branch ends, activations with a gate or without, and what products of
quantised weights read: rows of x [T, dim].

Meaning and rounding are those of `inflight_kernels.reference`; a piece of work is a row.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from inflight_kernels.cpu.intrinsics import (
    FAST,
    array_at,
    compiled_for,
    exp,
    finish_piece,
    get,
    nearest,
    no_bias,
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
    return _normed(x, NormWeights.of(weight, None, eps))


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """As `reference.layer_norm`, of x [T, dim] or [dim]."""
    return _normed(x, NormWeights.of(weight, bias, eps, is_layer=True, size=x.shape[-1]))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `reference.add_rms_norm`."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    norm = NormWeights.of(weight, None, eps)
    add_norm_stage(x, residual, norm, out, total).run(is_small=x.numel() < _FEW)
    return out, total


def activate(x: Tensor, kind: str, is_gated: bool) -> Tensor:
    """As `reference.activate`."""
    x = x.contiguous()
    out = torch.empty(len(x), x.shape[1] // (1 + is_gated), dtype=x.dtype)
    activate_stage(x, kind, out).run(is_small=out.numel() < _FEW)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `reference.silu_mul`."""
    return activate(gate_up, "silu", True)


class NormWeights(NamedTuple):
    """Of a norm over rows [dim]: ``weight`` and ``bias`` [dim] are float32, as stages read them; a
    norm of the kind "rms" has zeros for a bias. ``is_layer``: see `reference.layer_norm`."""

    weight: Tensor
    bias: Tensor
    eps: float
    is_layer: bool

    @classmethod
    def of(
        cls,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        *,
        is_layer: bool = False,
        size: int = 0,
    ) -> NormWeights:
        """Of tensors of any type; without a weight it is ones [``size``]."""
        weight = torch.ones(size) if weight is None else weight.float()
        bias = no_bias(len(weight)) if bias is None else bias.float()
        return cls(weight, bias, eps, is_layer)


def _normed(x: Tensor, norm: NormWeights) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    norm_stage(x, norm, out).run(is_small=x.numel() < _FEW)
    return out


# The same into memory that is given. All tensors are contiguous; weights of norms are kept by who
# calls.


def norm_stage(x: Tensor, norm: NormWeights, out: Tensor) -> Stage:
    """`rms_norm` or `layer_norm`; x and ``out`` may be columns of something wider, the same ones
    too."""
    return _norm_stage(x, None, None, None, norm, out, None, 1.0)


def add_norm_stage(
    x: Tensor,
    residual: Tensor,
    norm: NormWeights | None,
    out: Tensor,
    total: Tensor,
    *,
    beside: Tensor | None = None,
    own_norm: NormWeights | None = None,
    scale: float = 1.0,
) -> Stage:
    """What stands between two branches of a decoder: ``total = residual + y * scale``, where y is
    ``own_norm`` of ``x + beside``; then ``out = norm(total)``. What is None is left out: without
    ``norm`` ``out`` may hold anything. Rounded after each step."""
    return _norm_stage(x, beside, own_norm, residual, norm, out, total, scale)


def activate_stage(x: Tensor, kind: str, out: Tensor) -> Stage:
    """`activate`, with a gate if x is twice as wide as ``out``."""
    size, is_bfloat16 = out.shape[1], out.dtype == torch.bfloat16
    numbers = (len(out), x.data_ptr(), out.data_ptr(), size, x.shape[1] > size, is_bfloat16)
    return Stage(_activate_kernel(kind), numbers)


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
    x: Tensor,
    beside: Tensor | None,
    own_norm: NormWeights | None,
    residual: Tensor | None,
    norm: NormWeights | None,
    out: Tensor,
    total: Tensor | None,
    scale: float,
) -> Stage:
    norms = [each for each in (own_norm, norm) if each is not None]
    assert len({(each.eps, each.is_layer) for each in norms}) < 2, "norms of a model are alike"
    is_layer, eps = (norms[0].is_layer, norms[0].eps) if norms else (False, 0.0)
    tensors = (x, beside, *_tensors_of(own_norm), residual, total, *_tensors_of(norm), out)
    pointers = [0 if each is None else each.data_ptr() for each in tensors]
    size = x.shape[-1]
    kernel = _norm_kernel(x.dtype == torch.bfloat16)
    # Of a vector there is one row.
    strides = (each.stride(-2) * each.itemsize if each.dim() > 1 else 0 for each in (x, out))
    return Stage(kernel, (x.numel() // size, *pointers, size, is_layer, *strides), (eps, scale))


def _tensors_of(norm: NormWeights | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if norm is None else (norm.weight, norm.bias)


@njit(**FAST)
def _norm_row(x, weight, bias, is_layer, eps, out, like):
    size, mean, squares = np.float32(len(x)), np.float32(0.0), np.float32(0.0)
    if is_layer:
        for i in range(len(x)):
            mean += get(x, i)
        mean /= size
    for i in range(len(x)):
        number = get(x, i) - mean
        squares += number * number
    scale = np.float32(1.0) / np.sqrt(squares / size + np.float32(eps))
    if is_layer:
        for i in range(len(x)):
            put(out, i, (get(x, i) - mean) * scale * weight[i] + bias[i])
    else:
        for i in range(len(x)):
            put(out, i, rounded(get(x, i) * scale, like) * weight[i])


@njit(**_EXACT)
def _add_row(x, other, scale, out, like):
    """``other + x * scale``: exact, for a multiply-add would not round the product."""
    for i in range(len(x)):
        put(out, i, get(other, i) + rounded(get(x, i) * scale, like))


@njit(**FAST)
def _norm_rows(pointer, size, like):
    """``size``: bytes of a number like ``like``."""
    numbers, floats = carray(pointer, 16, types.int64), carray(pointer, 18, types.float64)
    num_rows, dim, is_layer = numbers[2], numbers[12], numbers[13] != 0
    stride_x, stride_out = numbers[14], numbers[15]
    eps, scale = floats[16], np.float32(floats[17])
    own_weight, own_bias, weight, bias = (
        array_at(numbers[5], dim, np.float32(0)),
        array_at(numbers[6], dim, np.float32(0)),
        array_at(numbers[9], dim, np.float32(0)),
        array_at(numbers[10], dim, np.float32(0)),
    )
    while True:
        row = take_next(numbers.ctypes.data)
        if row >= num_rows:
            break
        start = row * dim * size
        x = array_at(numbers[3] + row * stride_x, dim, like)
        out = array_at(numbers[11] + row * stride_out, dim, like)
        if numbers[4] != 0:
            _add_row(x, array_at(numbers[4] + start, dim, like), np.float32(1.0), out, like)
            x = out
        if numbers[5] != 0:
            _norm_row(x, own_weight, own_bias, is_layer, eps, out, like)
            x = out
        if numbers[7] != 0:
            total = array_at(numbers[8] + start, dim, like)
            _add_row(x, array_at(numbers[7] + start, dim, like), scale, total, like)
            x = total
        if numbers[9] != 0:
            _norm_row(x, weight, bias, is_layer, eps, out, like)
        finish_piece(numbers.ctypes.data)
    return num_rows


def _norm_float32(pointer):
    return _norm_rows(pointer, 4, np.float32(0))


def _norm_bfloat16(pointer):
    return _norm_rows(pointer, 2, np.uint16(0))


@cache
def _norm_kernel(is_bfloat16: bool) -> Kernel:
    return Kernel(_norm_bfloat16 if is_bfloat16 else _norm_float32, 14, 2)


_ENOUGH = np.float32(12.0)
"""From here on, on both sides, GELU is x or 0 to more places than float32 has."""


@njit(**FAST)
def _silu(x):
    return x / (np.float32(1.0) + exp(-x))


@njit(**FAST)
def _gelu(x):
    """By the complementary error function, ``t * p(t) * exp(-y * y)`` for t of y >= 0: p of
    degree 7 was fitted up to 8.5 with the least relative error, which is 7e-8."""
    y = min(abs(x), _ENOUGH) * np.float32(0.70710678118654752)
    t = np.float32(1.0) / (np.float32(1.0) + np.float32(0.3275911) * y)
    p = np.float32(-0.143848171)
    p = p * t + np.float32(0.508320172)
    p = p * t - np.float32(0.426609138)
    p = p * t + np.float32(0.473094768)
    p = p * t + np.float32(0.0143690751)
    p = p * t + np.float32(0.20946685)
    p = p * t + np.float32(0.180108866)
    p = p * t + np.float32(0.185097582)
    tail = np.float32(0.5) * t * p * exp(-y * y)
    return x * (tail if x < np.float32(0.0) else np.float32(1.0) - tail)


@njit(**FAST)
def _gelu_tanh(x):
    """``x * sigmoid(2 u)``, which is ``x / 2 * (1 + tanh(u))``."""
    y = min(max(x, -_ENOUGH), _ENOUGH)
    u = np.float32(0.79788456080286536) * (y + np.float32(0.044715) * y * y * y)
    return x / (np.float32(1.0) + exp(np.float32(-2.0) * u))


@njit(**FAST)
def _relu(x):
    return max(x, np.float32(0.0))


@njit(**FAST)
def _relu2(x):
    return _relu(x) * _relu(x)


def _make_rows(kind, activate):
    """The rows of both types by one function: code that took it as an argument could not be
    kept."""

    @compiled_for(kind)
    def run_row(x, up, is_gated, out, like):
        if is_gated:
            for i in range(len(out)):
                put(out, i, rounded(activate(get(x, i)), like) * get(up, i))
        else:
            for i in range(len(out)):
                put(out, i, activate(get(x, i)))

    @compiled_for(kind)
    def run(pointer, size, like):
        """``size``: bytes of a number like ``like``."""
        numbers = carray(pointer, 8, types.int64)
        num_rows, dim, is_gated = numbers[2], numbers[5], numbers[6] != 0
        while True:
            row = take_next(numbers.ctypes.data)
            if row >= num_rows:
                break
            width = dim * size
            start = numbers[3] + row * width * (2 if is_gated else 1)
            # Without a gate nothing is read from behind the row.
            x, up = array_at(start, dim, like), array_at(start + width, dim, like)
            run_row(x, up, is_gated, array_at(numbers[4] + row * width, dim, like), like)
            finish_piece(numbers.ctypes.data)
        return num_rows

    @compiled_for(kind)
    def run_of_type(pointer):
        if carray(pointer, 8, types.int64)[7] != 0:
            return run(pointer, 2, np.uint16(0))
        return run(pointer, 4, np.float32(0))

    return run_of_type


_silu_rows = _make_rows("silu", _silu)
_gelu_rows = _make_rows("gelu", _gelu)
_gelu_tanh_rows = _make_rows("gelu_tanh", _gelu_tanh)
_relu_rows = _make_rows("relu", _relu)
_relu2_rows = _make_rows("relu2", _relu2)


def _run_silu(pointer):
    return _silu_rows(pointer)


def _run_gelu(pointer):
    return _gelu_rows(pointer)


def _run_gelu_tanh(pointer):
    return _gelu_tanh_rows(pointer)


def _run_relu(pointer):
    return _relu_rows(pointer)


def _run_relu2(pointer):
    return _relu2_rows(pointer)


_ACTIVATIONS = {
    "silu": _run_silu,
    "gelu": _run_gelu,
    "gelu_tanh": _run_gelu_tanh,
    "relu": _run_relu,
    "relu2": _run_relu2,
}


@cache
def _activate_kernel(kind: str) -> Kernel:
    return Kernel(_ACTIVATIONS[kind], 6)


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
