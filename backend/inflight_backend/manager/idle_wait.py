"""How the loop waits while it has nothing to do.

Who calls `GptManager.wake` for whatever its callbacks have next is waited for; other callbacks are
asked again by and by. In both cases a wake-up ends the wait at once. It is never lost: what is new
is there before `wake`, and the loop looks for it after it has taken the wake-up back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from inflight_backend.manager.callback_guard import CallbackGuard

TURN_SECONDS = 5.0
"""How long a loop that is woken for everything waits at most: its statistics have a time stamp, by
which others see that it lives."""

_FIRST_POLL_SECONDS = 0.005
LAST_POLL_SECONDS = 0.05
"""How long after the last time callbacks that wake nobody are asked again, at most."""


class IdleWait:
    """The wait of one loop, and what ends it."""

    def __init__(self, guard: CallbackGuard, poll_when_idle: Callable[[], bool]) -> None:
        """``poll_when_idle``: may the callbacks have something new without a call of `wake`? One
        that fails, in the hands of ``guard``, is taken for a yes."""
        self._guard = guard
        self._poll_when_idle = poll_when_idle
        self._event = threading.Event()
        self._poll_seconds = _FIRST_POLL_SECONDS

    def wake(self) -> None:
        """End the wait, or the next one; from any thread."""
        self._event.set()

    def after_turn(self, *, is_idle: bool, has_requests: bool) -> None:
        """Wait for something to do, after a turn that found nothing.

        Not for long where the loop ``has_requests``: time alone may let them go on, or end them.
        """
        if not is_idle:
            self._poll_seconds = _FIRST_POLL_SECONDS
            return
        seconds = TURN_SECONDS
        if has_requests or self._must_poll():
            seconds = self._poll_seconds
            self._poll_seconds = min(2 * seconds, LAST_POLL_SECONDS)
        self._event.wait(seconds)
        self._event.clear()

    def _must_poll(self) -> bool:
        return self._guard.call("poll_when_idle", self._poll_when_idle) is not False
