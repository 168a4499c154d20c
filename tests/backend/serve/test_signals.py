"""Signals are counted while entered and act as usual afterwards."""

from __future__ import annotations

import os
import signal

import pytest

from inflight_backend.serve.signals import StopSignals


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
