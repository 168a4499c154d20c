"""``x @ weight.T + bias`` for few and for many rows of x, in float32 or bfloat16, or in float32
with a weight of 16 bits, whose numbers are widened in registers.

A weight [rows, columns] is kept in *panels* of 16 rows, whose numbers of one column (of 16 bits of
two) lie together: one load feeds a multiply-add for each row of x. A *tile* of up to 8 rows of x
and 3 panels (without AVX-512 of 4 rows and one) stays in registers over all columns; of a single
row it is 6 panels, since nothing then bounds it but the reading of the weight. Sums are float32, in
the order of the columns, so a row of the answer does not depend on the rows beside it.

A piece of work is some panels and up to 64 rows of x. Pieces of the same panels follow one another,
so that their weight is read from memory once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, overload
from torch import Tensor
from torch.nn import functional

from inflight_kernels.cpu.intrinsics import (
    F32,
    FAST,
    FLOATS,
    HAS_WIDE_REGISTERS,
    I64,
    INTS,
    SHORTS,
    WIDTH,
    array_at,
    bias_of,
    constant,
    finish_piece,
    halves,
    load_bfloat16,
    load_floats,
    multiply_add,
    multiply_add_pairs,
    no_bias,
    pointer_to,
    prefetch,
    splat,
    take_next,
    to_bfloat16,
)
from inflight_kernels.cpu.threads import Kernel, Stage

_ROWS_AT_A_TIME = 64
_HIGH, _LOW = (8, 4) if HAS_WIDE_REGISTERS else (4, 2)
_PANELS, _PANELS_OF_ONE_ROW = (3, 6) if HAS_WIDE_REGISTERS else (1, 3)
_PREFETCH_BYTES = 2048
_PIECES_AHEAD = 2
"""Whose weight is read meanwhile: a thread takes it next if there are two; if there are more, it
comes into the cache that they share."""
_FEW_PRODUCTS = 1 << 17
"""Of numbers: one thread is done with them before others have begun."""


def takes(weight: Tensor) -> bool:
    """Whether there is a product for a weight [rows, columns]."""
    rows, columns = weight.shape
    is_known = weight.dtype in (torch.float32, torch.bfloat16)
    if weight.dtype == torch.float16:
        is_known = "+f16c" in get_host_cpu_features()
    return is_known and rows % WIDTH == 0 and columns % 2 == 0


def padded(weight: Tensor) -> Tensor:
    """With rows of zeros behind its own, up to whole panels."""
    return functional.pad(weight, (0, 0, 0, -len(weight) % WIDTH))


def pack(weight: Tensor) -> Tensor:
    """The weight [rows, columns] in panels: [rows / 16, columns / n, 16, n], n numbers of 32 bits
    in all."""
    rows, columns = weight.shape
    pair = 4 // weight.itemsize
    panels = weight.view(rows // WIDTH, WIDTH, columns // pair, pair)
    packed = torch.empty(rows * columns + 64, dtype=weight.dtype)
    start = -packed.data_ptr() % 64 // weight.itemsize
    packed = packed[start : start + rows * columns].view(panels.shape[0], -1, WIDTH, pair)
    return packed.copy_(panels.transpose(1, 2))


def num_rows(packed: Tensor) -> int:
    """Of the weight."""
    return len(packed) * WIDTH


def rows(packed: Tensor, numbers: Tensor) -> Tensor:
    """Those rows of the weight: [T, columns]."""
    return packed[numbers // WIDTH, :, numbers % WIDTH].flatten(1)


def linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, columns] -> [T, rows], both of the dtype of the weight, or float32 beside one of 16
    bits; bias: float32 [rows]."""
    num_tokens, x = len(x), x.contiguous()
    out = torch.empty(num_tokens, num_rows(packed), dtype=x.dtype)
    if num_tokens:
        is_small = num_tokens * packed.numel() < _FEW_PRODUCTS
        linear_stage(x, packed, bias, out).run(is_small=is_small)
    return out


def linear_stage(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> Stage:
    """`linear` into ``out``, whose rows are contiguous; x is, too."""
    numbers = (
        len(x),
        x.data_ptr(),
        packed.data_ptr(),
        (no_bias(num_rows(packed)) if bias is None else bias).data_ptr(),
        out.data_ptr(),
        x.shape[1] * x.itemsize,
        out.stride(0) * out.itemsize,
        len(packed),
    )
    return Stage(_kernel(x.dtype, packed.dtype), numbers)


def grouped_linear(x: Tensor, packed: Tensor, starts: Tensor, bias: Tensor | None) -> Tensor:
    """As `reference.grouped_linear`; the rows of all groups' weights are packed one after another,
    ``bias`` float32 has a number for each."""
    num_groups, x = len(starts) - 1, x.contiguous()
    out = torch.empty(len(x), num_rows(packed) // num_groups, dtype=x.dtype)
    starts = starts.int()
    found = starts.diff().nonzero().flatten().int()
    active = torch.cat((torch.tensor([len(found)], dtype=torch.int32), found))
    grouped_linear_stage(x, packed, bias, starts, active, out).run()
    return out


def grouped_linear_stage(
    x: Tensor, packed: Tensor, bias: Tensor | None, starts: Tensor, active: Tensor, out: Tensor
) -> Stage:
    """`grouped_linear` into ``out``; it and x are contiguous. ``starts`` [groups + 1] and
    ``active`` [groups + 1] (how many groups have rows, then which) are int32."""
    numbers = (
        len(x),
        x.data_ptr(),
        packed.data_ptr(),
        (no_bias(num_rows(packed)) if bias is None else bias).data_ptr(),
        out.data_ptr(),
        x.shape[1] * x.itemsize,
        out.stride(0) * out.itemsize,
        len(packed) // (len(starts) - 1),
        starts.data_ptr(),
        active.data_ptr(),
        len(starts),
    )
    return Stage(_grouped_kernel(x.dtype, packed.dtype), numbers)


def _widen_float16(builder, pairs):
    """Both numbers of each place as float32."""
    bits = builder.bitcast(pairs, INTS)
    shorts = (builder.trunc(each, SHORTS) for each in (bits, builder.lshr(bits, constant(16))))
    kind = ir.VectorType(ir.HalfType(), WIDTH)
    return [builder.fpext(builder.bitcast(each, kind), FLOATS) for each in shorts]


_WIDEN = {types.uint32: halves, types.int32: _widen_float16}


def _add_step(builder, like, step, x_rows, weights, sums):
    """``sums``, by row and panel, with the products of a step of each row of x and each panel."""
    multiply = multiply_add_pairs if like == types.uint16 else multiply_add
    columns, added = [weights], dict(sums)
    if like in _WIDEN:
        pairs = [_WIDEN[like](builder, each) for each in weights]
        columns = [[pair[column] for pair in pairs] for column in (0, 1)]
    x_offset = builder.mul(step, ir.Constant(I64, 4 * len(columns)))
    for column, numbers in enumerate(columns):
        for row, address in enumerate(x_rows):
            place = builder.add(builder.add(address, x_offset), ir.Constant(I64, 4 * column))
            number = splat(builder, builder.load(pointer_to(builder, place, F32), align=4))
            for panel, weight in enumerate(numbers):
                added[row, panel] = multiply(builder, number, weight, added[row, panel])
    return added


def _make_tile(num_rows: int, num_panels: int):
    """An intrinsic: ``num_rows`` rows of x times ``num_panels`` panels, all columns."""
    grid = [(row, panel) for row in range(num_rows) for panel in range(num_panels)]

    @intrinsic
    def tile(_, like, x, stride_x, weight, stride_panel, num_steps, bias, out, stride_out, ahead):
        """Addresses and bytes; a step is 4 bytes of a row of the weight. Numbers are ``like`` it:
        uint16 stands for bfloat16, uint32 and int32 for float32 beside a weight in bfloat16 and in
        float16. ``bias`` None: the product is added to what ``out`` has. ``ahead``: how far behind
        the weight is what is read into the caches."""
        is_bfloat16, has_bias = like == types.uint16, bias == types.int64

        def generate(context, builder, signature, arguments):
            _, x, stride_x, weight, stride_panel, num_steps, bias, out, stride_out, ahead = (
                arguments
            )

            def at(address, stride, index, offset=0):
                far = builder.mul(stride, ir.Constant(I64, index))
                return builder.add(builder.add(address, far), ir.Constant(I64, offset))

            x_rows = [at(x, stride_x, row) for row in range(num_rows)]
            panels = [at(weight, stride_panel, panel) for panel in range(num_panels)]
            size = WIDTH * (2 if is_bfloat16 else 4)
            places_out = {
                (row, panel): at(out, stride_out, row, panel * size) for row, panel in grid
            }
            nothing = ir.Constant(FLOATS, [0.0] * WIDTH)
            starts = [
                bias_of(builder, bias, panel) if has_bias else nothing
                for panel in range(num_panels)
            ]
            begin, loop, end = (
                builder.block,
                builder.append_basic_block("columns"),
                builder.append_basic_block("stored"),
            )
            builder.branch(loop)
            builder.position_at_end(loop)
            step = builder.phi(I64)
            step.add_incoming(ir.Constant(I64, 0), begin)
            sums = {place: builder.phi(FLOATS) for place in grid}
            for (_, panel), total in sums.items():
                total.add_incoming(starts[panel], begin)
            weight_offset = builder.mul(step, ir.Constant(I64, 64))
            places = [builder.add(panel, weight_offset) for panel in panels]
            weights = [builder.load(pointer_to(builder, each, FLOATS), align=64) for each in places]
            prefetch(builder, [builder.add(each, ahead) for each in places], 0)
            added = _add_step(builder, like, step, x_rows, weights, sums)
            following = builder.add(step, ir.Constant(I64, 1))
            step.add_incoming(following, loop)
            for place, total in sums.items():
                total.add_incoming(added[place], loop)
            builder.cbranch(builder.icmp_signed("<", following, num_steps), loop, end)
            builder.position_at_end(end)
            read = load_bfloat16 if is_bfloat16 else load_floats
            for each, total in added.items():
                if not has_bias:  # of sums that begin so LLVM 22 made poison, as `bias_of` tells
                    total = builder.fadd(read(builder, places_out[each]), total)
                kind = SHORTS if is_bfloat16 else FLOATS
                stored = to_bfloat16(builder, total) if is_bfloat16 else total
                builder.store(stored, pointer_to(builder, places_out[each], kind), align=4)
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 5, bias, *[types.int64] * 3), generate

    return tile


_tile_high_wide, _tile_low_wide, _tile_1_wide = (
    _make_tile(rows, _PANELS) for rows in (_HIGH, _LOW, 1)
)
_tile_high, _tile_1 = (_make_tile(rows, 1) for rows in (_HIGH, 1))


@njit(**FAST)
def _multiply_wide(like, x, stride_x, weight, stride_panel, steps, bias, out, stride_out, count):
    """``count`` rows of x times `_PANELS` panels: by `_HIGH`, `_LOW` and one."""
    row, ahead = 0, _PREFETCH_BYTES
    while row + _HIGH <= count:
        _tile_high_wide(
            like, x + row * stride_x, stride_x, weight, stride_panel, steps, bias,
            out + row * stride_out, stride_out, ahead,
        )  # fmt: skip
        row += _HIGH
        # The weight is in the caches now: others of it are read while there is much to multiply.
        ahead = _PIECES_AHEAD * _PANELS * stride_panel
    if row + _LOW <= count:
        _tile_low_wide(
            like, x + row * stride_x, stride_x, weight, stride_panel, steps, bias,
            out + row * stride_out, stride_out, ahead,
        )  # fmt: skip
        row += _LOW
    while row < count:
        _tile_1_wide(
            like, x + row * stride_x, stride_x, weight, stride_panel, steps, bias,
            out + row * stride_out, stride_out, ahead,
        )  # fmt: skip
        row += 1


@njit(**FAST)
def _multiply_panel(like, x, stride_x, weight, stride_panel, steps, bias, out, stride_out, count):
    """The same of one panel."""
    row = 0
    while row + _HIGH <= count:
        _tile_high(
            like, x + row * stride_x, stride_x, weight, stride_panel, steps, bias,
            out + row * stride_out, stride_out, _PREFETCH_BYTES,
        )  # fmt: skip
        row += _HIGH
    while row < count:
        _tile_1(
            like, x + row * stride_x, stride_x, weight, stride_panel, steps, bias,
            out + row * stride_out, stride_out, _PREFETCH_BYTES,
        )  # fmt: skip
        row += 1


def part_of_bias(bias, first):
    """The address of a panel's numbers; None of None."""


@overload(part_of_bias, inline="always")
def _part_of_bias(bias, first):
    if bias == types.none:
        return lambda bias, first: None
    return lambda bias, first: bias + first * WIDTH * 4


@njit(**FAST)
def multiply_panels(
    like, x, stride_x, weight, stride_panel, steps, bias, out, stride_out, count, first, end, size
):
    """``count`` rows of x times panels ``first`` to ``end``; ``size``: bytes of a number. All
    others as a tile has them."""
    while first < end:
        panel, place = weight + first * stride_panel, out + first * WIDTH * size
        own_bias = part_of_bias(bias, first)
        if first + _PANELS <= end:
            _multiply_wide(
                like, x, stride_x, panel, stride_panel, steps, own_bias, place, stride_out, count
            )
            first += _PANELS
        else:
            _multiply_panel(
                like, x, stride_x, panel, stride_panel, steps, own_bias, place, stride_out, count
            )
            first += 1


@njit(**FAST)
def _run(pointer, size, like, step_bytes):
    """``size``: bytes of a number like ``like``; ``step_bytes``: of x in a step."""
    numbers = carray(pointer, 10, types.int64)
    num_tokens, x, weight, bias, out = numbers[2], numbers[3], numbers[4], numbers[5], numbers[6]
    stride_x, stride_out, num_panels = numbers[7], numbers[8], numbers[9]
    steps = stride_x // step_bytes
    at_a_time = _PANELS_OF_ONE_ROW if num_tokens == 1 else _PANELS
    num_parts = (num_tokens + _ROWS_AT_A_TIME - 1) // _ROWS_AT_A_TIME
    num_pieces = (num_panels + at_a_time - 1) // at_a_time * num_parts
    while True:
        piece = take_next(numbers.ctypes.data)
        if piece >= num_pieces:
            break
        first, row = piece // num_parts * at_a_time, piece % num_parts * _ROWS_AT_A_TIME
        multiply_panels(
            like, x + row * stride_x, stride_x, weight, steps * 64, steps, bias,
            out + row * stride_out, stride_out, min(_ROWS_AT_A_TIME, num_tokens - row),
            first, min(first + at_a_time, num_panels), size,
        )  # fmt: skip
        finish_piece(numbers.ctypes.data)
    return num_pieces


def _run_float32(pointer):
    return _run(pointer, 4, np.float32(0), 4)


def _run_bfloat16(pointer):
    return _run(pointer, 2, np.uint16(0), 4)


def _run_float32_by_bfloat16(pointer):
    return _run(pointer, 4, np.uint32(0), 8)


def _run_float32_by_float16(pointer):
    return _run(pointer, 4, np.int32(0), 8)


_RUN: dict[tuple[torch.dtype, torch.dtype], Any] = {
    (torch.float32, torch.float32): _run_float32,
    (torch.bfloat16, torch.bfloat16): _run_bfloat16,
    (torch.float32, torch.bfloat16): _run_float32_by_bfloat16,
    (torch.float32, torch.float16): _run_float32_by_float16,
}
"""By the types of x and of the weight."""


@cache
def _kernel(dtype: torch.dtype, of_weight: torch.dtype) -> Kernel:
    return Kernel(_RUN[dtype, of_weight], 8)


@njit(**FAST)
def _run_grouped(pointer, size, like, step_bytes):
    """As `_run` has them. A piece is some panels of a group, and all of its rows of x."""
    numbers = carray(pointer, 13, types.int64)
    x, weight, bias, out = numbers[3], numbers[4], numbers[5], numbers[6]
    stride_x, stride_out, num_panels = numbers[7], numbers[8], numbers[9]
    starts = array_at(numbers[10], numbers[12], np.int32(0))
    active = array_at(numbers[11], numbers[12], np.int32(0))
    steps = stride_x // step_bytes
    num_parts = (num_panels + _PANELS_OF_ONE_ROW - 1) // _PANELS_OF_ONE_ROW
    num_pieces = np.int64(active[0]) * num_parts
    while True:
        piece = take_next(numbers.ctypes.data)
        if piece >= num_pieces:
            break
        group, first = active[1 + piece // num_parts], piece % num_parts * _PANELS_OF_ONE_ROW
        before = np.int64(group) * num_panels
        row, end = np.int64(starts[group]), np.int64(starts[group + 1])
        while row < end:
            multiply_panels(
                like, x + row * stride_x, stride_x, weight + before * steps * 64, steps * 64, steps,
                bias + before * WIDTH * 4, out + row * stride_out, stride_out,
                min(_ROWS_AT_A_TIME, end - row), first,
                min(first + _PANELS_OF_ONE_ROW, num_panels), size,
            )  # fmt: skip
            row += _ROWS_AT_A_TIME
        finish_piece(numbers.ctypes.data)
    return num_pieces


def _run_grouped_float32(pointer):
    return _run_grouped(pointer, 4, np.float32(0), 4)


def _run_grouped_bfloat16(pointer):
    return _run_grouped(pointer, 2, np.uint16(0), 4)


def _run_grouped_float32_by_bfloat16(pointer):
    return _run_grouped(pointer, 4, np.uint32(0), 8)


def _run_grouped_float32_by_float16(pointer):
    return _run_grouped(pointer, 4, np.int32(0), 8)


_RUN_GROUPED: dict[tuple[torch.dtype, torch.dtype], Any] = {
    (torch.float32, torch.float32): _run_grouped_float32,
    (torch.bfloat16, torch.bfloat16): _run_grouped_bfloat16,
    (torch.float32, torch.bfloat16): _run_grouped_float32_by_bfloat16,
    (torch.float32, torch.float16): _run_grouped_float32_by_float16,
}


@cache
def _grouped_kernel(dtype: torch.dtype, of_weight: torch.dtype) -> Kernel:
    return Kernel(_RUN_GROUPED[dtype, of_weight], 11)
