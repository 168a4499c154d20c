"""A loop without anything to do: who wakes it is waited for, others are asked now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from support.manager_harness import WAIT, Recorder, request, running

from inflight_backend.manager import gpt_manager as idle_wait
from inflight_backend.manager.gpt_manager import (
    LAST_POLL_SECONDS,
    TURN_SECONDS,
    CallbackGuard,
    GptManager,
    IdleWait,
)
from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_server.serve.settings import DEMO_MODEL


class Clock:
    """In place of an event that nobody sets: how long was to be waited."""

    def __init__(self, wait: IdleWait) -> None:
        self.seconds: list[float] = []
        wait._event = self  # type: ignore[assignment]

    def wait(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def clear(self) -> None:
        """There is nothing to take back."""


def test_callbacks_that_wake_nobody_are_asked_less_and_less_often() -> None:
    wait = IdleWait(CallbackGuard(), lambda: True)
    clock = Clock(wait)
    for _ in range(6):
        wait.after_turn(is_idle=True, has_requests=False)
    wait.after_turn(is_idle=False, has_requests=True)  # there was something to do
    wait.after_turn(is_idle=True, has_requests=False)
    assert clock.seconds == [0.005, 0.01, 0.02, 0.04, 0.05, 0.05, 0.005]
    assert LAST_POLL_SECONDS == 0.05


def test_who_is_woken_waits_for_that_unless_time_alone_may_help() -> None:
    """As at a deadline of a request that cannot run."""
    wait = IdleWait(CallbackGuard(), lambda: False)
    clock = Clock(wait)
    for has_requests in (False, True, False):
        wait.after_turn(is_idle=True, has_requests=has_requests)
    assert clock.seconds == [TURN_SECONDS, 0.005, TURN_SECONDS]


def test_a_wake_up_before_the_wait_is_not_lost() -> None:
    wait = IdleWait(CallbackGuard(), lambda: False)
    wait.wake()
    began = time.monotonic()
    wait.after_turn(is_idle=True, has_requests=False)
    assert time.monotonic() - began < TURN_SECONDS


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but a wake-up ends a wait."""
    monkeypatch.setattr(idle_wait, "TURN_SECONDS", 3600.0)


def wait_until_idle(manager: GptManager) -> None:
    deadline = time.monotonic() + WAIT
    while manager.health.is_busy or not manager.health.num_moves:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_idle_loop_calls_nobody_until_it_is_woken(endless: None) -> None:
    recorder = Recorder()
    with running(recorder, poll_when_idle=lambda: False) as manager:
        wait_until_idle(manager)
        assert set(recorder.events) == {"get", "poll"}, "each turn asks both"
        num_calls = len(recorder.events)
        time.sleep(0.2)
        assert len(recorder.events) == num_calls
        recorder.pending.append(request(1, [100], 3))
        manager.wake()
        recorder.wait_for_finals(1)
        assert recorder.tokens(1) == [101, 102, 103]


def test_a_failing_question_whether_to_poll_has_it_poll(endless: None) -> None:
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
def test_whatever_else_is_asked_of_an_idle_loop_wakes_it(
    act: Callable[[GptManager, Recorder], None], endless: None
) -> None:
    recorder = Recorder()
    with running(recorder, poll_when_idle=lambda: False, terminate_req_id=77) as manager:
        wait_until_idle(manager)
        act(manager, recorder)


def test_a_grammar_that_is_compiled_wakes_the_loop(
    monkeypatch: pytest.MonkeyPatch, endless: None
) -> None:
    """Nor does its request wait for the next poll."""
    for name in ("_FIRST_POLL_SECONDS", "LAST_POLL_SECONDS"):
        monkeypatch.setattr(idle_wait, name, 3600.0)
    recorder = Recorder()
    params = TrtGptModelOptionalParams(max_batch_size=2, device="cpu")
    with running(recorder, DEMO_MODEL, params=params, poll_when_idle=lambda: False) as manager:
        wait_until_idle(manager)
        guide: dict[str, Any] = {
            "guided_decoding_guide_type": "regex",
            "guided_decoding_guide": "[0-9]{2}",
        }
        recorder.pending.append(request(1, [100], 3, **guide))
        manager.wake()
        recorder.wait_for_finals(1)
        assert recorder.responses[1][-1][2] == ""
