"""Sampling against the reference: the same token from the same (seed, position)."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.ops.sample import sample, sample_with_log_probs


def parameters(
    device: torch.device, rows: list[tuple[float, int, float]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """temperature, top_k and top_p of the rows."""
    temperature, top_k, top_p = zip(*rows, strict=True)
    return (
        torch.tensor(temperature, dtype=torch.float32, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, dtype=torch.float32, device=device),
    )


def noise_arguments(num_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds at the ends of int64 and between, and positions."""
    seeds = torch.arange(num_rows, dtype=torch.int64) * 7919 + 3
    seeds[0] = -(2**63)
    seeds[-1] = 2**63 - 1
    return seeds.to(device), (torch.arange(num_rows, dtype=torch.int64) * 31 + 5).to(device)


@pytest.mark.fast(3)
@pytest.mark.parametrize("vocabulary", [1, 2, 100, 4096, 5000])
def test_equals_the_reference(
    device: torch.device, generator: torch.Generator, vocabulary: int
) -> None:
    """Every mix of filters in one batch, on flat and on peaked rows."""
    rows = [
        (0.0, 0, 0.0),
        (1.0, 0, 1.0),
        (0.7, 0, 0.9),
        (1.3, 40, 0.0),
        (1.0, 40, 0.5),
        (0.5, 1, 0.9),
        (2.0, 3, 1.0),
        (1.0, 10**6, 0.999),
        (1.0, 0, 0.0),
        (1e-3, 0, 0.95),
    ]
    num_rows = len(rows)
    logits = 3 * torch.randn(num_rows, vocabulary, generator=generator)
    arguments = (
        logits.to(device),
        *parameters(device, rows),
        *noise_arguments(num_rows, device),
    )
    assert torch.equal(sample(*arguments), reference.sample(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_count_as_in_float32(
    device: torch.device, generator: torch.Generator, dtype: torch.dtype
) -> None:
    """Bit by bit, whatever is searched among tokens that were copied; of so few digits many tie."""
    rows = [(0.0, 0, 0.0), (0.7, 0, 0.9), (1.3, 40, 0.0), (0.9, 40, 0.5), (1.0, 0, 0.999)]
    logits = (3 * torch.randn(len(rows), 5000, generator=generator)).to(device, dtype)
    settings = (*parameters(device, rows), *noise_arguments(len(rows), device))
    tokens, log_probs = sample_with_log_probs(logits, *settings)
    wide_tokens, wide_log_probs = sample_with_log_probs(logits.float(), *settings)
    assert torch.equal(tokens, wide_tokens)
    assert torch.equal(log_probs, wide_log_probs)
    assert torch.equal(tokens, reference.sample(logits, *settings))


def test_min_p_equals_the_reference(device: torch.device, generator: torch.Generator) -> None:
    """Alone, with the other filters, off, and so high that one token is left."""
    rows = [(0.0, 0, 0.0), (1.0, 0, 0.0), (0.7, 5, 0.9), (2.0, 0, 0.95), (1.5, 0, 1.0), (1.0, 0, 0)]
    min_p = torch.tensor([0.5, 0.1, 0.05, 0.3, 1.0, 0.0], device=device)
    logits = 3 * torch.randn(len(rows), 5000, generator=generator)
    settings = parameters(device, rows)
    noise = noise_arguments(len(rows), device)
    arguments = (logits.to(device), *settings, *noise, min_p)
    tokens = sample(*arguments)
    assert torch.equal(tokens, reference.sample(*arguments))
    assert torch.equal(tokens[[0, 4, 5]].cpu(), logits[[0, 4, 5]].argmax(-1))


def test_log_probs_equal_the_reference(device: torch.device, generator: torch.Generator) -> None:
    """Among what the filters left; 0 where greedy, NaN where nothing is drawn."""
    rows = [
        (0.0, 0, 0.0),
        (1.0, 1, 0.5),
        (1.0, 0, 1.0),
        (0.7, 0, 0.9),
        (1.3, 40, 0.0),
        (1.0, 40, 0.5),
        (2.0, 0, 0.0),
        (0.25, 7, 0.95),
    ]
    min_p = torch.tensor([0.0, 0.2, 0.0, 0.0, 0.1, 0.0, 0.3, 0.0], device=device)
    logits = 3 * torch.randn(len(rows) + 1, 5000, generator=generator)
    logits[-1, 17] = float("nan")
    settings = parameters(device, [*rows, (1.0, 5, 0.9)])
    noise = noise_arguments(len(logits), device)
    min_p = torch.cat((min_p, min_p[:1]))
    arguments = (logits.to(device), *settings, *noise, min_p)
    tokens, log_probs = sample_with_log_probs(*arguments)
    expected_tokens, expected = reference.sample_with_log_probs(*arguments)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert log_probs[:2].tolist() == [0.0, 0.0]
    assert bool((log_probs[2:-1] < 0).all())
    assert bool(log_probs[-1].isnan())


@pytest.mark.fast(1)
@pytest.mark.parametrize(("low", "high"), [(-60.0, 8.0), (2.0, 8.0), (1.0, 1.05), (-1.05, -1.0)])
def test_thresholds_are_exact_wherever_tokens_lie(
    device: torch.device, generator: torch.Generator, low: float, high: float
) -> None:
    """Few share the first two digits of a threshold; only the first three; all share these. What
    is kept shows in the log probability."""
    rows = [(0.5, 40, 0.0), (0.5, 1300, 0.0), (0.5, 0, 0.5), (0.5, 0, 0.999), (0.5, 1300, 0.7)]
    logits = 0.5 * (low + (high - low) * torch.rand(len(rows), 5000, generator=generator))
    logits[:, 1000:1100] = -torch.inf
    settings, noise = parameters(device, rows), noise_arguments(len(rows), device)
    arguments = (logits.to(device), *settings, *noise)
    tokens, log_probs = sample_with_log_probs(*arguments)
    expected_tokens, expected = reference.sample_with_log_probs(*arguments)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected, atol=2e-5, rtol=0)


def test_a_top_p_next_to_1_leaves_top_k_in_force(device: torch.device) -> None:
    """Of these rows the sums over what top-k kept are below the largest top_p times their own total
    (in the interpreter; on a GPU they round otherwise): no threshold reaches what is wanted."""
    likelihoods = [
        torch.randn(1, 100, generator=torch.Generator().manual_seed(seed)) for seed in (4, 7, 17)
    ]
    logits = 0.5 * torch.cat(likelihoods)
    settings = parameters(device, [(1.0, 60, 1 - 2**-24)] * 3)
    arguments = (logits.to(device), *settings, *noise_arguments(3, device))
    tokens, log_probs = sample_with_log_probs(*arguments)
    expected_tokens, expected = reference.sample_with_log_probs(*arguments)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)


def test_a_row_does_not_depend_on_the_batch(
    device: torch.device, generator: torch.Generator
) -> None:
    logits = torch.randn(3, 300, generator=generator).to(device)
    settings = parameters(device, [(0.9, 20, 0.8), (1.0, 0, 1.0), (1.1, 0, 0.7)])
    noise = noise_arguments(3, device)
    together = sample(logits, *settings, *noise)
    order = [2, 0, 1]
    arguments = [tensor[order] for tensor in (logits, *settings, *noise)]
    assert torch.equal(sample(*arguments), together[order])


def test_parameters_may_be_columns_of_a_table(
    device: torch.device, generator: torch.Generator
) -> None:
    """As the engine has them: of 32 bits and of 64, each row as wide as the table."""
    rows = [(0.9, 20, 0.8), (0.0, 0, 1.0), (1.1, 0, 0.7)]
    logits, min_p = torch.randn(3, 300, generator=generator).to(device), [0.1, 0.0, 0.0]
    seeds, positions = noise_arguments(3, device)
    table = torch.zeros(3, 8, dtype=torch.int32, device=device)
    floats = table.view(torch.float32)
    columns = (floats[:, 0], table[:, 1], floats[:, 2], table.view(torch.int64)[:, 2])
    alone = (*parameters(device, rows), seeds)
    for column, values in zip(columns, alone, strict=True):
        column.copy_(values)
    floats[:, 3] = torch.tensor(min_p)
    tokens = sample(logits, *columns, positions, floats[:, 3])
    assert torch.equal(tokens, sample(logits, *alone, positions, floats[:, 3].contiguous()))


def test_rows_that_are_not_finite_give_minus_one(device: torch.device) -> None:
    """NaN, +inf, or nothing allowed; -inf alone only forbids a token."""
    logits = torch.zeros(8, 5000)
    logits[0, 4999] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = -float("inf")
    logits[3, 1:] = -float("inf")
    logits[4:] = logits[:4]
    arguments = (
        logits.to(device),
        *parameters(device, [(0.0, 0, 0.0)] * 4 + [(1.0, 5, 0.9)] * 4),
        *noise_arguments(8, device),
    )
    tokens = sample(*arguments)
    assert tokens.tolist() == [-1, -1, -1, 0, -1, -1, -1, 0]


def test_ties_at_a_filter_are_kept(device: torch.device) -> None:
    """top_k 2 over four equal logits keeps all four, so some draw leaves the first two."""
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]], device=device).repeat(12, 1)
    settings = parameters(device, [(1.0, 2, 1.0)] * 12)
    tokens = sample(logits, *settings, *noise_arguments(12, device))
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_greedy_takes_the_first_of_equals(device: torch.device) -> None:
    logits = torch.zeros(1, 9000, device=device)
    logits[0, [5000, 8999]] = 1.0
    settings = parameters(device, [(0.0, 0, 0.0)])
    assert sample(logits, *settings, *noise_arguments(1, device)).tolist() == [5000]
