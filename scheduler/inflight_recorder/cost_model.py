"""How long an iteration takes, learnt from a recording; no price is negative.

::

    microseconds = base
                 + a * context tokens        (matrix products over the prompt)
                 + b * context requests      (their set-up)
                 + c * generation rows       (one for each beam, and for each draft)
                 + d * cached tokens         (what attention reads for these, once for all drafts)
                 + noise                     (drawn from what recorded iterations took beyond that)

Without the noise a prediction would have no slow iterations, and queues that a busy machine makes
would be missing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import NamedTuple

from inflight_recorder.settings import RecordingError

MIN_SAMPLES = 20
_NUM_TERMS = 5
_MAX_OUTLIERS = 3
_OUTLIER_FACTOR = 3.0
_OUTLIER_SHARE = 0.01
_LEAST_SHARE = 0.3  # of its price, whatever is drawn
_MAX_FITTED = 4000  # samples, evenly taken from all
_NUM_REWEIGHTINGS = 8


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
    """Prices in microseconds, of iterations that nothing holds up. ``noise``: what samples took
    beyond them, or below. ``relative_error``: the mean error of a prediction of the samples that
    adds the mean of the noise to the prices, as a share of their mean."""

    base: float
    per_context_token: float
    per_context_request: float
    per_generation_row: float
    per_cached_token: float
    relative_error: float = 0.0
    noise: tuple[float, ...] = field(default=(), repr=False)

    @property
    def mean_noise(self) -> float:
        """Microseconds that an iteration takes on average beyond its price."""
        return sum(self.noise) / max(len(self.noise), 1)

    def scaled(self, factor: float) -> CostModel:
        """Everything ``factor`` times as dear."""
        base, token, request, row, cached = (factor * price for price in _prices_of(self))
        noise = tuple(factor * each for each in self.noise)
        return CostModel(base, token, request, row, cached, self.relative_error, noise)

    def predict(self, load: Load) -> float:
        """Microseconds of an iteration with this work, without noise."""
        return _predict(_prices_of(self), load)

    def draw(self, load: Load, rng: random.Random) -> float:
        """Microseconds of one such iteration."""
        price = self.predict(load)
        return max(price + rng.choice(self.noise), _LEAST_SHARE * price) if self.noise else price


def fit_cost_model(samples: Sequence[Sample]) -> CostModel:
    """The prices that explain ``samples`` best, and the noise that makes the time in all right.

    The noise of a machine goes one way, up, so least squares would chase it: prices come from least
    absolute errors. Slow iterations come again in what is predicted, but for those few that stand
    alone (the first ones, a machine that stood still): three at most, each more than three times as
    far off as all others, and a hundredth of the recording. `RecordingError` for fewer than
    `MIN_SAMPLES`.
    """
    if len(samples) < MIN_SAMPLES:
        raise RecordingError(
            f"{len(samples)} iterations are too few to learn what one costs; record at least "
            f"{MIN_SAMPLES}"
        )
    step = -(-len(samples) // _MAX_FITTED)
    prices = _fit_absolute(samples[::step])
    errors = [sample.microseconds - _predict(prices, sample.load) for sample in samples]
    total = max(sum(sample.microseconds for sample in samples), 1)
    base, token, request, row, cached = prices
    noise = tuple(_without_outliers(errors, _OUTLIER_SHARE * total))
    mean = sum(noise) / len(noise)
    relative_error = sum(abs(error - mean) for error in errors) / total
    return CostModel(base, token, request, row, cached, relative_error, noise)


def _without_outliers(errors: Sequence[float], least: float) -> Sequence[float]:
    """All of them, but for those few that are ``least`` at least and far above the others."""
    largest = sorted(errors, reverse=True)[: _MAX_OUTLIERS + 1]
    for number in range(_MAX_OUTLIERS, 0, -1):
        if largest[number - 1] > max(_OUTLIER_FACTOR * largest[number], least):
            return [error for error in errors if error < largest[number - 1]]
    return errors


def _prices_of(model: CostModel) -> tuple[float, ...]:
    """In the order of `_terms`."""
    return (
        model.base,
        model.per_context_token,
        model.per_context_request,
        model.per_generation_row,
        model.per_cached_token,
    )


def _terms(load: Load) -> tuple[float, ...]:
    return (1.0, *map(float, load))


def _predict(prices: Sequence[float], load: Load) -> float:
    return sum(price * term for price, term in zip(prices, _terms(load), strict=True))


def _fit_absolute(samples: Sequence[Sample]) -> list[float]:
    """Least absolute errors: least squares again and again, each sample weighed by its error."""
    weights = [1.0] * len(samples)
    prices = _fit(samples, weights)
    for _ in range(_NUM_REWEIGHTINGS):
        errors = [abs(_predict(prices, sample.load) - sample.microseconds) for sample in samples]
        least = max(sorted(errors)[len(errors) // 2] / 20, 1.0)
        weights = [1.0 / max(error, least) for error in errors]
        prices = _fit(samples, weights)
    return prices


def _fit(samples: Sequence[Sample], weights: Sequence[float]) -> list[float]:
    """Weighted least squares; while a price is negative, the most negative one is taken out."""
    free = list(range(_NUM_TERMS))
    while True:
        solution = _solve_free(samples, weights, free)
        worst = min(free, key=lambda term: solution[term])
        if solution[worst] >= 0.0 or len(free) == 1:
            return [max(price, 0.0) for price in solution]
        free.remove(worst)


def _solve_free(
    samples: Sequence[Sample], weights: Sequence[float], free: Sequence[int]
) -> list[float]:
    """The normal equations of the terms in ``free``, each scaled to its largest value."""
    rows = [_terms(sample.load) for sample in samples]
    scales = [max(max(row[term] for row in rows), 1.0) for term in free]
    columns = [
        [row[term] / scale for row in rows] for term, scale in zip(free, scales, strict=True)
    ]
    heavy = [list(map(mul, weights, column)) for column in columns]
    size, total = len(free), sum(weights)
    matrix = [[sum(map(mul, one, other)) for other in columns] for one in heavy]
    for index in range(size):  # terms that never vary apart share their price
        matrix[index][index] *= 1.0 + 1e-9
        matrix[index][index] += 1e-9 * total / len(samples)
    times = [float(sample.microseconds) for sample in samples]
    target = [sum(map(mul, one, times)) for one in heavy]
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
