"""Signals are counted while entered and act as usual afterwards."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from inflight_server.serve.supervisor import StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_is_counted_not_raised(number: signal.Signals) -> None:
    before = signal.signal(number, signal.default_int_handler)  # under nohup one is ignored
    try:
        with StopSignals() as signals:
            assert not signals.is_asked()
            os.kill(os.getpid(), number)
            assert signals.is_asked()
            assert not signals.is_asked(times=2)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.count == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


NOBODY = -1  # as if it had been reaped just now


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_a_signal_ends_a_wait_also_one_that_came_before() -> None:
    with StopSignals() as signals:
        for delay in (0.0, 0.1):
            timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGTERM))
            timer.start()
            if not delay:
                timer.join()
            began = time.monotonic()
            signals.wait(60.0)
            assert time.monotonic() - began < 30
            timer.join()
        assert signals.count == 2


def test_the_end_of_a_process_ends_a_wait(sleeper: subprocess.Popen[bytes]) -> None:
    with StopSignals() as signals:
        signals.wait(0.01, [sleeper.pid, NOBODY])
        assert sleeper.poll() is None
        timer = threading.Timer(0.1, sleeper.kill)
        timer.start()
        began = time.monotonic()
        signals.wait(60.0, [NOBODY, sleeper.pid])
        signals.wait(60.0, [sleeper.pid])  # it is not reaped yet
        assert time.monotonic() - began < 30


def test_a_kernel_that_cannot_watch_processes_makes_it_wait_for_the_time(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with StopSignals() as signals:
        began = time.monotonic()
        signals.wait(0.05, [sleeper.pid])
        assert time.monotonic() - began >= 0.05
