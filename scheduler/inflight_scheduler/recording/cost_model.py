"""How long an iteration takes, learnt from a recording: least squares with no negative price.

::

    microseconds = base
                 + a * context tokens        (matrix products over the prompt)
                 + b * context requests      (their set-up)
                 + c * generation rows
                 + d * cached tokens         (what attention reads for the generation rows)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from inflight_scheduler.recording.errors import RecordingError

MIN_SAMPLES = 20
_NUM_TERMS = 5
_OUTLIER_FACTOR = 5.0


class Load(NamedTuple):
    """The work of one iteration."""

    num_context_tokens: int
    num_context_requests: int
    num_generation_rows: int
    num_cached_tokens: int


class Sample(NamedTuple):
    """An iteration as it was measured."""

    load: Load
    microseconds: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices in microseconds. ``relative_error`` is the mean error of the samples it was fitted
    to, as a share of their mean."""

    base: float
    per_context_token: float
    per_context_request: float
    per_generation_row: float
    per_cached_token: float
    relative_error: float = 0.0

    def predict(self, load: Load) -> float:
        """Microseconds of an iteration with this work."""
        return (
            self.base
            + self.per_context_token * load.num_context_tokens
            + self.per_context_request * load.num_context_requests
            + self.per_generation_row * load.num_generation_rows
            + self.per_cached_token * load.num_cached_tokens
        )


def fit_cost_model(samples: Sequence[Sample]) -> CostModel:
    """The prices that explain ``samples`` best.

    Iterations far off (a busy machine, the first ones) are left out of a second fit.
    `RecordingError` for fewer than `MIN_SAMPLES`.
    """
    if len(samples) < MIN_SAMPLES:
        raise RecordingError(
            f"{len(samples)} iterations are too few to learn what one costs; record at least "
            f"{MIN_SAMPLES}"
        )
    prices = _fit(samples)
    errors = [abs(_predict(prices, sample.load) - sample.microseconds) for sample in samples]
    bound = _OUTLIER_FACTOR * max(sorted(errors)[len(errors) // 2], 1.0)
    kept = [sample for sample, error in zip(samples, errors, strict=True) if error <= bound]
    if len(kept) >= MIN_SAMPLES:
        prices = _fit(kept)
    mean = sum(sample.microseconds for sample in samples) / len(samples)
    errors = [abs(_predict(prices, sample.load) - sample.microseconds) for sample in samples]
    base, token, request, row, cached = prices
    relative_error = sum(errors) / len(errors) / max(mean, 1e-9)
    return CostModel(base, token, request, row, cached, relative_error)


def _terms(load: Load) -> tuple[float, ...]:
    return (1.0, *map(float, load))


def _predict(prices: Sequence[float], load: Load) -> float:
    return sum(price * term for price, term in zip(prices, _terms(load), strict=True))


def _fit(samples: Sequence[Sample]) -> list[float]:
    """Least squares; while a price is negative, the most negative one is taken out."""
    free = list(range(_NUM_TERMS))
    while True:
        solution = _solve_free(samples, free)
        worst = min(free, key=lambda term: solution[term])
        if solution[worst] >= 0.0 or len(free) == 1:
            return [max(price, 0.0) for price in solution]
        free.remove(worst)


def _solve_free(samples: Sequence[Sample], free: Sequence[int]) -> list[float]:
    """The normal equations of the terms in ``free``, each scaled to its largest value."""
    rows = [_terms(sample.load) for sample in samples]
    scales = [max(max(row[term] for row in rows), 1.0) for term in free]
    scaled = [[row[term] / scale for term, scale in zip(free, scales, strict=True)] for row in rows]
    size = len(free)
    matrix = [[sum(row[i] * row[j] for row in scaled) for j in range(size)] for i in range(size)]
    for index in range(size):  # terms that never vary apart share their price
        matrix[index][index] *= 1.0 + 1e-9
        matrix[index][index] += 1e-9
    target = [
        sum(row[i] * sample.microseconds for row, sample in zip(scaled, samples, strict=True))
        for i in range(size)
    ]
    solution = [0.0] * _NUM_TERMS
    for term, scale, value in zip(free, scales, _solve(matrix, target), strict=True):
        solution[term] = value / scale
    return solution


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Gaussian elimination with the largest pivot; the matrix is symmetric and positive."""
    size = len(target)
    rows = [[*row, value] for row, value in zip(matrix, target, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for index in range(column + 1, size):
            factor = rows[index][column] / rows[column][column]
            rows[index] = [
                value - factor * above
                for value, above in zip(rows[index], rows[column], strict=True)
            ]
    solution = [0.0] * size
    for index in range(size - 1, -1, -1):
        rest = sum(rows[index][k] * solution[k] for k in range(index + 1, size))
        solution[index] = (rows[index][size] - rest) / rows[index][index]
    return solution
