"""Sampling: the filters against transformers, the draw against exact probabilities."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight_kernels import reference

VOCAB = 50


def _sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """All rows with the same parameters; by default row ``i`` has seed ``i``, position 0."""
    n = len(logits)
    return reference.sample(
        logits,
        torch.full((n,), temperature),
        torch.full((n,), top_k, dtype=torch.int32),
        torch.full((n,), top_p),
        torch.arange(n) if seeds is None else seeds,
        torch.zeros(n, dtype=torch.int64) if positions is None else positions,
    )


def _warped(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Probabilities as transformers makes them: temperature, then top-k, then top-p."""
    from transformers.generation import logits_process as warpers

    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    logits = warpers.TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        logits = warpers.TopKLogitsWarper(top_k)(ids, logits)
    if top_p < 1:
        logits = warpers.TopPLogitsWarper(top_p)(ids, logits)
    return logits.softmax(-1, dtype=torch.float64)


def test_uniform_is_splitmix64() -> None:
    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    seeds, positions = [0, 1, -1, 2**63 - 1, -(2**63)], [0, 1, 7, 100_000, 5]
    gamma = 0x9E3779B97F4A7C15
    expected = [
        (mix((mix((seed + gamma) % 2**64) + position * gamma) % 2**64) >> 40) / 2**24
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert reference.uniform(torch.tensor(seeds), torch.tensor(positions)).tolist() == expected


@pytest.mark.parametrize("is_by_seed", [True, False])
def test_uniform_is_even(is_by_seed: bool) -> None:
    counting, fixed = torch.arange(65_536), torch.full((65_536,), 3)
    numbers = (
        reference.uniform(counting, fixed) if is_by_seed else reference.uniform(fixed, counting)
    )
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, 64, 0, 1)
    chi_square = ((counts - 1024).square() / 1024).sum()
    assert chi_square < 104  # 99.9 % of even draws: 63 degrees of freedom
    assert abs(torch.corrcoef(torch.stack((numbers[1:], numbers[:-1])))[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 5, 0.0), (1.7, 12, 0.8), (0.8, 0, 0.6), (1.0, 90, 0.999)],
)
def test_draws_follow_the_warped_distribution(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    expected = _warped(logits, temperature, top_k, top_p or 1.0)[0]
    n = 20_000
    tokens = _sample(logits.expand(n, -1), temperature=temperature, top_k=top_k, top_p=top_p)
    counts = tokens.bincount(minlength=VOCAB).double()
    assert counts[expected == 0].sum() == 0
    rare = expected * n < 5
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    wanted = torch.cat((expected[~rare] * n, expected[rare].sum()[None] * n)).clamp(min=1e-9)
    chi_square = ((observed - wanted).square() / wanted).sum()
    degrees = len(wanted) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5 + 4


@pytest.mark.parametrize(("top_k", "top_p"), [(4, 1.0), (0, 0.3), (0, 0.95), (20, 0.7)])
def test_kept_tokens_are_those_of_transformers(top_k: int, top_p: float) -> None:
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    expected = _warped(logits, 0.9, top_k, top_p) > 0
    drawn = torch.zeros(64, VOCAB, dtype=torch.bool)
    for position in range(400):
        tokens = _sample(
            logits,
            temperature=0.9,
            top_k=top_k,
            top_p=top_p,
            positions=torch.full((64,), position),
        )
        drawn[torch.arange(64), tokens] = True
    assert not (drawn & ~expected).any()
    likely = _warped(logits, 0.9, top_k, top_p) > 0.05  # unseen in 400 draws: once in 10^8
    assert (drawn | ~likely).all()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.0, 5, 0.9), (1.0, 1, 0.9), (1.0, 0, 0.0)]
)
def test_greedy_parameters(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(1))
    tokens = _sample(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    assert torch.equal(tokens, logits.argmax(-1))


def test_a_row_does_not_know_its_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    n = 48
    logits = torch.randn(n, VOCAB, generator=generator) * 2
    temperature = torch.rand(n, generator=generator) * 2
    temperature[::7] = 0
    top_k = torch.randint(0, 20, (n,), generator=generator, dtype=torch.int32)
    top_p = torch.rand(n, generator=generator)
    seeds = torch.randint(-(2**62), 2**62, (n,), generator=generator)
    positions = torch.randint(0, 10_000, (n,), generator=generator)
    arguments = (logits, temperature, top_k, top_p, seeds, positions)
    together = reference.sample(*arguments)
    order = torch.randperm(n, generator=generator)
    assert torch.equal(reference.sample(*(x[order] for x in arguments)), together[order])
    for row in range(n):
        alone = reference.sample(*(x[row : row + 1] for x in arguments))
        assert alone.item() == together[row]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-38])
def test_rows_that_are_not_finite(temperature: float) -> None:
    logits = torch.zeros(6, VOCAB)
    logits[:, 7] = 30
    logits[1, 4] = torch.nan
    logits[2, 4] = torch.inf
    logits[3] = -torch.inf
    logits[4, :7] = -torch.inf  # allowed: forbidden tokens
    logits[4, 8:] = -torch.inf
    tokens = _sample(logits, temperature=temperature, top_k=3, top_p=0.5)
    assert tokens.tolist() == [7, -1, -1, -1, 7, 7]


def test_ties_at_the_border_are_kept() -> None:
    logits = torch.full((2_000, 4), 1.0)
    logits[:, 3] = -5.0
    assert set(_sample(logits, top_k=2).tolist()) == {0, 1, 2}
    assert set(_sample(logits, top_p=0.4).tolist()) == {0, 1, 2}
