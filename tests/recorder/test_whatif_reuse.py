"""With block reuse what is cached is not computed: so say recordings, and so do predictions."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
from recorder.recorded import (
    GUARANTEED,
    MAX_UTILIZATION,
    RecordedWorld,
    play,
    read,
)
from scheduler.world import make_request

from inflight_recorder.cost_model import CostModel
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.replay import replay
from inflight_recorder.settings import Settings
from inflight_recorder.timeline import Activity, build_timeline
from inflight_recorder.whatif import Clock, predict
from inflight_recorder.workload import Job, make_workload, read_workload
from inflight_scheduler import ContextChunking, LlmRequest
from inflight_scheduler.policies.explain import LeftOut, explain_left_out

PRICES = CostModel(900.0, 120.0, 40.0, 25.0, 1.0)  # whole microseconds, as recorded times are
BASE = Settings(MAX_UTILIZATION, 24, 4, 8, 40, enable_reuse=True, may_copy_blocks=True)
CASES = {
    "paused": BASE,
    "reserved": replace(BASE, policy=GUARANTEED),
    "cut": replace(BASE, chunking=ContextChunking(unit_size=4)),
    "overlapped": replace(BASE, is_overlapped=True),
    "overlapped and cut": replace(
        BASE, chunking=ContextChunking(unit_size=4), is_overlapped=True, may_copy_blocks=False
    ),
}
all_cases = pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())


def talk(settings: Settings, num_talks: int = 12, seed: int = 1) -> RecordedWorld:
    """Requests with one of three beginnings come by the clock, and come again with their answer.

    None ends early, so a prediction has the same tokens to generate.
    """
    world = RecordedWorld(settings, prices=PRICES)
    rng = random.Random(seed)
    coming: deque[tuple[int, LlmRequest]] = deque()
    time_us = 0
    for number in range(1, num_talks + 1):
        time_us += int(rng.expovariate(1 / 3000))
        length = rng.randint(8, 24)
        request = make_request(number, length, rng.randint(3, 8), family=rng.randint(1, 3))
        own = [90 + number] * rng.randint(1, 3)
        again = LlmRequest(number, [*request.tokens[:-3], *own], request.max_new_tokens)
        coming.append((time_us, again))
    next_id = num_talks + 1
    while coming or world.active or world.running:
        if not world.active and not world.running:
            world.clock.time_us = max(world.clock.time_us, float(coming[0][0]))
        while coming and coming[0][0] <= world.clock.time_us:
            if len(world.active) == settings.max_batch_size:
                break
            came_us, request = coming.popleft()
            world.arrive(request, came_us * 1000)
        num_finished = len(world.finished)
        world.iterate()
        for request in world.finished[num_finished:]:
            if request.request_id <= num_talks and request.num_tokens < 30:
                came_us = max(int(world.clock.time_us), coming[-1][0] if coming else 0)
                coming.append((came_us, LlmRequest(next_id, [*request.tokens, 88], 4)))
                next_id += 1
    return world


@all_cases
def test_the_work_of_each_iteration_is_that_of_its_batch(settings: Settings) -> None:
    """Told by time, since the recording has no word of it."""
    world = play(settings, world=RecordedWorld(settings, prices=PRICES), seed=5)
    assert world.manager.reuse_stats.num_reused_blocks > 20
    samples = read_workload(read(world.text)).samples
    assert len(samples) > len(world.batches) // 2
    for load, microseconds in samples:
        assert PRICES.predict(load) == microseconds


@all_cases
def test_a_timeline_shows_what_was_computed(settings: Settings) -> None:
    world = play(settings, seed=5)
    history = build_timeline(read(world.text))
    is_decided = [iteration.decision is not None for iteration in read(world.text)]
    shown = [
        num for num, is_it in zip(history.num_context_tokens, is_decided, strict=True) if is_it
    ]
    assert shown == [batch.num_context_tokens for batch in world.batches]
    spans = [span for row in history.rows for span in row.spans]
    in_spans = sum(
        s.num_tokens for s in spans if s.activity in (Activity.CONTEXT, Activity.RESUMED)
    )
    assert in_spans == sum(shown)
    assert settings.max_num_tokens is not None
    assert max(
        map(sum, zip(shown, [b.num_generation_requests for b in world.batches], strict=True))
    ) <= (settings.max_num_tokens)


def test_only_what_is_computed_again_is_recomputed() -> None:
    world = play(CASES["paused"], seed=7)
    spans = [span for row in build_timeline(read(world.text)).rows for span in row.spans]
    recomputed = sum(span.num_tokens for span in spans if span.activity is Activity.RESUMED)
    assert read_workload(read(world.text)).latencies.summary().num_recomputed_tokens == recomputed
    paused: set[int] = set()
    num_decided = 0
    for iteration in read(world.text):
        if iteration.decision is not None:
            chunks = [c for c in iteration.decision.context if c.request_id in paused]
            num_decided += sum(chunk.num_tokens for chunk in chunks)
            paused.update(iteration.decision.paused)
    assert 0 < recomputed < num_decided / 2, "most of what a pause gives up is still cached"


@all_cases
def test_a_prediction_with_the_true_prices_is_what_was_measured(settings: Settings) -> None:
    world = talk(settings)
    assert world.manager.reuse_stats.hit_rate > 0.3
    workload = read_workload(read(world.text))
    measured = workload.latencies.summary()
    predicted = predict(settings, workload.jobs, PRICES, book=workload.book)
    assert predicted.num_tokens == measured.num_tokens
    assert predicted.num_pauses == measured.num_pauses == world.num_pauses
    assert predicted.num_recomputed_tokens == measured.num_recomputed_tokens
    for name in ("seconds", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99"):
        assert getattr(predicted, name) == pytest.approx(getattr(measured, name), abs=0.005), name
    unlike = [job._replace(text_number=None) for job in workload.jobs]
    assert predict(settings, unlike, PRICES).seconds > 1.1 * measured.seconds


@all_cases
def test_a_prediction_is_recorded_as_it_was(settings: Settings) -> None:
    """More texts than 32 bits hold with a place each."""
    workload = read_workload(read(talk(settings, num_talks=100).text))
    clock = Clock()
    recorder = FlightRecorder(settings, software="whatif", clock=clock)
    arguments = settings, workload.jobs, PRICES
    summary = predict(*arguments, book=workload.book, recorder=recorder, clock=clock)
    text = "".join(recorder.lines())
    result = replay(read(text))
    assert result.divergence is None, str(result)
    again = read_workload(read(text))
    assert again.latencies.summary() == summary
    assert predict(settings, again.jobs, PRICES, book=again.book) == summary
    for load, microseconds in again.samples:
        assert PRICES.predict(load) == microseconds


def test_whom_a_text_is_like_need_not_have_been_answered() -> None:
    """Two prompts begin like a third one, which was stopped before its first token."""
    settings = replace(BASE, policy=GUARANTEED)
    world = RecordedWorld(settings, prices=PRICES)
    first, *others = [make_request(number, 20, 3, family=1) for number in (1, 2, 3)]
    world.arrive(first)
    world.iterate([first], "failed")
    for request in others:
        world.arrive(request)
        world.iterate()
    while world.active:
        world.iterate()
    workload = read_workload(read(world.text))
    assert [job.text_number for job in workload.jobs] == [0, 1, 2]
    contexts = [load.num_context_tokens for load, _ in workload.samples if load[0]]
    predicted = predict(settings, workload.jobs[1:], PRICES, book=workload.book)
    assert contexts == [20, 1]
    assert predicted.ttft_p50 < 0.5 * predicted.ttft_p99


def test_jobs_without_the_book_of_their_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="the book that holds them"):
        predict(BASE, [Job(0, 4, 4, 4, text_number=0)], PRICES)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_made_up_jobs_share_nothing(is_overlapped: bool) -> None:
    jobs = make_workload(50.0, (1, 30), (1, 40), 80, seed=3)
    settings = replace(BASE, policy=GUARANTEED, max_num_tokens=64, is_overlapped=is_overlapped)
    clock = Clock()
    recorder = FlightRecorder(settings, clock=clock)
    summary = predict(settings, jobs, PRICES, recorder=recorder, clock=clock)
    assert summary == predict(replace(settings, enable_reuse=False), jobs, PRICES)
    text = "".join(recorder.lines())
    assert sum(build_timeline(read(text)).num_context_tokens) == sum(job.prompt_len for job in jobs)
    assert replay(read(text)).divergence is None


def test_a_scheduler_of_the_user_took_the_tokens_that_ran() -> None:
    world = play(replace(BASE, policy=GUARANTEED), max_iterations=30, seed=5)
    request = make_request(1000, 22, 2, family=1)
    cached = world.manager.count_reusable_tokens(request)
    assert cached >= 8
    waiting = make_request(1001, 22, 2)
    reasons = explain_left_out(
        "Mine",
        [request, waiting],
        ([request], [], []),
        block_manager=world.manager,
        max_batch_size=8,
        max_num_tokens=40,
    )
    assert reasons[1001].left_out == LeftOut("Mine", 1, 8, 22 - cached, 40)
