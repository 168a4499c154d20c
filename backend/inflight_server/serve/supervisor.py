"""Signals that ask to stop, and restarts of a server that has failed.

Signals are counted and never raise, so that cleaning up is never interrupted. A server that failed
is killed with everything it started, which closes every connection: its clients get an error at
once instead of silence. Then its shared memory is removed, and a new one is started.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from inflight_backend.errors import ServerKilled, ServingError
from inflight_server.serve.console import say
from inflight_server.serve.workspace import Workspace

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """While entered, ``count`` says how often SIGINT, SIGTERM or SIGHUP came."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> StopSignals:
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_end = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._previous = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
        for number, handler in self._previous.items():
            if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
                signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_end)
        os.close(self._read_end)
        os.close(self._write_end)

    def is_asked(self, times: int = 1) -> bool:
        """True once the user has asked at least ``times`` times."""
        return self.count >= times

    def wait(self, seconds: float, processes: Iterable[int] = ()) -> None:
        """Wait for so long, or until a signal comes or one of ``processes`` ends.

        Where the kernel cannot watch a process its end is not noticed here.
        """
        watched = []
        for pid in processes:
            with suppress(OSError, AttributeError):  # a Python may not have it
                watched.append(os.pidfd_open(pid))
        poll = select.poll()
        for descriptor in (self._read_end, *watched):
            poll.register(descriptor, select.POLLIN)
        poll.poll(1000 * seconds)
        for descriptor in watched:
            os.close(descriptor)
        with suppress(BlockingIOError):
            while os.read(self._read_end, 512):
                pass

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


STEADY_SECONDS = 60.0
"""After so long a time of service a failure counts as the first."""

_FIRST_DELAY = 1.0
_MAX_DELAY = 30.0


class RestartPolicy:
    """At once, then after 1, 2, 4, ... and at last every 30 seconds, for as long as a start makes a
    server ready now and then: a request may have ended those, and other clients are served.

    After ``max_restarts`` starts in a row that did not come so far there are no more.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self.num_failures = 0
        """In a row: since a server was ready for `STEADY_SECONDS`."""
        self.num_failed_starts = 0
        """In a row: since a server was ready."""

    def next_delay(self, ready_seconds: float | None) -> float | None:
        """Seconds to wait before the next start; None to give up.

        ``ready_seconds``: how long the server that failed was ready; None if it never was.
        """
        if ready_seconds is not None:
            self.num_failed_starts = 0
            if ready_seconds >= STEADY_SECONDS:
                self.num_failures = 0
        elif self.num_failures:  # the very first start is no restart
            self.num_failed_starts += 1
        self.num_failures += 1
        if self.num_failed_starts >= self._max_restarts:
            return None
        if self.num_failures == 1:
            return 0.0
        return min(_FIRST_DELAY * 2.0 ** min(self.num_failures - 2, 10), _MAX_DELAY)


@dataclass(slots=True)
class Attempt:
    """One start of the server; its runner notes when the server is ready."""

    number: int
    delay: float = 0.0
    """Seconds to wait before it."""
    failed_at: float | None = None
    """When the server before it failed; None until one has been ready."""
    ready_at: float | None = None

    def mark_ready(self) -> None:
        """Requests are served from now on."""
        self.ready_at = time.monotonic()

    @property
    def ready_seconds(self) -> float | None:
        """How long the server has been ready; None if it never was."""
        return None if self.ready_at is None else time.monotonic() - self.ready_at


class Supervisor:
    """Runs attempts until one ends by itself, the user wants to stop, or the policy gives up."""

    def __init__(self, workspace: Workspace, signals: StopSignals, policy: RestartPolicy) -> None:
        self._workspace = workspace
        self._signals = signals
        self._policy = policy

    def run(self, serve: Callable[[Attempt], None]) -> None:
        """Run ``serve``, again if it raises; `ServingError` for a failure that nothing follows.

        An ``OSError`` is one as well, of `clear_run` too: a full disk may have room soon. A server
        that never was ready is not started again, since a setting is wrong then; but once if a
        signal ended it: Triton 24.10 now and then aborts while it loads several Python models on a
        busy machine (an uncaught `lock_exception` of boost).
        """
        attempt = Attempt(1)
        was_ready = False
        while True:
            try:
                if attempt.number > 1:
                    self._workspace.clear_run()
                    self._signals.wait(attempt.delay)
                    if self._signals.is_asked():
                        return
                serve(attempt)
                return
            except (ServingError, OSError) as error:
                was_ready = was_ready or attempt.ready_at is not None
                is_chance = isinstance(error, ServerKilled) and attempt.number == 1
                if not (was_ready or is_chance) or self._signals.is_asked():
                    raise
                delay = self._next_delay(attempt, error)
            failed_at = time.monotonic() if was_ready else None
            attempt = Attempt(attempt.number + 1, delay, failed_at)

    def _next_delay(self, attempt: Attempt, error: Exception) -> float:
        delay = self._policy.next_delay(attempt.ready_seconds)
        if delay is None:
            if number := self._policy.num_failed_starts:
                starts = "1 failed start" if number == 1 else f"{number} failed starts in a row"
                raise ServingError(f"giving up after {starts}, last: {error}")
            raise error
        when = f"in {delay:g} s" if delay else "now"
        say(f"{error}; starting again {when} (failure {self._policy.num_failures})", err=True)
        return delay
