"""A prediction with the true prices is what was measured, and differs where settings do."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from support.recorder_worlds import (
    BASE,
    GUARANTEED,
    MAX_UTILIZATION,
    PRICES,
    DraftingWorld,
    RecordedWorld,
    SearchingWorld,
    TextSink,
    read,
    searching,
)
from support.scheduler_world import make_request

from inflight_recorder import simulator, whatif
from inflight_recorder.cost_model import Load, Sample, fit_cost_model
from inflight_recorder.replay import replay
from inflight_recorder.settings import Lists, RecordingError, Settings, scheduler_of
from inflight_recorder.timeline import build_timeline
from inflight_recorder.whatif import predict
from inflight_recorder.workload import (
    Job,
    Summary,
    Workload,
    make_workload,
    read_workload,
)
from inflight_scheduler import (
    BatchPlanner,
    CapacitySchedulerPolicy,
    ContextChunking,
    LlmRequest,
    RequestScheduler,
    rank_at_arrival,
)

ORDERED = Settings(GUARANTEED, 12, 4, 40)
SEARCHING = Settings(MAX_UTILIZATION, 30, 4, 8, 64)
DRAFTING = Settings(GUARANTEED, 200, 4, 6, max_drafting_batch=5)


def serve(
    world: RecordedWorld,
    requests: Iterable[LlmRequest],
    patience_us: int | None = None,
    reply: Callable[[LlmRequest], LlmRequest | None] = lambda _: None,
) -> RecordedWorld:
    """Requests come some milliseconds apart and wait for a place in their order.

    With a patience, one that has no token by then has expired. ``reply`` is the request that comes
    as soon as one has ended.
    """
    settings, rng = world.recorder.settings, random.Random(5)
    came: dict[int, int] = {}
    coming, queue = deque[LlmRequest](), list[tuple[float, int, LlmRequest]]()

    def come(request: LlmRequest, time_us: int) -> None:
        came[request.request_id], request.arrival = time_us, len(came) + 1
        coming.append(request)

    time_us = 0
    for request in requests:
        time_us += rng.randint(0, 2500)
        come(request, time_us)
    while coming or queue or world.active or world.is_running:
        if not world.active and not world.is_running and not queue:
            world.clock.time_us = max(world.clock.time_us, float(came[coming[0].request_id]))
        now = world.clock.time_us
        while coming and came[coming[0].request_id] <= now:
            request = coming.popleft()
            assert request.arrival is not None
            rank = rank_at_arrival(request.arrival, request.priority, settings.priority_span)
            heapq.heappush(queue, (rank, request.arrival, request))
        while queue and len(world.active) < settings.max_batch_size:
            _, _, request = heapq.heappop(queue)
            world.arrive(request, came[request.request_id] * 1000)
        if patience_us is not None:
            expire(world, {each for each in came if came[each] + patience_us <= now})
        num_finished = len(world.finished)
        if world.active or world.is_running:
            world.iterate()
        else:
            world.recorder.finish_iteration()
        for next_one in filter(None, map(reply, world.finished[num_finished:])):
            last_us = came[coming[-1].request_id] if coming else 0
            come(next_one, max(int(world.clock.time_us), last_us))
    return world


def expire(world: RecordedWorld, late_ids: set[int]) -> None:
    """End those that have no token."""
    for request in list(world.active):
        if request.request_id in late_ids and request.num_generated_tokens == 0:
            world.end(request, "late")


def predicted(settings: Settings, workload: Workload) -> tuple[Summary, str]:
    """A prediction with the true prices, and its recording, which replays."""
    sink = TextSink()
    summary = predict(settings, workload.jobs, PRICES, sink=sink)
    result = replay(read(sink.text))
    assert result.divergence is None, str(result)
    again = read_workload(read(sink.text))
    assert again.latencies.summary(reuse=again.reuse) == replace(summary, num_refused=0)
    assert predict(settings, workload.jobs, PRICES) == summary, (
        "turns are skipped where none records"
    )
    return summary, sink.text


def check_as_recorded(world: RecordedWorld) -> Summary:
    """The prediction under the recorded settings is what was measured, which is returned."""
    workload = read_workload(read(world.text))
    for load, microseconds in workload.samples:
        assert PRICES.predict(load) == microseconds
    measured = workload.latencies.summary(reuse=workload.reuse)
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


@pytest.mark.fast(2)
@pytest.mark.parametrize("max_batch_size", [3, 40])
@pytest.mark.parametrize("span", [0, 5, 1000])
@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_urgent_requests_start_first_as_they_did(
    policy: CapacitySchedulerPolicy, span: float, max_batch_size: int, is_overlapped: bool
) -> None:
    """Some wait for a place, others for blocks: the order is one."""
    settings = replace(
        ORDERED,
        policy=policy,
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


@pytest.mark.fast(4)
@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
@pytest.mark.parametrize("is_equal", [False, True])
@pytest.mark.parametrize("has_others", [False, True])
def test_beams_are_as_they_were(
    policy: CapacitySchedulerPolicy, is_overlapped: bool, has_others: bool, is_equal: bool
) -> None:
    """Their rows, their blocks and their pauses; what they generate twice counts once.

    An overlapped step with beams is waited for before the next decision; others run beside that.
    Some come in a turn in which only its tokens do, and are more urgent than those that wait.
    """
    settings = replace(SEARCHING, policy=policy, num_blocks=18, is_overlapped=is_overlapped)
    priorities = [0.5 if is_equal else (0.0, 0.5, 0.9)[i % 3] for i in range(24)]
    requests = [
        make_request(i, 5, 15, priority=priority)
        if has_others and i % 3 == 0
        else searching(i, priority=priority)
        for i, priority in enumerate(priorities, start=1)
    ]
    world = serve(SearchingWorld(settings, PRICES), requests)
    measured = check_as_recorded(world)
    assert (world.num_pauses > 0) == (policy is MAX_UTILIZATION)
    jobs = read_workload(read(world.text)).jobs
    assert measured.num_requests == 24
    assert measured.num_tokens == sum(job.num_new_tokens for job in jobs)
    assert {job.beam_width for job in jobs} == ({1, 2, 3} if has_others else {2, 3})


def test_searches_that_are_over_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 24 have more entries than there may be at once, the 8 that run have not."""
    world = serve(SearchingWorld(SEARCHING, PRICES), map(searching, range(1, 25)))
    monkeypatch.setattr(simulator, "MAX_BEAM_ENTRIES", 8 * 3 * -(-(9 + 16) // 4))
    check_as_recorded(world)
    monkeypatch.setattr(simulator, "MAX_BEAM_ENTRIES", 40)
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


def test_no_request_is_paused_for_drafts() -> None:
    """Two requests fill the pool and end before they need more; eight drafts would."""
    settings = Settings(MAX_UTILIZATION, 4, 4, 2, max_drafting_batch=2)
    jobs = [Job(0, 4, 12, 4, drafts={1: (8, 2)}), Job(0, 4, 4, 4)]
    for num_blocks, num_drafts in ((4, 0), (6, 8)):
        sink = TextSink()
        summary = predict(replace(settings, num_blocks=num_blocks), jobs, PRICES, sink=sink)
        assert (summary.num_pauses, summary.num_tokens) == (0, 8)
        assert sum(each.num_drafts for i in read(sink.text) for each in i.drafts) == num_drafts


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
def test_an_expired_request_expires_again_and_runs_where_there_is_room(is_overlapped: bool) -> None:
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
    jobs, sink = [Job(0, 10, 10, 10), Job(0, 30, 20, 20)], TextSink()
    summary = predict(settings, jobs, PRICES, make_scheduler=Stubborn, sink=sink)
    assert (summary.num_refused, summary.num_requests) == (1, 1), "a pause could be its end"
    told = [i.is_by_default for i in read(sink.text) if i.decision is not None]
    assert told == [True, False] * 5
    assert predict(replace(settings, scheduler_class=None), jobs, PRICES).num_refused == 0
    build_timeline(read(sink.text))


def talk(settings: Settings, num_talks: int) -> RecordedWorld:
    """Requests with one of three beginnings come, and come again with their answer.

    None ends early, so a prediction has the same tokens to generate.
    """
    rng = random.Random(1)
    requests = []
    for number in range(1, num_talks + 1):
        text = make_request(number, rng.randint(8, 24), family=rng.randint(1, 3)).tokens
        own = [90 + number] * rng.randint(1, 3)
        requests.append(LlmRequest(number, [*text[:-3], *own], rng.randint(3, 8)))
    ids = count(num_talks + 1)

    def reply(request: LlmRequest) -> LlmRequest | None:
        if request.request_id > num_talks or request.num_tokens >= 30:
            return None
        return LlmRequest(next(ids), [*request.tokens, 88], 4)

    return serve(RecordedWorld(settings, prices=PRICES), requests, reply=reply)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"policy": GUARANTEED},
        {"chunking": ContextChunking(unit_size=4)},
        {"is_overlapped": True},
        {"chunking": ContextChunking(unit_size=4), "is_overlapped": True},
    ],
)
@pytest.mark.parametrize("may_copy", [False, True])
def test_cached_blocks_are_found_again(changes: dict[str, Any], may_copy: bool) -> None:
    """What of a further block was found cached is approximated under other settings, and here."""
    settings = replace(BASE, may_copy_blocks=may_copy, **changes)
    world = talk(settings, num_talks=40)
    assert world.manager.reuse_stats.hit_rate > 0.3
    workload = read_workload(read(world.text))
    measured = workload.latencies.summary(reuse=workload.reuse)
    summary, text = predicted(settings, workload)
    if may_copy:
        assert summary.seconds == pytest.approx(measured.seconds, rel=0.03)
        assert summary.ttft_p50 == pytest.approx(measured.ttft_p50, rel=0.1)
    else:
        assert summary == measured
        again = read_workload(read(text))
        assert predict(settings, again.jobs, PRICES) == summary
    unlike = [replace(job, hashes=b"", partial_matches={}) for job in workload.jobs]
    assert predict(settings, unlike, PRICES).seconds > 1.1 * measured.seconds


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_made_up_jobs_share_nothing(is_overlapped: bool) -> None:
    jobs = make_workload(50.0, (1, 30), (1, 40), 80, seed=3)
    settings = replace(BASE, policy=GUARANTEED, max_num_tokens=64, is_overlapped=is_overlapped)
    sink = TextSink()
    summary = predict(settings, jobs, PRICES, sink=sink)
    assert summary == predict(replace(settings, enable_reuse=False), jobs, PRICES)
    shown = build_timeline(read(sink.text)).num_context_tokens
    assert sum(shown) == sum(job.prompt_len for job in jobs)


SETTINGS = Settings(MAX_UTILIZATION, 24, 4, 8, 64)
JOBS = make_workload(50.0, (1, 30), (1, 40), 60, seed=3)


def test_a_prediction_has_the_slow_iterations_and_is_the_same_each_time() -> None:
    load = Load(0, 0, 10, 1000)
    samples = [Sample(load, 2000 + 90_000 * (n % 20 == 7)) for n in range(1000)]
    cost = fit_cost_model(samples)
    even = cost._replace(noise=(cost.mean_noise,))
    first, again, smooth = (predict(SETTINGS, JOBS, each) for each in (cost, cost, even))
    assert first == again
    assert first.itl_p50 < smooth.itl_p50
    assert first.itl_p99 > smooth.itl_p99 + 10


def test_a_prediction_is_arithmetic() -> None:
    """One job: a context of 10 tokens, then 3 steps with 10, 11 and 12 tokens cached."""
    summary = predict(Settings(GUARANTEED, 24, 4, 8), [Job(1000, 10, 4, 4)], PRICES)
    context = 900 + 120 * 10 + 40
    steps = [900 + 25 + cached for cached in (10, 11, 12)]
    assert summary.ttft_p50 == pytest.approx(context / 1000, abs=0.002)
    assert summary.seconds == pytest.approx((context + sum(steps)) / 1e6, abs=3e-6)
    assert summary.num_tokens == 4
    assert summary.tokens_per_second == pytest.approx(4 / summary.seconds)


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
    """So the bound, a hundred times that, is too low for no recording of requests that ended."""
    settings = replace(SETTINGS, is_overlapped=is_overlapped)
    workload = read_workload(read(predicted(settings, Workload(jobs=JOBS))[1]))
    monkeypatch.setattr(whatif, "MIN_STEPS", 0)
    monkeypatch.setattr(whatif, "STEPS_PER_STEP", 1)
    predict(settings, workload.jobs, PRICES, num_recorded_steps=workload.num_steps)
    with pytest.raises(RecordingError, match="this prediction takes more than"):
        predict(settings, workload.jobs, PRICES, num_recorded_steps=(workload.num_steps or 0) - 1)
