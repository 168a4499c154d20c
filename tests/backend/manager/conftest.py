"""Fixtures of the manager's tests."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from inflight_backend.manager import health


class Clock:
    """`time.monotonic` as the watch of the deadlines sees it."""

    ahead = 0.0  # seconds

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Deadlines pass when a test sets ``ahead``, without waiting."""
    made = Clock()
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=made.monotonic))
    return made
