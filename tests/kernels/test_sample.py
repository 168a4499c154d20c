"""Sampling against the reference: the same token from the same (seed, position)."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.ops.sampling.sample import sample, sample_with_log_probs

Row = tuple[float, int, float]
Arguments = tuple[torch.Tensor, ...]


def arguments_of(
    logits: torch.Tensor, rows: list[Row], device: torch.device, min_p: list[float] | None = None
) -> Arguments:
    """Of rows (temperature, top_k, top_p). Seeds lie at the ends of int64 and between."""
    temperature, top_k, top_p = zip(*rows, strict=True)
    numbers = torch.arange(len(rows))
    seeds = numbers * 7919 + 3
    seeds[0], seeds[-1] = -(2**63), 2**63 - 1
    arguments = [
        logits,
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=torch.float32),
        seeds,
        numbers * 31 + 5,
    ]
    if min_p is not None:
        arguments.append(torch.tensor(min_p))
    return tuple(each.to(device) for each in arguments)


def equals_the_reference(arguments: Arguments, tolerance: float = 1e-5) -> Arguments:
    """The tokens and log probabilities, once compared. What is kept shows in the latter."""
    tokens, log_probs = sample_with_log_probs(*arguments)
    expected_tokens, expected = reference.sample_with_log_probs(*arguments)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected, atol=tolerance, rtol=0, equal_nan=True)
    return tokens, log_probs


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
    logits = 3 * torch.randn(len(rows), vocabulary, generator=generator)
    equals_the_reference(arguments_of(logits, rows, device))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_count_as_in_float32(
    device: torch.device, generator: torch.Generator, dtype: torch.dtype
) -> None:
    """Bit by bit, whatever groups of tokens are searched; of so few digits many tie."""
    rows = [(0.0, 0, 0.0), (0.7, 0, 0.9), (1.3, 40, 0.0), (0.9, 40, 0.5), (1.0, 0, 0.999)]
    logits = (3 * torch.randn(len(rows), 5000, generator=generator)).to(dtype)
    narrow = equals_the_reference(arguments_of(logits, rows, device))
    wide = sample_with_log_probs(*arguments_of(logits.float(), rows, device))
    assert all(map(torch.equal, narrow, wide))


def test_min_p_equals_the_reference(device: torch.device, generator: torch.Generator) -> None:
    """Alone, with the other filters, off, and so high that one token is left; where a row is greedy
    the log probability is 0, and NaN where nothing is drawn."""
    rows = [
        (0.0, 0, 0.0),
        (1.0, 1, 0.5),
        (1.5, 0, 1.0),
        (1.0, 0, 0.0),
        (1.0, 0, 0.0),
        (0.7, 5, 0.9),
        (1.3, 40, 0.0),
        (2.0, 0, 0.95),
        (0.25, 7, 0.95),
        (1.0, 5, 0.9),
    ]
    min_p = [0.5, 0.2, 1.0, 0.0, 0.1, 0.05, 0.1, 0.3, 0.0, 0.0]
    logits = 3 * torch.randn(len(rows), 5000, generator=generator)
    logits[-1, 17] = torch.nan
    tokens, log_probs = equals_the_reference(arguments_of(logits, rows, device, min_p))
    assert torch.equal(tokens[:4].cpu(), logits[:4].argmax(-1))
    assert log_probs[:2].tolist() == [0.0, 0.0]
    assert bool((log_probs[4:-1] < 0).all())
    assert bool(log_probs[-1].isnan())


@pytest.mark.fast(1)
@pytest.mark.parametrize(("low", "high"), [(-60.0, 8.0), (2.0, 8.0), (1.0, 1.05), (-1.05, -1.0)])
def test_thresholds_are_exact_wherever_tokens_lie(
    device: torch.device, generator: torch.Generator, low: float, high: float
) -> None:
    """Few share the first two digits of a threshold; only the first three; all share these."""
    rows = [(0.5, 40, 0.0), (0.5, 1300, 0.0), (0.5, 0, 0.5), (0.5, 0, 0.999), (0.5, 1300, 0.7)]
    logits = 0.5 * (low + (high - low) * torch.rand(len(rows), 5000, generator=generator))
    logits[:, 1000:1100] = -torch.inf
    equals_the_reference(arguments_of(logits, rows, device), tolerance=2e-5)


def test_a_top_p_next_to_1_leaves_top_k_in_force(device: torch.device) -> None:
    """Of these rows the sums over what top-k kept are below the largest top_p times their own total
    (in the interpreter; on a GPU they round otherwise): no threshold reaches what is wanted."""
    likelihoods = [
        torch.randn(1, 100, generator=torch.Generator().manual_seed(seed)) for seed in (4, 7, 17)
    ]
    logits = 0.5 * torch.cat(likelihoods)
    equals_the_reference(arguments_of(logits, [(1.0, 60, 1 - 2**-24)] * 3, device))


def test_a_row_does_not_depend_on_the_batch(
    device: torch.device, generator: torch.Generator
) -> None:
    logits = torch.randn(3, 300, generator=generator)
    arguments = arguments_of(logits, [(0.9, 20, 0.8), (1.0, 0, 1.0), (1.1, 0, 0.7)], device)
    order = [2, 0, 1]
    assert torch.equal(sample(*(each[order] for each in arguments)), sample(*arguments)[order])


def test_parameters_may_be_columns_of_a_table(
    device: torch.device, generator: torch.Generator
) -> None:
    """As the engine has them: of 32 bits and of 64, each row as wide as the table."""
    rows = [(0.9, 20, 0.8), (0.0, 0, 1.0), (1.1, 0, 0.7)]
    alone = arguments_of(torch.randn(3, 300, generator=generator), rows, device, [0.1, 0.0, 0.0])
    logits, temperature, top_k, top_p, seeds, positions, min_p = alone
    table = torch.zeros(3, 8, dtype=torch.int32, device=device)
    floats = table.view(torch.float32)
    columns = (floats[:, 0], table[:, 1], floats[:, 2], table.view(torch.int64)[:, 2], floats[:, 3])
    for column, values in zip(columns, (temperature, top_k, top_p, seeds, min_p), strict=True):
        column.copy_(values)
    tokens = sample(logits, *columns[:4], positions, columns[4])
    assert torch.equal(tokens, sample(*alone))


def test_rows_that_are_not_finite_give_minus_one(device: torch.device) -> None:
    """NaN, +inf, or nothing allowed; -inf alone only forbids a token."""
    logits = torch.zeros(8, 5000)
    logits[0, 4999] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = -float("inf")
    logits[3, 1:] = -float("inf")
    logits[4:] = logits[:4]
    rows = [(0.0, 0, 0.0)] * 4 + [(1.0, 5, 0.9)] * 4
    tokens = sample(*arguments_of(logits, rows, device))
    assert tokens.tolist() == [-1, -1, -1, 0, -1, -1, -1, 0]


@pytest.mark.parametrize("highest", [[1.0, 1.0, 1.0, 1.0], [0.0, -0.0, 0.0, -0.0]])
def test_ties_at_a_filter_are_kept(device: torch.device, highest: list[float]) -> None:
    """top_k 2 over four equal logits keeps all four, so some draw leaves the first two."""
    logits = torch.tensor([[*highest, -1.0]]).repeat(12, 1)
    tokens = sample(*arguments_of(logits, [(1.0, 2, 1.0)] * 12, device))
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_greedy_takes_the_first_of_equals(device: torch.device) -> None:
    logits = torch.zeros(1, 9000)
    logits[0, [5000, 8999]] = 1.0
    assert sample(*arguments_of(logits, [(0.0, 0, 0.0)], device)).tolist() == [5000]
