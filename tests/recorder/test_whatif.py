"""Cost models learn prices, and predictions run the scheduler for real."""

from __future__ import annotations

import io
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from recorder.recorded import GUARANTEED, MAX_UTILIZATION, RecordedWorld, read
from scheduler.world import make_request

from inflight_recorder import whatif
from inflight_recorder.cost_model import MIN_SAMPLES, CostModel, Load, Sample, fit_cost_model
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.replay import replay
from inflight_recorder.settings import RecordingError, Settings
from inflight_recorder.storage import RecordingReader
from inflight_recorder.whatif import Clock, predict
from inflight_recorder.workload import Job, Latencies, make_workload, read_workload
from inflight_scheduler import ContextChunking

PRICES = CostModel(900.0, 12.0, 40.0, 25.0, 0.5)


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


def test_no_price_is_negative_and_none_pays_for_slow_iterations() -> None:
    rng = random.Random(1)
    samples = []
    for number in range(400):
        load = random_load(rng)
        noise = 1 + rng.uniform(-0.1, 0.1)
        spike = 50.0 if number % 40 == 0 else 1.0
        samples.append(Sample(load, round(PRICES.predict(load) * noise * spike)))
    fitted = fit_cost_model(samples)
    assert min(fitted.base, fitted.per_context_token, fitted.per_cached_token) >= 0
    for load in (Load(0, 0, 10, 1000), Load(150, 1, 5, 500)):
        assert fitted.predict(load) == pytest.approx(PRICES.predict(load), rel=0.1)


def test_the_time_in_all_is_right_whichever_way_the_noise_goes() -> None:
    """The median of these times is 1,100 and their mean 1,137: a run takes the mean of each."""
    times = [1000 + number**2 for number in range(21)]
    cost = fit_cost_model([Sample(Load(0, 0, 1, 0), time) for time in times])
    mean = cost.predict(Load(0, 0, 1, 0)) + cost.mean_noise
    assert len(times) * mean == pytest.approx(sum(times), rel=1e-3)


def noisy_samples(rng: random.Random, number: int = 1000) -> list[Sample]:
    """One in twenty is held up for 90 ms, for longer than all that they cost; no other is."""
    loads = [random_load(rng) for _ in range(number)]
    times = [PRICES.predict(load) + 90_000 * (n % 20 == 7) for n, load in enumerate(loads)]
    return [Sample(load, round(time)) for load, time in zip(loads, times, strict=True)]


@pytest.mark.parametrize("number", [80, 1000, 5000])
def test_iterations_that_are_often_slow_count_and_come_again(number: int) -> None:
    """The time in all is right, and the slow ones are apart: the median is as if none were."""
    rng = random.Random(2)
    samples = noisy_samples(rng, number)
    cost = fit_cost_model(samples)
    measured = sum(sample.microseconds for sample in samples)
    times = [cost.predict(sample.load) + cost.mean_noise for sample in samples]
    assert sum(times) == pytest.approx(measured, rel=1e-3)
    rounds = range(40_000 // number)
    times = [cost.draw(sample.load, rng) for _ in rounds for sample in samples]
    assert sum(times) / len(rounds) == pytest.approx(measured, rel=0.05), "none is cut or left out"
    load = Load(0, 0, 10, 1000)
    drawn = sorted(cost.draw(load, rng) for _ in range(2000))
    assert drawn[1000] == pytest.approx(PRICES.predict(load), rel=0.05)
    assert sum(time > 20_000 for time in drawn) == pytest.approx(100, rel=0.4)
    fast = cost.scaled(0.5)
    assert max(fast.draw(load, rng) for _ in range(500)) == pytest.approx(drawn[-1] / 2, rel=0.02)


def test_noise_that_keeps_time_with_the_samples_is_drawn_whole() -> None:
    """Above 4,000 samples prices come from every other one, and here all of those are alike."""
    load = Load(0, 0, 1, 0)
    cost = fit_cost_model([Sample(load, 1000 + 2000 * (n % 2)) for n in range(5000)])
    rng = random.Random(5)
    drawn = {round(cost.draw(load, rng)) for _ in range(20)}
    assert drawn == {1000, 3000}


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
    mean = sum(cost.draw(load, rng) for _ in range(20_000)) / 20_000
    assert mean == pytest.approx(total / (300 + len(slow) * is_counted), rel=0.1)


def test_no_draw_goes_back_in_time() -> None:
    cost = CostModel(100.0, 0.0, 0.0, 0.0, 0.0, noise=(-5000.0, 5000.0))
    rng = random.Random(3)
    assert {cost.draw(Load(0, 0, 1, 1), rng) for _ in range(20)} == {30.0, 5100.0}


def test_falling_times_make_no_negative_price() -> None:
    samples = [Sample(Load(0, 0, rows, 0), 1000 - 10 * rows) for rows in range(1, 60)]
    fitted = fit_cost_model(samples)
    assert fitted.per_generation_row == 0
    assert fitted.predict(Load(0, 0, 500, 0)) > 0


def test_times_below_the_price_make_no_negative_base() -> None:
    times = [100 * rows * (rows % 4 > 0) for rows in range(1, 61)]
    samples = [Sample(Load(0, 0, rows, 0), time) for rows, time in enumerate(times, start=1)]
    cost = fit_cost_model(samples)
    assert cost.per_generation_row == pytest.approx(100, rel=0.01)
    assert 0 <= cost.base < 1


def test_too_few_iterations_are_said_so() -> None:
    with pytest.raises(RecordingError, match="19 iterations are too few"):
        fit_cost_model([Sample(Load(0, 0, 1, 1), 100)] * (MIN_SAMPLES - 1))


def test_percentiles_are_the_nearest_rank() -> None:
    latencies = Latencies()
    for number in range(1, 101):
        latencies.arrived(number, 0)
        latencies.advanced(number, 1000 * number, 1)
        latencies.advanced(number, 1100 * number, 2)
        latencies.ended(number)
    summary = latencies.summary()
    assert (summary.ttft_p50, summary.ttft_p99) == (50.0, 99.0)
    assert (summary.itl_p50, summary.itl_p99) == (5.0, 9.9)
    assert (summary.num_requests, summary.num_tokens) == (100, 200)
    assert summary.seconds == pytest.approx(0.110)


def test_all_who_run_are_the_batch_and_all_who_are_paused_count() -> None:
    latencies = Latencies()
    one, two, three, four = (make_request(number) for number in range(4))
    latencies.decided(([one], [two, three], []))
    latencies.decided(([], [two], [three, four]))
    latencies.decided(([one], [two], []))
    summary = latencies.summary()
    assert (summary.max_batch, summary.num_pauses) == (3, 2)


SETTINGS = Settings(MAX_UTILIZATION, 24, 4, 8, 64)
JOBS = make_workload(50.0, (1, 30), (1, 40), 60, seed=3)


def test_a_prediction_has_the_slow_iterations_and_is_the_same_each_time() -> None:
    cost = fit_cost_model(noisy_samples(random.Random(4)))
    even = replace(cost, noise=(cost.mean_noise,))
    first, again, smooth = (predict(SETTINGS, JOBS, each) for each in (cost, cost, even))
    assert first == again
    assert first.itl_p50 < smooth.itl_p50
    assert first.itl_p99 > smooth.itl_p99 + 10


def test_a_prediction_is_arithmetic() -> None:
    """One job: a context of 10 tokens, then 3 steps with 10, 11 and 12 tokens cached."""
    summary = predict(Settings(GUARANTEED, 24, 4, 8), [Job(1000, 10, 4, 4)], PRICES)
    context = 900 + 12 * 10 + 40
    steps = [900 + 25 + 0.5 * cached for cached in (10, 11, 12)]
    assert summary.ttft_p50 == pytest.approx(context / 1000, abs=0.002)
    assert summary.seconds == pytest.approx((context + sum(steps)) / 1e6, abs=3e-6)
    assert summary.num_tokens == 4
    assert summary.tokens_per_second == pytest.approx(4 / summary.seconds)


@pytest.mark.parametrize("chunking", [None, ContextChunking(unit_size=4)])
def test_every_job_runs_and_a_prediction_can_be_replayed(chunking: ContextChunking | None) -> None:
    settings = Settings(MAX_UTILIZATION, 24, 4, 8, 64, chunking)
    clock = Clock()
    recorder = FlightRecorder(settings, software="whatif", clock=clock)
    summary = predict(settings, JOBS, PRICES, recorder=recorder, clock=clock)
    assert summary.num_requests == 60
    assert summary.num_tokens == sum(job.num_new_tokens for job in JOBS)
    text = "".join(recorder.lines())
    result = replay(RecordingReader(io.BytesIO(text.encode()), "predicted"))
    assert result.divergence is None
    assert (result.num_requests, result.num_pauses) == (60, summary.num_pauses)
    again = read_workload(RecordingReader(io.BytesIO(text.encode()), "predicted"))
    assert sum(job.num_new_tokens for job in again.jobs) == summary.num_tokens
    fitted = fit_cost_model(again.samples)
    assert fitted.relative_error < 0.01


def test_a_request_that_could_never_run_is_refused() -> None:
    jobs = [*JOBS, Job(10**7, 60, 80, 80)]
    summary = predict(SETTINGS, jobs, PRICES)
    assert (summary.num_refused, summary.num_requests) == (1, 60)


def test_more_blocks_pause_less() -> None:
    few = predict(SETTINGS, JOBS, PRICES)
    many = predict(Settings(MAX_UTILIZATION, 400, 4, 8, 64), JOBS, PRICES)
    assert few.num_pauses > 0
    assert few.num_recomputed_tokens > 0
    assert (many.num_pauses, many.num_recomputed_tokens) == (0, 0)
    assert many.ttft_p99 < few.ttft_p99


def test_of_a_context_paused_in_the_middle_its_end_is_not_computed_again() -> None:
    """Request 2 computes 4 tokens beside each of the other one, which opens a block after the
    fourth: 16 of 24 are computed then, and all 24 once the other one has ended."""
    settings = Settings(MAX_UTILIZATION, 8, 4, 8, 5, ContextChunking(unit_size=4))
    world = RecordedWorld(settings)
    world.arrive(make_request(1, 4, 12))
    world.arrive(make_request(2, 24, 2))
    while world.active:
        world.iterate()
    summary = read_workload(read(world.text)).latencies.summary()
    assert (summary.num_pauses, summary.num_recomputed_tokens) == (1, 16)
    jobs = [Job(0, 4, 12, 12), Job(0, 24, 2, 2)]
    assert predict(settings, jobs, PRICES).num_recomputed_tokens == 16


def test_jobs_of_a_recording_are_what_was_asked_and_given() -> None:
    world = RecordedWorld(SETTINGS)
    world.arrive(make_request(1, 5, 7))
    world.arrive(make_request(2, 3, 30))
    second = world.active.get(2)
    for _ in range(4):
        world.iterate()
    assert second is not None
    world.iterate([second])
    world.arrive(make_request(3, 2, 9))
    world.iterate()
    jobs = {job.prompt_len: job for job in read_workload(read(world.text)).jobs}
    assert jobs[3].num_new_tokens == 5  # stopped
    assert (jobs[2].num_new_tokens, jobs[2].max_new_tokens) == (9, 9)  # still running
    assert jobs[5].arrival_us <= jobs[2].arrival_us


def test_time_in_the_queue_before_a_place_counts() -> None:
    """The second request comes at once, and is taken when the first has ended."""
    settings = Settings(GUARANTEED, 24, 4, 1)
    jobs = [Job(0, 4, 10, 10), Job(0, 4, 10, 10)]
    clock = Clock()
    recorder = FlightRecorder(settings, clock=clock)
    summary = predict(settings, jobs, PRICES, recorder=recorder, clock=clock)
    reader = RecordingReader(io.BytesIO("".join(recorder.lines()).encode()), "predicted")
    workload = read_workload(reader)
    assert [job.arrival_us for job in workload.jobs] == [0, 0]
    assert workload.latencies.summary().ttft_p99 == pytest.approx(summary.ttft_p99, abs=0.01)
    both = predict(Settings(GUARANTEED, 24, 4, 2), workload.jobs, PRICES)
    assert both.ttft_p99 < summary.ttft_p99 / 2


def test_a_few_lines_do_not_keep_a_prediction_busy_for_hours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request that had just begun, and may generate sixteen million tokens."""
    settings = Settings(GUARANTEED, 2**20, 64, 8)
    world = RecordedWorld(settings)
    world.arrive(make_request(1, 1, 2**24 - 1))
    for _ in range(40):
        world.iterate()
    workload = read_workload(read(world.text))
    assert (workload.num_unended, workload.num_steps) == (1, 80)
    monkeypatch.setattr(whatif, "MIN_STEPS", 1000)
    with pytest.raises(RecordingError, match=r"more than 9,000 steps .* which is 1,000 and 100"):
        predict(settings, workload.jobs, PRICES, num_recorded_steps=workload.num_steps)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_prediction_of_what_was_recorded_takes_as_many_steps(
    is_overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the bound, a hundred times that, is for no recording of those who have ended too low."""
    monkeypatch.setattr(whatif, "MIN_STEPS", 0)
    monkeypatch.setattr(whatif, "STEPS_PER_STEP", 1)
    settings = replace(SETTINGS, is_overlapped=is_overlapped)
    clock = Clock()
    recorder = FlightRecorder(settings, clock=clock)
    predict(settings, JOBS, PRICES, recorder=recorder, clock=clock)
    reader = RecordingReader(io.BytesIO("".join(recorder.lines()).encode()), "predicted")
    workload = read_workload(reader)
    predict(settings, workload.jobs, PRICES, num_recorded_steps=workload.num_steps)
    with pytest.raises(RecordingError, match="this prediction takes more than"):
        predict(settings, workload.jobs, PRICES, num_recorded_steps=workload.num_steps - 1)


def test_nothing_to_run_is_an_error() -> None:
    with pytest.raises(RecordingError, match="holds no request that came"):
        predict(SETTINGS, [], PRICES)


def test_a_workload_is_repeatable_and_as_asked() -> None:
    jobs = make_workload(10.0, (5, 6), (7, 9), 2000, seed=1)
    assert jobs == make_workload(10.0, (5, 6), (7, 9), 2000, seed=1)
    assert {job.prompt_len for job in jobs} == {5, 6}
    assert {job.num_new_tokens for job in jobs} == {7, 8, 9}
    assert jobs[-1].arrival_us == pytest.approx(200e6, rel=0.1)
