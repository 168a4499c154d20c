"""What a what-if takes from a recording: jobs, samples and latencies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.recorder_worlds import BASE, GUARANTEED, PRICES, RecordedWorld, long_ring, play, read
from support.scheduler_world import make_request

from inflight_recorder.settings import Settings
from inflight_recorder.timeline import Activity, build_timeline
from inflight_recorder.whatif import predict
from inflight_recorder.workload import Latencies, make_workload, read_workload
from inflight_scheduler import ContextChunking

SETTINGS = replace(BASE, enable_reuse=False, may_copy_blocks=False, max_num_tokens=64)
REUSING = [
    BASE,
    replace(BASE, policy=GUARANTEED),
    replace(BASE, chunking=ContextChunking(unit_size=4)),
    replace(BASE, is_overlapped=True),
]


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


def test_tokens_that_come_at_once_share_the_time() -> None:
    latencies = Latencies()
    latencies.arrived(1, 0)
    latencies.advanced(1, 1000, 1)
    latencies.advanced(1, 4000, 4)
    latencies.advanced(1, 5000, 2)  # beams that were paused
    latencies.advanced(1, 6000, 5)
    assert latencies.ended(1) == 5
    summary = latencies.summary()
    assert (summary.num_tokens, summary.ttft_p50, summary.itl_p50) == (5, 1.0, 1.0)
    assert (summary.itl_p99, summary.seconds) == (2.0, 0.006)


def test_a_request_in_flight_before_counts_from_there() -> None:
    latencies = Latencies()
    request = make_request(7)
    for token in range(3):
        request.add_new_token(token)
    latencies.found(request, 500)
    latencies.advanced(7, 1000, 4)
    latencies.advanced(7, 1500, 5)
    assert latencies.summary().num_tokens == 2
    assert (latencies.summary().seconds, latencies.summary().itl_p99) == (0.001, 0.5)


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


def test_patience_is_the_time_from_arrival_to_end() -> None:
    world = RecordedWorld(Settings(GUARANTEED, 6, 4, 40), prices=PRICES)
    world.arrive(make_request(1, 8, 16), 0)
    world.iterate()
    late, came_us = make_request(2, 8, 16), int(world.clock.time_us) - 70
    world.arrive(late, came_us * 1000)
    for _ in range(4):
        world.iterate()
    ended_us = int(world.clock.time_us)
    world.end(late, "late")
    world.iterate()
    jobs = read_workload(read(world.text)).jobs
    assert [job.patience_us for job in jobs] == [None, ended_us - came_us]


def test_a_ring_is_measured_from_its_beginning() -> None:
    """Requests before and behind it are counted."""
    text = long_ring()
    iterations = list(read(text))
    span = (iterations[-1].start_us + iterations[-1].step_us - iterations[0].start_us) / 1e6
    workload = read_workload(read(text))
    measured = workload.latencies.summary()
    num_tokens = sum(i.decision.num_requests for i in iterations if i.decision)
    assert measured.num_tokens == num_tokens
    assert measured.seconds == pytest.approx(span)
    assert measured.tokens_per_second == pytest.approx(num_tokens / span)
    assert (workload.num_found, workload.num_unended) == (20, 3)
    assert [job.num_new_tokens for job in workload.jobs] == [400, 5, 400, 5, 400, 5]
    summary = predict(Settings(GUARANTEED, 3000, 4, 40, 640), workload.jobs, PRICES)
    assert (summary.num_requests, summary.num_tokens) == (6, 1215)


@pytest.mark.parametrize("settings", REUSING)
def test_the_work_of_each_iteration_is_that_of_its_batch(settings: Settings) -> None:
    """With block reuse it is told by the time alone, in samples and in the timeline."""
    world = play(settings, world=RecordedWorld(settings, prices=PRICES), seed=5)
    assert world.manager.reuse_stats.num_reused_blocks > 20
    samples = read_workload(read(world.text)).samples
    assert len(samples) > len(world.batches) // 2
    for load, microseconds in samples:
        assert PRICES.predict(load) == microseconds
    timeline = build_timeline(read(world.text))
    is_decided = [iteration.decision is not None for iteration in read(world.text)]
    pairs = zip(timeline.num_context_tokens, is_decided, strict=True)
    assert [num for num, is_it in pairs if is_it] == [b.num_context_tokens for b in world.batches]


def test_only_what_is_computed_again_is_recomputed() -> None:
    world = play(BASE, seed=7)
    lanes = build_timeline(read(world.text)).lanes
    intervals = [interval for lane in lanes for interval in lane.intervals]
    recomputed = sum(i.num_tokens for i in intervals if i.activity is Activity.RESUMED)
    assert read_workload(read(world.text)).latencies.summary().num_recomputed_tokens == recomputed
    paused: set[int] = set()
    num_decided = 0
    for iteration in read(world.text):
        if iteration.decision is not None:
            chunks = [c for c in iteration.decision.context if c.request_id in paused]
            num_decided += sum(chunk.num_tokens for chunk in chunks)
            paused.update(iteration.decision.paused)
    assert 0 < recomputed < num_decided / 2, "most of what a pause gives up is still cached"


def test_a_workload_is_repeatable_and_as_asked() -> None:
    jobs = make_workload(10.0, (5, 6), (7, 9), 2000, seed=1)
    assert jobs == make_workload(10.0, (5, 6), (7, 9), 2000, seed=1)
    assert {job.prompt_len for job in jobs} == {5, 6}
    assert {job.num_new_tokens for job in jobs} == {7, 8, 9}
    assert jobs[-1].arrival_us == pytest.approx(200e6, rel=0.1)
