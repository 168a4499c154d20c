"""The watchdog and the periodic tasks: without progress streams end and requests are refused, until
it moves again."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import (
    WAIT,
    Gate,
    Server,
    error_of,
    full_disk,
    ids_of,
    last_error,
    phase_of,
    wait_for_phase,
    wait_until,
)
from support.triton_stub import CountingEngine, FailingSender, FakePbUtils, FakeSender, HeldSender

from inflight_backend.status import beat_of
from inflight_backend.triton.metrics import TritonMetrics
from inflight_backend.triton.queue import RequestQueue
from inflight_backend.triton.watchdog import (
    PeriodicTask,
    PeriodicTasks,
    Progress,
    Watchdog,
)
from inflight_backend.triton_io.sender import ResponseSender
from inflight_backend.triton_models import (
    bls,
    postprocessing,
    preprocessing,
    relay_client,
    text_base,
    vllm,
)
from inflight_scheduler import ScheduledBatch
from inflight_server.serve.settings import DEMO_MODEL

STALL = 0.3
NO_PROGRESS = (
    "the server makes no progress; send the request to another server",
    FakePbUtils.TritonError.UNAVAILABLE,
)


LEAVING = (
    "the server is shutting down: this answer is not complete",
    FakePbUtils.TritonError.UNAVAILABLE,
)
LONG: dict[str, Any] = {"input_ids": [1], "request_output_len": 8000, "streaming": True}
"""It takes 40 s on the engine of `slow_server`."""


@pytest.mark.slow
def test_slow_steps_and_idle_times_are_no_stall(make_server: MakeServer) -> None:
    stall = 2 * STALL  # beside it, what a busy machine may add to a step is little
    engine = CountingEngine(before_step=lambda batch: time.sleep(stall / 4))
    server = make_server(engine, stall_seconds=str(stall))
    sender = server.ask(input_ids=[1], request_output_len=6, streaming=True)
    assert ids_of(sender) == [2, 3, 4, 5, 6, 7]
    time.sleep(2 * stall)
    assert server.model.is_ready()
    assert ids_of(server.ask(input_ids=[1], request_output_len=1)) == [1, 2]


@pytest.mark.case(125)
def test_a_device_that_fails_every_step_is_not_ready_until_one_succeeds(
    make_server: MakeServer,
) -> None:
    is_lost = [True]

    def fail(batch: ScheduledBatch) -> None:
        if is_lost[0]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    server = make_server(CountingEngine(before_step=fail), stall_seconds=str(STALL))
    for number in range(3):
        assert server.model.is_ready(), f"{number} failures are bad luck"
        text, _ = error_of(server.ask(input_ids=[1], request_output_len=5, streaming=True))
        assert text == "the engine failed while it ran this request"
    assert not server.model.is_ready()
    assert error_of(server.ask(ready=True))[0] == "one step after the other fails"
    wait_for_phase(server, "unhealthy")
    is_lost[0] = False
    assert ids_of(server.ask(input_ids=[1], request_output_len=2)) == [1, 2, 3]
    assert server.model.is_ready()
    wait_for_phase(server, "ready")


def test_the_beat_goes_on_and_a_failing_action_does_not_end_it() -> None:
    beats = threading.Semaphore(0)

    def beat() -> None:
        beats.release()
        raise OSError("no disk")

    watchdog = Watchdog((), 0.1, on_stall=lambda: None, on_move=lambda: None, beat=beat)
    for _ in range(3):
        assert beats.acquire(timeout=10)
    watchdog.close()
    assert not watchdog.is_stalled


@pytest.mark.slow
def test_a_process_that_was_stopped_and_goes_on_has_missed_nothing() -> None:
    """The watchdog stands still with those whom it watches, and looks before they have moved."""
    stall, progress, has_looked, stalls = 0.8, Progress(), threading.Event(), list[int]()
    looks = itertools.count()
    seen: list[list[int]] = []

    def beat() -> None:
        """It comes behind each look."""
        look = next(looks)
        if look == 0:
            time.sleep(2 * stall)
        elif look == 1:
            seen.append(list(stalls))
            has_looked.set()

    with progress:
        watchdog = Watchdog(
            [progress], stall, on_stall=lambda: stalls.append(1), on_move=lambda: None, beat=beat
        )
        assert has_looked.wait(WAIT)
    watchdog.close()
    assert seen == [[]]


@pytest.mark.case(88)
def test_a_stall_that_cannot_be_told_is_silence_until_it_can(
    make_server: MakeServer, gate: Gate
) -> None:
    gate.clear()
    server = make_server(CountingEngine(before_step=gate), stall_seconds=str(STALL))
    with full_disk(server.status_file):
        assert server.send(input_ids=[1], request_output_len=5).is_final.wait(10)
        wait_until(lambda: not server.model.is_ready())
        os.utime(server.status_file, (1, 1))
        time.sleep(2 * STALL)  # beats come after a quarter of it
        assert beat_of(server.status_file) == 10**9
    wait_for_phase(server, "unhealthy")
    with full_disk(server.status_file):
        gate.set()
        wait_until(server.model.is_ready)
        assert phase_of(server) == "unhealthy"
    wait_for_phase(server, "ready")


def test_a_load_that_cannot_be_told_is_told_when_it_can(
    make_server: MakeServer, tmp_path: Path
) -> None:
    with full_disk(tmp_path / "status.json"):
        server = make_server(CountingEngine(), stall_seconds=str(STALL))
        assert not server.status_file.exists()
        server.status_file.touch()
        os.utime(server.status_file, (1, 1))
        wait_until(lambda: beat_of(server.status_file) > 10**18)  # it gets things done
    wait_until(lambda: server.status_file.stat().st_size > 0)
    assert phase_of(server) == "ready"


@pytest.mark.case(100)
def test_a_drain_that_cannot_be_told_is_told_when_it_can(make_server: MakeServer) -> None:
    server = make_server(CountingEngine())
    with full_disk(server.status_file):
        server.drain_file.touch()
        wait_until(lambda: not server.model.is_ready())
        time.sleep(0.3)  # it looks ten times a second
        assert phase_of(server) == "ready"
    wait_for_phase(server, "drained")


def test_draining_is_not_ready(make_server: MakeServer) -> None:
    server = make_server(CountingEngine())
    assert server.ask(ready=True).responses[0].error is None
    server.drain_file.write_text("")
    wait_until(lambda: not server.model.is_ready())
    text, code = error_of(server.ask(ready=True))  # what a probe sees of it on every Triton
    assert text.startswith("the server is shutting down")
    assert code == FakePbUtils.TritonError.UNAVAILABLE


def test_a_task_that_raises_is_tried_again_and_the_others_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is told twice: the third try succeeds, and the one after that does not."""
    num_tries = 0
    tried_often, other_ran = threading.Event(), threading.Event()

    def fail() -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 6:
            tried_often.set()
        if num_tries != 3:
            raise RuntimeError("a task")

    tasks = [PeriodicTask(fail, 0.01), PeriodicTask(other_ran.set, 60.0)]
    periodic_tasks = PeriodicTasks(tasks, is_busy=lambda: True)
    assert tried_often.wait(WAIT)
    assert other_ran.wait(WAIT)
    periodic_tasks.close()
    assert caplog.text.count("a housekeeping task failed") == 2


def test_tasks_rest_while_no_request_is_there() -> None:
    """Behind the last request each runs once more; the next request wakes them."""
    requests: set[int] = set()
    seen: list[bool] = []  # of the task that rests: was a request there?
    idle_ran = threading.Semaphore(0)

    def look() -> None:
        seen.append(bool(requests))
        if len(seen) == 5:
            requests.clear()

    tasks = [PeriodicTask(look, 0.001), PeriodicTask(idle_ran.release, 0.01, idle_period=0.01)]
    periodic_tasks = PeriodicTasks(tasks, is_busy=lambda: bool(requests))
    for _ in range(5):
        assert idle_ran.acquire(timeout=WAIT)
    assert seen == [False], "once, when it was made"
    requests.add(1)
    periodic_tasks.wake()
    wait_until(lambda: len(seen) == 6)
    for _ in range(20):
        assert idle_ran.acquire(timeout=WAIT)
    periodic_tasks.close()
    assert seen == [False, True, True, True, True, False]


def test_a_task_that_takes_long_rests_longer_and_holds_up_no_other() -> None:
    """A look at every stream takes a while when there are many."""
    starts: list[float] = []
    has_run_often, other_ran = threading.Event(), threading.Semaphore(0)

    def look() -> None:
        starts.append(time.monotonic())
        time.sleep(0.01)
        if len(starts) == 3:
            has_run_often.set()

    tasks = [PeriodicTask(look, 0.001), PeriodicTask(other_ran.release, 0.002)]
    periodic_tasks = PeriodicTasks(tasks, is_busy=lambda: True)
    assert has_run_often.wait(WAIT)
    periodic_tasks.close()
    assert min(later - earlier for earlier, later in itertools.pairwise(starts)) >= 0.2
    assert all(other_ran.acquire(blocking=False) for _ in range(6))
    # One during which the machine stood still.
    assert PeriodicTask(look, 0.1, seconds=3600.0).busy_period == 1.0


def test_a_request_that_has_ended_already_is_seen_to_at_once() -> None:
    """One that was refused counts among the errors; nothing is in flight when a task looks."""
    num_runs = 0

    def count() -> None:
        nonlocal num_runs
        num_runs += 1

    periodic_tasks = PeriodicTasks([PeriodicTask(count, 0.001)], is_busy=lambda: False)
    wait_until(lambda: num_runs == 1)
    periodic_tasks.wake()
    wait_until(lambda: num_runs == 2)
    periodic_tasks.close()


class UnclearSender(FakeSender):
    """Triton does not say whether its client has gone."""

    def is_cancelled(self) -> bool:
        raise RuntimeError("shm full")


@pytest.mark.case(67)
def test_a_stream_that_cannot_be_asked_hides_nobody_who_leaves(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = CountingEngine(
        num_blocks=9000, max_seq_len=9000, before_step=lambda batch: time.sleep(0.002)
    )
    server = make_server(engine, cancellation_check_period_ms="10")
    mute, leaving = UnclearSender(), FakeSender()
    for sender in (mute, leaving):
        server.send(sender=sender, input_ids=[1], request_output_len=700, streaming=True)
        assert sender.has_response.wait(WAIT)
    leaving.cancelled = True
    assert leaving.is_final.wait(WAIT)
    assert not mute.is_final.is_set()
    assert mute.is_final.wait(WAIT)
    assert ids_of(mute) == list(range(2, 702))
    assert caplog.text.count("whether a client has gone") == 1


WATCHER = "from inflight_backend.process_guard import exit_with_parent; exit_with_parent('m')"


@pytest.mark.case(124)
def test_a_process_ends_soon_after_its_parent() -> None:
    """The parent starts a child that would sleep for a minute, and is gone."""
    child = f"{WATCHER}\nimport time; print('watching', flush=True); time.sleep(60)"
    parent = (
        "import subprocess, sys;"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE);"
        "assert p.stdout.readline(); print(p.pid)"
    )
    command = [sys.executable, "-c", parent]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    with suppress(psutil.NoSuchProcess):
        child_process = psutil.Process(int(result.stdout))
        wait_until(lambda: child_process.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.case(124)
@pytest.mark.parametrize("model", [bls, vllm, preprocessing, postprocessing])
def test_every_added_model_watches_its_server(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `tensorrt_llm` does, which is seen in tests/e2e/test_supervision.py."""
    watched: list[str] = []
    for module in (relay_client, text_base):
        monkeypatch.setattr(module, "exit_with_parent", watched.append)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils)
    parameters = {"gpt_model_path": {"string_value": str(DEMO_MODEL)}}
    config = json.dumps({"parameters": {} if model is bls else parameters})
    loaded = model.TritonPythonModel()
    loaded.initialize({"model_config": config, "model_name": "added"})
    assert watched == ["added"]
    if hasattr(loaded, "finalize"):
        loaded.finalize()


@pytest.mark.case(88)
def test_a_request_that_a_stall_ends_while_it_is_taken_ends_once(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(CountingEngine())
    put = server.model._queue.put

    def put_late(*requests: Any, **options: Any) -> None:
        server.model._end_streams()
        put(*requests, **options)

    monkeypatch.setattr(server.model._queue, "put", put_late)
    sender = FailingSender(num_failures=0)
    server.send("x", sender=sender, input_ids=[1], request_output_len=3)
    assert error_of(sender) == NO_PROGRESS
    assert sender.num_finals == 1
    assert caplog.text == ""
    assert server.model._frontend.num_live == 0
    server.model._queue.refuse("")
    monkeypatch.undo()
    assert ids_of(server.ask("x", input_ids=[1], request_output_len=2)) == [1, 2, 3]


@pytest.mark.case(88)
@pytest.mark.parametrize("question", ["describe", "why", "recording"])
def test_a_question_that_a_stall_ends_while_it_is_taken_keeps_no_place(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    """Whenever the stall comes: at the first look at the refusal, or before each step."""
    server = make_server(CountingEngine())
    introspection = server.model._frontend._introspection
    on_final = ResponseSender.on_final

    def late(self: ResponseSender, callback: Any) -> None:
        if self in introspection._waiting:
            server.model._end_streams()
        on_final(self, callback)

    class Stalling(RequestQueue):
        @property
        def refusal(self) -> str:
            server.model._end_streams()
            return super().refusal

    monkeypatch.setattr(ResponseSender, "on_final", late)
    server.model._queue.__class__ = Stalling
    sender = FailingSender(num_failures=0)
    server.send("x", (), sender, **{question: True})
    assert error_of(sender) == NO_PROGRESS
    assert sender.num_finals == 1
    assert not introspection._waiting
    assert introspection._recording_for is None
    server.model._queue.__class__ = RequestQueue
    server.model._queue.refuse("")
    assert server.ask("x", (), **{question: True}).responses[0].error is None


class MuteSender(FakeSender):
    """The question whether its client has gone is not answered before ``release``."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held, self.release = threading.Event(), threading.Event()

    def is_cancelled(self) -> bool:
        self.is_held.set()
        assert self.release.wait(3 * WAIT)
        return False


class Stuck:
    """Something of a loaded model does not return before `go_on`, for a request."""

    def __init__(self, server: Server, gate: Gate, what: str) -> None:
        self._gate = gate
        senders = {"step": FakeSender, "send": HeldSender}
        self.sender: Any = senders.get(what, MuteSender)()
        if what == "step":
            gate.close_after(3)
        streaming = what != "question without streaming"
        server.send("a", sender=self.sender, **{**LONG, "streaming": streaming})
        assert getattr(self.sender, "is_held", gate.is_reached).wait(WAIT)

    def go_on(self) -> None:
        self._gate.set()
        getattr(self.sender, "release", self._gate).set()
        assert self.sender.is_final.wait(WAIT)


@pytest.fixture
def slow_server(make_server: MakeServer, gate: Gate) -> Callable[..., Server]:
    def before_step(batch: ScheduledBatch) -> None:
        gate(batch)
        time.sleep(0.005)

    engine = CountingEngine(num_blocks=9000, max_seq_len=9000, before_step=before_step)
    return partial(make_server, engine)


@contextmanager
def traffic(server: Server) -> Iterator[list[FakeSender]]:
    """Requests that keep coming meanwhile, from a thread of their own as in Triton."""
    senders: list[FakeSender] = []
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(0.01):
            senders.append(server.send(input_ids=[1], request_output_len=3, streaming=True))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield senders
    finally:
        is_over.set()
        thread.join()


@pytest.mark.fast(2)
@pytest.mark.case(88, 92)
@pytest.mark.parametrize("what", ["step", "send", "question", "question without streaming"])
def test_call_that_never_returns_is_a_stall_whatever_else_comes(
    slow_server: Callable[..., Server], gate: Gate, what: str
) -> None:
    """All streams end with an error, and nothing is served until it returns."""
    server = slow_server(stall_seconds=str(STALL))
    assert server.model.is_ready()
    stuck = Stuck(server, gate, what)
    with traffic(server) as senders:
        asked = [server.send(stats=True), server.send(describe=True), server.send("a", why=True)]
        wait_until(lambda: not server.model.is_ready())
    for sender in (*senders, *asked):
        assert sender.is_final.wait(WAIT)
    if "question" not in what:  # beside which the loop goes on
        assert {last_error(each) for each in senders} == {NO_PROGRESS}
    wait_for_phase(server, "unhealthy")
    for question in ("describe", "why", "recording", "stats"):
        assert error_of(server.ask("no", (), **{question: True})) == NO_PROGRESS
    assert stuck.sender.is_final.is_set() == (what == "step")
    if what == "send":
        time.sleep(STALL)  # long after the request has ended; the loop had nothing to do meanwhile
    stuck.go_on()
    assert last_error(stuck.sender) == NO_PROGRESS
    wait_until(server.model.is_ready)
    wait_for_phase(server, "ready")
    assert ids_of(server.ask("a", input_ids=[1], request_output_len=2)) == [1, 2, 3]
    assert server.ask(recording=True).responses[0].error is None
    wait_until(lambda: server.model._manager.get_num_active_requests() == 0)
    assert server.model._manager._batcher.is_idle_and_intact()


@pytest.mark.slow
@pytest.mark.case(92)
def test_own_thread_of_triton_stuck_in_a_refusal_is_a_stall(make_server: MakeServer) -> None:
    server = make_server(CountingEngine(), stall_seconds=str(STALL))
    stuck = HeldSender()
    thread = threading.Thread(target=lambda: server.send(sender=stuck, request_output_len=1))
    thread.start()
    wait_until(lambda: not server.model.is_ready())
    stuck.release.set()
    thread.join()
    wait_until(server.model.is_ready)
    assert "input_ids" in error_of(stuck)[0]


@pytest.mark.fast(1)
@pytest.mark.case(88, 92, 123)
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("what", ["step", "send", "question"])
def test_model_with_a_thread_that_is_stuck_can_be_unloaded(
    slow_server: Callable[..., Server], gate: Gate, what: str, is_known: bool
) -> None:
    """Whether it is called a stall already or not yet."""
    server = slow_server(stall_seconds=str(STALL))
    stuck = Stuck(server, gate, what)
    wait_until(lambda: not (is_known and server.model.is_ready()))
    unload = threading.Thread(target=server.model.finalize)
    unload.start()
    unload.join(WAIT)
    assert not unload.is_alive()
    stuck.go_on()


@pytest.mark.slow
@pytest.mark.case(92)
def test_send_that_never_returns_hides_neither_a_cancel_nor_the_drain(
    slow_server: Callable[..., Server], gate: Gate
) -> None:
    server = slow_server()
    stuck = Stuck(server, gate, "send")
    other = server.send(**LONG)
    manager = server.model._manager
    wait_until(lambda: manager.get_num_active_requests() == 2)
    other.cancelled = True
    wait_until(lambda: manager.get_num_active_requests() == 1)
    server.drain_file.write_text("")
    wait_for_phase(server, "draining")
    stuck.sender.cancelled = True
    stuck.go_on()
    wait_for_phase(server, "drained")


@pytest.mark.slow
def test_metric_that_never_returns_holds_up_the_first_answer_only(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error is counted before its client hears of it, and the server takes no number."""
    release, is_stuck = threading.Event(), threading.Event()

    def stand_still(*_: object) -> None:
        is_stuck.set()
        release.wait(3 * WAIT)

    monkeypatch.setattr(TritonMetrics, "update", stand_still)
    server = make_server(CountingEngine())
    assert is_stuck.wait(WAIT)
    begin = time.monotonic()
    senders = [server.send(request_output_len=1) for _ in range(2 * int(WAIT))]
    assert all(sender.is_final.wait(WAIT) for sender in senders)
    assert time.monotonic() - begin < WAIT, "a second for each"
    release.set()


@pytest.mark.slow
@pytest.mark.case(92, 117)
@pytest.mark.parametrize(("by", "error"), [("stall", NO_PROGRESS), ("unload", LEAVING)])
def test_send_that_raises_keeps_no_other_stream_from_its_end(
    slow_server: Callable[..., Server], gate: Gate, by: str, error: tuple[str, int]
) -> None:
    server = slow_server(stall_seconds=str(STALL) if by == "stall" else "60")
    broken = FailingSender(num_failures=0)
    senders = [
        server.send(sender=sender, **LONG) for sender in (broken, FakeSender(), FakeSender())
    ]
    for sender in senders:
        assert sender.has_response.wait(WAIT)
    broken.num_failures = 99
    if by == "stall":
        gate.close_after(0)
        server.send("no", sender=FailingSender(99), stats=True)
        server.send("x", sender=FailingSender(99), recording=True)
    feeds = [server.send(sender=FailingSender(99), stats=True), server.send(stats=True)]
    if by == "unload":
        server.model.finalize()
        assert not server.model._manager._thread.is_alive()
        assert not server.model._dispatcher._thread.is_alive()
    for sender in senders[1:]:
        assert sender.is_final.wait(WAIT)
        assert last_error(sender) == error
    assert feeds[1].is_final.wait(WAIT)
    wait_until(lambda: server.model._frontend.num_live == 0)
    gate.set()
    wait_until(lambda: by == "unload" or server.model.is_ready())
