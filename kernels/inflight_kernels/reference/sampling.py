"""Sampling in plain torch, and the adjustments of logits before it.

A row is filtered by temperature, then top-k, top-p and min-p, and sampled by inverting its
cumulative distribution *in the order of the vocabulary* with one uniform number. That number is a
hash of (seed, position), so it does not depend on the batch, on a pause, or on the device, and an
implementation may find the thresholds however it likes: with a sort, or by bisection.

Adjustments and their order are TensorRT-LLM's (`cpp/tensorrt_llm/kernels/penaltyKernels.cu`,
`banRepeatNgram.cu`, `banBadWords.cu`): bias, temperature, repetition, presence, frequency, bans.
Here the temperature is divided out by `sample`, later, so additive penalties are multiplied by it.
Their state is kept per *slot*, [S, ...]; ``slots`` [N] names the row of it that each row of logits
reads. They change ``logits`` in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

# splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014);
# int64 arithmetic wraps, so the unsigned constants are written as their signed twins.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row [N, V] -> [N] int64; -1 where a row is not finite.

    Not finite: a NaN, a +inf, or nothing but -inf. (-inf alone forbids a token.)
    """
    best, tokens = logits.max(dim=-1)
    return torch.where(best.abs() < torch.inf, tokens, -1)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) with 24 random bits, float32, for each (seed, position) of int64."""
    mixed = _mix(_mix(seeds + _GAMMA) + positions * _GAMMA)
    return _shift_right(mixed, 40).to(torch.float32) * 2.0**-24


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    min_p: Tensor | None = None,
) -> Tensor:
    """Draw one token per row of logits [N, V] -> [N] int64; -1 where a row is not finite. Logits of
    16 bits count as the same numbers in float32.

    temperature [N] float32, top_k [N] int32 (0: off), top_p [N] float32 (0 or >= 1: off), seeds
    and positions [N] int64: what `uniform` hashes; the position is the one the drawn token will
    take. min_p [N] float32 (0: off) drops tokens less likely than that share of the likeliest. A
    row is greedy when its temperature is 0, its top_k is 1, or all filters are 0. Tokens that tie
    with the last one a filter keeps are kept too. Only rows that draw pay for filters.
    """
    tokens = greedy(logits)
    rows = (is_drawn(temperature, top_k, top_p, min_p) & (tokens >= 0)).nonzero().squeeze(1)
    if rows.numel() == 0:
        return tokens
    logits = logits.float()
    kept = filtered(logits, rows, temperature, top_k, top_p, min_p)
    tokens[rows] = draw(kept, uniform(seeds[rows], positions[rows]))
    return tokens


def sample_with_log_probs(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The tokens of `sample`, and of each what `log_probs_of_draws` says."""
    tokens = sample(logits, temperature, top_k, top_p, seeds, positions, min_p)
    return tokens, log_probs_of_draws(logits, tokens, temperature, top_k, top_p, min_p)


def log_probs_of_draws(
    logits: Tensor,
    tokens: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor | None = None,
) -> Tensor:
    """How likely each of tokens [N] was when `sample` drew it from logits [N, V]: [N] float32.

    That is among what the filters left; 0 where the row is greedy, NaN where nothing was drawn.
    """
    result = torch.where(tokens >= 0, 0.0, torch.nan).to(torch.float32)
    rows = (is_drawn(temperature, top_k, top_p, min_p) & (tokens >= 0)).nonzero().squeeze(1)
    if rows.numel() == 0:
        return result
    kept = filtered(logits.float(), rows, temperature, top_k, top_p, min_p).log_softmax(dim=-1)
    result[rows] = kept.gather(1, tokens[rows, None]).squeeze(1)
    return result


def is_drawn(temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None) -> Tensor:
    """[N] bool: which rows `sample` draws; the others are greedy."""
    has_no_filter = (top_k == 0) & (top_p == 0)
    if min_p is not None:
        has_no_filter &= min_p == 0
    return ~((temperature == 0) | (top_k == 1) | has_no_filter)


def filtered(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor | None,
) -> Tensor:
    """``rows`` [R] of logits [N, V], scaled, with -inf for what the filters drop: [R, V].

    Their temperature is above 0.
    """
    # The distance from the best token, so that a tiny temperature cannot overflow to +inf.
    scaled = (logits[rows] - logits[rows].amax(-1, keepdim=True)) / temperature[rows, None]
    kept = _keep_top_k(scaled, top_k[rows])
    kept = _keep_top_p(kept, top_p[rows])
    if min_p is not None:
        # The likeliest token stands at 0, so its share is the exponential.
        kept = kept.masked_fill(scaled < min_p[rows, None].log(), -torch.inf)
    return kept


def _keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    rows = (top_k > 0).nonzero().squeeze(1)
    if rows.numel() == 0:
        return logits
    limits = top_k[rows].clamp(max=logits.shape[1]).to(torch.int64)
    best = torch.topk(logits[rows], int(limits.max())).values  # [rows, largest k], descending
    threshold = best.gather(1, limits[:, None] - 1)
    kept = logits[rows].masked_fill(logits[rows] < threshold, -torch.inf)
    return logits.index_copy(0, rows, kept)


def _keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    rows = ((top_p > 0) & (top_p < 1)).nonzero().squeeze(1)
    if rows.numel() == 0:
        return logits
    candidates = logits[rows]
    ordered = candidates.sort(dim=-1, descending=True).values
    probabilities = ordered.softmax(dim=-1, dtype=torch.float64)
    mass_above = probabilities.cumsum(dim=-1) - probabilities
    # The smallest set with at least that mass: a token stays while those above it have less.
    num_kept = (mass_above < top_p[rows, None].to(torch.float64)).sum(dim=-1, keepdim=True)
    threshold = ordered.gather(1, num_kept.clamp(min=1) - 1)
    return logits.index_copy(0, rows, candidates.masked_fill(candidates < threshold, -torch.inf))


def draw(logits: Tensor, noise: Tensor) -> Tensor:
    """Of each row of logits [N, V] the first token whose cumulative probability exceeds its
    ``noise`` [N] in [0, 1): [N] int64."""
    cumulative = logits.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    wanted = noise.to(torch.float64)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(1)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift_right(value, 30)) * _MIX_1
    value = (value ^ _shift_right(value, 27)) * _MIX_2
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, count: int) -> Tensor:
    """Logical shift of int64, whose own ``>>`` drags the sign along."""
    return (value >> count) & ((1 << (64 - count)) - 1)


COUNT_UNIT = 2
"""One occurrence in a table of counts; the lowest bit says that a token has been seen at all."""


def adjust_logits(
    logits: Tensor,
    slots: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    counts: Tensor | None,
    penalties: Tensor,
) -> None:
    """Add ``bias`` and apply penalties for what was seen, to logits [N, V] float32.

    slots [N] int64; temperature [N] float32 (0 counts as 1: such a row is greedy); bias [S, V]
    float32; counts [S, V] int32 in units of `COUNT_UNIT`, odd for a token that was seen without
    being counted; penalties [N, 3] float32: repetition (a positive logit of a token seen is
    divided by it, a negative one multiplied), presence (subtracted once from tokens counted) and
    frequency (subtracted once per count). (1, 0, 0) changes nothing.
    """
    if bias is not None:
        logits += bias[slots]
    if counts is None:
        return
    seen = counts[slots]
    repetition, presence, frequency = (penalties[:, i, None] for i in range(3))
    penalized = torch.where(logits < 0, logits * repetition, logits / repetition)
    torch.where(seen > 0, penalized, logits, out=logits)
    number = (seen // COUNT_UNIT).float()
    scale = torch.where(temperature == 0, 1.0, temperature)[:, None]
    logits -= scale * ((number > 0) * presence + number * frequency)


def ban_repeated_ngrams(
    logits: Tensor,
    slots: Tensor,
    lengths: Tensor,
    sizes: Tensor,
    history: Tensor,
    max_length: int,
) -> None:
    """Forbid the token that would repeat an n-gram of the text so far.

    lengths [N] int64: tokens so far; sizes [N] int32: n, 0 for rows without the rule; history
    [S, L] int32: the tokens of each slot; ``max_length`` is no less than the largest length.
    """
    if max_length == 0:
        return
    text = history[slots, :max_length]  # [N, L]
    starts = torch.arange(max_length, device=logits.device)
    # Where an n-gram begins whose last token is in the text.
    matches = (starts + sizes[:, None] <= lengths[:, None]) & (sizes[:, None] > 0)
    for offset in range(int(sizes.max()) - 1):
        is_compared = offset < sizes - 1
        last = (lengths - sizes + 1 + offset).clamp(0, max_length - 1)
        wanted = text.gather(1, last[:, None])
        found = text[:, (starts + offset).clamp(max=max_length - 1)]
        matches &= (found == wanted) | ~is_compared[:, None]
        if not matches.any():
            return
    ends = (starts + sizes[:, None] - 1).clamp(0, max_length - 1)
    rows, columns = matches.nonzero(as_tuple=True)
    logits[rows, text.gather(1, ends)[rows, columns].long()] = -torch.inf


def ban_words(
    logits: Tensor,
    rows: Tensor,
    lengths: Tensor,
    words: Tensor,
    word_lengths: Tensor,
    word_slots: Tensor,
    history: Tensor,
) -> None:
    """Forbid the last token of each word whose other tokens end the text so far.

    rows [S] int32: row of logits of each slot, -1 for slots not drawn; lengths [N] int64: tokens so
    far; words [W, K] int32, padded behind ``word_lengths`` [W] int32 (>= 1); word_slots [W] int32:
    whose words they are; history [S, L] int32.
    """
    row = rows[word_slots.long()].long()
    is_drawn = row >= 0
    length = lengths[row.clamp(min=0)]
    start = length - (word_lengths - 1)  # where the text would have to begin like the word
    matches = is_drawn & (start >= 0)
    for offset in range(words.shape[1] - 1):
        position = (start + offset).clamp(0, history.shape[1] - 1)
        found = history[word_slots.long(), position]
        matches &= (found == words[:, offset]) | (offset >= word_lengths - 1)
    last = words.gather(1, (word_lengths.long() - 1)[:, None]).squeeze(1).long()
    logits[row[matches], last[matches]] = -torch.inf


def mask_logits(logits: Tensor, masks: Tensor) -> None:
    """Forbid tokens of some rows of ``logits`` [N, V] float32, in place.

    A row of ``masks`` [M, 2 + ceil(V / 32)] int32 holds the row of ``logits`` it is for, the one
    token that must be drawn there (-1: none), and a bit for each token, the lowest first: tokens
    without one become -inf. A token that must be drawn gets 0 and all others -inf, whatever they
    were. At most one mask per row.
    """
    if len(masks) == 0:
        return
    vocabulary = logits.shape[1]
    rows, forced = masks[:, 0].long(), masks[:, 1].long()
    shifts = torch.arange(32, device=masks.device, dtype=torch.int32)
    bits = (masks[:, 2:, None] >> shifts) & 1  # [M, words, 32]
    is_allowed = bits.reshape(len(masks), -1)[:, :vocabulary] != 0
    chosen = torch.arange(vocabulary, device=masks.device) == forced[:, None]
    free = logits[rows].masked_fill(~is_allowed, -torch.inf)
    only = torch.zeros_like(free).masked_fill(~chosen, -torch.inf)
    logits[rows] = torch.where(forced[:, None] >= 0, only, free)
