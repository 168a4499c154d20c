"""Progress is watched: what is stuck is ended, said and refused, and taken back when it moves."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import WAIT, Gate, Server, error_of, full_disk, ids_of, wait_until
from support.triton_stub import CountingEngine, FakePbUtils, FakeSender

from inflight_backend.status import beat_of, read_status
from inflight_backend.triton.watchdog import Progress, ProgressSource, Watchdog, WatchdogTargets
from inflight_scheduler import ScheduledBatch

STALL = 0.3


def phase_of(server: Server) -> str:
    status = read_status(server.status_file)
    assert status is not None
    return status.phase


def last_error(sender: FakeSender) -> tuple[str, int]:
    error = sender.responses[-1].error
    assert error is not None
    return str(error), error.code


@pytest.mark.case(88)
def test_a_step_that_never_returns_ends_the_streams_and_readiness(make_server: MakeServer) -> None:
    gate = Gate()
    gate.close_after(3)
    server = make_server(CountingEngine(before_step=gate), stall_seconds=str(STALL))
    assert server.model.is_ready()
    running = server.send("a", input_ids=[1], request_output_len=200, streaming=True)
    assert gate.is_reached.wait(10)
    began = time.monotonic()
    feed = server.send(stats=True)
    waiting = [server.send(f"w{i}", input_ids=[1], request_output_len=5) for i in range(6)]
    for sender in (running, *waiting, feed):
        assert sender.is_final.wait(10)
    assert time.monotonic() - began < 10
    for sender in (running, *waiting):
        assert last_error(sender)[0].startswith("the server makes no progress")
    assert not server.model.is_ready()
    wait_until(lambda: phase_of(server) == "unhealthy")
    text, code = error_of(server.ask("a", input_ids=[1]))  # its id is free, but nothing is served
    assert (text.startswith("the server makes no progress"), code) == (
        True,
        FakePbUtils.TritonError.UNAVAILABLE,
    )
    gate.set()
    wait_until(server.model.is_ready)
    wait_until(lambda: phase_of(server) == "ready")
    assert ids_of(server.ask("a", input_ids=[1], request_output_len=2)) == [1, 2, 3]
    assert server.model._manager._batcher.block_manager.num_used_blocks == 0


@pytest.mark.case(88)
def test_a_model_that_is_stuck_for_good_can_be_unloaded(make_server: MakeServer) -> None:
    gate = Gate()
    gate.clear()
    server = make_server(CountingEngine(before_step=gate), stall_seconds=str(STALL))
    sender = server.send(input_ids=[1], request_output_len=5)
    assert sender.is_final.wait(10)
    server.model.finalize()  # returns although the loop does not
    gate.set()


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
    wait_until(lambda: phase_of(server) == "unhealthy")
    is_lost[0] = False
    assert ids_of(server.ask(input_ids=[1], request_output_len=2)) == [1, 2, 3]
    assert server.model.is_ready()
    wait_until(lambda: phase_of(server) == "ready")


def test_the_beat_goes_on_and_a_failing_action_does_not_end_it() -> None:
    beats = threading.Semaphore(0)

    def beat() -> None:
        beats.release()
        raise OSError("no disk")

    watched = WatchdogTargets((), lambda: None, lambda: None, beat)
    watchdog = Watchdog(watched, stall_seconds=0.1)
    for _ in range(3):
        assert beats.acquire(timeout=10)
    watchdog.close()
    assert not watchdog.is_stalled


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
        watched = WatchdogTargets(
            [ProgressSource.of(progress)], lambda: stalls.append(1), on_move=lambda: None, beat=beat
        )
        watchdog = Watchdog(watched, stall)
        assert has_looked.wait(WAIT)
    watchdog.close()
    assert seen == [[]]


def test_the_beat_renews_the_status_file(make_server: MakeServer) -> None:
    server = make_server(CountingEngine(), stall_seconds="0.4")
    os.utime(server.status_file, (1, 1))
    assert beat_of(server.status_file) == 10**9
    wait_until(lambda: beat_of(server.status_file) > 10**18)
    assert beat_of(server.status_file.with_name("none")) == 0


@pytest.mark.case(88)
def test_a_stall_that_cannot_be_told_is_silence_until_it_can(make_server: MakeServer) -> None:
    gate = Gate()
    gate.clear()
    server = make_server(CountingEngine(before_step=gate), stall_seconds=str(STALL))
    with server.full_disk():
        assert server.send(input_ids=[1], request_output_len=5).is_final.wait(10)
        wait_until(lambda: not server.model.is_ready())
        os.utime(server.status_file, (1, 1))
        time.sleep(2 * STALL)  # beats come after a quarter of it
        assert beat_of(server.status_file) == 10**9
    wait_until(lambda: phase_of(server) == "unhealthy")
    with server.full_disk():
        gate.set()
        wait_until(server.model.is_ready)
        assert phase_of(server) == "unhealthy"
    wait_until(lambda: phase_of(server) == "ready")


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
    with server.full_disk():
        server.drain_file.touch()
        wait_until(lambda: not server.model.is_ready())
        time.sleep(0.3)  # it looks ten times a second
        assert phase_of(server) == "ready"
    wait_until(lambda: phase_of(server) == "drained")


def test_draining_is_not_ready(make_server: MakeServer) -> None:
    server = make_server(CountingEngine())
    assert server.ask(ready=True).responses[0].error is None
    server.drain_file.write_text("")
    wait_until(lambda: not server.model.is_ready())
    text, code = error_of(server.ask(ready=True))  # what a probe sees of it on every Triton
    assert text.startswith("the server is shutting down")
    assert code == FakePbUtils.TritonError.UNAVAILABLE
