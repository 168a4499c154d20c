"""Failures of steps and of the loop, and deadlines: which requests end, and that others run."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import pytest
import torch
from backend.manager.conftest import Clock
from support.manager_harness import (
    BOTH_LOOPS,
    GUARANTEED,
    LOOP_FAILED,
    MAX_UTILIZATION,
    STEP_FAILED,
    WAIT,
    GatedEngine,
    Recorder,
    assert_serves,
    fail_once,
    request,
    running,
    serve,
)
from support.triton_harness import wait_until
from support.triton_stub import CountedStep, CountingEngine

from inflight_backend.errors import ErrorText
from inflight_backend.manager import gpt_manager
from inflight_backend.manager.health import MAX_FAILURES_IN_A_ROW, DeadlineWatch, LoopHealth
from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_backend.manager.responses import make_tensors
from inflight_backend.manager.step_loop import OverlapScheduler, StepOutcome
from inflight_backend.requests.inference_request import InferenceRequest, NamedTensor
from inflight_scheduler import (
    ActiveRequests,
    BatchPlanner,
    BlockManager,
    CapacitySchedulerPolicy,
    LlmRequest,
    ScheduledBatch,
)


@pytest.mark.case(118)
@pytest.mark.parametrize("is_step_lost", [False, True])
def test_response_that_cannot_be_built_ends_only_its_request(
    monkeypatch: pytest.MonkeyPatch, is_step_lost: bool
) -> None:
    """With one final response, even if its next step is lost in the same iteration."""
    real = make_tensors

    def make(request: LlmRequest, is_final: bool, *more: Any) -> list[NamedTensor]:
        if request.request_id == 1 and request.num_tokens == 6:
            raise MemoryError
        return real(request, is_final, *more)

    monkeypatch.setattr(gpt_manager, "make_tensors", make)
    recorder = Recorder()
    with running(recorder) as manager:
        run_once = manager._steps.run_once

        def losing_run() -> StepOutcome:
            outcome = run_once()
            lost = [r for r in outcome.advanced if r.request_id == 1 and r.num_tokens == 6]
            return dataclasses.replace(outcome, failed=lost)

        if is_step_lost:
            monkeypatch.setattr(manager._steps, "run_once", losing_run)
        recorder.pending += [request(i, [100 * i], 20) for i in (1, 2)]
        recorder.wait_for_finals(1, 2)
        assert recorder.final_errors(1) == ["the response could not be built"]
        assert recorder.tokens(2) == list(range(201, 221))
        assert_serves(recorder, manager)


@pytest.mark.case(118)
def test_failing_release_after_a_failed_response_keeps_the_other_responses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Responses of the same iteration behind the failed one are sent, also a last one."""
    real = make_tensors
    recorder = Recorder()
    with running(recorder) as manager:
        once = fail_once(manager._batcher.block_manager, "release", AssertionError("ours"))

        def make(request: LlmRequest, is_final: bool, *more: Any) -> list[NamedTensor]:
            if request.request_id == 1 and request.num_tokens == 6:
                once.arm()
                raise MemoryError
            return real(request, is_final, *more)

        monkeypatch.setattr(gpt_manager, "make_tensors", make)
        recorder.pending += [request(1, [100], 20), request(2, [200], 5), request(3, [300], 20)]
        recorder.wait_for_finals(1, 2, 3)
        assert recorder.final_errors(1) == recorder.final_errors(3) == [LOOP_FAILED]
        assert recorder.final_errors(2) == [""]
        assert recorder.tokens(2) == list(range(201, 206))
        assert recorder.tokens(3) == list(range(301, 306))
        assert_serves(recorder, manager)


@pytest.mark.case(89, 118)
@pytest.mark.parametrize("error", [AssertionError("ours"), SystemExit("out")])
@pytest.mark.parametrize(
    "place", ["schedule", "update", "release", "measure", "plan", "ended", "remove", "order"]
)
@BOTH_LOOPS
def test_unexpected_exception_fails_all_requests_and_resets_the_loop(
    overlap: OverlapScheduler, place: str, error: BaseException
) -> None:
    recorder = Recorder()
    with running(recorder, overlap_scheduler=overlap) as manager:
        batcher = manager._batcher
        update = "update" if overlap is OverlapScheduler.OFF else "apply_tokens"
        once = {
            "schedule": lambda: fail_once(batcher, "schedule", error),
            "update": lambda: fail_once(batcher.planner, update, error),
            "plan": lambda: fail_once(batcher.planner, "plan", error),
            "release": lambda: fail_once(batcher.block_manager, "release", error),
            "measure": lambda: fail_once(manager, "_measure", error),
            "ended": lambda: fail_once(batcher.recorder, "ended", error),
            "remove": lambda: fail_once(batcher.active, "remove", error),
            "order": lambda: fail_once(batcher.active._phases[-1], "remove", error),
        }[place]()
        seen: list[bool] = []
        recorder.when(1, 5, once.arm)
        recorder.on_response = lambda request_id, is_final: (
            seen.append(manager.health.is_healthy) if is_final else None
        )
        # Request 3 ends while the other two run, which is when a release can fail.
        recorder.pending += [request(1, [1], 100), request(2, [2], 100), request(3, [3], 7)]
        recorder.wait_for_finals(1, 2, 3)
        for request_id in (1, 2):
            assert len(recorder.final_errors(request_id)) == 1
            assert recorder.final_errors(request_id)[0] in (LOOP_FAILED, STEP_FAILED)
        escapes = place not in ("update",) or not isinstance(error, Exception)
        assert seen[:2] == [not escapes] * 2, "readiness is false while the loop recovers"
        recorder.on_response = lambda request_id, is_final: None
        assert_serves(recorder, manager)


@BOTH_LOOPS
def test_step_whose_tokens_are_applied_in_part_ends_each_request_once(
    overlap: OverlapScheduler,
) -> None:
    """Request 1 has its last token already when applying the step of request 2 fails."""
    recorder, is_overlapped = Recorder(), overlap is OverlapScheduler.ON

    class Engine(CountingEngine):
        def execute(self, batch: ScheduledBatch) -> list[int]:
            tokens = super().execute(batch)
            if is_overlapped and [s.request_id for s in batch.setups] == [2]:
                once.arm()
                tokens[0] = -1  # what was computed of request 2 is to be forgotten
            return tokens

    with running(recorder, Engine(), overlap_scheduler=overlap) as manager:
        once = fail_once(
            manager._batcher.block_manager,
            "forget" if is_overlapped else "store",
            AssertionError("ours"),
        )

        def send_the_second(request_id: int, is_final: bool) -> None:
            if 2 not in recorder.responses and not sent:
                sent.append(request(2, [200], 20))
                recorder.pending += sent
                if not is_overlapped:
                    once.arm()  # its context ends in the step of the last token of 1

        sent: list[InferenceRequest] = []
        recorder.on_response = send_the_second
        recorder.pending += [request(1, [100], 3 if is_overlapped else 2)]
        recorder.wait_for_finals(1, 2)
        assert recorder.final_errors(1) == recorder.final_errors(2) == [STEP_FAILED]
        assert_serves(recorder, manager)


def test_request_that_cannot_be_released_gets_its_token_and_one_final(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder, params = Recorder(), TrtGptModelOptionalParams(max_batch_size=8, max_run_seconds=60)
    with running(recorder, params=params) as manager:
        apply, release, failures = manager._apply, BatchPlanner.release, [RuntimeError("ours")]

        def fail(each: LlmRequest) -> None:
            if (each.request_id, each.num_generated_tokens) == (2, 3):
                failures.append(RuntimeError("in the release"))
                raise failures.pop(0)
            apply(each)

        def fail_to_release(planner: BatchPlanner, each: LlmRequest) -> None:
            if each.request_id == 1 and len(recorder.responses[2]) == 2 and failures:
                raise failures.pop()
            release(planner, each)

        monkeypatch.setattr(manager, "_apply", fail)
        monkeypatch.setattr(BatchPlanner, "release", fail_to_release)
        recorder.pending += [request(1, [100], 20), request(2, [200], 20)]
        recorder.wait_for_finals(1, 2)
    assert not failures
    assert recorder.responses[1][2:] == [([103], False, ""), ([], True, LOOP_FAILED)]
    assert recorder.responses[2][2:] == [([], True, LOOP_FAILED)]


def test_engine_that_fails_to_start_raises_and_leaves_no_thread() -> None:
    engine, others = CountingEngine(), set(threading.enumerate())
    fail_once(engine, "prepare_thread", RuntimeError("no product runs")).arm()
    with pytest.raises(RuntimeError, match="no product runs"), running(Recorder(), engine):
        pass
    started = set(threading.enumerate()) - others
    assert "GptManager" not in {thread.name for thread in started}


class _Failing(CountingEngine):
    """Raises ``error`` in ``place`` of the second step: execute, submit, or read."""

    def __init__(self, place: str, error: Exception) -> None:
        super().__init__()
        self._place, self._error = place, error

    def submit(self, batch: ScheduledBatch) -> CountedStep:
        step = super().submit(batch)
        self._fail("submit", batch)
        is_lost = self._place == "read" and batch.iteration == 1
        return dataclasses.replace(step, error=self._error if is_lost else None)

    def execute(self, batch: ScheduledBatch) -> list[int]:
        self._fail("execute", batch)
        return super().execute(batch)

    def _fail(self, place: str, batch: ScheduledBatch) -> None:
        if (place, batch.iteration) == (self._place, 1):
            raise self._error


def _accelerator_error(code: int) -> torch.AcceleratorError:
    error = torch.AcceleratorError("CUDA error")
    vars(error)["error_code"] = code  # as torch's own code does
    return error


@pytest.mark.parametrize("place", ["execute", "submit", "read"])
@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (_accelerator_error(700), True),  # an illegal address: every later call fails with it
        (_accelerator_error(2), False),  # no memory
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("shapes do not fit"), False),
    ],
)
def test_lost_device_is_unhealthy_at_once_and_for_good(
    place: str, error: Exception, is_lost: bool
) -> None:
    overlap = OverlapScheduler.OFF if place == "execute" else OverlapScheduler.ON
    recorder = Recorder([request(1, [1], 10)])
    with running(recorder, _Failing(place, error), overlap_scheduler=overlap) as manager:
        recorder.wait_for_finals(1)
        assert recorder.final_errors(1) == [STEP_FAILED]
        assert manager.health.is_healthy != is_lost
        recorder.pending.append(request(2, [20], 3))
        manager.wake()
        recorder.wait_for_finals(2)
        assert manager.health.is_healthy != is_lost


def test_repeated_failures_of_the_loop_are_unhealthy_until_it_works() -> None:
    recorder = Recorder()
    with running(recorder) as manager:
        first = manager._batcher
        for number in range(1, MAX_FAILURES_IN_A_ROW + 1):
            assert manager.health.is_healthy
            fail_once(manager._batcher, "schedule", RuntimeError("again")).arm()
            wait_until(lambda n=number: manager.health._num_failures_in_a_row == n)  # type: ignore[misc]
            wait_until(lambda: not manager.health._is_recovering)
        assert not manager.health.is_healthy
        assert manager._batcher is not first, "the second failure rebuilds it"
        assert_serves(recorder, manager)


@pytest.mark.parametrize("num_failed_steps", [0, 2])
def test_failures_of_the_loop_are_logged_ever_less_often(
    num_failed_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An idle loop has 20 turns a second. Failed steps do not hide a failure of the loop, and after
    a success the next one is logged again."""
    health = LoopHealth()
    for _ in range(num_failed_steps):
        health.note(is_completed=False, has_failed=True)
    for number in range(40):
        with health.recovering(number):
            raise SystemExit("in the rescue")
    assert not health.is_healthy
    health.note(is_completed=True, has_failed=False)
    assert health.is_healthy
    with health.recovering(99):
        pass
    logged = [1, 2, 4, 8, 16, 32]
    assert caplog.text.count("the rescue of the batch manager failed") == len(logged)
    assert [each for each in caplog.messages if "in a row" in each] == [
        f"the batch manager failed in iteration {number - 1} (failure {number} in a row)"
        for number in logged
    ] + ["the batch manager failed in iteration 99 (failure 1 in a row)"]


@pytest.mark.case(82, 83, 86)
@pytest.mark.parametrize("error", [MemoryError(), torch.cuda.OutOfMemoryError("2 GiB"), OSError()])
@pytest.mark.parametrize("iteration", [1, 4])
@pytest.mark.parametrize(
    ("policy", "overlap"),
    [(GUARANTEED, OverlapScheduler.OFF), (MAX_UTILIZATION, OverlapScheduler.ON)],
)
def test_failing_step_ends_only_its_requests(
    policy: CapacitySchedulerPolicy, overlap: OverlapScheduler, iteration: int, error: Exception
) -> None:
    """A context at iteration 1, generation at 4; two of five requests are not in that step."""

    def fail(batch: ScheduledBatch) -> None:
        if batch.iteration == iteration:
            raise error

    recorder = Recorder([request(i, [10 * i], 9) for i in range(1, 6)])
    engine = CountingEngine(num_blocks=64, before_step=fail)
    with running(recorder, engine, policy, max_batch_size=3, overlap_scheduler=overlap) as manager:
        recorder.wait_for_finals(*range(1, 6))
        for victim in (1, 2, 3):
            assert recorder.final_errors(victim) == [STEP_FAILED]
        for other in (4, 5):
            assert recorder.tokens(other) == list(range(10 * other + 1, 10 * other + 10))
            assert recorder.final_errors(other) == [""]
        assert_serves(recorder, manager)


LIMIT = 500.0
"""Seconds of a deadline, which passes when the clock of a test is set ahead."""


@pytest.mark.case(70)
@pytest.mark.parametrize("limit", ["max_queue_seconds", "max_run_seconds"])
def test_deadline_ends_requests_with_their_tokens_or_the_reason(limit: str, clock: Clock) -> None:
    """An empty answer would look like a short one."""
    engine = GatedEngine(num_blocks=8, tokens_per_block=4)
    recorder = Recorder([request(1, [1], 30), request(2, [9], 30), request(3, [5], 30)])
    params: dict[str, Any] = {"max_batch_size": 8, limit: LIMIT}
    with running(recorder, engine, **params) as manager:
        assert engine.has_begun.wait(WAIT)
        clock.ahead = LIMIT
        engine.go_on.set()
        recorder.wait_for_finals(1, 2, 3)
    if limit == "max_queue_seconds":
        assert recorder.tokens(1) == list(range(2, 32)), "it started before its deadline"
    else:
        assert recorder.responses[1] == [([2], False, ""), ([], True, "")]
    text = "not started before its deadline (place {} of 2): {}"
    no_room = "waiting for KV blocks: needs 8, free 0"
    behind = "behind 1 other, first of them request 2"
    assert recorder.responses[2] == [([], True, text.format(1, no_room))]
    assert recorder.responses[3] == [([], True, text.format(2, behind))]
    error = recorder.responses[2][0][2]
    assert isinstance(error, ErrorText)
    assert error.code == "UNAVAILABLE", "not our fault"
    assert manager.describe_load() == (
        "0 of 8 places are taken, 0 of those requests wait, and 8 of 8 KV blocks are free"
    )


def test_deadlines_of_ended_requests_end_no_later_one_and_each_counts_once() -> None:
    active = ActiveRequests(BlockManager(4, 4))
    watch = DeadlineWatch(active)
    far = time.monotonic() + 1000
    ended, late = (LlmRequest(1, [1], 1, queue_deadline=0.0, run_deadline=0.0) for _ in range(2))
    again = LlmRequest(1, [1], 1, queue_deadline=far, run_deadline=far)
    for request_, expired in ((ended, None), (again, []), (late, [late])):
        active.add(request_)
        watch.add(request_)
        if expired is not None:
            assert [entry.request for entry in watch.take_expired()] == expired
            assert watch.take_expired() == []
        active.remove(request_)


def test_paused_request_has_met_its_queue_deadline() -> None:
    """Its client may have tokens of it; only a run deadline ends it."""
    active = ActiveRequests(BlockManager(4, 4))
    watch = DeadlineWatch(active)
    paused, waiting = (LlmRequest(i, [1], 4, queue_deadline=0.0) for i in (1, 2))
    for each in (paused, waiting):
        active.add(each)
        watch.add(each)
    paused.pause()
    assert [entry.request for entry in watch.take_expired()] == [waiting]


@pytest.fixture
def _clock_that_jumps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the time of day finds it an hour earlier."""
    now = [time.time()]

    def clock() -> float:
        now[0] -= 3600.0
        return now[0]

    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(time, "time_ns", lambda: int(clock() * 1e9))


@pytest.mark.case(96)
@pytest.mark.usefixtures("_clock_that_jumps_back")
def test_deadlines_do_not_follow_the_time_of_day() -> None:
    """One request is far from its deadline, the other one reaches it."""
    engine = CountingEngine(
        num_blocks=300, max_seq_len=1000, before_step=lambda batch: time.sleep(0.005)
    )
    recorder = serve(
        [request(1, [1], 40), request(2, [1], 900, allotted_time_ms=500)],
        engine,
        max_run_seconds=60,
        max_queue_seconds=60,
    )
    assert recorder.tokens(1) == list(range(2, 42))
    assert 0 < len(recorder.tokens(2)) < 900
    assert recorder.final_errors(1) == recorder.final_errors(2) == [""]
