"""Products of some query heads with keys, and of their weights with values, where these lie in the
cache.

A head is read in *words* of 32 bits, a float32 or a pair of bfloat16, `WIDTH` at a time; words
behind its last one are read as zeros, and not at all from memory.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from inflight_kernels.cpu.intrinsics import (
    F32,
    FAST,
    FLOATS,
    I32,
    I64,
    WIDTH,
    compiled_for,
    halves,
    load_words,
    loop,
    multiply_add,
    multiply_add_pairs,
    pointer_to,
    prefetch,
    splat,
    sum_lanes,
)

STEP_BYTES = 4 * WIDTH
KEYS = 4
"""Of a product: scores of so many are written, the last ones again if there are fewer."""
_MOST_HEADS = 4
STEPS = 2
"""Of a head that are added up side by side."""


def _far(builder, address, stride, index):
    return builder.add(address, builder.mul(stride, index))


def _make_score(num_heads: int):
    """An intrinsic: the products of ``num_heads`` queries, ``query_row`` bytes apart and padded
    with zeros to whole steps, and `KEYS` keys of ``num_words`` words."""

    @intrinsic
    def score(_, like, keys, stride, last, num_words, query, query_row, out, out_row, ahead):
        """``last``: the last key that there is; ``out`` [heads, `KEYS`] float32; ``ahead``: how
        far behind the keys is what is read into the caches."""
        multiply = multiply_add_pairs if like == types.uint16 else multiply_add

        def generate(context, builder, signature, arguments):
            _, keys, stride, last, num_words, query, query_row, out, out_row, ahead = arguments
            places = []
            for key in range(KEYS):
                number = ir.Constant(I64, key)
                is_past = builder.icmp_signed(">", number, last)
                places.append(_far(builder, keys, stride, builder.select(is_past, last, number)))
            queries = [
                _far(builder, query, query_row, ir.Constant(I64, head)) for head in range(num_heads)
            ]

            def add(step, totals):
                offset = builder.mul(step, ir.Constant(I64, STEP_BYTES))
                rest = builder.sub(num_words, builder.mul(step, ir.Constant(I64, WIDTH)))
                steps = [builder.add(each, offset) for each in places]
                prefetch(builder, [builder.add(each, ahead) for each in steps], 0)
                rows = [load_words(builder, each, rest) for each in steps]
                found = []
                for head, query in enumerate(queries):
                    pointer = pointer_to(builder, builder.add(query, offset), FLOATS)
                    numbers = builder.load(pointer, align=4)
                    found += [
                        multiply(builder, numbers, row, totals[head * KEYS + key])
                        for key, row in enumerate(rows)
                    ]
                return found

            zeros = [ir.Constant(FLOATS, [0.0] * WIDTH)] * (num_heads * KEYS)
            num_steps = builder.sdiv(
                builder.add(num_words, ir.Constant(I64, WIDTH - 1)), ir.Constant(I64, WIDTH)
            )
            sums = sum_lanes(builder, loop(builder, num_steps, zeros, add))
            kind = ir.VectorType(F32, KEYS)
            for head in range(num_heads):
                lanes = [head * KEYS + key for key in range(KEYS)]
                mask = ir.Constant(ir.VectorType(I32, KEYS), lanes)
                part = builder.shuffle_vector(sums, sums, mask)
                place = _far(builder, out, out_row, ir.Constant(I64, head))
                builder.store(part, pointer_to(builder, place, kind), align=4)
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 9), generate

    return score


def _make_add_values(num_heads: int):
    """An intrinsic: values of ``count`` tokens by the weights of ``num_heads`` heads, added to
    `STEPS` steps of their sums."""

    @intrinsic
    def add_values(
        _, like, values, stride, count, num_words, weights, weights_row, sums, sums_row, ahead
    ):
        """``num_words`` behind ``values``; ``weights`` [heads, tokens]; see `add_values` for the
        sums; ``ahead`` as of keys."""
        num_parts = 2 if like == types.uint16 else 1

        def generate(context, builder, signature, arguments):
            _, values, stride, count, num_words, weights, weights_row, sums, sums_row, ahead = (
                arguments
            )
            rows = [
                _far(builder, weights, weights_row, ir.Constant(I64, head))
                for head in range(num_heads)
            ]

            def add(token, totals):
                place = _far(builder, values, stride, token)
                parts = list[Any]()
                for step in range(STEPS):
                    rest = builder.sub(num_words, ir.Constant(I64, step * WIDTH))
                    own = builder.add(place, ir.Constant(I64, step * STEP_BYTES))
                    prefetch(builder, [builder.add(own, ahead)], 0)
                    words = load_words(builder, own, rest)
                    parts += halves(builder, words) if num_parts == 2 else [words]
                found = []
                for head, row in enumerate(rows):
                    own = _far(builder, row, token, ir.Constant(I64, 4))
                    weight = builder.load(pointer_to(builder, own, F32), align=4)
                    weight = splat(builder, weight)
                    found += [
                        multiply_add(builder, weight, part, totals[head * len(parts) + index])
                        for index, part in enumerate(parts)
                    ]
                return found

            num_sums = STEPS * num_parts
            zeros = [ir.Constant(FLOATS, [0.0] * WIDTH)] * (num_heads * num_sums)
            for index, total in enumerate(loop(builder, count, zeros, add)):
                head, part = divmod(index, num_sums)
                place = _far(builder, sums, sums_row, ir.Constant(I64, head))
                place = builder.add(place, ir.Constant(I64, part * STEP_BYTES))
                pointer = pointer_to(builder, place, FLOATS)
                builder.store(builder.fadd(builder.load(pointer, align=4), total), pointer, align=4)
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 9), generate

    return add_values


def _of_any_heads(make, kind: str):
    """Tiles of ``make``, as many as ``num_heads`` needs; the first of them reads ahead."""
    tile_1, tile_2, tile_3, tile_4 = (make(heads + 1) for heads in range(_MOST_HEADS))

    @compiled_for(kind)
    def run(like, rows, stride, last, num_words, own, own_row, out, out_row, ahead, num_heads):
        head = 0
        while head < num_heads:
            mine, found, rest = own + head * own_row, out + head * out_row, num_heads - head
            if rest >= 4:
                tile_4(like, rows, stride, last, num_words, mine, own_row, found, out_row, ahead)
            elif rest == 3:
                tile_3(like, rows, stride, last, num_words, mine, own_row, found, out_row, ahead)
            elif rest == 2:
                tile_2(like, rows, stride, last, num_words, mine, own_row, found, out_row, ahead)
            else:
                tile_1(like, rows, stride, last, num_words, mine, own_row, found, out_row, ahead)
            head += _MOST_HEADS
            ahead = np.int64(0)

    return run


_score_heads = _of_any_heads(_make_score, "score")
_add_heads = _of_any_heads(_make_add_values, "add")


@njit(**FAST)
def score(like, keys, stride, count, num_words, query, query_row, out, out_row, num_heads, ahead):
    """Products of ``num_heads`` queries and ``count`` keys of ``num_words`` words, ``stride`` bytes
    apart: ``out`` [heads, count], with room for `KEYS` - 1 more; rows are bytes apart. What lies
    ``ahead`` of the keys is read into the caches."""
    for first in range(0, count, KEYS):
        _score_heads(
            like, keys + first * stride, stride, count - 1 - first, num_words, query, query_row,
            out + first * 4, out_row, ahead, num_heads,
        )  # fmt: skip


@njit(**FAST)
def add_values(
    like, values, stride, count, num_words, weights, weights_row, sums, sums_row, heads, num_parts,
    ahead,
):  # fmt: skip
    """Add ``count`` values by weights [heads, count] to sums [heads, steps, parts, `WIDTH`]
    float32: a part is what a step of words has, of bfloat16 two, the lower numbers of its pairs and
    the upper ones. Whole `STEPS` are written; ``ahead`` as of keys."""
    for first in range(0, num_words, STEPS * WIDTH):
        _add_heads(
            like, values + first * 4, stride, count, num_words - first, weights, weights_row,
            sums + first * 4 * num_parts, sums_row, ahead, heads,
        )  # fmt: skip
