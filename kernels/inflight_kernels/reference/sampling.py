"""Draw the next token of each row; a seeded row depends on its own seed and position only.

A row is filtered by temperature, then top-k, top-p and min-p, and drawn by inverting its cumulative
distribution *in the order of the vocabulary* with one uniform number. That number is a hash of
(seed, position), so it knows nothing of the batch, of a pause, or of the device, and an
implementation may find the thresholds however it likes: with a sort, or by bisection.
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
    return torch.where(torch.isfinite(best), tokens, -1)


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
