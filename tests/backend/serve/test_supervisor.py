"""When a server that failed is started again, after how long, and when that ends; stop signals."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from inflight_backend.errors import ServerKilled, ServingError
from inflight_server.serve import supervisor
from inflight_server.serve.supervisor import (
    STEADY_SECONDS,
    Attempt,
    RestartPolicy,
    StopSignals,
    Supervisor,
)
from inflight_server.serve.workspace import Workspace


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Workspace]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.01)
    with Workspace() as workspace:
        yield workspace


@pytest.mark.case(120)
def test_delays_double_up_to_a_bound_as_long_as_servers_become_ready() -> None:
    """Whatever clients do to it, others are served again: here for some ten hours."""
    policy = RestartPolicy(1)
    assert [policy.next_delay(1.0) for _ in range(1200)] == [0, 1, 2, 4, 8, 16, *[30] * 1194]
    assert policy.next_delay(STEADY_SECONDS) == 0, "after a long good time it is the first failure"
    assert policy.next_delay(0.0) == 1
    assert policy.num_failures == 2


@pytest.mark.case(120)
def test_starts_that_make_no_server_ready_come_to_an_end() -> None:
    """One that did in between gives it as many again."""
    policy = RestartPolicy(3)
    assert None not in [policy.next_delay(each) for each in (1.0, None, None, 1.0, None, None)]
    assert policy.next_delay(None) is None


DIED = ServingError("the model process died")
KILLED = ServerKilled("tritonserver ended (killed by SIGABRT)")


def run(
    workspace: Workspace,
    outcomes: Sequence[tuple[bool, Exception | None]],
    max_restarts: int = 3,
    during: Callable[[Attempt], None] = lambda attempt: None,
) -> list[Attempt]:
    """Attempts that become ready or not and then end, the last outcome again and again."""
    attempts: list[Attempt] = []

    def serve(attempt: Attempt) -> None:
        attempts.append(attempt)
        is_ready, error = outcomes[min(len(attempts), len(outcomes)) - 1]
        if is_ready:
            attempt.mark_ready()
        during(attempt)
        if error is not None:
            raise error

    with StopSignals() as signals:
        Supervisor(workspace, signals, RestartPolicy(max_restarts)).run(serve)
    return attempts


@pytest.mark.case(119)
def test_a_failure_after_ready_is_followed_by_a_clean_start(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    region = Path("/dev/shm") / f"{workspace.shm_prefix}test"

    def leave_files(attempt: Attempt) -> None:
        assert not region.exists()
        assert not workspace.status_file.exists()
        if attempt.number == 1:
            for file in (region, workspace.status_file, workspace.log_file):
                file.write_text("old")

    assert len(run(workspace, [(True, DIED), (True, None)], during=leave_files)) == 2
    assert "the model process died; starting again now (failure 1)" in capsys.readouterr().err
    assert workspace.log_file.with_suffix(".old").read_text() == "old"


@pytest.mark.case(119)
def test_a_restart_that_nobody_hears_of_takes_place(
    workspace: Workspace, nobody_hears: AbstractContextManager[None]
) -> None:
    with nobody_hears:
        assert len(run(workspace, [(True, DIED), (True, None)])) == 2


@pytest.mark.case(119)
def test_an_error_of_the_machine_is_a_failure_like_others(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert len(run(workspace, [(True, DIED), (False, full), (True, None)])) == 3
    assert "No space left on device; starting again in" in capsys.readouterr().err


@pytest.mark.case(119)
def test_files_that_cannot_be_removed_are_a_failure_and_no_server_starts_over_them(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it end the launcher at once: the disk may have room again soon."""
    attempts: list[Attempt] = []

    def leave_folder(attempt: Attempt) -> None:
        attempts.append(attempt)
        workspace.status_file.mkdir()

    with pytest.raises(
        ServingError, match=r"giving up after 2 failed starts in a row, last: .*directory"
    ):
        run(workspace, [(True, DIED)], max_restarts=2, during=leave_folder)
    assert len(attempts) == 1
    assert capsys.readouterr().err.count("Is a directory") == 1


def test_a_server_that_a_signal_ended_while_it_loaded_gets_one_more_chance(
    workspace: Workspace,
) -> None:
    """Ready then, it is not ready *again*."""
    attempts = run(workspace, [(False, KILLED), (True, None)])
    assert [(each.number, each.failed_at) for each in attempts] == [(1, None), (2, None)]


@pytest.mark.case(120)
def test_crashes_between_answers_do_not_use_up_the_restarts(workspace: Workspace) -> None:
    """As those that a client causes: more of them than there may be failed starts."""
    attempts = run(workspace, [*[(True, KILLED)] * 6, (True, None)], max_restarts=1)
    assert [each.number for each in attempts] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.case(120)
@pytest.mark.parametrize(
    ("outcomes", "max_restarts", "num_attempts", "message"),
    [
        ([(False, DIED)], 3, 1, r"^the model process died$"),  # it never was ready
        ([(False, KILLED)], 3, 2, r"^tritonserver ended \(killed by SIGABRT\)$"),
        ([(True, KILLED), (False, DIED)], 1, 2, "giving up after 1 failed start, last: the model"),
        ([(True, DIED)], 0, 1, r"^the model process died$"),
    ],
)
def test_it_gives_up_with_the_last_reason(
    workspace: Workspace,
    outcomes: list[tuple[bool, Exception | None]],
    max_restarts: int,
    num_attempts: int,
    message: str,
) -> None:
    attempts: list[Attempt] = []
    with pytest.raises(ServingError, match=message):
        run(workspace, outcomes, max_restarts, attempts.append)
    assert len(attempts) == num_attempts


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_stop_is_not_followed_by_a_restart(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, is_waiting: bool
) -> None:
    """Neither if it comes before the failure nor while the next start is waited for."""
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 3600.0)
    attempts: list[Attempt] = []

    def stop(attempt: Attempt) -> None:
        attempts.append(attempt)
        if attempt.number == 2:
            seconds = 0.1 if is_waiting else 0.0
            timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
            timer.start()
            if not is_waiting:
                timer.join()

    began = time.monotonic()
    if is_waiting:
        run(workspace, [(True, DIED)], during=stop)
    else:
        with pytest.raises(ServingError, match=r"^the model process died$"):
            run(workspace, [(True, DIED)], during=stop)
    assert len(attempts) == 2
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("is_ignored", [False, True])
def test_signal_is_counted_not_raised_unless_it_is_ignored(
    number: signal.Signals, is_ignored: bool
) -> None:
    """nohup ignores SIGHUP."""
    handler = signal.SIG_IGN if is_ignored else signal.default_int_handler
    before = signal.signal(number, handler)
    try:
        with StopSignals() as signals:
            assert not signals.is_asked()
            os.kill(os.getpid(), number)
            assert signals.is_asked() != is_ignored
            assert not signals.is_asked(times=2)
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


NO_PROCESS = -1  # as if it had been reaped just now


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_a_signal_ends_a_wait_also_one_that_came_before(delay: float) -> None:
    with StopSignals() as signals:
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        if not delay:
            timer.join()
        began = time.monotonic()
        signals.wait(60.0)
        assert time.monotonic() - began < 30
        timer.join()
        assert signals.is_asked()


def test_the_end_of_a_process_ends_a_wait(sleeper: subprocess.Popen[bytes]) -> None:
    with StopSignals() as signals:
        signals.wait(0.01, [sleeper.pid, NO_PROCESS])
        assert sleeper.poll() is None
        threading.Timer(0.1, sleeper.kill).start()
        began = time.monotonic()
        signals.wait(60.0, [NO_PROCESS, sleeper.pid])
        signals.wait(60.0, [sleeper.pid])  # it is not reaped yet
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("lacks", ["kernel", "python"])
def test_what_cannot_watch_processes_makes_it_wait_for_the_time(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """A Python made for old systems has no such function."""

    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if lacks == "kernel":
        monkeypatch.setattr(os, "pidfd_open", refuse)
    else:
        monkeypatch.delattr(os, "pidfd_open")
    with StopSignals() as signals:
        began = time.monotonic()
        signals.wait(0.05, [sleeper.pid])
        assert time.monotonic() - began >= 0.05
