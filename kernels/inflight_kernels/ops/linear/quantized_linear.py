"""A linear layer whose weight is kept in numbers of 4 or 8 bits, widened in registers.

    out[t] = x[t] @ ((values - zeros) * scales).T + bias

Scales and zeros belong to a row and to a group of neighbouring columns. Numbers of 4 bits may be
places in a table of 16 (``codebook``). With ``starts`` the rows of x belong to groups (experts),
each of which has a weight of its own, as in `grouped_linear`.

What x holds decides how numbers are multiplied:

* bfloat16, float16, float32: the weight's are widened to that type, tile by tile.
* int8 or float8_e4m3fn, with a scale per row (or per row and group of columns): as they are.

As in `invariant_linear` the rows of the weight are the rows of the product, so that few tokens
take few registers. Few tokens and few rows of the weight leave most of a GPU idle, so that the
columns are split among programs; the last one to end adds up what the others left in memory, in
one order.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from inflight_kernels import launch, reference
from inflight_kernels.launch import INTERPRETED, Argument, find_group, narrow

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

_FP8 = torch.float8_e4m3fn
_STEP = 128  # the columns of every weight are padded to a multiple of it
_LEAST_DEPTH = 16  # the fewest columns that tensor cores take
_ROWS_AT_ONCE = 1024  # of a weight, while its numbers are moved
_LEAST_PER_SM, _MOST_PER_SM, _MOST_SPLITS = 2, 3, 16  # programs
_LEAST_ROUNDS = 4  # of a program that shares columns: with fewer, starting takes longer
_MOST_TILES = 2**14  # that split their columns
WHOLE_ROW = tl.constexpr(2**30)  # the group of all columns: a multiple of every tile


class Tile(NamedTuple):
    """What a program computes, in tokens and rows of the weight, and the words of a row that it
    reads in one round; ``num_splits`` programs share the columns."""

    tokens: int
    rows: int
    round_words: int
    num_splits: int
    num_stages: int
    num_warps: int


class QuantizedWeight(NamedTuple):
    """A weight as the kernel reads it; see `prepare`.

    ``kind``: what ``values`` hold: "int4", "int8" or "float8" [R, words] int16, or "plain" [R,
    columns] int8 or float8_e4m3fn, for x of that type. ``scales`` and ``zeros`` [groups, R],
    ``order`` [G, columns]. A product takes ``depth`` columns.
    """

    kind: str
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    codebook: torch.Tensor | None
    columns: int
    group_size: int
    depth: int

    @property
    def per_word(self) -> int:
        """Numbers of one of ``values``."""
        return {"plain": 1, "int4": 4}.get(self.kind, 2)


def prepare(
    values: torch.Tensor,  # [R, columns] int8 or float8_e4m3fn, or uint8 [R, columns / 2]
    scales: torch.Tensor,  # [R, groups] of any float dtype
    zeros: torch.Tensor | None = None,  # like scales
    *,
    group_size: int,
    order: torch.Tensor | None = None,  # [G, columns] int32
    codebook: torch.Tensor | None = None,  # [16] float32, for uint8
    is_plain: bool = False,
) -> QuantizedWeight:
    """The weight in the order in which the kernel reads it; numbers are moved, none is changed.

    ``values`` as `reference.dequantize` has them; ``order``: which column of x each stands for.
    Without zeros and codebook 8 stands for 0 of 4 bits. ``is_plain``: x will be of the type of
    the 8-bit values.
    """
    kind = {torch.uint8: "int4", torch.int8: "int8", _FP8: "float8"}[values.dtype]
    columns = values.shape[1] * (2 if kind == "int4" else 1)
    num_groups = scales.shape[1]
    depth = _STEP // (1 if is_plain else 4 if kind == "int4" else 2)
    if num_groups > 1 and gcd(group_size, depth) >= _LEAST_DEPTH:
        depth = gcd(group_size, depth)
    if is_plain:
        kind = "plain"
        padded = functional.pad(values.view(torch.uint8), (0, -columns % _STEP))
        values = padded.view(values.dtype)
    else:
        values = _to_words(values, columns, depth)
    if kind == "int4" and zeros is not None and bool((zeros == 8).all()):
        zeros = None
    if values.device.type == "cuda":
        _counters(values.device)
    return QuantizedWeight(
        kind,
        values.contiguous(),
        scales.t().contiguous(),
        None if zeros is None else zeros.t().contiguous(),
        None if order is None else order.contiguous(),
        codebook,
        columns,
        columns if num_groups == 1 else group_size,
        depth,
    )


def _to_words(values: torch.Tensor, columns: int, depth: int) -> torch.Tensor:
    """Of each run of ``n * depth`` columns, n numbers to a word of 16 bits: word ``i`` has columns
    ``i``, ``i + depth`` and so on, the low bits first. So a product of ``depth`` columns reads the
    same bits of neighbouring words, two of which make a register."""
    has_nibbles = values.dtype == torch.uint8
    bits = 4 if has_nibbles else 8
    num_words = launch.cdiv(columns, _STEP) * _STEP * bits // 16
    words = torch.empty((len(values), num_words), dtype=torch.int16, device=values.device)
    for first in range(0, len(values), _ROWS_AT_ONCE):
        part = values[first : first + _ROWS_AT_ONCE].view(torch.uint8)
        numbers = torch.stack((part & 15, part >> 4), -1).flatten(1) if has_nibbles else part
        numbers = functional.pad(numbers, (0, -columns % _STEP)).to(torch.int32)
        runs = numbers.view(len(part), -1, 16 // bits, depth)
        shifts = torch.arange(0, 16, bits, dtype=torch.int32, device=values.device)
        joined = (runs << shifts[:, None]).sum(2, dtype=torch.int32).flatten(1)
        words[first : first + len(part)].copy_(joined)
    return words


def rows(
    weight: QuantizedWeight, numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Values, scales and zeros of those rows [n], as `prepare` got them; without zeros, they were
    none or all the middle one."""
    columns, scales = weight.columns, weight.scales[:, numbers].t()
    zeros = None if weight.zeros is None else weight.zeros[:, numbers].t()
    if weight.kind == "plain":
        values = weight.values.view(torch.uint8)[numbers][:, :columns]
        return values.view(weight.values.dtype), scales, zeros
    bits, depth = 16 // weight.per_word, weight.depth
    runs = weight.values[numbers].view(len(numbers), weight.values.shape[1] // depth, 1, depth)
    shifts = torch.arange(0, 16, bits, dtype=torch.int16, device=runs.device)
    parts = ((runs >> shifts[:, None]) & (2**bits - 1)).to(torch.uint8).flatten(1)[:, :columns]
    if weight.kind == "int4":
        return reference.pack_nibbles(parts), scales, zeros
    return parts.view(torch.int8 if weight.kind == "int8" else _FP8), scales, zeros


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """How many programs of each tile have ended; 0 between two launches."""
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


def _int4_in_assembly(kind: str, magic: int, one: int, minus: int) -> str:
    """Two words of four nibbles each -> four pairs of 16-bit numbers: a nibble becomes the last
    bits of a number of which they are the units (``magic``), which is then taken away."""
    pairs = "".join(
        f"""
        shr.u32 bits, $4, {4 * place};
        lop3.b32 bits, bits, 0x000f000f, {magic:#x}, 0xea;
        fma.rn.{kind} out{place}, bits, one, minus;"""
        for place in range(4)
    )
    moves = "".join(f"\n        mov.b32 ${place}, out{place};" for place in range(4))
    return f"""{{
        .reg .b32 bits, one, minus, out0, out1, out2, out3;
        mov.b32 one, {one:#x};
        mov.b32 minus, {minus:#x};{pairs}{moves}
    }}"""


def _float8_in_assembly(kind: str, shift: int, kept: int, factor: int) -> str:
    """Two words of two float8_e4m3fn each -> two pairs of 16-bit numbers: exponent and mantissa
    are moved to where the wider type has their last bits, which divides by ``factor``."""
    return f"""{{
        .reg .b32 bits, sign, factor, none, low;
        mov.b32 factor, {factor:#x};
        mov.b32 none, 0x80008000;
        shl.b32 bits, $2, {8 - shift};
        and.b32 bits, bits, {kept:#x};
        shl.b32 sign, $2, 8;
        lop3.b32 bits, sign, 0x80008000, bits, 0xea;
        fma.rn.{kind} low, bits, factor, none;
        shr.u32 bits, $2, {shift};
        and.b32 bits, bits, {kept:#x};
        lop3.b32 bits, $2, 0x80008000, bits, 0xea;
        fma.rn.{kind} $1, bits, factor, none;
        mov.b32 $0, low;
    }}"""


_INT8_BF16 = tl.constexpr("""{
        .reg .b32 bits, one, two, low, next;
        .reg .f32 wide, other;
        xor.b32 bits, $2, 0x80808080;
        prmt.b32 one, bits, 0x4b000000, 0x7440;
        prmt.b32 two, bits, 0x4b000000, 0x7442;
        mov.b32 wide, one;
        mov.b32 other, two;
        sub.f32 wide, wide, 0f4B000080;
        sub.f32 other, other, 0f4B000080;
        mov.b32 one, wide;
        mov.b32 two, other;
        prmt.b32 low, one, two, 0x7632;
        prmt.b32 one, bits, 0x4b000000, 0x7441;
        prmt.b32 two, bits, 0x4b000000, 0x7443;
        mov.b32 wide, one;
        mov.b32 other, two;
        sub.f32 wide, wide, 0f4B000080;
        sub.f32 other, other, 0f4B000080;
        mov.b32 one, wide;
        mov.b32 two, other;
        prmt.b32 $1, one, two, 0x7632;
        mov.b32 $0, low;
    }""")
"""Two words of two int8 each, made unsigned, become the last bits of 2^23, which is taken away with
128; bfloat16 is the upper half of float32."""
_INT8_FP16 = tl.constexpr("""{
        .reg .b32 bits, next, one, minus, low;
        mov.b32 one, 0x3c003c00;
        mov.b32 minus, 0xe480e480;
        xor.b32 bits, $2, 0x80808080;
        lop3.b32 next, bits, 0x00ff00ff, 0x64006400, 0xea;
        fma.rn.f16x2 low, next, one, minus;
        shr.u32 bits, bits, 8;
        lop3.b32 next, bits, 0x00ff00ff, 0x64006400, 0xea;
        fma.rn.f16x2 $1, next, one, minus;
        mov.b32 $0, low;
    }""")
"""The same in float16, of which 1024 has units."""
# bfloat16 has units up to 256, float16 up to 2048; 8 is taken away with the rest, or not.
_INT4_BF16 = tl.constexpr(_int4_in_assembly("bf16x2", 0x43004300, 0x3F803F80, 0xC300C300))
_INT4_BF16_BY_8 = tl.constexpr(_int4_in_assembly("bf16x2", 0x43004300, 0x3F803F80, 0xC308C308))
_INT4_FP16 = tl.constexpr(_int4_in_assembly("f16x2", 0x64006400, 0x3C003C00, 0xE400E400))
_INT4_FP16_BY_8 = tl.constexpr(_int4_in_assembly("f16x2", 0x64006400, 0x3C003C00, 0xE408E408))
_FLOAT8_BF16 = tl.constexpr(_float8_in_assembly("bf16x2", 4, 0x07F007F0, 0x7B807B80))
_FLOAT8_FP16 = tl.constexpr(_float8_in_assembly("f16x2", 1, 0x3F803F80, 0x5C005C00))
_FLOAT8_FACTOR = tl.constexpr(2.0**120)


@triton.jit
def _widen_int4(words, BY_8: tl.constexpr, dtype: tl.constexpr):
    """int16 [R, n] -> the four numbers of all words, less 8 if asked for, each [R, n]."""
    if INTERPRETED or dtype == tl.float32:
        minus: tl.constexpr = 8 if BY_8 else 0
        a, b = ((words & 15) - minus).to(tl.float32), (((words >> 4) & 15) - minus).to(tl.float32)
        c, d = (((words >> 8) & 15) - minus), (((words >> 12) & 15) - minus)
        return a, b, c.to(tl.float32), d.to(tl.float32)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _INT4_BF16_BY_8 if BY_8 else _INT4_BF16, "=r,=r,=r,=r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _INT4_FP16_BY_8 if BY_8 else _INT4_FP16, "=r,=r,=r,=r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _look_up(words, codebook_ptr, dtype: tl.constexpr):
    """int16 [R, n] -> the entries at the four nibbles of all words."""
    a, b = tl.load(codebook_ptr + (words & 15)), tl.load(codebook_ptr + ((words >> 4) & 15))
    c = tl.load(codebook_ptr + ((words >> 8) & 15))
    d = tl.load(codebook_ptr + ((words >> 12) & 15))
    if INTERPRETED:
        return a, b, c, d
    else:
        return a.to(dtype), b.to(dtype), c.to(dtype), d.to(dtype)


@triton.jit
def _widen_int8(words, dtype: tl.constexpr):
    """int16 [R, n] -> the two int8 of all words, each [R, n]."""
    if INTERPRETED or dtype == tl.float32:
        return words.to(tl.int8).to(tl.float32), (words >> 8).to(tl.float32)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _INT8_BF16, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _INT8_FP16, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def _widen_float8(words, dtype: tl.constexpr):
    """int16 [R, n] -> the two float8_e4m3fn of all words, each [R, n]. (sm_80 has no such type.)"""
    if INTERPRETED or dtype == tl.float32:
        wide = words.to(tl.int32)
        low = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
        high = ((wide & 0x7F00) << 12) | ((wide & 0x8000) << 16)
        return (
            low.to(tl.float32, bitcast=True) * _FLOAT8_FACTOR,
            high.to(tl.float32, bitcast=True) * _FLOAT8_FACTOR,
        )
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _FLOAT8_BF16, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _FLOAT8_FP16, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def _widen(words, codebook_ptr, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, dtype: tl.constexpr):
    """A tuple of the numbers of all words, each [R, n]."""
    if KIND == "int4":
        return _widen_int4(words, not HAS_ZEROS, dtype)
    elif KIND == "codebook":
        return _look_up(words, codebook_ptr, dtype)
    elif KIND == "int8":
        return _widen_int8(words, dtype)
    elif KIND == "float8":
        return _widen_float8(words, dtype)
    else:
        return (words,)


@triton.jit
def _of_groups(ptr, rows, columns, num_rows, GROUP: tl.constexpr):
    """Of a table [groups, num_rows]: the numbers of ``rows`` in the groups of ``columns``."""
    return tl.load(ptr + (columns // GROUP).to(tl.int64) * num_rows + rows).to(tl.float32)


@triton.jit
def _shift(weight, zeros_ptr, scales_ptr, rows, column, num_rows, num_columns,
           GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, DEPTH: tl.constexpr,
           dtype: tl.constexpr):  # fmt: skip
    """weight [R, n] less its zeros; times its scales too where neighbours do not share them."""
    if GROUP % DEPTH == 0:
        if HAS_ZEROS:
            group = tl.minimum(column, num_columns - 1)
            zeros = _of_groups(zeros_ptr, rows, group, num_rows, GROUP)
            weight = weight - zeros.to(weight.dtype)[:, None]
    else:
        columns = tl.minimum(column + tl.arange(0, DEPTH), num_columns - 1)[None, :]
        wide = weight.to(tl.float32)
        if HAS_ZEROS:
            wide -= _of_groups(zeros_ptr, rows[:, None], columns, num_rows, GROUP)
        wide *= _of_groups(scales_ptr, rows[:, None], columns, num_rows, GROUP)
        weight = wide if INTERPRETED else narrow(wide, dtype)
    return weight


@triton.jit
def _load_x(x_rows, order_ptr, column, num_columns, HAS_ORDER: tl.constexpr, IS_EVEN: tl.constexpr,
            DEPTH: tl.constexpr):  # fmt: skip
    """x [T, n] that the weight's columns from ``column`` on are multiplied by."""
    columns = column + tl.arange(0, DEPTH)
    is_column = columns < num_columns
    if HAS_ORDER:
        columns = tl.load(order_ptr + columns, mask=is_column, other=0)
    if IS_EVEN:
        x = tl.load(x_rows + columns[None, :])
    else:
        x = tl.load(x_rows + columns[None, :], mask=is_column[None, :], other=0.0)
    return x


@triton.jit
def _add_product(acc, weight, x):
    """acc [R, T] + weight [R, n] @ x [T, n].T; integers are summed as integers."""
    if INTERPRETED:
        acc += tl.dot(weight.to(tl.float32), tl.trans(x.to(tl.float32)))
    else:
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit
def _scales_of(scales_ptr, rows, column, num_rows, num_columns, GROUP: tl.constexpr,
               DEPTH: tl.constexpr):  # fmt: skip
    """Those of a product [R, 1] that begins with ``column``; 1 where they are multiplied in before
    or behind. (They are asked for early, and on their way while the product is made.)"""
    if GROUP < WHOLE_ROW and GROUP % DEPTH == 0:
        at = tl.minimum(column, num_columns - 1)
        return _of_groups(scales_ptr, rows, at, num_rows, GROUP)[:, None]
    else:
        return 1.0


@triton.jit
def _add_words(
    acc, words, column, x_rows, x_scale_rows, scales_ptr, zeros_ptr, order_ptr, codebook_ptr,
    rows, num_rows, num_columns,
    GROUP: tl.constexpr, KIND: tl.constexpr, PER_WORD: tl.constexpr, SHARING: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr, IS_EVEN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """acc [R, T] and the products of words [R, n], the first of whose numbers is of ``column``."""
    numbers = _widen(words, codebook_ptr, KIND, HAS_ZEROS, x_rows.dtype.element_ty)
    for number in tl.static_range(PER_WORD):
        first = column + number * DEPTH
        weight = numbers[number]
        if KIND != "plain":
            weight = _shift(weight, zeros_ptr, scales_ptr, rows, first, num_rows, num_columns,
                            GROUP, HAS_ZEROS, DEPTH, x_rows.dtype.element_ty)  # fmt: skip
        x = _load_x(x_rows, order_ptr, first, num_columns, HAS_ORDER, IS_EVEN, DEPTH)
        if KIND == "plain" and GROUP >= WHOLE_ROW:
            acc = _add_product(acc, weight, x)
        else:
            # A sum of its own for what shares scales. (Without one the assembler of Hopper was seen
            # to overwrite numbers that a product still reads from registers.)
            if number % SHARING == 0:
                scales = _scales_of(scales_ptr, rows, first, num_rows, num_columns, GROUP, DEPTH)
                sums = tl.zeros(acc.shape, tl.float32)
            sums = _add_product(sums, weight, x)
            if number % SHARING == SHARING - 1:
                if KIND == "plain":
                    at = tl.minimum(first, num_columns - 1) // GROUP
                    sums *= tl.load(x_scale_rows + at)[None, :]
                acc += sums * scales
    return acc


@triton.jit
def _times_row_scales(acc, scale_rows, x_scale_rows, GROUP: tl.constexpr, KIND: tl.constexpr):
    """acc [R, T] in float32, times the scales that all columns share, if they do."""
    found = acc.to(tl.float32)
    if GROUP >= WHOLE_ROW:
        found *= tl.load(scale_rows).to(tl.float32)[:, None]
        if KIND == "plain":
            found *= tl.load(x_scale_rows)[None, :]
    return found


@triton.jit
def _rows_of_tile(tile, starts_ptr, num_tokens, num_groups, IS_GROUPED: tl.constexpr,
                  SIZE: tl.constexpr):  # fmt: skip
    """(group, first row of x, end of the group's) of a tile of ``SIZE`` rows."""
    if IS_GROUPED:
        group = find_group(tile, starts_ptr, num_groups, SIZE)
        start = tl.load(starts_ptr + group)
        end = tl.load(starts_ptr + group + 1)
        return group, start + (tile - start // SIZE - group) * SIZE, end
    else:
        return 0, tile * SIZE, num_tokens


@triton.jit
def _add_splits(found, sums_ptr, counters_ptr, tile, R: tl.constexpr, T: tl.constexpr):
    """(whether all programs of the tile have left their part [R, T], all parts together)."""
    num_splits = tl.num_programs(2)
    places = tl.arange(0, R)[:, None] * T + tl.arange(0, T)[None, :]
    sums_ptr += tile.to(tl.int64) * num_splits * R * T
    tl.store(sums_ptr + tl.program_id(2) * R * T + places, found)
    tl.debug_barrier()  # all threads have written before one of them says so
    is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == num_splits - 1
    if is_last:
        found = tl.zeros([R, T], tl.float32)
        for each in range(num_splits):  # not out of the L1 cache, which does not know of others
            found += tl.load(sums_ptr + each * R * T + places, cache_modifier=".cg")
        tl.store(counters_ptr + tile, 0)
    return is_last, found


@triton.jit(do_not_specialize=["num_tokens", "num_groups"],
            do_not_specialize_on_alignment=["starts_ptr"])  # fmt: skip
def _quantized_linear_kernel(
    out_ptr,  # [T, ROWS]
    x_ptr,  # [T, columns]
    x_scales_ptr,  # [T, groups or 1] float32, with KIND plain
    values_ptr,  # [G * ROWS, words]
    scales_ptr,  # [groups, G * ROWS]
    zeros_ptr,  # [groups, G * ROWS], with HAS_ZEROS
    order_ptr,  # [G, columns] int32, with HAS_ORDER
    codebook_ptr,  # [16] float32, with KIND codebook
    bias_ptr,  # [G * ROWS], with HAS_BIAS
    starts_ptr,  # [G + 1] int32, with IS_GROUPED
    sums_ptr,  # [tiles, splits, BLOCK_R * BLOCK_T] float32, with IS_SPLIT
    counters_ptr,  # [tiles] int32, with IS_SPLIT
    num_tokens,
    num_groups,
    num_rows,
    num_columns,
    num_words,  # of a row of values
    stride_x,
    stride_x_scales,
    words_per_split,
    GROUP: tl.constexpr,  # neighbouring columns that share a scale
    KIND: tl.constexpr,  # as in `QuantizedWeight`, or "codebook"
    PER_WORD: tl.constexpr,  # numbers of a word
    SHARING: tl.constexpr,  # how many of them, one after another, share a scale
    HAS_ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_EVEN: tl.constexpr,  # there are no columns beyond the last one
    DEPTH: tl.constexpr,  # words of a row in one product
    ROUND: tl.constexpr,  # words of a row in one round
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Neighbours share rows of the weight, which then come out of the L2 cache.
    tile_t, tile_r = tl.program_id(0), tl.program_id(1)
    group, first, end = _rows_of_tile(
        tile_t, starts_ptr, num_tokens, num_groups, IS_GROUPED, BLOCK_T
    )
    # Past the end the last one is read again, and not written: loads without a mask are faster.
    tokens, rows = first + tl.arange(0, BLOCK_T), tile_r * BLOCK_R + tl.arange(0, BLOCK_R)
    is_written = (tokens < end)[:, None] & (rows < num_rows)[None, :]
    tokens = tl.maximum(tl.minimum(tokens, end - 1), 0).to(tl.int64)
    rows = tl.minimum(rows, num_rows - 1)
    all_rows, num_all_rows = group * num_rows + rows, num_groups * num_rows
    order_ptr += group * num_columns

    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_rows = x_ptr + tokens[:, None] * stride_x
    word_rows = values_ptr + all_rows.to(tl.int64)[:, None] * num_words
    x_scale_rows = x_scales_ptr + tokens * stride_x_scales
    is_integer: tl.constexpr = dtype == tl.int8 and not INTERPRETED
    acc = tl.zeros([BLOCK_R, BLOCK_T], tl.int32 if is_integer else tl.float32)
    begin = tl.program_id(2) * words_per_split
    # A tile without rows has no columns either: to return here would take twice the registers.
    last = tl.where(first < end, tl.minimum(begin + words_per_split, num_words), begin)
    for place in tl.range(begin, last, ROUND, num_stages=STAGES):
        for part in tl.static_range(0, ROUND, DEPTH):
            words = tl.load(word_rows + place + part + tl.arange(0, DEPTH)[None, :])
            acc = _add_words(
                acc, words, (place + part) * PER_WORD, x_rows, x_scale_rows, scales_ptr, zeros_ptr,
                order_ptr, codebook_ptr, all_rows, num_all_rows, num_columns, GROUP, KIND, PER_WORD,
                SHARING, HAS_ZEROS, HAS_ORDER, IS_EVEN, DEPTH,
            )  # fmt: skip
    found = _times_row_scales(acc, scales_ptr + all_rows, x_scale_rows, GROUP, KIND)
    if IS_SPLIT:
        tile = tile_r * tl.num_programs(0) + tile_t
        is_last, found = _add_splits(found, sums_ptr, counters_ptr, tile, BLOCK_R, BLOCK_T)
        if not is_last:
            return
    if HAS_BIAS:
        found += tl.load(bias_ptr + all_rows).to(tl.float32)[:, None]
    out = narrow(tl.trans(found), out_ptr.dtype.element_ty)
    tl.store(out_ptr + tokens[:, None] * num_rows + rows[None, :], out, mask=is_written)


def _sharing(weight: QuantizedWeight) -> int:
    """How many numbers of a word, one after another, have the same scale, or none in a product."""
    if len(weight.scales) == 1 or weight.group_size % weight.depth:
        return weight.per_word
    return gcd(weight.group_size // weight.depth, weight.per_word)


def choose_tile(
    weight: QuantizedWeight, num_tokens: int, num_rows: int, dtype: torch.dtype, num_groups: int = 1
) -> Tile:
    """By rule, from few sizes so that loading compiles them all; for few tokens with enough splits
    to give every multiprocessor some programs. The large tile is for what fills them with it."""
    is_wide = dtype == torch.float32  # multiplied without tensor cores: registers run out
    mean = launch.cdiv(num_tokens, num_groups)
    # Of registers: what is looked up for every number, or many scales of 8 bits.
    is_tight = weight.order is not None or weight.codebook is not None
    is_tight |= weight.group_size % weight.depth != 0
    is_tight |= weight.per_word == 2 and weight.depth < _STEP // 2
    num_sms = launch.num_sms(weight.values.device)
    # No number of tokens below 256, which is one of those that loading compiles for, decides.
    is_small = num_tokens <= 256 and 2 * launch.cdiv(num_rows, 128) < num_sms
    tokens = 64 if num_groups > 1 or is_tight or is_small else 128
    tokens = 16 if mean <= 16 else 64 if mean <= 64 else tokens
    tokens = min(tokens, 32) if is_wide else tokens
    rows = 64 if tokens <= 64 else 128
    round_words = weight.depth if is_wide else _STEP // weight.per_word
    num_stages = 2 if is_wide else 4 if launch.has_large_shared_memory() else 3
    num_splits = 1
    if num_groups == 1 and num_tokens <= 64:
        most = min(weight.values.shape[1] // (_LEAST_ROUNDS * round_words), _MOST_SPLITS)
        num_splits = _choose_splits(launch.cdiv(num_rows, rows), max(most, 1), num_sms)
    return Tile(tokens, rows, round_words, num_splits, num_stages, 8 if tokens > 64 else 4)


def _choose_splits(num_tiles: int, most: int, num_sms: int) -> int:
    """Of the splits that give a multiprocessor two or three programs the fewest with which the
    busiest has least to do."""
    most = max(min(_MOST_PER_SM * num_sms // num_tiles, most), 1)
    least = max(min(_LEAST_PER_SM * num_sms // num_tiles, most), 1)
    return min(range(least, most + 1), key=lambda n: launch.cdiv(num_tiles * n, num_sms) / n)


def quantized_linear(
    x: torch.Tensor,  # [T, columns] bfloat16, float16, float32; or int8, float8_e4m3fn
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,  # [R] of any float dtype
    *,
    x_scales: torch.Tensor | None = None,  # [T, 1 or groups] float32, with int8 and float8_e4m3fn
    starts: torch.Tensor | None = None,  # [G + 1] int32, ascending from 0; [-1] at most T
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,  # default: `choose_tile`
) -> torch.Tensor:
    """[T, R], with ``starts`` [T, R / G], in ``out_dtype`` (default: that of x, else bfloat16).

    Starts and the order of columns are not checked against bounds: they live on the device. Rows
    of x behind the last start get no answer: theirs are any numbers.
    Raises ValueError naming the argument that does not fit.
    """
    is_narrow = x.dtype.itemsize == 1
    num_all_rows = len(weight.values)
    num_groups = 1 if starts is None else len(starts) - 1
    is_whole = len(weight.scales) == 1
    launch.check_arguments(
        Argument("x", x, ("T", weight.columns), (*launch.FLOAT_DTYPES, torch.int8, _FP8),
                 launch.check_rows),
        Argument("values", weight.values, ("R", "words"), (torch.int16, torch.int8, _FP8)),
        Argument("scales", weight.scales, ("groups", "R"), launch.FLOAT_DTYPES),
        Argument("zeros", weight.zeros, ("groups", "R"), launch.FLOAT_DTYPES),
        Argument("order", weight.order, (num_groups, weight.columns), (torch.int32,)),
        Argument("codebook", weight.codebook, (16,), (torch.float32,)),
        Argument("bias", bias, (num_all_rows,), launch.FLOAT_DTYPES),
        Argument("x_scales", x_scales, ("T", "groups"), (torch.float32,)),
        Argument("starts", starts, (num_groups + 1,), (torch.int32,)),
    )  # fmt: skip
    if (x_scales is None) == is_narrow:
        raise ValueError("x_scales: must be given with int8 and float8_e4m3fn, and only then")
    if is_narrow != (weight.kind == "plain") or (is_narrow and x.dtype != weight.values.dtype):
        raise ValueError("x: of 8 bits goes with a plain weight of its type, and only with that")
    if num_all_rows % num_groups:
        raise ValueError(
            f"starts: shape must be [G + 1] where the weight's {num_all_rows} rows are those of G "
            f"groups, not {list(starts.shape) if starts is not None else None}"
        )
    if is_narrow and not is_whole and (x.dtype == torch.int8 or weight.group_size % weight.depth):
        raise ValueError("x: of 8 bits needs a scale per row, or groups that are a product's")
    num_tokens, num_rows = len(x), num_all_rows // num_groups
    dtype = out_dtype or (torch.bfloat16 if is_narrow else x.dtype)
    out = torch.empty((num_tokens, num_rows), dtype=dtype, device=x.device)
    if num_tokens == 0:
        return out
    tile = tile or choose_tile(weight, num_tokens, num_rows, x.dtype, num_groups)
    num_tiles = launch.cdiv(num_tokens, tile.tokens)
    if starts is not None:
        num_tiles = num_tokens // tile.tokens + num_groups
    grid = (num_tiles, launch.cdiv(num_rows, tile.rows), tile.num_splits)
    num_words = weight.values.shape[1]
    rounds = launch.cdiv(num_words, tile.round_words)
    sums = counters = out
    if tile.num_splits > 1:
        shape = (grid[0] * grid[1], tile.num_splits, tile.rows * tile.tokens)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
        counters = _counters(x.device)
    _quantized_linear_kernel[grid](
        out,
        x,
        out if x_scales is None else x_scales,
        weight.values,
        weight.scales,
        out if weight.zeros is None else weight.zeros,
        out if weight.order is None else weight.order,
        out if weight.codebook is None else weight.codebook,
        out if bias is None else bias,
        out if starts is None else starts,
        sums,
        counters,
        num_tokens,
        num_groups,
        num_rows,
        weight.columns,
        num_words,
        x.stride(0),
        0 if x_scales is None else x_scales.stride(0),
        launch.cdiv(rounds, tile.num_splits) * tile.round_words,
        GROUP=WHOLE_ROW.value if is_whole else weight.group_size,
        KIND=weight.kind if weight.codebook is None else "codebook",
        PER_WORD=weight.per_word,
        SHARING=_sharing(weight),
        HAS_ZEROS=weight.zeros is not None,
        HAS_ORDER=weight.order is not None,
        HAS_BIAS=bias is not None,
        IS_GROUPED=starts is not None,
        IS_SPLIT=tile.num_splits > 1,
        IS_EVEN=weight.columns % _STEP == 0,
        DEPTH=weight.depth,
        ROUND=tile.round_words,
        BLOCK_T=tile.tokens,
        BLOCK_R=tile.rows,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **launch.LAUNCH_OPTIONS,
    )
    return out
