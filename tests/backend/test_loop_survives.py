"""Whatever escapes, in a step, in a callback or in our own code: finals for all, and on it goes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.manager_harness import GUARANTEED, MAX_UTILIZATION, WAIT, Recorder, request, running
from support.triton_harness import wait_until
from support.triton_stub import CountedStep, CountingEngine

from inflight_backend.manager import gpt_manager
from inflight_backend.manager import gpt_manager as idle_wait
from inflight_backend.manager.gpt_manager import GptManager
from inflight_backend.manager.health import MAX_FAILURES_IN_A_ROW, LoopHealth
from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_backend.manager.responses import make_tensors
from inflight_backend.manager.step_loop import OverlapScheduler, StepOutcome
from inflight_backend.requests.inference_request import InferenceRequest, NamedTensor
from inflight_scheduler import CapacitySchedulerPolicy, LlmRequest, ScheduledBatch

FAILED = "the batch manager failed while it held this request"
STEP_FAILED = "the engine failed while it ran this request"


class Once:
    """Raises ``error`` at one call, chosen by `arm`; passes all others on."""

    def __init__(self, function: Callable[..., Any], error: BaseException) -> None:
        self._function = function
        self._error = error
        self._is_armed = False

    def arm(self) -> None:
        self._is_armed = True

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._is_armed:
            self._is_armed = False
            raise self._error
        return self._function(*args, **options)


def finals_of(recorder: Recorder, request_id: int) -> list[str]:
    return [error for _, is_final, error in recorder.responses[request_id] if is_final]


def assert_works(recorder: Recorder, manager: GptManager, request_id: int = 99) -> None:
    """Nothing is held, and the next request is answered in full."""
    recorder.pending.append(request(request_id, [500], 4))
    manager.wake()
    recorder.wait_for_finals(request_id)
    assert recorder.tokens(request_id) == [501, 502, 503, 504]
    assert manager.get_num_active_requests() == 0
    assert manager._batcher.is_idle_and_intact()
    assert manager.health.is_healthy


@pytest.mark.case(91, 92, 93, 94)
@pytest.mark.parametrize("name", ["get", "send", "poll", "return_stats"])
def test_a_callback_that_ends_the_thread_does_not(name: str) -> None:
    recorder = Recorder([request(i, [100 * i], 50) for i in (1, 2)])
    once = Once(getattr(recorder, name), SystemExit("a callback"))
    setattr(recorder, name, once)
    recorder.on_response = lambda request_id, is_final: (
        once.arm() if (request_id, len(recorder.tokens(1))) == (1, 5) else None
    )
    with running(recorder) as manager:
        recorder.wait_for_finals(1, 2)
        assert finals_of(recorder, 1) == finals_of(recorder, 2) == [""]
        assert recorder.tokens(1) == list(range(101, 151))
        num_lost = 50 - len(recorder.tokens(2))
        assert num_lost == (name == "send"), "what was in the call that raised is the callback's"
        assert_works(recorder, manager)


@pytest.mark.case(118)
@pytest.mark.parametrize("is_step_lost", [False, True])
def test_a_response_that_cannot_be_built_ends_its_request_only(
    monkeypatch: pytest.MonkeyPatch, is_step_lost: bool
) -> None:
    """Once, also if its next step, which was on its way, is lost in the same iteration."""
    real = make_tensors

    def make(request: LlmRequest, is_final: bool, *more: Any) -> list[NamedTensor]:
        if request.request_id == 1 and request.num_tokens == 6:
            raise MemoryError
        return real(request, is_final, *more)

    monkeypatch.setattr(gpt_manager, "make_tensors", make)
    recorder = Recorder()
    with running(recorder) as manager:
        turn = manager._steps.turn

        def losing_turn() -> StepOutcome:
            outcome = turn()
            lost = [r for r in outcome.advanced if r.request_id == 1 and r.num_tokens == 6]
            return dataclasses.replace(outcome, failed=lost)

        if is_step_lost:
            monkeypatch.setattr(manager._steps, "turn", losing_turn)
        recorder.pending += [request(i, [100 * i], 20) for i in (1, 2)]
        recorder.wait_for_finals(1, 2)
        assert finals_of(recorder, 1) == ["the response could not be built"]
        assert recorder.tokens(2) == list(range(201, 221))
        assert_works(recorder, manager)


@pytest.mark.case(118)
def test_a_response_that_cannot_be_built_and_a_release_that_fails_lose_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both at once: the answers of that iteration behind it are sent, also the last of one."""
    real = make_tensors
    recorder = Recorder()
    with running(recorder) as manager:
        once = replace(manager._batcher.block_manager, "release", AssertionError("ours"))

        def make(request: LlmRequest, is_final: bool, *more: Any) -> list[NamedTensor]:
            if request.request_id == 1 and request.num_tokens == 6:
                once.arm()
                raise MemoryError
            return real(request, is_final, *more)

        monkeypatch.setattr(gpt_manager, "make_tensors", make)
        recorder.pending += [request(1, [100], 20), request(2, [200], 5), request(3, [300], 20)]
        recorder.wait_for_finals(1, 2, 3)
        assert finals_of(recorder, 1) == finals_of(recorder, 3) == [FAILED]
        assert finals_of(recorder, 2) == [""]
        assert recorder.tokens(2) == list(range(201, 206))
        assert recorder.tokens(3) == list(range(301, 306))
        assert_works(recorder, manager)


@pytest.mark.case(89, 118)
@pytest.mark.parametrize("error", [AssertionError("ours"), SystemExit("out"), MemoryError()])
@pytest.mark.parametrize(
    "place", ["schedule", "update", "release", "measure", "plan", "ended", "remove", "order"]
)
@pytest.mark.parametrize("overlap", [OverlapScheduler.OFF, OverlapScheduler.ON])
def test_whatever_escapes_ends_all_and_starts_afresh(
    overlap: OverlapScheduler, place: str, error: BaseException
) -> None:
    recorder = Recorder()
    params = TrtGptModelOptionalParams(max_batch_size=8, overlap_scheduler=overlap)
    with running(recorder, params=params) as manager:
        batcher = manager._batcher
        update = "update" if overlap is OverlapScheduler.OFF else "apply_tokens"
        once = {
            "schedule": lambda: replace(batcher, "schedule", error),
            "update": lambda: replace(batcher.planner, update, error),
            "plan": lambda: replace(batcher.planner, "plan", error),
            "release": lambda: replace(batcher.block_manager, "release", error),
            "measure": lambda: replace(manager, "_measure", error),
            "ended": lambda: replace(batcher.recorder, "ended", error),
            "remove": lambda: replace(batcher.active, "remove", error),
            "order": lambda: replace(batcher.active._order, "remove", error),
        }[place]()
        seen: list[bool] = []
        recorder.on_response = lambda request_id, is_final: (
            seen.append(manager.health.is_healthy)
            if is_final
            else once.arm()
            if len(recorder.tokens(1)) == 5
            else None
        )
        # Request 3 ends while the other two run, which is when a release can fail.
        recorder.pending += [request(1, [1], 100), request(2, [2], 100), request(3, [3], 7)]
        recorder.wait_for_finals(1, 2, 3)
        for request_id in (1, 2):
            assert len(finals_of(recorder, request_id)) == 1
            assert finals_of(recorder, request_id)[0] in (FAILED, STEP_FAILED)
        escapes = place not in ("update",) or not isinstance(error, Exception)
        assert seen[:2] == [not escapes] * 2, "readiness is false while the loop recovers"
        recorder.on_response = lambda request_id, is_final: None
        assert_works(recorder, manager)


@pytest.mark.parametrize("error", [AssertionError("ours"), MemoryError()])
@pytest.mark.parametrize("overlap", [OverlapScheduler.OFF, OverlapScheduler.ON])
def test_tokens_that_can_be_applied_in_part_only_end_each_of_their_step_once(
    overlap: OverlapScheduler, error: BaseException
) -> None:
    """Request 1 has its last token already when what its step means for 2 cannot be noted."""
    recorder, is_overlapped = Recorder(), overlap is OverlapScheduler.ON

    class Engine(CountingEngine):
        def execute(self, batch: ScheduledBatch) -> list[int]:
            tokens = super().execute(batch)
            if is_overlapped and [s.request_id for s in batch.setups] == [2]:
                once.arm()
                tokens[0] = -1  # what was computed of request 2 is to be forgotten
            return tokens

    params = TrtGptModelOptionalParams(max_batch_size=8, overlap_scheduler=overlap)
    with running(recorder, Engine(), params=params) as manager:
        once = replace(
            manager._batcher.block_manager, "forget" if is_overlapped else "store", error
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
        assert finals_of(recorder, 1) == finals_of(recorder, 2) == [STEP_FAILED]
        assert_works(recorder, manager)


def replace(owner: Any, name: str, error: BaseException) -> Once:
    """Wrap a method of an object, which may have slots, on its class for this object only."""
    once = Once(getattr(owner, name), error)
    cls = type(owner)

    class Wrapped(cls):  # type: ignore[misc,valid-type]
        __slots__ = ()

    setattr(Wrapped, name, lambda self, *args, **options: once(*args, **options))
    owner.__class__ = Wrapped
    return once


def test_an_engine_that_cannot_begin_is_told_and_leaves_no_loop_behind() -> None:
    engine = CountingEngine()
    vars(engine)["prepare_thread"] = Once(lambda: None, RuntimeError("no product runs"))
    vars(engine)["prepare_thread"].arm()
    with pytest.raises(RuntimeError, match="no product runs"), running(Recorder(), engine):
        pass
    wait_until(lambda: "GptManager" not in {thread.name for thread in threading.enumerate()})


class _Failing(CountingEngine):
    """Raises ``error`` in ``place`` of the second step: execute, submit, or read."""

    def __init__(self, place: str, error: Exception) -> None:
        super().__init__()
        self._place, self._error = place, error

    def submit(self, batch: ScheduledBatch) -> CountedStep:
        step = super().submit(batch)
        self._fail("submit", batch)
        if self._place == "read" and batch.iteration == 1:
            once = Once(step.read, self._error)
            once.arm()
            return SimpleNamespace(read=once)  # type: ignore[return-value]
        return step

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
def test_a_lost_device_is_unhealthy_at_once_and_for_good(
    place: str, error: Exception, is_lost: bool
) -> None:
    overlap = OverlapScheduler.OFF if place == "execute" else OverlapScheduler.ON
    params = TrtGptModelOptionalParams(max_batch_size=8, overlap_scheduler=overlap)
    recorder = Recorder([request(1, [1], 10)])
    with running(recorder, _Failing(place, error), params=params) as manager:
        recorder.wait_for_finals(1)
        assert finals_of(recorder, 1) == [STEP_FAILED]
        assert manager.health.is_healthy != is_lost
        recorder.pending.append(request(2, [20], 3))
        manager.wake()
        recorder.wait_for_finals(2)
        assert manager.health.is_healthy != is_lost


def test_a_loop_that_fails_again_and_again_is_not_healthy_until_it_works() -> None:
    recorder = Recorder()
    with running(recorder) as manager:
        first = manager._batcher
        for number in range(1, MAX_FAILURES_IN_A_ROW + 1):
            assert manager.health.is_healthy
            replace(manager._batcher, "schedule", RuntimeError("again")).arm()
            wait_until(lambda n=number: manager.health._num_failures_in_a_row == n)  # type: ignore[misc]
            wait_until(lambda: not manager.health._is_recovering)
        assert not manager.health.is_healthy
        assert manager._batcher is not first, "after the second failure nothing is kept"
        assert_works_again(recorder, manager)


def assert_works_again(recorder: Recorder, manager: GptManager) -> None:
    recorder.pending.append(request(50, [5], 3))
    recorder.wait_for_finals(50)
    assert recorder.tokens(50) == [6, 7, 8]
    assert manager.health.is_healthy


def test_a_rescue_that_fails_is_logged_and_the_thread_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = LoopHealth()
    with health.recovering(1):
        raise SystemExit("in the rescue")
    assert caplog.text.count("the rescue of the batch manager failed") == 1
    assert health.is_healthy
    for _ in range(MAX_FAILURES_IN_A_ROW):
        health.failed()
    assert not health.is_healthy
    health.moved()
    assert health.is_healthy


def test_a_loop_that_fails_in_every_turn_does_not_fill_the_disk_with_its_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is active: a turn every 50 ms. When it works again and fails anew, that is said."""
    monkeypatch.setattr(idle_wait, "LAST_POLL_SECONDS", 0.0001)
    recorder = Recorder()
    with running(recorder) as manager:

        def fail() -> None:
            raise RuntimeError("again")

        with monkeypatch.context() as patch:
            patch.setattr(manager, "_measure", fail)
            wait_until(lambda: manager.health._num_failures_in_a_row >= 100)
        assert_works_again(recorder, manager)
        numbers = [int(each.split()[-4]) for each in caplog.messages if each.endswith("in a row)")]
        assert numbers[:7] == [1, 2, 4, 8, 16, 32, 64]
        replace(manager, "_measure", RuntimeError("anew")).arm()
        wait_until(lambda: caplog.messages[-1].endswith("(failure 1 in a row)"))


@pytest.mark.parametrize("num_failed_steps", range(5))
def test_failed_steps_do_not_keep_a_failure_of_the_loop_out_of_the_log(
    num_failed_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    health = LoopHealth()
    for _ in range(num_failed_steps):
        health.note(is_completed=False, has_failed=True)
    with health.recovering(7):
        pass
    assert caplog.messages == ["the batch manager failed in iteration 7 (failure 1 in a row)"]


# Memory and other errors of a step: its requests fail, the waiting ones do not.


@pytest.mark.case(82, 83, 86)
@pytest.mark.parametrize("error", [MemoryError(), torch.cuda.OutOfMemoryError("2 GiB"), OSError()])
@pytest.mark.parametrize("iteration", [1, 4])
@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
def test_out_of_memory_in_a_step_fails_its_requests_only(
    policy: CapacitySchedulerPolicy, iteration: int, error: Exception
) -> None:
    """Context at iteration 1, generation at 4; two of five requests are not in that step."""

    def fail(batch: ScheduledBatch) -> None:
        if batch.iteration == iteration:
            raise error

    recorder = Recorder([request(i, [10 * i], 9) for i in range(1, 6)])
    engine = CountingEngine(num_blocks=64, before_step=fail)
    with running(
        recorder, engine, policy, params=TrtGptModelOptionalParams(max_batch_size=3)
    ) as manager:
        recorder.wait_for_finals(*range(1, 6))
        for victim in (1, 2, 3):
            assert finals_of(recorder, victim) == [STEP_FAILED]
        for other in (4, 5):
            assert recorder.tokens(other) == list(range(10 * other + 1, 10 * other + 10))
            assert finals_of(recorder, other) == [""]
        assert_works(recorder, manager)


# Callbacks.


@pytest.mark.case(91)
def test_a_get_callback_that_repeats_itself_serves_each_request_once() -> None:
    recorder = Recorder()
    mine = [request(1, [1], 30), request(2, [50], 30)]
    calls = iter([[*mine, *mine], mine, mine[:1]])
    recorder.get = lambda room: next(calls, [])  # type: ignore[method-assign]
    with running(recorder) as manager:
        recorder.wait_for_finals(1, 2)
        assert recorder.tokens(1) == list(range(2, 32))
        assert recorder.tokens(2) == list(range(51, 81))
        assert finals_of(recorder, 1) == finals_of(recorder, 2) == [""]
        assert manager._batcher.is_idle_and_intact()


@pytest.mark.case(91, 92)
@pytest.mark.parametrize("name", ["get", "send", "poll", "return_stats"])
def test_a_callback_that_blocks_delays_and_loses_nothing(name: str) -> None:
    recorder = Recorder([request(i, [10 * i], 20) for i in (1, 2)])
    real = getattr(recorder, name)
    is_blocked, release = threading.Event(), threading.Event()

    def block(*args: Any) -> Any:
        if not release.is_set():
            is_blocked.set()
            assert release.wait(WAIT)
        return real(*args)

    setattr(recorder, name, block)
    with running(recorder) as manager:
        assert is_blocked.wait(WAIT)
        moves = manager.health.num_moves
        time.sleep(0.05)
        assert manager.health.num_moves == moves, "what the watchdog sees: nothing moves"
        release.set()
        recorder.wait_for_finals(1, 2)
    for i in (1, 2):
        assert recorder.tokens(i) == list(range(10 * i + 1, 10 * i + 21))


@pytest.mark.case(61)
def test_a_stop_before_its_request_has_no_effect_on_it() -> None:
    recorder = Recorder()
    polled = threading.Event()
    with running(recorder) as manager:

        def poll() -> set[int]:
            polled.set()
            return {1} if not recorder.pending and not recorder.responses else set()

        manager._poll_cb = poll
        assert polled.wait(WAIT)
        polled.clear()
        assert polled.wait(WAIT)
        manager._poll_cb = lambda: set()
        recorder.pending.append(request(1, [1], 3))
        recorder.wait_for_finals(1)
    assert recorder.tokens(1) == [2, 3, 4]


@pytest.fixture
def _clock_that_jumps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever somebody looks, it is an hour earlier."""
    now = [time.time()]

    def clock() -> float:
        now[0] -= 3600.0
        return now[0]

    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(time, "time_ns", lambda: int(clock() * 1e9))


@pytest.mark.case(96)
@pytest.mark.usefixtures("_clock_that_jumps_back")
def test_a_clock_that_jumps_back_disturbs_nothing() -> None:
    recorder = Recorder([request(1, [1], 40)])
    params = TrtGptModelOptionalParams(max_batch_size=8, max_run_seconds=60, max_queue_seconds=60)
    with running(recorder, params=params):
        recorder.wait_for_finals(1)
    assert recorder.tokens(1) == list(range(2, 42))
    assert finals_of(recorder, 1) == [""]


@pytest.mark.case(96)
@pytest.mark.usefixtures("_clock_that_jumps_back")
def test_a_deadline_passes_though_the_clock_jumps_back() -> None:
    engine = CountingEngine(
        num_blocks=300, max_seq_len=1000, before_step=lambda batch: time.sleep(0.01)
    )
    recorder = Recorder([request(1, [1], 900)])
    params = TrtGptModelOptionalParams(max_batch_size=8, max_run_seconds=1.0)
    with running(recorder, engine, params=params):
        recorder.wait_for_finals(1)
    assert 0 < len(recorder.tokens(1)) < 900
    assert finals_of(recorder, 1) == [""]


def test_rubbish_types_are_told_apart() -> None:
    """A request object is taken whoever else is in the list."""
    rubbish: list[Any] = [3.5, {"id": 1}, b"x"]
    recorder = Recorder([*rubbish, request(1, [1], 2)])
    assert isinstance(recorder.pending[-1], InferenceRequest)
    with running(recorder):
        recorder.wait_for_finals(1)
    assert recorder.tokens(1) == [2, 3]
