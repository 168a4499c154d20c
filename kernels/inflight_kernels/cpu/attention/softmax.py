"""A softmax of scores [keys, rows] float32, some keys at a time: `WIDTH` rows stand side by side in
a vector, each with a peak and a total of its own, so that nothing is summed over lanes.

Addresses are those of the first row of a vector; scores of a key are ``stride`` bytes behind those
of the one before. What a row gets does not depend on other rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from inflight_kernels.cpu.intrinsics import (
    FLOATS,
    INTS,
    WIDTH,
    constant,
    load_floats,
    load_ints,
    loop,
    multiply_add,
    pointer_to,
    splat,
    splat_int,
    to_bfloat16,
)

UNSEEN = -1e30
"""The score of a key that a row does not see."""
_POWER_OF_TWO = (
    1.0, 0.69314720574, 0.24022646890, 0.055503287773, 0.0096184890027, 0.0013399931120,
    0.00015345799735,
)  # fmt: skip
"""Coefficients of 2^x from -1/2 to 1/2, within 2e-9: the polynomial whose largest relative error is
least, found by reweighted least squares."""


_EXACT = ("nsz",)
"""Flags of operations: numba gives all to those that have none, and their order would depend on
how many there are."""


def _floats(number):
    return ir.Constant(FLOATS, [float(number)] * WIDTH)


def _larger(builder, left, right):
    """The right one if either is no number."""
    is_left = builder.fcmp_ordered(">", left, right, flags=_EXACT)
    return builder.select(is_left, left, right)


def _exp(builder, x):
    """e^x of numbers that are not above 0, within three units of the last place; 2^-126 for those
    whose power is less."""
    x, log2_e = _larger(builder, _floats(-87.33), x), _floats(1.44269504088896341)
    name, kind = f"llvm.rint.v{WIDTH}f32", ir.FunctionType(FLOATS, [FLOATS])
    rint = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    whole = builder.call(rint, [builder.fmul(x, log2_e, flags=_EXACT)])
    rest = multiply_add(builder, x, log2_e, builder.fneg(whole, flags=_EXACT))
    power = _floats(_POWER_OF_TWO[-1])
    for coefficient in _POWER_OF_TWO[-2::-1]:
        power = multiply_add(builder, power, rest, _floats(coefficient))
    exponent = builder.shl(builder.fptosi(whole, INTS), constant(23))
    return builder.bitcast(builder.add(builder.bitcast(power, INTS), exponent), FLOATS)


@intrinsic
def bias_scores(_, scores, stride, first, end, scale, firsts, positions, slopes):
    """Scale scores of the keys from ``first`` to ``end`` and add the slope of the row by its
    distance from the key, in place; none is left of keys behind the position of a row, and of
    those before the first that it sees."""

    def generate(context, builder, signature, arguments):
        scores, stride, first, end, scale, firsts, positions, slopes = arguments
        firsts, positions = (load_ints(builder, each) for each in (firsts, positions))
        scale, slopes = splat(builder, scale), load_floats(builder, slopes)

        def bias(index, _):
            address = builder.add(scores, builder.mul(index, stride))
            key = splat_int(builder, builder.add(first, index))
            number = builder.fmul(load_floats(builder, address), scale, flags=_EXACT)
            distance = builder.sitofp(builder.sub(key, positions), FLOATS)
            number = multiply_add(builder, slopes, distance, number)
            for is_unseen in (
                builder.icmp_signed(">", key, positions),
                builder.icmp_signed("<", key, firsts),
            ):
                number = builder.select(is_unseen, _floats(UNSEEN), number)
            builder.store(number, pointer_to(builder, address, FLOATS), align=4)
            return []

        loop(builder, builder.sub(end, first), [], bias)
        return context.get_dummy_value()

    kinds = [types.float32, *[types.int64] * 3]
    return types.void(*[types.int64] * 4, *kinds), generate


@intrinsic
def raise_peaks(_, scores, stride, num_pairs, scale, peaks, factors):
    """Make ``peaks`` those of pairs of keys too, whose scores are yet to be scaled; what was
    summed before has to be multiplied by ``factors``."""

    def generate(context, builder, signature, arguments):
        scores, stride, num_pairs, scale, peaks, factors = arguments
        scale = splat(builder, scale)

        def raise_(index, held):
            address = builder.add(scores, builder.mul(index, builder.add(stride, stride)))
            return [
                _larger(
                    builder, builder.fmul(load_floats(builder, place), scale, flags=_EXACT), peak
                )
                for place, peak in zip((address, builder.add(address, stride)), held, strict=True)
            ]

        found = _larger(builder, *loop(builder, num_pairs, [_floats(UNSEEN)] * 2, raise_))
        before = load_floats(builder, peaks)
        found = _larger(builder, found, before)
        builder.store(found, pointer_to(builder, peaks, FLOATS), align=4)
        factor = _exp(builder, builder.fsub(before, found, flags=_EXACT))
        builder.store(factor, pointer_to(builder, factors, FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.float32, *[types.int64] * 2), generate


@intrinsic
def weigh(_, like, scores, stride, num_pairs, scale, peaks, totals, weights):
    """Weights of pairs of keys, whose scores are yet to be scaled, are added to ``totals``. For
    uint16 (bfloat16) both stand in the 32 bits of a pair in ``weights``, and the first of all lie
    ``stride`` bytes apart; float32 ones stand where the scores were."""

    def generate(context, builder, signature, arguments):
        _, scores, stride, num_pairs, scale, peaks, totals, weights = arguments
        scale, peaks = splat(builder, scale), load_floats(builder, peaks)

        def add(index, held):
            low = builder.add(scores, builder.mul(index, builder.add(stride, stride)))
            places = [low, builder.add(low, stride)]
            (total,), found = held, []
            for place in places:
                number = builder.fmul(load_floats(builder, place), scale, flags=_EXACT)
                found.append(_exp(builder, builder.fsub(number, peaks, flags=_EXACT)))
                total = builder.fadd(total, found[-1], flags=_EXACT)
            if like == types.uint16:
                low, high = (builder.zext(to_bfloat16(builder, each), INTS) for each in found)
                pair = builder.or_(builder.shl(high, constant(16)), low)
                place = builder.add(weights, builder.mul(index, stride))
                builder.store(pair, pointer_to(builder, place, INTS), align=4)
            else:
                for number, place in zip(found, places, strict=True):
                    builder.store(number, pointer_to(builder, place, FLOATS), align=4)
            return [total]

        (total,) = loop(builder, num_pairs, [_floats(0.0)], add)
        total = builder.fadd(load_floats(builder, totals), total, flags=_EXACT)
        builder.store(total, pointer_to(builder, totals, FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 3, types.float32, *[types.int64] * 3), generate
