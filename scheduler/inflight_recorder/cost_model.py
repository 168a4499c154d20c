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
from array import array
from collections.abc import Sequence
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


class CostModel(NamedTuple):
    """Prices in microseconds, of iterations that nothing holds up. ``noise``: what samples took
    beyond them, or below. ``relative_error``: the mean error of a prediction of the samples that
    adds the mean of the noise to the prices, as a share of their mean."""

    base: float
    per_context_token: float
    per_context_request: float
    per_generation_row: float
    per_cached_token: float
    relative_error: float = 0.0
    noise: tuple[float, ...] = ()

    @property
    def mean_noise(self) -> float:
        """Microseconds that an iteration takes on average beyond its price."""
        return sum(self.noise) / max(len(self.noise), 1)

    def scaled(self, factor: float) -> CostModel:
        """Everything ``factor`` times as dear."""
        prices = [factor * price for price in self[:5]]
        noise = tuple([factor * each for each in self.noise])
        return CostModel._make((*prices, self.relative_error, noise))

    def predict(self, load: Load) -> float:
        """Microseconds of an iteration with this work, without noise."""
        return _predict(self[:5], load)

    def draw_noise(self, rng: random.Random) -> float:
        """What the next iteration takes beyond its price, or below."""
        return rng.choice(self.noise) if self.noise else 0.0

    def with_noise(self, load: Load, noise: float) -> float:
        """Microseconds of an iteration with this work and ``noise``."""
        price = self.predict(load)
        return max(price + noise, _LEAST_SHARE * price)


def fit_cost_model(samples: Sequence[Sample]) -> CostModel:
    """The prices that explain ``samples`` best, and the noise that makes the time in all right.

    The noise of a machine goes one way, up, so least squares would chase it: prices come from least
    absolute errors. Slow iterations come again in predictions, except for the few that stand
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
    noise = tuple(_without_outliers(errors, _OUTLIER_SHARE * total))
    mean = sum(noise) / len(noise)
    relative_error = sum(abs(error - mean) for error in errors) / total
    return CostModel._make((*prices, relative_error, noise))


def _without_outliers(errors: Sequence[float], least: float) -> Sequence[float]:
    """All of them, but for those few that are ``least`` at least and far above the others."""
    largest = sorted(errors, reverse=True)[: _MAX_OUTLIERS + 1]
    for number in range(_MAX_OUTLIERS, 0, -1):
        if largest[number - 1] > max(_OUTLIER_FACTOR * largest[number], least):
            return [error for error in errors if error < largest[number - 1]]
    return errors


def _terms(load: Load) -> tuple[float, ...]:
    return (1.0, *map(float, load))


def _predict(prices: Sequence[float], load: Load) -> float:
    return sum(price * term for price, term in zip(prices, _terms(load), strict=True))


def _fit_absolute(samples: Sequence[Sample]) -> list[float]:
    """Least absolute errors: least squares again and again, each sample weighed by its error."""
    columns = [
        array("d", column) for column in zip(*[_terms(s.load) for s in samples], strict=True)
    ]
    times = array("d", [sample.microseconds for sample in samples])
    prices = _fit(columns, times, [1.0] * len(samples))
    for _ in range(_NUM_REWEIGHTINGS):
        errors = [abs(_predict(prices, sample.load) - sample.microseconds) for sample in samples]
        least = max(sorted(errors)[len(errors) // 2] / 20, 1.0)
        prices = _fit(columns, times, [1.0 / max(error, least) for error in errors])
    return prices


def _fit(
    columns: Sequence[Sequence[float]], times: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Weighted least squares; while a price is negative, the most negative one is taken out.

    ``columns``: of each term, what it is in each sample.
    """
    scales = [max(*column, 1.0) for column in columns]
    heavy = [list(map(mul, weights, column)) for column in columns]
    least = 1e-9 * sum(weights) / len(weights)
    free = list(range(_NUM_TERMS))
    while True:
        rows: list[list[float]] = []  # the normal equations, each term scaled to its largest value
        for term in free:
            row = [
                sum(map(mul, heavy[term], columns[other])) / (scales[term] * scales[other])
                for other in free
            ]
            # Terms that never vary apart share their price.
            row[len(rows)] = row[len(rows)] * (1.0 + 1e-9) + least
            rows.append([*row, sum(map(mul, heavy[term], times)) / scales[term]])
        prices = [0.0] * _NUM_TERMS
        for term, value in zip(free, _solve(rows), strict=True):
            prices[term] = value / scales[term]
        worst = min(free, key=prices.__getitem__)
        if prices[worst] >= 0.0 or len(free) == 1:
            return [max(price, 0.0) for price in prices]
        free.remove(worst)


def _solve(rows: list[list[float]]) -> list[float]:
    """Gauss-Jordan elimination in place; each row ends with its right side.

    The matrix is symmetric and positive definite, so no pivot is 0.
    """
    for column, pivot in enumerate(rows):
        for index, row in enumerate(rows):
            if index != column:
                factor = row[column] / pivot[column]
                rows[index] = [x - factor * y for x, y in zip(row, pivot, strict=True)]
    return [row[-1] / row[column] for column, row in enumerate(rows)]
