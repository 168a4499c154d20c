"""``x @ weight.T + bias`` of weights of 4 or 8 bits, which become numbers in registers alone.

A weight [rows, columns] is kept in panels of 16 rows, as in `linear`; a word of 32 bits has 8
numbers of a row, or 4. Products of a group are added up first, then multiplied by its scale; sums
are float32, and a row of the answer does not depend on the rows beside it. Where the CPU multiplies
pairs of bfloat16, two columns are widened at once for it; with AVX-512 numbers of 4 bits are looked
up in a register, which takes an instruction for 16 of them, or for 16 such pairs. So are the two
bytes of what FP8 is in bfloat16, where the CPU looks up bytes (VBMI).

`integer_linear` rounds x to 8 bits, too, and adds up products of integers, where the CPU has an
instruction for four of them (VNNI).

A *tile* is some rows of x and panels that stay in registers over a group. Where panels are left
over, the last tile begins earlier, and makes some answers a second time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic
from torch import Tensor

from inflight_kernels import reference
from inflight_kernels.cpu.elementwise import group_sums_stage, quantize_stage
from inflight_kernels.cpu.intrinsics import (
    F32,
    FLOATS,
    HAS_WIDE_REGISTERS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    SHORTS,
    WIDTH,
    bias_of,
    compiled_for,
    constant,
    finish_piece,
    load_bfloat16,
    load_float16,
    load_floats,
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
_PREFETCH_BYTES = 2048
_MOST_COLUMNS = 1 << 16
"""Of which products of 8 bits are added up in 32."""
_FEW = 32_768
"""Numbers that one thread is done with before others have begun."""
_KINDS = {torch.uint8: "nibbles", torch.int8: "integers", torch.float8_e4m3fn: "floats"}
_IN_A_WORD = {
    **dict.fromkeys(("nibbles", "nibbles and zeros", "nibbles and small zeros", "codes"), 8),
    **dict.fromkeys(("integers", "integers and zeros", "floats", "float pairs"), 4),
    "integer products": 4,
}
_AND_ZEROS = " zeros"  # how their kinds end
_SMALL = "nibbles and small zeros"
_HAVE_WIDE_SCALES = ("floats", "float pairs", "integer products")
_TYPES = {
    **dict.fromkeys(("nibbles", "nibbles and zeros", _SMALL, "codes"), torch.uint8),
    **dict.fromkeys(("integers", "integers and zeros"), torch.int8),
    **dict.fromkeys(("floats", "float pairs"), torch.float8_e4m3fn),
}


@dataclass(frozen=True, slots=True)
class Packed:
    """``kind``: what the words hold. ``words`` int32 [panels, columns / n, 16], of 4 bits the even
    columns in the low half, of float pairs see `_in_pairs`; ``scales`` and ``zeros`` [panels,
    groups, 16], of integer products zeros are what sums begin from. Small zeros are uint8 [panels,
    groups / 2, 16], the even group in the low bits. ``table`` [16] float32: what codes stand for,
    or what is added to small zeros."""

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

    @property
    def num_groups(self) -> int:
        """Of a row."""
        return self.scales.shape[1]

    @property
    def codebook(self) -> Tensor | None:
        """What codes stand for, if there are codes."""
        return self.table if self.kind == "codes" else None

    @property
    def first_zero(self) -> int:
        """What `pack` got."""
        return 0 if self.kind != _SMALL or self.table is None else int(self.table[0]) + 8


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


@cache
def _looks_up_bytes() -> bool:
    return multiplies_bfloat16() and "+avx512vbmi" in get_host_cpu_features()


def pack(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    codebook: Tensor | None = None,
    first_zero: int = 0,
) -> Packed:
    """A weight as `reference.dequantize` has it. Scales and zeros keep their type: that of the
    model, ``dtype``, but float32 beside float8; in float32, of 4 bits without zeros or with those
    in bytes, scales may be of 16 bits. In bfloat16 a codebook is rounded to it. Zeros may
    also be bytes [rows, groups / 2] of two numbers of 4 bits, the even group's in the low bits, to
    which ``first_zero`` is added."""
    kind, columns, table = _KINDS[values.dtype], values.shape[1], None
    if kind == "nibbles":
        columns *= 2
        if codebook is not None:
            kind, table = "codes", codebook.to(dtype).float().contiguous()
        else:
            values = values ^ 0x88  # -8 to 7, with a sign
        values = _parted(values)
    if scales.dtype == torch.float16 and "+f16c" not in get_host_cpu_features():
        scales = scales.float()
    given = [values.contiguous().view(torch.int32), scales]
    if zeros is not None:
        given.append(zeros)
        is_small = zeros.dtype == torch.uint8
        if is_small:
            table = _small_zeros_table(first_zero)
        kind = _SMALL if is_small else f"{kind} and zeros"
    words, scales, *others = _panels(*given)
    if kind == "floats" and dtype == torch.bfloat16 and _looks_up_bytes():
        kind, words = "float pairs", _in_pairs(words)
    return Packed(kind, words, scales, others[0] if others else None, table, columns, group_size)


@cache
def _small_zeros_table(first_zero: int) -> Tensor:
    """What `Packed.table` is for small zeros: of all weights the same."""
    return torch.full((WIDTH,), float(first_zero - 8))


def _panels(*tensors: Tensor) -> list[Tensor]:
    """Each [rows, n] -> [rows / 16, n, 16], at a multiple of 64 bytes. They lie in one piece of
    memory: in pieces of their own small ones would take a page more each."""
    sizes = [-(-each.nbytes // 64) * 64 for each in tensors]
    held = torch.empty(sum(sizes) + 64, dtype=torch.uint8)
    start = -held.data_ptr() % 64
    places = held[start : start + sum(sizes)].split_with_sizes(sizes)
    found = []
    for numbers, place in zip(tensors, places, strict=True):
        rows, width = numbers.shape
        panels = numbers.view(rows // WIDTH, WIDTH, width).transpose(1, 2)
        found.append(place[: numbers.nbytes].view(numbers.dtype).view(panels.shape).copy_(panels))
    return found


def _parted(values: Tensor) -> Tensor:
    """Bytes [rows, n] of two columns each -> words of eight whose even columns come first."""
    words = values.reshape(-1, 4)
    return reference.pack_nibbles(torch.cat((words & 15, words >> 4), 1)).view(values.shape)


def _put_together(values: Tensor) -> Tensor:
    """What `_parted` has made, as it was."""
    even, odd = reference.unpack_nibbles(values.reshape(-1, 4)).split_with_sizes([4, 4], 1)
    return (even | (odd << 4)).view(values.shape)


def _in_pairs(words: Tensor) -> Tensor:
    """Of words of four rows the first two bytes of each, then the others: their pairs are put
    together from halves of 16 bytes."""
    grouped = words.view(torch.int16).view(*words.shape[:2], 4, 4, 2)
    words.copy_(grouped.transpose(-1, -2).reshape(*words.shape[:2], -1).view(torch.int32))
    return words


def rows(weight: Packed, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values, scales and zeros of those rows [T], as they were packed."""
    panels, places = numbers // WIDTH, numbers % WIDTH
    if weight.kind == "float pairs":
        grouped = weight.words.view(torch.int16).view(*weight.words.shape[:2], 4, 2, 4)
        values = grouped[panels, :, places // 4, :, places % 4].flatten(1).view(torch.int32)
    else:
        values = weight.words[panels, :, places]
    values = values.view(_TYPES[weight.kind])
    scales, zeros = (
        None if each is None else each[panels, :, places] for each in (weight.scales, weight.zeros)
    )
    assert scales is not None
    if _KINDS.get(values.dtype) == "nibbles":
        values = _put_together(values)
        if weight.codebook is None:
            values = values ^ 0x88
    return values, scales, zeros


def quantized_linear(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """x [T, columns] -> [T, rows], both of the model's dtype; bias: float32 [rows]."""
    num_tokens, x = len(x), x.contiguous()
    out = torch.empty(num_tokens, weight.rows, dtype=x.dtype)
    if num_tokens:
        sums = None
        if weight.zeros is not None:
            sums = torch.empty(num_tokens, weight.num_groups)
            group_sums_stage(x, weight.group_size, sums).run(is_small=x.numel() < _FEW)
        quantized_linear_stage(x, weight, bias, out, sums).run()
    return out


def quantized_linear_stage(
    x: Tensor, weight: Packed, bias: Tensor | None, out: Tensor, sums: Tensor | None = None
) -> Stage:
    """`quantized_linear` into ``out``, whose rows are contiguous; x is, too. ``sums``: those of
    `group_sums_stage`, if there are zeros. Of integer products x and sums are what `quantize_stage`
    makes."""
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
        out.stride(0) * out.itemsize,
    )
    return Stage(_kernel(weight.kind, out.dtype, weight.scales.dtype), numbers)


def takes_integers(values: Tensor, scales: Tensor) -> bool:
    """Whether there is an `integer_linear` for int8 ``values`` [rows, columns] here."""
    rows, columns = values.shape
    return (
        values.dtype == torch.int8
        and scales.shape == (rows, 1)
        and rows % WIDTH == 0
        and rows >= _PANELS * WIDTH
        and columns % 4 == 0
        and columns <= _MOST_COLUMNS
        and "+avx512vnni" in get_host_cpu_features()
    )


def pack_integers(values: Tensor, scales: Tensor) -> Packed:
    """int8 [rows, columns] with scales [rows, 1]."""
    starts = values.sum(1, keepdim=True, dtype=torch.int32) * -128
    words, scales, starts = _panels(values.contiguous().view(torch.int32), scales.float(), starts)
    columns = values.shape[1]
    return Packed("integer products", words, scales, starts, None, columns, columns)


def integer_linear(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """x [T, columns] -> [T, rows], both of the model's dtype: `reference.quantize_int8` of x, times
    the weight; bias: float32 [rows]."""
    num_tokens, x = len(x), x.contiguous()
    out = torch.empty(num_tokens, weight.rows, dtype=x.dtype)
    if num_tokens:
        numbers, scales = torch.empty_like(x, dtype=torch.uint8), torch.empty(num_tokens, 1)
        quantize_stage(x, numbers, scales).run(is_small=x.numel() < _FEW)
        quantized_linear_stage(numbers, weight, bias, out, scales).run()
    return out


def _place(column):
    """Where the 4 bits of a column are in a word."""
    return column // 2 + 4 * (column % 2)


def _nibble(builder, word, column, table):
    """The 4 bits of a column of each word, as float32."""
    if HAS_WIDE_REGISTERS:
        return _code(builder, word, column, table)
    top = builder.shl(word, constant(28 - 4 * _place(column)))
    return builder.sitofp(builder.ashr(top, constant(28)), FLOATS)


def _code(builder, word, column, table):
    """The same, looked up in a table."""
    codes = builder.lshr(word, constant(4 * _place(column)))
    if HAS_WIDE_REGISTERS:
        return _call(builder, "llvm.x86.avx512.permvar.sf.512", table, codes)
    halves = [
        [
            _call(builder, "llvm.x86.avx2.permps", _half(builder, table, half), part)
            for part in (_half(builder, codes, 0), _half(builder, codes, 1))
        ]
        for half in (0, 1)
    ]
    low, high = (
        builder.shuffle_vector(*parts, ir.Constant(INTS, list(range(WIDTH)))) for parts in halves
    )
    is_high = builder.icmp_signed("<", builder.shl(codes, constant(28)), constant(0))
    return builder.select(is_high, high, low)


def _codes_of_pairs(builder, word, column, table):
    """An even column and the next one, as pairs of bfloat16; ``table``: `_table_of_pairs`."""
    codes = builder.lshr(word, constant(4 * _place(column)))
    codes = builder.bitcast(codes, _PAIRS)
    return builder.bitcast(_call(builder, _LOOK_UP_PAIRS, table, codes), FLOATS)


def _table_of_pairs(builder, table):
    """``table`` in bfloat16, twice: of an index 5 bits count, and the last is another number's."""
    bits = builder.lshr(builder.bitcast(table, INTS), constant(16))
    twice = ir.Constant(ir.VectorType(I32, 2 * WIDTH), [*range(WIDTH)] * 2)
    short = builder.trunc(bits, SHORTS)
    return builder.shuffle_vector(short, ir.Constant(SHORTS, ir.Undefined), twice)


def _call(builder, name, *vectors):
    """An operation of the CPU on vectors, of the type of the first."""
    kind = ir.FunctionType(vectors[0].type, [each.type for each in vectors])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, vectors)


_PAIRS = ir.VectorType(I16, 2 * WIDTH)
_LOOK_UP_PAIRS = "llvm.x86.avx512.permvar.hi.512"
_SIGNED_NIBBLES = ir.Constant(FLOATS, [*map(float, range(8)), *map(float, range(-8, 0))])
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


def _float_pairs(builder, word, column, table):
    """Columns 0 and 1 of e4m3, or 2 and 3, as pairs of bfloat16: a table has each of their bytes,
    by 7 bits; the eighth is the sign. See `_in_pairs`."""
    codes = builder.bitcast(word, _BYTES)
    low, high = (
        _call(builder, _LOOK_UP_BYTES, first, codes, second) for first, second in _FLOAT8_BYTES
    )
    high = builder.or_(high, builder.and_(codes, ir.Constant(_BYTES, [0x80] * 64)))
    places = [
        which * 64 + lane * 16 + column * 4 + place
        for lane in range(4)
        for place in range(8)
        for which in (0, 1)
    ]
    pairs = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 64), places))
    return builder.bitcast(pairs, FLOATS)


_BYTES = ir.VectorType(I8, 64)
_LOOK_UP_BYTES = "llvm.x86.avx512.vpermi2var.qi.512"


def _float8_bytes():
    """Low and high bytes in bfloat16 of e4m3 without a sign, by their codes: two vectors each."""
    codes = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = codes.to(torch.bfloat16).view(torch.uint8).view(2, 64, 2)
    return [
        [ir.Constant(_BYTES, numbers[half, :, which].tolist()) for half in (0, 1)]
        for which in (0, 1)
    ]


_FLOAT8_BYTES = _float8_bytes()

_WIDEN = {
    **dict.fromkeys(("nibbles", "nibbles and zeros", _SMALL), _nibble),
    **dict.fromkeys(("integers", "integers and zeros"), _integer),
    "codes": _code,
    "floats": _float8,
}
_WIDEN_PAIRS = {
    **dict.fromkeys(("nibbles", "nibbles and zeros", _SMALL, "codes"), _codes_of_pairs),
    "float pairs": _float_pairs,
}
"""Two columns at once, where the CPU multiplies pairs."""


def _pair(builder, first, second):
    """Two float32 in each place, whose last bits are zeros, as bfloat16."""
    low = builder.lshr(builder.bitcast(first, INTS), constant(16))
    return builder.bitcast(builder.or_(low, builder.bitcast(second, INTS)), FLOATS)


_SHORT_SCALES = {
    types.uint16: load_bfloat16,
    types.uint32: load_bfloat16,
    types.int32: load_float16,
}


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

    def __init__(self, builder, kind, like, rows, panels, arguments):
        self._builder, self._kind, self._is_bfloat16 = builder, kind, like == types.uint16
        self._load_short = _SHORT_SCALES.get(like)
        self._is_dot = self._is_bfloat16 and multiplies_bfloat16()
        self._widen_pairs = _WIDEN_PAIRS.get(kind) if self._is_dot else None
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
        table = _SIGNED_NIBBLES
        if self._kind == "codes":
            table = builder.load(pointer_to(builder, self._table, FLOATS), align=4)
        if self._widen_pairs is not None:
            table = _table_of_pairs(builder, table)
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
        if self._widen_pairs is not None:
            return [self._widen_pairs(builder, word, column, table)]
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
        if self._load_short is None or self._kind in _HAVE_WIDE_SCALES:
            return load_floats(builder, self._plus(address, place, WIDTH * 4))
        return self._load_short(builder, self._plus(address, place, WIDTH * 2))

    def _without_zeros(self, group, products):
        """Products minus the number for zero times the sum of x over the group, where there are
        such numbers."""
        builder = self._builder
        if not self._kind.endswith(_AND_ZEROS):
            return [products[place] for place in self._grid]
        found = []
        for row, panel in self._grid:
            if self._kind == _SMALL:
                zeros = self._small_zeros(panel, group)
            else:
                zeros = self._of_group(self._zeros, panel, group)
                if _IN_A_WORD[self._kind] == 8:
                    zeros = builder.fsub(zeros, ir.Constant(FLOATS, [8.0] * WIDTH))
            place = self._plus(group, self._num_groups, row)
            pointer = pointer_to(builder, self._plus(self._sums, place, 4), F32)
            total = builder.fneg(splat(builder, builder.load(pointer, align=4)))
            found.append(multiply_add(builder, total, zeros, products[row, panel]))
        return found

    def _small_zeros(self, panel, group):
        """Those of a panel as float32, 8 less."""
        builder = self._builder
        num_bytes = builder.lshr(builder.add(self._num_groups, _int(1)), _int(1))
        place = self._plus(builder.lshr(group, _int(1)), num_bytes, panel)
        address = self._plus(self._zeros, place, WIDTH)
        codes = builder.load(pointer_to(builder, address, ir.VectorType(I8, WIDTH)), align=1)
        is_odd = builder.trunc(group, ir.IntType(1))
        codes = builder.zext(codes, INTS)
        codes = builder.select(is_odd, builder.lshr(codes, constant(4)), codes)
        wide = builder.sitofp(builder.and_(codes, constant(15)), FLOATS)
        first = builder.load(pointer_to(builder, self._table, FLOATS), align=4)
        return builder.fadd(wide, first)

    def _store(self, totals):
        builder, size = self._builder, 2 if self._is_bfloat16 else 4
        for (row, panel), total in zip(self._grid, totals, strict=True):
            address = self._plus(self._out, self._stride_out, row)
            address = builder.add(address, _int(panel * WIDTH * size))
            stored = to_bfloat16(builder, total) if self._is_bfloat16 else total
            kind = SHORTS if self._is_bfloat16 else FLOATS
            builder.store(stored, pointer_to(builder, address, kind), align=2)


class _IntegerTile(_Tile):
    """The same of x in 8 bits, 128 more than what they stand for, whose scales are in the place of
    sums; zeros are what sums of products begin from."""

    def write(self):
        """All of it."""
        builder = self._builder
        starts = [
            builder.bitcast(self._of_group(self._zeros, panel, _int(0)), FLOATS)
            for panel in self._panels
        ]
        loop = _Loop(builder, "words", _int(0), 4, [starts[panel] for _, panel in self._grid])
        here = self._plus(self._words, loop.index, WIDTH)
        panel_bytes = builder.mul(self._columns, _int(WIDTH))
        places = [self._plus(here, panel_bytes, panel) for panel in self._panels]
        words = [builder.load(pointer_to(builder, each, INTS), align=64) for each in places]
        prefetch(builder, places, _PREFETCH_BYTES)
        added = dict(zip(self._grid, loop.values, strict=True))
        for row in self._rows:
            place = builder.add(self._plus(self._x, self._stride_x, row), loop.index)
            x = splat(builder, builder.load(pointer_to(builder, place, F32), align=4))
            x = builder.bitcast(x, INTS)
            for panel in self._panels:
                total = builder.bitcast(added[row, panel], INTS)
                total = _call(builder, _ADD_PRODUCTS, total, x, words[panel])
                added[row, panel] = builder.bitcast(total, FLOATS)
        loop.close(self._columns, [added[place] for place in self._grid])
        self._store([self._scaled(*place, added[place]) for place in self._grid])

    def _scaled(self, row, panel, total):
        builder = self._builder
        pointer = pointer_to(builder, builder.add(self._sums, _int(4 * row)), F32)
        scale = splat(builder, builder.load(pointer, align=4))
        scale = builder.fmul(scale, self._of_group(self._scales, panel, _int(0)))
        total = builder.sitofp(builder.bitcast(total, INTS), FLOATS)
        return multiply_add(builder, total, scale, bias_of(builder, self._bias, panel))


_ADD_PRODUCTS = "llvm.x86.avx512.vpdpbusd.512"


def _int(number):
    return ir.Constant(I64, number)


def _make_tile(kind: str, num_rows: int, num_panels: int):
    """An intrinsic of a `_Tile`. Its numbers are ``like`` the first argument: uint16 stands for
    bfloat16, uint32 and int32 for float32 beside scales in bfloat16 and in float16."""

    @intrinsic
    def tile(
        _, like, x, stride_x, words, scales, zeros, sums, table, bias, out, stride_out, columns,
        group_size,
    ):  # fmt: skip
        def generate(context, builder, signature, arguments):
            make = _IntegerTile if kind == "integer products" else _Tile
            make(builder, kind, like, num_rows, num_panels, arguments[1:]).write()
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 12), generate

    return tile


def _make_run(kind: str):
    tile_high, tile_low, tile_1 = (_make_tile(kind, rows, _PANELS) for rows in _ROWS)
    tile_of_one_row = _make_tile(kind, 1, _PANELS_OF_ONE_ROW)
    in_a_word = _IN_A_WORD[kind]
    is_of_bytes, has_small_zeros = kind == "integer products", kind == _SMALL

    @compiled_for(kind)
    def run(pointer, size, like, scale_size):
        """``size``: bytes of a number like ``like``; ``scale_size``: of a scale."""
        numbers = carray(pointer, 15, types.int64)
        num_tokens, x, words, scales, zeros, sums, table, bias, out = numbers[2:11]
        columns, group_size, num_panels, stride_out = numbers[11:15]
        stride_x = columns * (1 if is_of_bytes else size)
        num_groups = (columns + group_size - 1) // group_size
        of_words = columns // in_a_word * WIDTH * 4
        of_scales = num_groups * WIDTH * scale_size
        of_zeros = (num_groups + 1) // 2 * WIDTH if has_small_zeros else of_scales
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
            own_zeros = zeros + first * of_zeros  # read by kinds that have them
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

    return run


_run_nibbles = _make_run("nibbles")
_run_nibbles_zeros = _make_run("nibbles and zeros")
_run_nibbles_small_zeros = _make_run(_SMALL)
_run_codes = _make_run("codes")
_run_integers = _make_run("integers")
_run_integers_zeros = _make_run("integers and zeros")
_run_floats = _make_run("floats")
_run_float_pairs = _make_run("float pairs")
_run_integer_products = _make_run("integer products")


# Functions of the module, each with a name of its own: by these compiled code is kept.


def _nibbles_float32(pointer):
    return _run_nibbles(pointer, 4, np.float32(0), 4)


def _nibbles_bfloat16(pointer):
    return _run_nibbles(pointer, 2, np.uint16(0), 2)


def _nibbles_zeros_float32(pointer):
    return _run_nibbles_zeros(pointer, 4, np.float32(0), 4)


def _nibbles_zeros_bfloat16(pointer):
    return _run_nibbles_zeros(pointer, 2, np.uint16(0), 2)


def _nibbles_small_zeros_float32(pointer):
    return _run_nibbles_small_zeros(pointer, 4, np.float32(0), 4)


def _nibbles_small_zeros_bfloat16(pointer):
    return _run_nibbles_small_zeros(pointer, 2, np.uint16(0), 2)


def _nibbles_float32_by_bfloat16(pointer):
    return _run_nibbles(pointer, 4, np.uint32(0), 2)


def _nibbles_float32_by_float16(pointer):
    return _run_nibbles(pointer, 4, np.int32(0), 2)


def _nibbles_small_zeros_float32_by_bfloat16(pointer):
    return _run_nibbles_small_zeros(pointer, 4, np.uint32(0), 2)


def _nibbles_small_zeros_float32_by_float16(pointer):
    return _run_nibbles_small_zeros(pointer, 4, np.int32(0), 2)


def _codes_float32(pointer):
    return _run_codes(pointer, 4, np.float32(0), 4)


def _codes_bfloat16(pointer):
    return _run_codes(pointer, 2, np.uint16(0), 2)


def _integers_float32(pointer):
    return _run_integers(pointer, 4, np.float32(0), 4)


def _integers_bfloat16(pointer):
    return _run_integers(pointer, 2, np.uint16(0), 2)


def _integers_zeros_float32(pointer):
    return _run_integers_zeros(pointer, 4, np.float32(0), 4)


def _integers_zeros_bfloat16(pointer):
    return _run_integers_zeros(pointer, 2, np.uint16(0), 2)


def _floats_float32(pointer):
    return _run_floats(pointer, 4, np.float32(0), 4)


def _floats_bfloat16(pointer):
    return _run_floats(pointer, 2, np.uint16(0), 4)


def _float_pairs_bfloat16(pointer):
    return _run_float_pairs(pointer, 2, np.uint16(0), 4)


def _integer_products_float32(pointer):
    return _run_integer_products(pointer, 4, np.float32(0), 4)


def _integer_products_bfloat16(pointer):
    return _run_integer_products(pointer, 2, np.uint16(0), 4)


_RUN: dict[str, Any] = {
    "nibbles": (_nibbles_float32, _nibbles_bfloat16),
    "nibbles and zeros": (_nibbles_zeros_float32, _nibbles_zeros_bfloat16),
    _SMALL: (_nibbles_small_zeros_float32, _nibbles_small_zeros_bfloat16),
    "codes": (_codes_float32, _codes_bfloat16),
    "integers": (_integers_float32, _integers_bfloat16),
    "integers and zeros": (_integers_zeros_float32, _integers_zeros_bfloat16),
    "floats": (_floats_float32, _floats_bfloat16),
    "float pairs": {True: _float_pairs_bfloat16},
    "integer products": (_integer_products_float32, _integer_products_bfloat16),
}


_RUN_BY_SHORT: dict[tuple[str, torch.dtype], Any] = {
    ("nibbles", torch.bfloat16): _nibbles_float32_by_bfloat16,
    ("nibbles", torch.float16): _nibbles_float32_by_float16,
    (_SMALL, torch.bfloat16): _nibbles_small_zeros_float32_by_bfloat16,
    (_SMALL, torch.float16): _nibbles_small_zeros_float32_by_float16,
}
"""In float32 by scales of 16 bits."""


@cache
def _kernel(kind: str, dtype: torch.dtype, of_scales: torch.dtype) -> Kernel:
    is_bfloat16 = dtype == torch.bfloat16
    if is_bfloat16 or of_scales == torch.float32:
        return Kernel(_RUN[kind][is_bfloat16], 13)
    return Kernel(_RUN_BY_SHORT[kind, of_scales], 13)
