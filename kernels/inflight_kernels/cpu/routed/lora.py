"""What adapters (LoRA) add to the answers of a linear, each to rows of its own: ``x @ a.T @ b.T``.

An adapter has a *part* for each linear of the checkpoint that it changes: a [rank, columns], b
[rows, rank], for rows ``start ..`` of the answer. Both are kept in the panels of `linear`. A piece
of work is one part and up to 16 rows of x with the same adapter, whose products with ``a`` are
rounded as x is.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, njit, types
from torch import Tensor
from torch.nn import functional

from inflight_kernels.cpu.intrinsics import (
    FAST,
    WIDTH,
    array_at,
    finish_piece,
    get,
    no_bias,
    put,
    take_next,
)
from inflight_kernels.cpu.linear import multiply_panels, pack, padded
from inflight_kernels.cpu.threads import Kernel, Stage

NUMBERS_OF_PART = 7
"""What the table of all parts says of one; all are 0 if there is none."""
STEP_COLUMN = 9
"""Where a `Program` has the address of the step; 0: no row has an adapter."""
_ROWS_OF_PIECE = 16
_NUMBERS_OF_STEP, _NUMBERS_OF_PIECE = 7, 3


class PackedPart(NamedTuple):
    """A part of an adapter in panels. ``scales``: float32 [rows] that multiply the linear's own
    product, without its bias (DoRA); None: it stays as it is."""

    start: int
    rank: int
    a: Tensor
    b: Tensor
    scales: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        scales = 0 if self.scales is None else self.scales.nbytes
        return self.a.nbytes + self.b.nbytes + scales

    @property
    def padded_rank(self) -> int:
        """Of whole panels."""
        return len(self.a) * WIDTH

    @property
    def numbers(self) -> tuple[int, ...]:
        """For the table."""
        scales = 0 if self.scales is None else self.scales.data_ptr()
        pair = 4 // self.b.itemsize
        return (
            self.a.data_ptr(),
            len(self.a),
            self.b.data_ptr(),
            -(-self.rank // pair),
            self.start,
            len(self.b),
            scales,
        )


def takes(start: int, a: Tensor, b: Tensor) -> bool:
    """Whether there is a product for a part."""
    return a.shape[1] % 2 == 0 and len(b) % WIDTH == 0 and start % WIDTH == 0


def pack_part(start: int, a: Tensor, b: Tensor, scales: Tensor | None) -> PackedPart:
    """Of the type of x: float32 or bfloat16."""
    whole = functional.pad(b, (0, -b.shape[1] % (4 // b.itemsize)))
    own_scales = None if scales is None else scales.float().contiguous()
    return PackedPart(start, len(a), pack(padded(a)), pack(whole), own_scales)


class StepRows:
    """The rows of a step by their adapters, as the kernel reads them."""

    def __init__(
        self,
        runs: Iterable[tuple[int, slice]],
        table: npt.NDArray[np.int64],
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        """``runs``: the place of an adapter and rows that have it. ``table`` [places, linears,
        parts, NUMBERS_OF_PART] has the parts of all, of rank ``max_rank`` (a multiple of 16) at
        most. ``dtype``: of x."""
        pieces = [
            (first, min(_ROWS_OF_PIECE, rows.stop - first), place)
            for place, rows in runs
            for first in range(rows.start, rows.stop, _ROWS_OF_PIECE)
        ]
        num_parts, last_row = table.shape[2], sum(pieces[-1][:2])
        self._inner = torch.empty(last_row * num_parts, max_rank, dtype=dtype)
        self._table, self._zeros = table, no_bias(max_rank)
        header = (
            len(pieces),
            num_parts,
            table.ctypes.data,
            table.strides[0],
            self._inner.data_ptr(),
            max_rank * self._inner.itemsize,
            self._zeros.data_ptr(),
        )
        self._numbers = np.concatenate([header, np.array(pieces).ravel()]).astype(np.int64)

    @property
    def address(self) -> int:
        """For `STEP_COLUMN`."""
        return self._numbers.ctypes.data


def add_lora_stage(
    x: Tensor, number: int, bias: Tensor | None, out: Tensor, step: int = 0
) -> Stage:
    """Adds to ``out`` [T, rows], which is the answer of linear ``number`` of the table for x [T,
    columns], and has ``bias`` (float32) in it; both tensors are contiguous. ``step``: the address
    of a `StepRows`."""
    width = x.itemsize
    numbers = (
        len(x),
        x.data_ptr(),
        out.data_ptr(),
        x.shape[1] * width,
        out.shape[1] * width,
        (no_bias(out.shape[1]) if bias is None else bias).data_ptr(),
        number,
        step,
    )
    return Stage(kernel(x.dtype), numbers)


@njit(**FAST)
def _scale(out, scales, bias, size, like):
    for i in range(size):
        put(out, i, (get(out, i) - bias[i]) * scales[i] + bias[i])


@njit(**FAST)
def _run(pointer, size, like):
    """``size``: bytes of a number like ``like``."""
    numbers = carray(pointer, 10, types.int64)
    stride_x, stride_out, bias, linear = numbers[5], numbers[6], numbers[7], numbers[8]
    if numbers[9] == 0:
        return 0
    step = array_at(numbers[9], _NUMBERS_OF_STEP, np.int64(0))
    num_parts, stride_inner, zeros = step[1], step[5], step[6]
    num_pieces = step[0] * num_parts
    while True:
        piece = take_next(numbers.ctypes.data)
        if piece >= num_pieces:
            break
        rows = array_at(
            numbers[9] + 8 * (_NUMBERS_OF_STEP + piece // num_parts * _NUMBERS_OF_PIECE),
            _NUMBERS_OF_PIECE, np.int64(0),
        )  # fmt: skip
        first, count, place = rows[0], rows[1], rows[2]
        number = linear * num_parts + piece % num_parts
        part = array_at(
            step[2] + place * step[3] + 8 * number * NUMBERS_OF_PART, NUMBERS_OF_PART, np.int64(0)
        )
        if part[0] != 0:
            x, out = numbers[3] + first * stride_x, numbers[4] + first * stride_out
            start, num_panels = part[4], part[5]
            out += start * size
            if part[6] != 0:
                num_out = num_panels * WIDTH
                scales = array_at(part[6], num_out, np.float32(0))
                own_bias = array_at(bias + start * 4, num_out, np.float32(0))
                for row in range(count):
                    own_out = array_at(out + row * stride_out, num_out, like)
                    _scale(own_out, scales, own_bias, num_out, like)
            inner = step[4] + (first * num_parts + piece % num_parts * count) * stride_inner
            multiply_panels(
                like, x, stride_x, part[0], stride_x * WIDTH, stride_x // 4, zeros,
                inner, stride_inner, count, 0, part[1], size,
            )  # fmt: skip
            multiply_panels(
                like, inner, stride_inner, part[2], part[3] * 64, part[3], None,
                out, stride_out, count, 0, num_panels, size,
            )  # fmt: skip
        finish_piece(numbers.ctypes.data)
    return num_pieces


def _run_float32(pointer):
    return _run(pointer, 4, np.float32(0))


def _run_bfloat16(pointer):
    return _run(pointer, 2, np.uint16(0))


@cache
def kernel(dtype: torch.dtype) -> Kernel:
    """Compiled, for x of that type."""
    return Kernel(_run_bfloat16 if dtype == torch.bfloat16 else _run_float32, 8)
