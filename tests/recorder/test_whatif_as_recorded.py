"""A prediction with the true prices is what was measured: priorities, beams, drafts, deadlines."""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from inflight_recorder.header import Header
from inflight_recorder.lines import LineReader, LineWriter
from recorder.recorded import (
    GUARANTEED,
    MAX_UTILIZATION,
    RecordedWorld,
    SearchingWorld,
    read,
    searching,
)
from recorder.searching import SearchingWorld as OverlappedSearchingWorld
from recorder.test_recorded_drafts import DraftingWorld
from scheduler.world import make_request

from inflight_recorder import beams
from inflight_recorder.cost_model import CostModel
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.replay import replay
from inflight_recorder.settings import Lists, RecordingError, Settings, scheduler_of
from inflight_recorder.timeline import build_timeline
from inflight_recorder.whatif import Clock, predict
from inflight_recorder.workload import Job, Latencies, RecordedWorkload, Summary, read_workload
from inflight_scheduler import BatchPlanner, LlmRequest, RequestScheduler, rank_at_arrival

PRICES = CostModel(900.0, 120.0, 40.0, 25.0, 1.0)  # whole microseconds, as recorded times are


def serve(
    world: RecordedWorld, requests: Iterable[LlmRequest], patience_us: int | None = None
) -> RecordedWorld:
    """Requests come some milliseconds apart and wait for a place in their order.

    With a patience, whoever has no token by then has expired.
    """
    settings, rng = world.recorder.settings, random.Random(5)
    came: dict[int, int] = {}
    coming, queue = [], list[tuple[float, int, LlmRequest]]()
    time_us = 0
    for number, request in enumerate(requests, start=1):
        time_us += rng.randint(0, 2500)
        came[request.request_id], request.arrival = time_us, number
        coming.append(request)
    while coming or queue or world.active or world.running:
        if not world.active and not world.running and not queue:
            world.clock.time_us = max(world.clock.time_us, float(came[coming[0].request_id]))
        now = world.clock.time_us
        while coming and came[coming[0].request_id] <= now:
            request = coming.pop(0)
            assert request.arrival is not None
            rank = rank_at_arrival(request.arrival, request.priority, settings.priority_span)
            heapq.heappush(queue, (rank, request.arrival, request))
        while queue and len(world.active) < settings.max_batch_size:
            _, _, request = heapq.heappop(queue)
            world.arrive(request, came[request.request_id] * 1000)
        for request in list(world.active):
            is_late = patience_us is not None and came[request.request_id] + patience_us <= now
            if is_late and request.num_generated_tokens == 0:
                world.end(request, "late")
        if world.active or world.running:
            world.iterate()
        else:
            world.recorder.finish_iteration()
    return world


def predicted(settings: Settings, workload: RecordedWorkload) -> tuple[Summary, str]:
    """A prediction with the true prices, and its recording, which replays."""
    clock = Clock()
    recorder = FlightRecorder(settings, software="whatif", clock=clock)
    summary = predict(
        settings, workload.jobs, PRICES, book=workload.book, recorder=recorder, clock=clock
    )
    text = "".join(recorder.lines())
    result = replay(read(text))
    assert result.divergence is None, str(result)
    assert read_workload(read(text)).latencies.summary() == replace(summary, num_refused=0)
    return summary, text


def check_as_recorded(world: RecordedWorld) -> Summary:
    """The prediction under the recorded settings is what was measured, which is returned."""
    workload = read_workload(read(world.text))
    for load, microseconds in workload.samples:
        assert PRICES.predict(load) == microseconds
    measured = workload.latencies.summary()
    summary, text = predicted(world.recorder.settings, workload)
    assert summary == measured
    assert starts(text) == starts(world.text)
    return measured


def starts(text: str) -> list[int]:
    """The number of the iteration in which each request started, in order of their arrival; 0 for
    one that did not."""
    first = dict[int, int]()
    for iteration in read(text):
        for arrival in iteration.arrivals:
            first[arrival.request_id] = 0
        for chunk in iteration.decision.context if iteration.decision else ():
            first[chunk.request_id] = first[chunk.request_id] or iteration.number
    return [first[request_id] for request_id in sorted(first)]


ORDERED = Settings(GUARANTEED, 12, 4, 40)


@pytest.mark.parametrize("max_batch_size", [3, 40])
@pytest.mark.parametrize("span", [0, 5, 1000])
@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_the_urgent_start_first_as_they_did(
    policy: object, span: float, max_batch_size: int, is_overlapped: bool
) -> None:
    """Some wait for a place, others for blocks: the order is one."""
    settings = replace(
        ORDERED,
        policy=policy,  # type: ignore[arg-type]
        priority_span=span,
        max_batch_size=max_batch_size,
        is_overlapped=is_overlapped,
    )
    requests = [make_request(i, 8, 20, priority=float(i > 30)) for i in range(1, 41)]
    world = serve(RecordedWorld(settings, prices=PRICES), requests)
    check_as_recorded(world)
    first = starts(world.text)
    if span == 1000:
        assert max(first[30:]) < sorted(first[:30])[20]
    assert (first == sorted(first)) == (span == 0)


def test_another_span_is_another_order() -> None:
    requests = [make_request(i, 8, 20, priority=float(i > 30)) for i in range(1, 41)]
    workload = read_workload(read(serve(RecordedWorld(ORDERED, prices=PRICES), requests).text))
    _, text = predicted(replace(ORDERED, priority_span=0), workload)
    assert starts(text) == sorted(starts(text)), "the order of arrival"


SEARCHING = Settings(MAX_UTILIZATION, 30, 4, 8, 64)


@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
def test_beams_are_as_they_were(policy: object) -> None:
    """Their rows, their blocks and their pauses; what they generate twice counts once."""
    settings = replace(SEARCHING, policy=policy)  # type: ignore[arg-type]
    world = serve(SearchingWorld(settings, PRICES), map(searching, range(1, 25)))
    measured = check_as_recorded(world)
    assert (world.num_pauses > 0) == (policy is MAX_UTILIZATION)
    jobs = read_workload(read(world.text)).jobs
    assert measured.num_tokens == sum(job.num_new_tokens for job in jobs)
    assert any(job.num_new_tokens < 16 for job in jobs), "some ended early"
    assert {job.beam_width for job in jobs} == {3}


@pytest.mark.parametrize("is_equal", [False, True])
@pytest.mark.parametrize("has_others", [False, True])
@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
def test_overlapped_beams_are_as_they_were(
    policy: object, has_others: bool, is_equal: bool
) -> None:
    """A step with beams is waited for before the next decision; others run beside that.

    Some come in a turn in which only its tokens do, and are more urgent than those who wait.
    """
    settings = replace(SEARCHING, policy=policy, num_blocks=18, is_overlapped=True)  # type: ignore[arg-type]
    priorities = [0.5 if is_equal else (0.0, 0.5, 0.9)[i % 3] for i in range(24)]
    requests = [
        make_request(i, 5, 15, priority=priority)
        if has_others and i % 3 == 0
        else searching(i, priority=priority)
        for i, priority in enumerate(priorities, start=1)
    ]
    world = serve(OverlappedSearchingWorld(settings, PRICES), requests)
    measured = check_as_recorded(world)
    assert (world.num_pauses > 0) == (policy is MAX_UTILIZATION)
    assert measured.num_requests == 24


def test_searches_that_are_over_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 24 have more entries than there may be at once, the 8 that run have not."""
    world = serve(SearchingWorld(SEARCHING, PRICES), map(searching, range(1, 25)))
    monkeypatch.setattr(beams, "MAX_BEAM_ENTRIES", 8 * 3 * -(-(9 + 16) // 4))
    check_as_recorded(world)
    monkeypatch.setattr(beams, "MAX_BEAM_ENTRIES", 40)
    with pytest.raises(RecordingError, match="have more than 40 blocks"):
        replay(read(world.text))


def test_beams_under_other_settings() -> None:
    """Overlapped, with fewer blocks, in an iteration too small for them."""
    mixed = [searching(i) if i % 3 else make_request(i, 5, 9) for i in range(1, 25)]
    workload = read_workload(read(serve(SearchingWorld(SEARCHING, PRICES), mixed).text))
    num_tokens = sum(job.num_new_tokens for job in workload.jobs)
    for changes in ({"is_overlapped": True}, {"num_blocks": 21}, {"policy": GUARANTEED}):
        summary, _ = predicted(replace(SEARCHING, **changes), workload)
        assert (summary.num_requests, summary.num_tokens) == (24, num_tokens)
    few = replace(SEARCHING, num_blocks=14)
    assert predicted(few, workload)[0].num_refused > 0, "three rows of one take more"


class GuessingWorld(DraftingWorld):
    """Guesses as the server does: for everybody, while all generate and few are active."""

    def _guess(self) -> None:
        limit = self.recorder.settings.max_drafting_batch
        assert limit is not None
        if len(self.active) <= limit and len(self.active.generation) == len(self.active):
            super()._guess()


DRAFTING = Settings(GUARANTEED, 200, 4, 6, max_drafting_batch=5)


@pytest.mark.parametrize("reuse", [(False, False), (True, True)])
def test_drafts_are_as_they_were(reuse: tuple[bool, bool]) -> None:
    settings = replace(DRAFTING, enable_reuse=reuse[0], may_copy_blocks=reuse[1])
    world = GuessingWorld(settings, 3, PRICES)
    requests = [make_request(i, 5 + i % 9, 12 + i % 20) for i in range(1, 31)]
    for request in requests[::3]:
        request.set_draft_tokens([0, 5])  # those of a client
    serve(world, requests)
    measured = check_as_recorded(world)
    assert world.num_accepted > 20
    assert measured.num_tokens == sum(request.max_new_tokens for request in requests)


def test_drafts_of_a_client_are_not_sent_again_after_a_pause() -> None:
    settings = replace(DRAFTING, policy=MAX_UTILIZATION, num_blocks=12, max_drafting_batch=0)
    world = GuessingWorld(settings, 3, PRICES)
    requests = [make_request(i, 5 + i % 9, 12 + i % 20) for i in range(1, 31)]
    for request in requests:
        request.set_draft_tokens([0, 5])
    serve(world, requests)
    check_as_recorded(world)
    assert world.num_pauses > 10
    drafts = [each for iteration in read(world.text) for each in iteration.drafts]
    assert any(each.num_gained > 1 for each in drafts)


def test_nobody_is_paused_for_drafts() -> None:
    """Two requests fill the pool and end before they need more; eight drafts would."""
    settings = Settings(MAX_UTILIZATION, 4, 4, 2, max_drafting_batch=2)
    jobs = [Job(0, 4, 12, 4, drafts={1: (8, 2)}), Job(0, 4, 4, 4)]
    for num_blocks, num_drafts in ((4, 0), (6, 8)):
        recorder = FlightRecorder(settings, clock=(clock := Clock()))
        now = replace(settings, num_blocks=num_blocks)
        summary = predict(now, jobs, PRICES, recorder=recorder, clock=clock)
        assert (summary.num_pauses, summary.num_tokens) == (0, 8)
        iterations = read("".join(recorder.lines()))
        assert sum(each.num_drafts for i in iterations for each in i.drafts) == num_drafts


def test_drafts_under_other_settings() -> None:
    world = GuessingWorld(DRAFTING, 3, PRICES)
    serve(world, [make_request(i, 5 + i % 9, 12 + i % 20) for i in range(1, 31)])
    workload = read_workload(read(world.text))
    num_tokens = sum(job.num_new_tokens for job in workload.jobs)
    plain, _ = predicted(replace(DRAFTING, max_drafting_batch=0), workload)
    for changes in (
        {"is_overlapped": True},
        {"policy": MAX_UTILIZATION, "num_blocks": 14},
        {"max_num_tokens": 20},
        {"max_drafting_batch": None},
    ):
        summary, text = predicted(replace(DRAFTING, **changes), workload)
        assert (summary.num_requests, summary.num_tokens) == (30, num_tokens)
        assert any(iteration.drafts for iteration in read(text))
        if changes == {"max_num_tokens": 20}:
            assert summary.seconds < plain.seconds


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_who_expired_expires_again_and_runs_where_there_is_room(is_overlapped: bool) -> None:
    settings = replace(ORDERED, is_overlapped=is_overlapped)
    requests = [make_request(i, 8, 20) for i in range(1, 41)]
    world = serve(RecordedWorld(settings, prices=PRICES), requests, patience_us=30_000)
    measured = check_as_recorded(world)
    assert 10 < measured.num_unanswered < 40 == measured.num_requests
    workload = read_workload(read(world.text))
    assert len(workload.jobs) == 40
    roomy, _ = predicted(replace(settings, num_blocks=400), workload)
    assert (roomy.num_unanswered, roomy.num_tokens) == (0, 800)
    narrow = predict(replace(settings, max_batch_size=2), workload.jobs, PRICES)
    assert narrow.num_unanswered >= measured.num_unanswered, "in the queue, too"


def test_patience_is_the_time_from_arrival_to_end() -> None:
    world = RecordedWorld(replace(ORDERED, num_blocks=6), prices=PRICES)
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


def test_who_was_in_flight_before_counts_from_there() -> None:
    latencies = Latencies()
    latencies.found(7, 100, 500)
    latencies.advanced(7, 1000, 101)
    latencies.advanced(7, 1500, 102)
    assert latencies.summary().num_tokens == 2
    assert (latencies.summary().seconds, latencies.summary().itl_p99) == (0.001, 0.5)


class Stubborn(RequestScheduler):
    """A user's scheduler that its guard overrules in every other decision."""

    is_overruled = False

    def __init__(self, settings: Settings, planner: BatchPlanner) -> None:
        self.ours = scheduler_of(MAX_UTILIZATION, settings, planner)

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: object
    ) -> Lists:
        self.is_overruled = not self.is_overruled
        return self.ours.schedule_request(active_requests, ())


def test_under_a_scheduler_of_the_user_a_prediction_refuses_and_tells_as_the_server() -> None:
    settings = Settings(GUARANTEED, 24, 4, 8, 40, scheduler_class="mine:Stubborn")
    jobs = [Job(0, 10, 10, 10), Job(0, 30, 20, 20)]
    clock = Clock()
    recorder = FlightRecorder(settings, clock=clock)
    summary = predict(
        settings, jobs, PRICES, make_scheduler=Stubborn, recorder=recorder, clock=clock
    )
    assert (summary.num_refused, summary.num_requests) == (1, 1), "a pause could be its end"
    told = [i.is_by_default for i in read("".join(recorder.lines())) if i.decision is not None]
    assert told == [True, False] * 5
    assert predict(replace(settings, scheduler_class=None), jobs, PRICES).num_refused == 0
    build_timeline(read("".join(recorder.lines())))


def header_with(**changes: object) -> str:
    """The recording of one request whose header says something else."""
    world = serve(RecordedWorld(ORDERED, prices=PRICES), [make_request(1, 4, 3)])
    first, _, rest = world.text.partition("\n")
    content = json.loads(first)
    for name, value in changes.items():
        content["settings"].pop(name)
        if value is not None:
            content["settings"][name] = value
    return json.dumps(content) + "\n" + rest


def test_a_recording_from_before_the_new_settings_is_read() -> None:
    reader = read(header_with(priority_span=None, max_drafting_batch=None))
    assert reader.header.settings == ORDERED
    assert (ORDERED.priority_span, ORDERED.max_drafting_batch) == (1000, None)
    settings = replace(ORDERED, priority_span=2.5, max_drafting_batch=7)
    assert LineReader().header(LineWriter().header(Header(settings))).settings == settings


@pytest.mark.parametrize("span", [-1, True, "5", [5], math.inf, math.nan, 10**400])
def test_a_span_that_is_no_span_is_refused(span: object) -> None:
    with pytest.raises(
        RecordingError, match=r"priority_span is .*: it must be a number, 0 or more"
    ):
        replay(read(header_with(priority_span=span)))
