"""Samples the next token of every row: greedy, or by temperature and filters. No sort, no sync.

The rule is that of ``reference.sample``: logits are divided by the temperature, filtered by top-k
then top-p and min-p, and the cumulative distribution *in the order of the vocabulary* is inverted
with one uniform number, a hash of (seed, position). So a row's token depends on nothing else in the
batch. Filters keep ``{x >= t}`` for a threshold t, which is the largest t such that

    top-k:  number of x >= t            >=  k
    top-p:  sum of exp(x) over x >= t   >=  p * (the same sum over what top-k kept)

and is found digit by digit in the ordered bits of a float, only in rows that ask for the filter.
First a bound that t reaches is taken from the maxima of groups of 64 tokens (k groups have a token
above it, or what lies below it weighs too little for top-p), and only groups whose maximum reaches
it are read, once per digit: of real answers few do. For min-p t is the best x plus log(min_p).

Two launches. The first cuts each row into chunks, so that a small batch fills the machine, and
leaves maximum, its index and the sum of exponentials of each, and the maxima of its groups; the
second, one program per row, decides from those and reads again only the chunk it samples from, or
where it filters the groups it has chosen.
Logits of 16 bits are read as such: what is sampled is what their float32 twins would give.
Sums are float32: a token differs from the float64 reference when the uniform number falls within
about 1e-6 of a boundary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import Argument

# mypy: disable-error-code="no-untyped-def, untyped-decorator"


@triton.jit
def over_temperature(logits, is_token, temperature):
    """logits / temperature in float32, -inf where there is no token; exact division, so that ties
    are the reference's."""
    logits = logits.to(tl.float32)
    x = tl.div_rn(logits, tl.zeros_like(logits) + temperature) + 0.0  # -0.0 is 0.0 in its bits, too
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
def number_of_bits(bits):
    """The float32 whose `ordered_bits` these are."""
    is_positive = (bits >> 31) != 0
    plain = tl.where(is_positive, bits ^ 0x80000000, ~bits)
    return plain.to(tl.float32, bitcast=True)


@triton.jit
def tokens_at(groups_ptr, positions, num_positions, vocabulary, GROUP: tl.constexpr):
    """Tokens of the chosen groups, one group after the other; past the end ``vocabulary``."""
    is_there = positions < num_positions
    group = tl.load(groups_ptr + positions // GROUP, mask=is_there, other=0)
    return tl.where(is_there, group * GROUP + positions % GROUP, vocabulary)


@triton.jit
def _find_bound(maxima, best, least_groups, most_below, GROUP: tl.constexpr):
    """Ordered bits that a threshold reaches, cut off behind 20 of them: the largest such t that
    ``least_groups`` maxima are t or more, and that tokens below t weigh ``most_below`` at most, in
    exp(x - best). maxima [BLOCK_G]: of groups of tokens."""
    bits = ordered_bits(maxima)
    bound = tl.full([], 0, tl.uint32)
    for step in range(20):
        tried = bound | (tl.full([], 1, tl.uint32) << (31 - step))
        reaches = bits >= tried
        # Of a group that reaches t, all tokens but one may lie just below it.
        most = tl.where(reaches, number_of_bits(tried), maxima)
        below = GROUP * tl.sum(tl.exp(most - best), axis=0)
        num_groups = tl.sum(reaches.to(tl.int32), axis=0)
        bound = tl.where((num_groups >= least_groups) & (below <= most_below), tried, bound)
    return bound


@triton.jit
def _choose_groups(
    groups_ptr, maxima, bound, num_groups, GROUP: tl.constexpr, BLOCK_G: tl.constexpr
):  # fmt: skip
    """Write those groups [num_groups] whose maximum reaches ``bound``, in order; how many positions
    they have."""
    groups = tl.arange(0, BLOCK_G)
    tl.debug_barrier()  # the choice before may still be read
    is_chosen = (ordered_bits(maxima) >= bound) & (groups < num_groups)
    places = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    tl.store(groups_ptr + places, groups, mask=is_chosen)
    tl.debug_barrier()  # what one thread has written is read by others
    return GROUP * tl.sum(is_chosen.to(tl.int32), axis=0)


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
    logits_ptr, groups_ptr, num_positions, maxima, num_groups, vocabulary, temperature, best, floor,
    target, BY_MASS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, BLOCK_G: tl.constexpr
):  # fmt: skip
    """Ordered bits of the largest t with measure(x >= t) >= target, which is ``floor`` or more; no
    more than ``floor`` if rounding leaves none such. And the positions of the groups that are left:
    those that are many are chosen again once more of t is known.

    Measured are tokens of the chosen groups whose ordered bits are at least ``floor``: counted, or,
    with BY_MASS, exp(x - best) summed. Each pass fixes four more bits of t, from the first on that
    ``floor`` and the best do not share.
    """
    digits = tl.arange(0, 16)
    top = ordered_bits(best)
    num_shared = tl.full([], 0, tl.int32)
    for step in tl.static_range(8):
        num_shared += ((top ^ floor) >> (28 - 4 * step) == 0).to(tl.int32)
    unknown = (32 - 4 * num_shared).to(tl.uint64)
    threshold = ((top.to(tl.uint64) >> unknown) << unknown).to(tl.uint32)
    above = tl.full([], 0.0, tl.float32)  # measure of what lies over the digits in question
    for step in range(num_shared, 8):
        shift = 28 - 4 * step
        # Summed per lane and only then across lanes: one reduction per pass.
        zero = tl.zeros([TILE], tl.float32)
        four = (zero, zero, zero, zero)
        sums = four + four + four + four
        for first in range(0, num_positions, TILE):
            positions = first + tl.arange(0, TILE)
            tokens = tokens_at(groups_ptr, positions, num_positions, vocabulary, GROUP)
            x = scaled(logits_ptr, tokens, vocabulary, temperature)
            bits = ordered_bits(x)
            counted = _is_in_question(bits, threshold, shift, floor) & (tokens < vocabulary)
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
        if num_positions > _MANY_TILES * TILE:
            num_positions = _choose_groups(
                groups_ptr, maxima, threshold, num_groups, GROUP, BLOCK_G
            )
    return threshold, num_positions


_MAX_CHUNK = 4096
# Sixteen sums per element are held in registers while a threshold is searched.
_MAX_TILE = 1024
_MANY_TILES = tl.constexpr(4)  # to read as many takes longer than to choose
_MAX_VOCABULARY = 2**20
_GROUP = 64  # tokens: so few that most of a group that is read counts, so many that maxima are few


@triton.jit
def _uniform(seed, position):
    """24 random bits of splitmix64 over (seed, position) as float32 in [0, 1)."""
    gamma = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    mixed = _mix(seed.to(tl.uint64, bitcast=True) + gamma)
    mixed = _mix(mixed + position.to(tl.uint64, bitcast=True) * gamma)
    return (mixed >> 40).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    value = (value ^ (value >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return value ^ (value >> 31)


# A column of one row lies wherever its table has it, and sums behind as many maxima as there are:
# neither must take another compiled kernel.
@triton.jit(
    do_not_specialize=["stride_temperature"],
    do_not_specialize_on_alignment=["sums_ptr", "temperature_ptr"],
)
def _chunk_kernel(
    maxima_ptr,  # [N, num_chunks] float32; +inf where a chunk holds a NaN
    tokens_ptr,  # [N, num_chunks] int32: index of the maximum
    sums_ptr,  # [N, num_chunks] float32: sum of exp(logit / temperature - maximum / temperature)
    group_maxima_ptr,  # [N, num_chunks * CHUNK / GROUP] float32
    logits_ptr,
    temperature_ptr,
    vocabulary,
    stride_logits,
    stride_temperature,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = offs < vocabulary
    logits_ptr += row * stride_logits
    logits = tl.load(logits_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
    broken = tl.sum((logits != logits).to(tl.int32), axis=0) > 0
    best = tl.max(logits, axis=0)
    index = tl.argmax(logits, axis=0, tie_break_left=True)
    slot = row * tl.num_programs(0) + chunk
    tl.store(maxima_ptr + slot, tl.where(broken, float("inf"), best))
    tl.store(tokens_ptr + slot, chunk * CHUNK + index)
    temperature = tl.load(temperature_ptr + row * stride_temperature)
    if temperature > 0:
        per_chunk: tl.constexpr = CHUNK // GROUP
        of_groups = tl.max(tl.reshape(logits, [per_chunk, GROUP]), axis=1)
        tl.store(group_maxima_ptr + slot * per_chunk + tl.arange(0, per_chunk), of_groups)
        x = scaled(logits_ptr, offs, vocabulary, temperature)
        tl.store(sums_ptr + slot, tl.sum(tl.exp(x - tl.max(x, axis=0)), axis=0))


@triton.jit
def _filter_floor(
    logits_ptr, groups_ptr, num_positions, maxima, num_groups, vocabulary, temperature, best, floor,
    mass, top_k, top_p, GROUP: tl.constexpr, TILE: tl.constexpr, BLOCK_G: tl.constexpr
):  # fmt: skip
    """Ordered bits below which top-k and top-p drop a token, ``floor`` or more, 0 keeps all; and
    the positions of groups that are left."""
    if top_k > 0:
        wanted = tl.minimum(top_k, vocabulary).to(tl.float32)
        floor, num_positions = find_threshold(
            logits_ptr, groups_ptr, num_positions, maxima, num_groups, vocabulary, temperature,
            best, floor, wanted, False, GROUP, TILE, BLOCK_G
        )  # fmt: skip
    if (top_p > 0) & (top_p < 1):
        if top_k > 0:
            lanes = tl.zeros([TILE], tl.float32)
            for first in range(0, num_positions, TILE):
                positions = first + tl.arange(0, TILE)
                tokens = tokens_at(groups_ptr, positions, num_positions, vocabulary, GROUP)
                x = scaled(logits_ptr, tokens, vocabulary, temperature)
                lanes += tl.where(ordered_bits(x) >= floor, tl.exp(x - best), 0.0)
            mass = tl.sum(lanes, axis=0)
        threshold, num_positions = find_threshold(
            logits_ptr, groups_ptr, num_positions, maxima, num_groups, vocabulary, temperature,
            best, floor, top_p * mass, True, GROUP, TILE, BLOCK_G
        )  # fmt: skip
        floor = tl.maximum(floor, threshold)
    return floor, num_positions


@triton.jit
def _draw(
    logits_ptr, groups_ptr, num_positions, vocabulary, temperature, best, floor, sums, noise,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """First token whose cumulative weight exceeds noise times the total, and its log probability.
    sums [BLOCK_C]: weight of each chunk without filters; with a floor they are taken again, of the
    chosen groups alone."""
    chunks = tl.arange(0, BLOCK_C)
    if floor > 0:
        sums = tl.zeros_like(sums)
        for first in range(0, num_positions, CHUNK):
            positions = first + tl.arange(0, CHUNK)
            tokens = tokens_at(groups_ptr, positions, num_positions, vocabulary, GROUP)
            x = scaled(logits_ptr, tokens, vocabulary, temperature)
            weight = tl.where(ordered_bits(x) >= floor, tl.exp(x - best), 0.0)
            sums = tl.where(chunks == first // CHUNK, tl.sum(weight, axis=0), sums)
    total = tl.sum(sums, axis=0)
    wanted = noise * total
    cumulative = tl.cumsum(sums, axis=0)
    # Rounding may leave no chunk above ``wanted``: then the last one with any weight.
    last = tl.max(tl.where(sums > 0, chunks, 0), axis=0)
    chunk = tl.minimum(tl.sum((cumulative <= wanted).to(tl.int32), axis=0), last)
    wanted -= tl.sum(tl.where(chunks < chunk, sums, 0.0), axis=0)

    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    if floor > 0:
        tokens = tokens_at(groups_ptr, tokens, num_positions, vocabulary, GROUP)
    x = scaled(logits_ptr, tokens, vocabulary, temperature)
    weight = tl.where(ordered_bits(x) >= floor, tl.exp(x - best), 0.0)
    is_beyond = (tl.cumsum(weight, axis=0) > wanted) & (weight > 0)
    first_beyond = tl.min(tl.where(is_beyond, tokens, vocabulary), axis=0)
    last = tl.max(tl.where(weight > 0, tokens, 0), axis=0)
    token = tl.where(first_beyond < vocabulary, first_beyond, last)
    return token, tl.sum(tl.where(tokens == token, x - best, 0.0), axis=0) - tl.log(total)


@triton.jit(
    do_not_specialize=[
        "stride_temperature",
        "stride_top_k",
        "stride_top_p",
        "stride_seeds",
        "stride_min_p",
    ],
    do_not_specialize_on_alignment=[
        "sums_ptr",
        "temperature_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "min_p_ptr",
        "log_probs_ptr",
        "seeds_ptr",
        "positions_ptr",
    ],
)
def _sample_kernel(
    out_ptr,  # [N] int64
    log_probs_ptr,  # [N] float32
    groups_ptr,  # [N, num_groups] int32: those chosen are written
    maxima_ptr,
    tokens_ptr,
    sums_ptr,
    group_maxima_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seeds_ptr,
    positions_ptr,
    vocabulary,
    stride_logits,
    num_chunks,
    num_groups,
    min_p_ptr,  # read with HAS_MIN_P only
    stride_temperature,
    stride_top_k,
    stride_top_p,
    stride_seeds,
    stride_min_p,
    HAS_MIN_P: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK_C)
    present = chunks < num_chunks
    slots = row * num_chunks + chunks
    maxima = tl.load(maxima_ptr + slots, mask=present, other=-float("inf"))
    best_logit = tl.max(maxima, axis=0)
    best_chunk = tl.argmax(maxima, axis=0, tie_break_left=True)
    token = tl.load(tokens_ptr + row * num_chunks + best_chunk).to(tl.int64)
    log_prob = tl.full([], 0.0, tl.float32)
    is_finite = (best_logit > -float("inf")) & (best_logit < float("inf"))
    temperature = tl.load(temperature_ptr + row * stride_temperature)
    top_k = tl.load(top_k_ptr + row * stride_top_k)
    top_p = tl.load(top_p_ptr + row * stride_top_p)
    has_no_filter = (top_k == 0) & (top_p == 0)
    if HAS_MIN_P:
        min_p = tl.load(min_p_ptr + row * stride_min_p)
        has_no_filter = has_no_filter & (min_p == 0)
    is_greedy = (temperature == 0) | (top_k == 1) | has_no_filter
    if is_finite & (is_greedy == 0):
        logits_ptr += row * stride_logits
        best = tl.div_rn(maxima, tl.zeros_like(maxima) + temperature)
        best = tl.minimum(tl.maximum(best, -3.4028234663852886e38), 3.4028234663852886e38)
        sums = tl.load(sums_ptr + slots, mask=present, other=0.0)
        top = tl.max(tl.where(present, best, -float("inf")), axis=0)
        sums = tl.where(present, sums * tl.exp(best - top), 0.0)
        mass = tl.sum(sums, axis=0)
        has_top_p = (top_p > 0) & (top_p < 1)
        floor = tl.full([], 0, tl.uint32)
        if HAS_MIN_P:
            least = ordered_bits(top + tl.log(tl.where(min_p > 0, min_p, 1.0)))
            floor = tl.where(min_p > 0, least, 0)
        groups_ptr += row * num_groups
        num_positions = 0
        if (top_k > 0) | has_top_p | (floor > 0):
            groups = tl.arange(0, BLOCK_G)
            is_group = groups < num_groups
            of_groups = tl.load(
                group_maxima_ptr + row * num_groups + groups, mask=is_group, other=-float("inf")
            )
            of_groups = over_temperature(of_groups, is_group, temperature)
            bound = floor
            if (top_k > 0) | has_top_p:
                # What top-k keeps is enough for top-p, too. A tenth is left for rounding.
                most_below = tl.where(top_k > 0, float("inf"), 0.9 * (1.0 - top_p) * mass)
                bound = _find_bound(of_groups, top, top_k, most_below, GROUP)
            num_positions = _choose_groups(groups_ptr, of_groups, bound, num_groups, GROUP, BLOCK_G)
            kept, num_positions = _filter_floor(
                logits_ptr, groups_ptr, num_positions, of_groups, num_groups, vocabulary,
                temperature, top, bound, mass, top_k, top_p, GROUP, TILE, BLOCK_G
            )  # fmt: skip
            floor = tl.maximum(floor, kept)
        seed = tl.load(seeds_ptr + row * stride_seeds)
        noise = _uniform(seed, tl.load(positions_ptr + row))
        drawn, log_prob = _draw(
            logits_ptr, groups_ptr, num_positions, vocabulary, temperature, top, floor, sums,
            noise, GROUP, CHUNK, BLOCK_C
        )  # fmt: skip
        token = drawn.to(tl.int64)
    tl.store(out_ptr + row, tl.where(is_finite, token, -1))
    tl.store(log_probs_ptr + row, tl.where(is_finite, log_prob, float("nan")))


def sample_with_log_probs(
    logits: torch.Tensor,  # [N, V] float32, bfloat16 or float16
    temperature: torch.Tensor,  # [N] float32, >= 0; 0: greedy
    top_k: torch.Tensor,  # [N] int32; 0: off, 1: greedy
    top_p: torch.Tensor,  # [N] float32; 0 or >= 1: off; greedy where all filters are 0
    seeds: torch.Tensor,  # [N] int64
    positions: torch.Tensor,  # [N] int64: the position the drawn token will take
    min_p: torch.Tensor | None = None,  # [N] float32, 0 to 1; 0: off
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row [N] int64; -1 where a row holds a NaN or a +inf, or nothing but -inf. And
    its log probability among what the filters left [N] float32: 0 if greedy, NaN with a -1.

    Values of the parameters are not checked against their bounds: they live on the device. All but
    positions may be columns of a table.
    Raises ValueError naming the argument that does not fit.
    """
    launch.check_arguments(
        Argument("logits", logits, ("N", "V"), launch.FLOAT_DTYPES, launch.check_rows),
        Argument("temperature", temperature, ("N",), (torch.float32,), None),
        Argument("top_k", top_k, ("N",), (torch.int32,), None),
        Argument("top_p", top_p, ("N",), (torch.float32,), None),
        Argument("seeds", seeds, ("N",), (torch.int64,), None),
        Argument("positions", positions, ("N",), (torch.int64,)),
        Argument("min_p", min_p, ("N",), (torch.float32,), None),
    )
    num_rows, vocabulary = logits.shape
    if not 0 < vocabulary <= _MAX_VOCABULARY:
        raise ValueError(
            f"logits: rows must have 1 to {_MAX_VOCABULARY} elements, got {vocabulary}"
        )
    min_p_or_any = top_p if min_p is None else min_p
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return out, log_probs
    chunk = min(launch.next_power_of_2(vocabulary), _MAX_CHUNK)
    num_chunks = launch.cdiv(vocabulary, chunk)
    maxima, sums = torch.empty(
        (2, num_rows, num_chunks), dtype=torch.float32, device=logits.device
    ).unbind()
    tokens = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    group = min(chunk, _GROUP)
    num_groups = num_chunks * (chunk // group)
    group_maxima = torch.empty((num_rows, num_groups), dtype=torch.float32, device=logits.device)
    groups = torch.empty((num_rows, num_groups), dtype=torch.int32, device=logits.device)
    _chunk_kernel[(num_chunks, num_rows)](
        maxima,
        tokens,
        sums,
        group_maxima,
        logits,
        temperature,
        vocabulary,
        logits.stride(0),
        temperature.stride(0),
        CHUNK=chunk,
        GROUP=group,
        num_warps=8,
        **launch.LAUNCH_OPTIONS,
    )
    _sample_kernel[(num_rows,)](
        out,
        log_probs,
        groups,
        maxima,
        tokens,
        sums,
        group_maxima,
        logits,
        temperature,
        top_k,
        top_p,
        seeds,
        positions,
        vocabulary,
        logits.stride(0),
        num_chunks,
        num_groups,
        min_p_or_any,
        temperature.stride(0),
        top_k.stride(0),
        top_p.stride(0),
        seeds.stride(0),
        min_p_or_any.stride(0),
        HAS_MIN_P=min_p is not None,
        CHUNK=chunk,
        GROUP=group,
        TILE=min(chunk, _MAX_TILE),
        BLOCK_C=launch.next_power_of_2(num_chunks),
        BLOCK_G=launch.next_power_of_2(num_groups),
        num_warps=16,
        **launch.LAUNCH_OPTIONS,
    )
    return out, log_probs


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tokens of `sample_with_log_probs` alone."""
    return sample_with_log_probs(logits, temperature, top_k, top_p, seeds, positions, min_p)[0]
