"""The search for the threshold of a filter, digit by digit; `sample` says what it is for."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def over_temperature(logits, is_token, temperature):
    """logits / temperature in float32, -inf where there is no token; exact division, so that ties
    are the reference's."""
    logits = logits.to(tl.float32)
    x = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
    # A tiny temperature may overflow; what counts is the distance from the best token.
    x = tl.minimum(tl.maximum(x, -3.4028234663852886e38), 3.4028234663852886e38)
    return tl.where(is_token, x, -float("inf"))


@triton.jit
def scaled(logits_ptr, offs, vocabulary, temperature):
    """logits / temperature at ``offs``, -inf past the end."""
    is_token = offs < vocabulary
    logits = tl.load(logits_ptr + offs, mask=is_token, other=-float("inf"))
    return over_temperature(logits, is_token, temperature)


@triton.jit
def ordered_bits(x):
    """float32 to uint32 so that order is kept: the larger number has the larger bits."""
    bits = x.to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return flipped.to(tl.uint32, bitcast=True)


@triton.jit
def _is_in_question(bits, threshold, shift, floor):
    """Whether a token's higher digits than those at ``shift`` are the threshold's."""
    # (A shift by 32 would be undefined.)
    return (((bits ^ threshold) >> shift) < 16) & (bits >= floor)


@triton.jit
def _copy_in_question(
    copied_ptr, num_places, logits_ptr, vocabulary, temperature, threshold, shift, floor, best,
    least, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy the logits of the tokens in question that are ``best + least`` or more, in order, as far
    as there are places; returns how many such tokens there are."""
    number = 0
    for first in range(0, vocabulary, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        is_token = offs < vocabulary
        logits = tl.load(logits_ptr + offs, mask=is_token, other=-float("inf"))
        x = over_temperature(logits, is_token, temperature)
        is_copied = _is_in_question(ordered_bits(x), threshold, shift, floor) & is_token
        is_copied &= x - best >= least  # the difference, not the sum, is exact where it matters
        places = number + tl.cumsum(is_copied.to(tl.int32), axis=0) - 1
        tl.store(copied_ptr + places, logits, mask=is_copied & (places < num_places))
        number += tl.sum(is_copied.to(tl.int32), axis=0)
    tl.debug_barrier()  # what one thread has written is read by others
    return number


@triton.jit
def _add_by_digit(sums, digit, weight):
    """Sixteen sums [TILE], weight added to the one that its digit names. (Kept as one table
    [TILE, 16], Triton 3.6 computes the weights in the table's layout: sixteen times.)"""
    return (
        sums[0] + tl.where(digit == 0, weight, 0.0),
        sums[1] + tl.where(digit == 1, weight, 0.0),
        sums[2] + tl.where(digit == 2, weight, 0.0),
        sums[3] + tl.where(digit == 3, weight, 0.0),
        sums[4] + tl.where(digit == 4, weight, 0.0),
        sums[5] + tl.where(digit == 5, weight, 0.0),
        sums[6] + tl.where(digit == 6, weight, 0.0),
        sums[7] + tl.where(digit == 7, weight, 0.0),
        sums[8] + tl.where(digit == 8, weight, 0.0),
        sums[9] + tl.where(digit == 9, weight, 0.0),
        sums[10] + tl.where(digit == 10, weight, 0.0),
        sums[11] + tl.where(digit == 11, weight, 0.0),
        sums[12] + tl.where(digit == 12, weight, 0.0),
        sums[13] + tl.where(digit == 13, weight, 0.0),
        sums[14] + tl.where(digit == 14, weight, 0.0),
        sums[15] + tl.where(digit == 15, weight, 0.0),
    )


@triton.jit
def _sum_by_digit(sums):
    """[16]: each of the sixteen [TILE] summed. Joining appends a last dimension, so pairs are
    joined from the highest bit of the digit down."""
    even = tl.join(
        tl.join(tl.join(sums[0], sums[8]), tl.join(sums[4], sums[12])),
        tl.join(tl.join(sums[2], sums[10]), tl.join(sums[6], sums[14])),
    )
    odd = tl.join(
        tl.join(tl.join(sums[1], sums[9]), tl.join(sums[5], sums[13])),
        tl.join(tl.join(sums[3], sums[11]), tl.join(sums[7], sums[15])),
    )
    return tl.sum(tl.reshape(tl.join(even, odd), [sums[0].shape[0], 16]), axis=0)


@triton.jit
def find_threshold(
    logits_ptr, copied_ptr, num_places, vocabulary, temperature, best, floor, target, least,
    BY_MASS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Ordered bits of the largest t with measure(x >= t) >= target; 0 if rounding leaves none such.

    Measured are tokens whose ordered bits are at least ``floor``: counted, or, with BY_MASS,
    exp(x - best) summed; then t is at least ``best + least``, and tokens below need not be read.
    Each pass fixes four more bits of t, from the top. copied_ptr [num_places], of the logits'
    dtype, is written.
    """
    digits = tl.arange(0, 16)
    threshold = tl.full([], 0, tl.uint32)
    above = tl.full([], 0.0, tl.float32)  # measure of what lies over the digits in question
    num_read = vocabulary
    for step in range(8):
        shift = 28 - 4 * step
        is_tried = (step == 2) | (step == 3) | ((step == 0) & BY_MASS)
        if is_tried & (num_read == vocabulary):
            num_left = _copy_in_question(
                copied_ptr, num_places, logits_ptr, vocabulary, temperature, threshold, shift,
                floor, best, least, 2 * TILE
            )  # fmt: skip
            if num_left <= num_places:
                logits_ptr, num_read = copied_ptr, num_left
        # Summed per lane and only then across lanes: one reduction per pass.
        zero = tl.zeros([TILE], tl.float32)
        four = (zero, zero, zero, zero)
        sums = four + four + four + four
        for first in range(0, num_read, TILE):
            offs = first + tl.arange(0, TILE)
            x = scaled(logits_ptr, offs, num_read, temperature)
            bits = ordered_bits(x)
            counted = _is_in_question(bits, threshold, shift, floor) & (offs < num_read)
            weight = tl.exp(x - best) if BY_MASS else tl.full([TILE], 1.0, tl.float32)
            weight = tl.where(counted, weight, 0.0)
            digit = ((bits >> shift) & 15).to(tl.int32)
            sums = _add_by_digit(sums, digit, weight)
        measures = _sum_by_digit(sums)
        # Measure of x >= threshold with this digit, for each digit; it falls with the digit.
        at_least = above + tl.cumsum(measures, axis=0, reverse=True)
        chosen = tl.maximum(tl.sum((at_least >= target).to(tl.int32), axis=0) - 1, 0)
        above += tl.sum(tl.where(digits > chosen, measures, 0.0), axis=0)
        threshold = threshold | (chosen.to(tl.uint32) << shift)
    return threshold
