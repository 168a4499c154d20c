"""Cost models learn the prices of iterations from samples."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from inflight_recorder.cost_model import MIN_SAMPLES, CostModel, Load, Sample, fit_cost_model
from inflight_recorder.settings import RecordingError

PRICES = CostModel(900.0, 12.0, 40.0, 25.0, 0.5)


def draw(cost: CostModel, load: Load, rng: random.Random) -> float:
    """Microseconds of one iteration."""
    return cost.with_noise(load, cost.draw_noise(rng))


def random_load(rng: random.Random) -> Load:
    num_contexts = rng.choice([0, 0, 0, 1, 2])
    rows = rng.randint(0, 30)
    return Load(
        sum(rng.randint(1, 200) for _ in range(num_contexts)),
        num_contexts,
        rows,
        rows * rng.randint(10, 300),
    )


@hypothesis_settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**16), st.lists(st.integers(0, 1000), min_size=5, max_size=5))
def test_exact_prices_are_found_again(seed: int, prices: list[int]) -> None:
    rng = random.Random(seed)
    base, token, request, row, cached = map(float, prices)
    truth = CostModel(base, token, request, row, cached)
    loads = [random_load(rng) for _ in range(300)]
    fitted = fit_cost_model([Sample(load, round(truth.predict(load))) for load in loads])
    for load in loads:
        assert fitted.predict(load) == pytest.approx(truth.predict(load), rel=0.02, abs=2.0)


def test_the_time_in_all_is_right_whichever_way_the_noise_goes() -> None:
    """The median of these times is 1,100 and their mean 1,137: a run takes the mean of each."""
    times = [1000 + number**2 for number in range(21)]
    cost = fit_cost_model([Sample(Load(0, 0, 1, 0), time) for time in times])
    mean = cost.predict(Load(0, 0, 1, 0)) + cost.mean_noise
    assert len(times) * mean == pytest.approx(sum(times), rel=1e-3)


@pytest.mark.parametrize("number", [80, 1000, 5000])
def test_iterations_that_are_often_slow_count_and_come_again(number: int) -> None:
    """The time in all is right, and the slow ones are apart: the median is as if none were.

    One in twenty is held up for 90 ms, for longer than all that they cost; no other is. Above 4,000
    samples prices come from every other one.
    """
    rng = random.Random(2)
    loads = [random_load(rng) for _ in range(number)]
    times = [PRICES.predict(load) + 90_000 * (n % 20 == 7) for n, load in enumerate(loads)]
    samples = [Sample(load, round(time)) for load, time in zip(loads, times, strict=True)]
    cost = fit_cost_model(samples)
    measured = sum(sample.microseconds for sample in samples)
    times = [cost.predict(sample.load) + cost.mean_noise for sample in samples]
    assert sum(times) == pytest.approx(measured, rel=1e-3)
    rounds = range(40_000 // number)
    times = [draw(cost, sample.load, rng) for _ in rounds for sample in samples]
    assert sum(times) / len(rounds) == pytest.approx(measured, rel=0.05), "none is cut or left out"
    load = Load(0, 0, 10, 1000)
    drawn = sorted(draw(cost, load, rng) for _ in range(2000))
    assert drawn[1000] == pytest.approx(PRICES.predict(load), rel=0.05)
    assert sum(time > 20_000 for time in drawn) == pytest.approx(100, rel=0.4)
    fast = cost.scaled(0.5)
    assert max(draw(fast, load, rng) for _ in range(500)) == pytest.approx(drawn[-1] / 2, rel=0.02)


@pytest.mark.parametrize(
    ("slow", "is_counted"),
    [
        ([400_000, 900_000, 500_000], False),
        ([400_000, 900_000, 500_000, 450_000], True),
        ([3000], True),
    ],
)
def test_few_iterations_that_stand_alone_do_not_count(slow: list[int], is_counted: bool) -> None:
    """The first ones of a server; what is no hundredth of the recording does no harm."""
    load = Load(0, 0, 1, 0)
    cost = fit_cost_model([Sample(load, time) for time in slow + [1000] * 300])
    total = 300_000 + sum(slow) * is_counted
    rng = random.Random(6)
    mean = sum(draw(cost, load, rng) for _ in range(20_000)) / 20_000
    assert mean == pytest.approx(total / (300 + len(slow) * is_counted), rel=0.1)


def test_no_price_is_negative_and_no_draw_goes_back_in_time() -> None:
    """Whether times fall with the load, or are below what the price of a row says."""
    rows = range(1, 61)
    falling = fit_cost_model([Sample(Load(0, 0, n, 0), 1000 - 10 * n) for n in rows])
    assert falling.per_generation_row == 0
    assert falling.predict(Load(0, 0, 500, 0)) > 0
    below = fit_cost_model([Sample(Load(0, 0, n, 0), 100 * n * (n % 4 > 0)) for n in rows])
    assert below.per_generation_row == pytest.approx(100, rel=0.01)
    assert 0 <= below.base < 1
    cost = CostModel(100.0, 0.0, 0.0, 0.0, 0.0, noise=(-5000.0, 5000.0))
    rng = random.Random(3)
    assert {draw(cost, Load(0, 0, 1, 1), rng) for _ in range(20)} == {30.0, 5100.0}


def test_too_few_iterations_are_said_so() -> None:
    with pytest.raises(RecordingError, match="19 iterations are too few"):
        fit_cost_model([Sample(Load(0, 0, 1, 1), 100)] * (MIN_SAMPLES - 1))
