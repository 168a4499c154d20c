"""An idle loop: how long it waits, what wakes it, and that everything is free."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.manager_harness import BOTH_LOOPS, GUARANTEED, WAIT, Recorder, request, running
from support.triton_stub import CountingEngine

from inflight_backend.manager import gpt_manager
from inflight_backend.manager.batcher import Batcher
from inflight_backend.manager.gpt_manager import (
    FULL_SECONDS,
    LAST_POLL_SECONDS,
    TURN_SECONDS,
    CallbackGuard,
    GptManager,
    IdleCheck,
    IdleWait,
)
from inflight_backend.manager.parameters import OverlapScheduler, TrtGptModelOptionalParams
from inflight_scheduler import BatchPlanner, BlockManager, LlmRequest
from inflight_server.serve.settings import DEMO_MODEL


class Clock:
    """Stands in for the event, which is never set, and keeps the seconds of each wait."""

    def __init__(self, wait: IdleWait) -> None:
        self.seconds: list[float] = []
        wait._event = self  # type: ignore[assignment]

    def wait(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def clear(self) -> None:
        """There is nothing to take back."""


def test_idle_loop_polls_at_growing_intervals() -> None:
    wait = IdleWait(CallbackGuard(), lambda: True)
    clock = Clock(wait)
    for _ in range(6):
        wait.after_turn(is_idle=True, has_requests=False)
    wait.after_turn(is_idle=False, has_requests=True)  # there was something to do
    wait.after_turn(is_idle=True, has_requests=False)
    assert clock.seconds == [0.005, 0.01, 0.02, 0.04, 0.05, 0.05, 0.005]
    assert LAST_POLL_SECONDS == 0.05


def test_loop_that_is_woken_polls_only_while_it_has_requests() -> None:
    """A deadline may end a request that cannot run."""
    wait = IdleWait(CallbackGuard(), lambda: False)
    clock = Clock(wait)
    for has_requests in (False, True, False):
        wait.after_turn(is_idle=True, has_requests=has_requests)
    assert clock.seconds == [TURN_SECONDS, 0.005, TURN_SECONDS]


def test_wake_up_before_the_wait_is_not_lost() -> None:
    wait = IdleWait(CallbackGuard(), lambda: False)
    wait.wake()
    began = time.monotonic()
    wait.after_turn(is_idle=True, has_requests=False)
    assert time.monotonic() - began < TURN_SECONDS


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a wake-up ends a wait."""
    monkeypatch.setattr(gpt_manager, "TURN_SECONDS", 3600.0)


def wait_until_idle(manager: GptManager) -> None:
    deadline = time.monotonic() + WAIT
    while manager.health.is_busy or not manager.health.num_moves:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_idle_loop_calls_no_callback_until_it_is_woken(endless: None) -> None:
    recorder = Recorder()
    with running(recorder, poll_when_idle=lambda: False) as manager:
        wait_until_idle(manager)
        assert set(recorder.events) == {"get", "poll"}, "each turn calls both"
        num_calls = len(recorder.events)
        time.sleep(0.2)
        assert len(recorder.events) == num_calls
        recorder.pending.append(request(1, [100], 3))
        manager.wake()
        recorder.wait_for_finals(1)
        assert recorder.tokens(1) == [101, 102, 103]


def test_poll_when_idle_that_raises_means_polling(endless: None) -> None:
    def fail() -> bool:
        raise SystemExit("in a callback")

    recorder = Recorder()
    with running(recorder, poll_when_idle=fail) as manager:
        wait_until_idle(manager)
        recorder.pending.append(request(1, [100], 3))
        recorder.wait_for_finals(1)


def ask(manager: GptManager, recorder: Recorder) -> None:
    manager.why(1).result(WAIT)


def terminate(manager: GptManager, recorder: Recorder) -> None:
    recorder.pending.append(request(77, [1], 1))
    manager.wake()
    manager.wait_until_terminate()


def shut_down(manager: GptManager, recorder: Recorder) -> None:
    manager.shutdown()


@pytest.mark.parametrize("act", [ask, terminate, shut_down])
def test_call_of_the_manager_wakes_an_idle_loop(
    act: Callable[[GptManager, Recorder], None], endless: None
) -> None:
    recorder = Recorder()
    with running(recorder, poll_when_idle=lambda: False, terminate_req_id=77) as manager:
        wait_until_idle(manager)
        act(manager, recorder)


def test_compiled_grammar_wakes_the_loop(monkeypatch: pytest.MonkeyPatch, endless: None) -> None:
    """Its request does not wait for the next poll."""
    for name in ("_FIRST_POLL_SECONDS", "LAST_POLL_SECONDS"):
        monkeypatch.setattr(gpt_manager, name, 3600.0)
    recorder = Recorder()
    with running(
        recorder, DEMO_MODEL, max_batch_size=2, device="cpu", poll_when_idle=lambda: False
    ) as manager:
        wait_until_idle(manager)
        guide: dict[str, Any] = {
            "guided_decoding_guide_type": "regex",
            "guided_decoding_guide": "[0-9]{2}",
        }
        recorder.pending.append(request(1, [100], 3, **guide))
        manager.wake()
        recorder.wait_for_finals(1)
        assert recorder.responses[1][-1][2] == ""


REPAIRED = "they are rebuilt"


def when_idle(manager: GptManager) -> Batcher:
    """The batcher of an idle loop, read on its thread between two turns."""
    turns = [manager._calls.call_soon(lambda: manager._batcher).result(WAIT) for _ in range(3)]
    return turns[-1]


def repairs_of(manager: GptManager) -> int:
    """As in the statistics."""
    return int(json.loads(manager.stats_json).get("Repairs", 0))


@pytest.mark.case(89)
@BOTH_LOOPS
@pytest.mark.parametrize("what", ["blocks", "slot"])
def test_blocks_or_slot_that_were_not_released_are_repaired_when_idle(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    overlap: OverlapScheduler,
    what: str,
) -> None:
    owner, name = (BlockManager, "release") if what == "blocks" else (BatchPlanner, "release")
    real, forgotten = getattr(owner, name), [1, 2]

    def forget(self: object, leaving: LlmRequest) -> None:
        if leaving.request_id not in forgotten:
            real(self, leaving)
        else:
            forgotten.remove(leaving.request_id)
            if what == "slot":
                leaving.drop_pending_tokens()
                self.block_manager.release(leaving)  # type: ignore[attr-defined]

    monkeypatch.setattr(owner, name, forget)
    recorder = Recorder([request(i, [100 * i], 9) for i in (1, 2)])
    with running(recorder, max_batch_size=2, overlap_scheduler=overlap) as manager:
        recorder.wait_for_finals(1, 2)
        batcher = when_idle(manager)
        assert forgotten == []
        assert batcher.is_idle_and_intact()
        recorder.pending += [request(i, [100 * i], 3) for i in (3, 4)]  # both have a slot
        manager.wake()
        recorder.wait_for_finals(3, 4)
        assert recorder.tokens(3) == [301, 302, 303]
        assert when_idle(manager) is batcher
        assert repairs_of(manager) == 1
    assert caplog.text.count(REPAIRED) == 1


def test_full_check_runs_once_a_minute() -> None:
    """The counts agree, the tables do not."""
    now = 1000.0
    batcher = Batcher(CountingEngine(), GUARANTEED, TrtGptModelOptionalParams())
    check = IdleCheck(lambda: now)

    def comes_to_rest() -> bool:
        assert not check.finds_fault(batcher, is_running=True)
        is_wrong = check.finds_fault(batcher, is_running=False)
        assert not check.finds_fault(batcher, is_running=False), "checked once"
        return is_wrong

    assert not check.finds_fault(batcher, is_running=False), "there was no request yet"
    assert not comes_to_rest()
    batcher.block_manager._num_held += 1
    assert not comes_to_rest()
    now += FULL_SECONDS
    assert comes_to_rest()
    assert not comes_to_rest()
    batcher.planner.slots.assign()
    assert comes_to_rest(), "the counts are compared every time"
