"""``x @ weight.T + bias`` of weights of 4 or 8 bits, which become numbers in registers alone.

A weight [rows, columns] is kept in panels of 16 rows, as in `linear`; a word of 32 bits has 8
numbers of a row, or 4. Products of a group are added up first, then multiplied by its scale; sums
are float32, and a row of the answer does not depend on the rows beside it. Where the CPU multiplies
pairs of bfloat16, two columns are widened at once for it.

A *tile* is some rows of x and panels that stay in registers over a group. Where panels are left
over, the last tile begins earlier, and makes some answers a second time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional

from inflight_kernels.cpu.intrinsics import (
    F32,
    FAST,
    FLOATS,
    HAS_WIDE_REGISTERS,
    I32,
    I64,
    INTS,
    SHORTS,
    WIDTH,
    bias_of,
    constant,
    finish_piece,
    multiplies_bfloat16,
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
_ROWS = (8, 4, 1) if HAS_WIDE_REGISTERS else (4, 2, 1)
_HIGH, _LOW, _ = _ROWS
_PANELS, _PANELS_OF_ONE_ROW = (2, 6) if HAS_WIDE_REGISTERS else (1, 3)
_PREFETCH_BYTES = 1024
_KINDS = {torch.uint8: "nibbles", torch.int8: "integers", torch.float8_e4m3fn: "floats"}
_IN_A_WORD = {
    **dict.fromkeys(("nibbles", "nibbles and zeros", "codes"), 8),
    **dict.fromkeys(("integers", "integers and zeros", "floats"), 4),
}
_AND_ZEROS = " and zeros"
_TYPES = {
    **dict.fromkeys(("nibbles", "nibbles and zeros", "codes"), torch.uint8),
    **dict.fromkeys(("integers", "integers and zeros"), torch.int8),
    "floats": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Packed:
    """``kind``: what the words hold. ``words`` int32 [panels, columns / n, 16]; ``scales`` and
    ``zeros`` [panels, groups, 16]; ``table`` [16] float32: what codes stand for."""

    kind: str
    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    table: Tensor | None
    columns: int
    group_size: int

    @property
    def rows(self) -> int:
        """Of the weight."""
        return len(self.words) * WIDTH


def takes(values: Tensor, dtype: torch.dtype, group_size: int, *, has_codebook: bool) -> bool:
    """Whether there is a product for ``values`` [rows, bytes] (as `reference.dequantize` has them)
    in groups of so many columns, in a model of ``dtype``."""
    kind = _KINDS.get(values.dtype)
    if kind is None or dtype not in (torch.float32, torch.bfloat16):
        return False
    if has_codebook and not _looks_up():
        return False
    step = _IN_A_WORD[kind]
    columns = values.shape[1] * (2 if kind == "nibbles" else 1)
    is_whole = columns % step == 0 and group_size % step == 0
    return is_whole and len(values) % WIDTH == 0 and len(values) >= _PANELS * WIDTH


@cache
def _looks_up() -> bool:
    return "+avx2" in get_host_cpu_features()


def pack(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    codebook: Tensor | None = None,
) -> Packed:
    """A weight as `reference.dequantize` has it. Scales and zeros keep their type: that of the
    model, ``dtype``, but float32 beside float8. In bfloat16 a codebook is rounded to it."""
    kind, columns, table = _KINDS[values.dtype], values.shape[1], None
    if kind == "nibbles":
        columns *= 2
        if codebook is not None:
            kind, table = "codes", codebook.to(dtype).float().contiguous()
        else:
            values = values ^ 0x88  # -8 to 7, with a sign
            if zeros is not None and bool((zeros == 8).all()):
                zeros = None
            elif zeros is None:
                raise ValueError("zeros: 4 bits without a codebook need them")
    words = _panels(values.contiguous().view(torch.int32))
    if zeros is not None:
        kind, zeros = kind + _AND_ZEROS, _panels(zeros)
    return Packed(kind, words, _panels(scales), zeros, table, columns, group_size)


def _panels(numbers: Tensor) -> Tensor:
    """[rows, n] -> [rows / 16, n, 16], at a multiple of 64 bytes."""
    rows, width = numbers.shape
    found = torch.empty(rows * width + 64, dtype=numbers.dtype)
    start = -found.data_ptr() % 64 // numbers.itemsize
    found = found[start : start + rows * width].view(rows // WIDTH, width, WIDTH)
    return found.copy_(numbers.view(rows // WIDTH, WIDTH, width).transpose(1, 2))


def rows(weight: Packed, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values, scales and zeros of those rows [T], as they were packed."""
    panels, places = numbers // WIDTH, numbers % WIDTH
    values = weight.words[panels, :, places].view(_TYPES[weight.kind])
    scales, zeros = (
        None if each is None else each[panels, :, places] for each in (weight.scales, weight.zeros)
    )
    assert scales is not None
    if _KINDS.get(values.dtype) == "nibbles" and weight.table is None:
        values = values ^ 0x88
        zeros = torch.full_like(scales, 8) if zeros is None else zeros
    return values, scales, zeros


def quantized_linear(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """x [T, columns] -> [T, rows], both of the model's dtype; bias: float32 [rows]."""
    num_tokens, x = len(x), x.contiguous()
    out = torch.empty(num_tokens, weight.rows, dtype=x.dtype)
    if num_tokens:
        sums = None if weight.zeros is None else _group_sums(x, weight.group_size)
        quantized_linear_stage(x, weight, bias, out, sums).run()
    return out


def quantized_linear_stage(
    x: Tensor, weight: Packed, bias: Tensor | None, out: Tensor, sums: Tensor | None = None
) -> Stage:
    """`quantized_linear` into ``out``; both tensors are contiguous. ``sums`` [T, groups] of x, if
    there are zeros."""
    numbers = (
        len(x),
        x.data_ptr(),
        weight.words.data_ptr(),
        weight.scales.data_ptr(),
        0 if weight.zeros is None else weight.zeros.data_ptr(),
        0 if sums is None else sums.data_ptr(),
        0 if weight.table is None else weight.table.data_ptr(),
        (no_bias(weight.rows) if bias is None else bias).data_ptr(),
        out.data_ptr(),
        x.shape[1],
        weight.group_size,
        len(weight.words),
    )
    return Stage(_kernel(weight.kind, x.dtype == torch.bfloat16), numbers)


def _group_sums(x: Tensor, group_size: int) -> Tensor:
    """[T, columns] -> float32 [T, groups]."""
    x = functional.pad(x, (0, -x.shape[1] % group_size))
    return x.view(len(x), -1, group_size).sum(dim=-1, dtype=torch.float32)


def _nibble(builder, word, place, table):
    """The 4 bits at ``place`` of each word, as float32."""
    top = builder.shl(word, constant(28 - 4 * place))
    return builder.sitofp(builder.ashr(top, constant(28)), FLOATS)


def _code(builder, word, place, table):
    """The same, looked up in a table of two halves of 8."""
    kind = ir.FunctionType(_EIGHT, [_EIGHT, ir.VectorType(I32, 8)])
    name = "llvm.x86.avx2.permps"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    codes = builder.lshr(word, constant(4 * place))
    halves = [
        [
            builder.call(function, [_half(builder, table, half), _half(builder, codes, part)])
            for part in (0, 1)
        ]
        for half in (0, 1)
    ]
    low, high = (
        builder.shuffle_vector(*parts, ir.Constant(INTS, list(range(WIDTH)))) for parts in halves
    )
    is_high = builder.icmp_signed("<", builder.shl(codes, constant(28)), constant(0))
    return builder.select(is_high, high, low)


_EIGHT = ir.VectorType(F32, 8)


def _half(builder, vector, number):
    places = ir.Constant(ir.VectorType(I32, 8), list(range(8 * number, 8 * number + 8)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), places)


def _integer(builder, word, place, table):
    """The byte at ``place`` of each word, as float32."""
    top = builder.shl(word, constant(24 - 8 * place))
    return builder.sitofp(builder.ashr(top, constant(24)), FLOATS)


def _float8(builder, word, place, table):
    """The same of e4m3: its bits are those of a float32 whose exponent is 120 less."""
    top = builder.shl(word, constant(24 - 8 * place))
    bits = builder.and_(builder.ashr(top, constant(4)), constant(0x87F00000 - 2**32))
    factor = ir.Constant(FLOATS, [2.0**120] * WIDTH)
    return builder.fmul(builder.bitcast(bits, FLOATS), factor)


_WIDEN = {
    **dict.fromkeys(("nibbles", "nibbles and zeros"), _nibble),
    **dict.fromkeys(("integers", "integers and zeros"), _integer),
    "codes": _code,
    "floats": _float8,
}


def _pair(builder, first, second):
    """Two float32 in each place, whose last bits are zeros, as bfloat16."""
    low = builder.lshr(builder.bitcast(first, INTS), constant(16))
    return builder.bitcast(builder.or_(low, builder.bitcast(second, INTS)), FLOATS)


class _Loop:
    """``for index in range(first, end)`` in IR, at least once, with vectors that go around."""

    def __init__(self, builder, name, first, step, starts):
        self._builder, self._step = builder, step
        before = builder.block
        self._block = builder.append_basic_block(name)
        self._behind = builder.append_basic_block(f"behind_{name}")
        builder.branch(self._block)
        builder.position_at_end(self._block)
        self.index = builder.phi(I64)
        self.index.add_incoming(first, before)
        self.values = [builder.phi(FLOATS) for _ in starts]
        for value, start in zip(self.values, starts, strict=True):
            value.add_incoming(start, before)

    def close(self, end, values):
        """Go on behind it once ``index`` is ``end``."""
        builder = self._builder
        following = builder.add(self.index, _int(self._step))
        self.index.add_incoming(following, builder.block)
        for value, after in zip(self.values, values, strict=True):
            value.add_incoming(after, builder.block)
        is_more = builder.icmp_signed("<", following, end)
        builder.cbranch(is_more, self._block, self._behind)
        builder.position_at_end(self._behind)


class _Tile:
    """Writes the code of a tile: ``rows`` rows of x times ``panels`` panels, all columns.

    ``arguments``: x, its stride, words, scales, zeros, sums, table, bias, out, its stride, columns,
    group_size; addresses, and strides in bytes.
    """

    def __init__(self, builder, kind, is_bfloat16, rows, panels, arguments):
        self._builder, self._kind, self._is_bfloat16 = builder, kind, is_bfloat16
        self._is_dot = is_bfloat16 and multiplies_bfloat16()
        self._grid = [(row, panel) for row in range(rows) for panel in range(panels)]
        self._rows, self._panels = range(rows), range(panels)
        (
            self._x, self._stride_x, self._words, self._scales, self._zeros, self._sums,
            self._table, self._bias, self._out, self._stride_out, self._columns, self._group_size,
        ) = arguments  # fmt: skip
        rounded_up = builder.sub(builder.add(self._columns, self._group_size), _int(1))
        self._num_groups = builder.sdiv(rounded_up, self._group_size)

    def write(self):
        """All of it."""
        builder = self._builder
        table = None
        if self._kind == "codes":
            table = builder.load(pointer_to(builder, self._table, FLOATS), align=4)
        biases = [bias_of(builder, self._bias, panel) for panel in self._panels]
        groups = _Loop(builder, "groups", _int(0), 1, [biases[panel] for _, panel in self._grid])
        products = self._without_zeros(groups.index, self._products(groups.index, table))
        scales = [self._of_group(self._scales, panel, groups.index) for panel in self._panels]
        totals = [
            multiply_add(builder, product, scales[panel], total)
            for (_, panel), product, total in zip(self._grid, products, groups.values, strict=True)
        ]
        groups.close(self._num_groups, totals)
        self._store(totals)

    def _plus(self, address, count, factor=1):
        """``address + count * factor``; the factor is known now."""
        return self._builder.add(address, self._builder.mul(count, _int(factor)))

    def _products(self, group, table):
        """Sums of products over the columns of a group, not scaled."""
        builder, in_a_word = self._builder, _IN_A_WORD[self._kind]
        first = builder.mul(group, self._group_size)
        end = builder.add(first, self._group_size)
        end = builder.select(builder.icmp_signed("<", end, self._columns), end, self._columns)
        nothing = ir.Constant(FLOATS, [0.0] * WIDTH)
        loop = _Loop(builder, "words", first, in_a_word, [nothing] * len(self._grid))
        word_bytes = WIDTH * 4 // in_a_word
        panel_bytes = builder.mul(self._columns, _int(word_bytes))
        here = self._plus(self._words, loop.index, word_bytes)
        places = [self._plus(here, panel_bytes, panel) for panel in self._panels]
        words = [builder.load(pointer_to(builder, each, INTS), align=64) for each in places]
        prefetch(builder, places, _PREFETCH_BYTES)
        added = dict(zip(self._grid, loop.values, strict=True))
        step = 2 if self._is_bfloat16 else 1
        for column in range(0, in_a_word, step):
            weights = [self._widened(word, column, step, table) for word in words]
            for row in self._rows:
                for each, x in enumerate(self._x_at(row, loop.index, column)):
                    for panel in self._panels:
                        place = row, panel
                        added[place] = self._multiply(x, weights[panel][each], added[place])
        loop.close(end, [added[place] for place in self._grid])
        return added

    def _multiply(self, x, weight, total):
        multiply = multiply_add_pairs if self._is_dot else multiply_add
        return multiply(self._builder, x, weight, total)

    def _widened(self, word, column, count, table):
        """``count`` columns of each word: a vector each, or one of pairs."""
        builder = self._builder
        found = [_WIDEN[self._kind](builder, word, column + each, table) for each in range(count)]
        return [_pair(builder, *found)] if self._is_dot else found

    def _x_at(self, row, column, offset):
        """What a load of 32 bits has of x, each number everywhere in a vector of its own; or both
        as they are, for their product."""
        builder, size = self._builder, 2 if self._is_bfloat16 else 4
        address = self._plus(self._plus(self._x, self._stride_x, row), column, size)
        address = builder.add(address, _int(offset * size))
        x = splat(builder, builder.load(pointer_to(builder, address, F32), align=2))
        if self._is_dot or not self._is_bfloat16:
            return [x]
        bits = builder.bitcast(x, INTS)
        parts = builder.shl(bits, constant(16)), builder.and_(bits, constant(-65536))
        return [builder.bitcast(each, FLOATS) for each in parts]

    def _of_group(self, address, panel, group):
        """Scales or zeros of a panel as float32."""
        builder = self._builder
        place = self._plus(group, self._num_groups, panel)
        if not self._is_bfloat16 or self._kind == "floats":
            address = self._plus(address, place, WIDTH * 4)
            return builder.load(pointer_to(builder, address, FLOATS), align=4)
        address = self._plus(address, place, WIDTH * 2)
        short = builder.load(pointer_to(builder, address, SHORTS), align=2)
        return builder.bitcast(builder.shl(builder.zext(short, INTS), constant(16)), FLOATS)

    def _without_zeros(self, group, products):
        """Products minus the number for zero times the sum of x over the group, where there are
        such numbers."""
        builder = self._builder
        if not self._kind.endswith(_AND_ZEROS):
            return [products[place] for place in self._grid]
        found = []
        for row, panel in self._grid:
            zeros = self._of_group(self._zeros, panel, group)
            if _IN_A_WORD[self._kind] == 8:
                zeros = builder.fsub(zeros, ir.Constant(FLOATS, [8.0] * WIDTH))
            place = self._plus(group, self._num_groups, row)
            pointer = pointer_to(builder, self._plus(self._sums, place, 4), F32)
            total = builder.fneg(splat(builder, builder.load(pointer, align=4)))
            found.append(multiply_add(builder, total, zeros, products[row, panel]))
        return found

    def _store(self, totals):
        builder, size = self._builder, 2 if self._is_bfloat16 else 4
        for (row, panel), total in zip(self._grid, totals, strict=True):
            address = self._plus(self._out, self._stride_out, row)
            address = builder.add(address, _int(panel * WIDTH * size))
            stored = to_bfloat16(builder, total) if self._is_bfloat16 else total
            kind = SHORTS if self._is_bfloat16 else FLOATS
            builder.store(stored, pointer_to(builder, address, kind), align=2)


def _int(number):
    return ir.Constant(I64, number)


def _make_tile(kind: str, num_rows: int, num_panels: int):
    """An intrinsic of a `_Tile`. Its numbers are ``like`` the first argument: uint16 stands for
    bfloat16."""

    @intrinsic
    def tile(
        _, like, x, stride_x, words, scales, zeros, sums, table, bias, out, stride_out, columns,
        group_size,
    ):  # fmt: skip
        def generate(context, builder, signature, arguments):
            is_bfloat16 = like == types.uint16
            _Tile(builder, kind, is_bfloat16, num_rows, num_panels, arguments[1:]).write()
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 12), generate

    return tile


def _make_run(kind: str):
    tile_high, tile_low, tile_1 = (_make_tile(kind, rows, _PANELS) for rows in _ROWS)
    tile_of_one_row = _make_tile(kind, 1, _PANELS_OF_ONE_ROW)
    in_a_word, is_float = _IN_A_WORD[kind], kind == "floats"

    def run(pointer, size, like):
        """``size``: bytes of a number like ``like``."""
        numbers = carray(pointer, 14, types.int64)
        num_tokens, x, words, scales, zeros, sums, table, bias, out = numbers[2:11]
        columns, group_size, num_panels = numbers[11:14]
        stride_x, stride_out = columns * size, num_panels * WIDTH * size
        num_groups = (columns + group_size - 1) // group_size
        of_words = columns // in_a_word * WIDTH * 4
        of_scales = num_groups * WIDTH * (4 if is_float else size)
        is_one = num_tokens == 1 and num_panels >= _PANELS_OF_ONE_ROW
        at_a_time = _PANELS_OF_ONE_ROW if is_one else _PANELS
        num_parts = (num_tokens + _ROWS_AT_A_TIME - 1) // _ROWS_AT_A_TIME
        num_pieces = (num_panels + at_a_time - 1) // at_a_time * num_parts
        while True:
            piece = take_next(numbers.ctypes.data)
            if piece >= num_pieces:
                break
            first = min(piece // num_parts * at_a_time, num_panels - at_a_time)
            row = piece % num_parts * _ROWS_AT_A_TIME
            end = min(row + _ROWS_AT_A_TIME, num_tokens)
            own_words, own_scales = words + first * of_words, scales + first * of_scales
            own_zeros = zeros + first * of_scales  # read by kinds that have them
            own_bias = bias + first * WIDTH * 4
            own_out = out + first * WIDTH * size
            if is_one:
                tile_of_one_row(
                    like, x, stride_x, own_words, own_scales, own_zeros, sums, table, own_bias,
                    own_out, stride_out, columns, group_size,
                )  # fmt: skip
                row = end
            while row < end:
                own_x, place = x + row * stride_x, own_out + row * stride_out
                own_sums = sums + row * num_groups * 4
                if row + _HIGH <= end:
                    tile_high(
                        like, own_x, stride_x, own_words, own_scales, own_zeros, own_sums, table,
                        own_bias, place, stride_out, columns, group_size,
                    )  # fmt: skip
                    row += _HIGH
                elif row + _LOW <= end:
                    tile_low(
                        like, own_x, stride_x, own_words, own_scales, own_zeros, own_sums, table,
                        own_bias, place, stride_out, columns, group_size,
                    )  # fmt: skip
                    row += _LOW
                else:
                    tile_1(
                        like, own_x, stride_x, own_words, own_scales, own_zeros, own_sums, table,
                        own_bias, place, stride_out, columns, group_size,
                    )  # fmt: skip
                    row += 1
            finish_piece(numbers.ctypes.data)
        return num_pieces

    # By its name LLVM tells it from those of other kinds, which another process may have compiled.
    run.__name__ = run.__qualname__ = f"run_{kind.replace(' ', '_')}"
    return njit(**FAST)(run)


_run_nibbles = _make_run("nibbles")
_run_nibbles_zeros = _make_run("nibbles and zeros")
_run_codes = _make_run("codes")
_run_integers = _make_run("integers")
_run_integers_zeros = _make_run("integers and zeros")
_run_floats = _make_run("floats")


# Functions of the module, each with a name of its own: by these compiled code is kept.


def _nibbles_float32(pointer):
    return _run_nibbles(pointer, 4, np.float32(0))


def _nibbles_bfloat16(pointer):
    return _run_nibbles(pointer, 2, np.uint16(0))


def _nibbles_zeros_float32(pointer):
    return _run_nibbles_zeros(pointer, 4, np.float32(0))


def _nibbles_zeros_bfloat16(pointer):
    return _run_nibbles_zeros(pointer, 2, np.uint16(0))


def _codes_float32(pointer):
    return _run_codes(pointer, 4, np.float32(0))


def _codes_bfloat16(pointer):
    return _run_codes(pointer, 2, np.uint16(0))


def _integers_float32(pointer):
    return _run_integers(pointer, 4, np.float32(0))


def _integers_bfloat16(pointer):
    return _run_integers(pointer, 2, np.uint16(0))


def _integers_zeros_float32(pointer):
    return _run_integers_zeros(pointer, 4, np.float32(0))


def _integers_zeros_bfloat16(pointer):
    return _run_integers_zeros(pointer, 2, np.uint16(0))


def _floats_float32(pointer):
    return _run_floats(pointer, 4, np.float32(0))


def _floats_bfloat16(pointer):
    return _run_floats(pointer, 2, np.uint16(0))


_RUN = {
    "nibbles": (_nibbles_float32, _nibbles_bfloat16),
    "nibbles and zeros": (_nibbles_zeros_float32, _nibbles_zeros_bfloat16),
    "codes": (_codes_float32, _codes_bfloat16),
    "integers": (_integers_float32, _integers_bfloat16),
    "integers and zeros": (_integers_zeros_float32, _integers_zeros_bfloat16),
    "floats": (_floats_float32, _floats_bfloat16),
}


@cache
def _kernel(kind: str, is_bfloat16: bool) -> Kernel:
    return Kernel(_RUN[kind][is_bfloat16], 12)
