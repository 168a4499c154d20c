"""Detects a model process that is alive but makes no progress, and runs periodic tasks.

The watchdog has a thread of its own, because any other may be the one that is stuck: the loop in a
step or a callback, the dispatcher or Triton's own thread in a send, the periodic tasks in a call to
the server. Each of them is watched separately. If even this thread cannot run (code that never
releases the interpreter lock), its heartbeat stops, which `inflight serve` sees from outside. Time
is measured by a clock that ignores suspension: `docker pause`, a snapshot of a virtual machine and
SIGSTOP stop the watched and the watching thread together, but not the system clock.

Periodic tasks: Triton tells a Python model neither that a client has gone nor that the server is
about to leave, so a thread has to look. While there is no request most tasks can wait.
"""

from __future__ import annotations

import faulthandler
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from inflight_backend.log import get_logger


class AwakeClock:
    """Seconds in which its owner has run; of one thread, which looks at it again and again."""

    def __init__(self, longest_turn: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``longest_turn``: the longest time between two looks of an owner that runs."""
        self._longest_turn = longest_turn
        self._clock = clock
        self._last = clock()
        self._seconds = 0.0

    def now(self) -> float:
        """Seconds since it was made, but of every turn ``longest_turn`` at most."""
        now = self._clock()
        self._seconds += min(now - self._last, self._longest_turn)
        self._last = now
        return self._seconds


_logger = get_logger(__name__)

_REST = 50
_LONGEST_REST_SECONDS = 1.0  # a run may have taken long because the machine stood still


@dataclass(slots=True)
class PeriodicTask:
    """Something to do every ``period`` seconds, every ``idle_period`` while no request is there;
    by default not at all then.

    One that took ``seconds`` last time rests fifty times as long, up to a second: to look at 256
    streams takes 25 ms on busy cores, in which it holds up those who generate and send.
    """

    run: Callable[[], None]
    period: float
    idle_period: float = math.inf
    next_time: float = 0.0
    seconds: float = 0.0
    is_failing: bool = False

    @property
    def busy_period(self) -> float:
        """Seconds from one run to the next while requests are there."""
        return max(self.period, min(_REST * self.seconds, _LONGEST_REST_SECONDS))


class PeriodicTasks:
    """Runs tasks on its own thread; one that raises is tried again next time.

    The first of several failures in a row is logged: there may be ten in a second, for days.
    """

    def __init__(self, tasks: Sequence[PeriodicTask], is_busy: Callable[[], bool]) -> None:
        """``is_busy``: is a request there? A caller that makes it true calls `wake` after that."""
        self._tasks = tasks
        self._is_busy = is_busy
        self._was_busy = False
        self.progress = Progress()
        self._is_closing = False
        self._event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="PeriodicTasks", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """End the idle periods, at least for one turn: a request has come, and may have been
        refused already; from any thread."""
        if not self._was_busy:  # else it looks by itself
            self._event.set()

    def close(self) -> None:
        """Stop after the task that runs now, and wait for that."""
        self._is_closing = True
        self._event.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            was_woken = self._event.is_set()
            self._event.clear()
            if self._is_closing:
                return
            self._was_busy = False  # a request from here on wakes it, or is seen in the next line
            self._was_busy = is_busy = self._is_busy() or was_woken
            now = time.monotonic()
            for task in self._tasks:
                if is_busy:
                    task.next_time = min(task.next_time, now + task.busy_period)
                if task.next_time <= now:
                    self._run_task(task)
                    # Behind the last request each runs once more, to see that it has gone.
                    task.next_time = now + (task.busy_period if is_busy else task.idle_period)
            wait = min(task.next_time for task in self._tasks) - time.monotonic()
            self._event.wait(None if wait == math.inf else max(wait, 0.0))

    def _run_task(self, task: PeriodicTask) -> None:
        started = time.monotonic()
        try:
            with self.progress:
                task.run()
            task.is_failing = False
        except BaseException:  # no other thread checks
            if not task.is_failing:
                _logger.exception("a housekeeping task failed; it is tried again and again")
            task.is_failing = True
        task.seconds = time.monotonic() - started


_STDERR = 2

BEAT_SECONDS = 1.0
"""How often the model process shows that it lives, at least."""


class Progress:
    """The work of one thread: ``with progress:`` around it, `moved` for parts of it.

    Its thread writes, any thread reads.
    """

    def __init__(self) -> None:
        self.is_busy = False
        self.num_moves = 0

    def __enter__(self) -> None:
        self.is_busy = True

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.is_busy = False
        self.moved()

    def moved(self) -> None:
        """A part of the work is done."""
        self.num_moves += 1


class Watched(Protocol):
    """What must not stand still: ``num_moves`` grows with everything done, at least while
    ``is_busy``."""

    @property
    def is_busy(self) -> bool:
        """True while there is something to do."""

    @property
    def num_moves(self) -> int:
        """How much was done so far."""


class Watchdog:
    """Detects a stall: something is busy for ``stall_seconds`` without progress.

    All callbacks are called on its thread: ``on_stall`` ends the streams, ``on_move`` says that
    things move again, ``beat`` is called every time it looks.
    """

    def __init__(
        self,
        watched: Sequence[Watched],
        stall_seconds: float,
        *,
        on_stall: Callable[[], None],
        on_move: Callable[[], None],
        beat: Callable[[], None],
    ) -> None:
        self._watched = watched
        self._stall_seconds = stall_seconds
        self._on_stall = on_stall
        self._on_move = on_move
        self._beat = beat
        self._is_stalled = False
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="Watchdog", daemon=True)
        self._thread.start()

    @property
    def is_stalled(self) -> bool:
        """True from the moment nothing has moved for too long until something does."""
        return self._is_stalled

    def close(self) -> None:
        """Stop watching."""
        self._is_closing.set()
        self._thread.join()

    def _run(self) -> None:
        period = min(BEAT_SECONDS, self._stall_seconds / 4)
        clock = AwakeClock(longest_turn=self._stall_seconds / 2)
        num_moves = [-1] * len(self._watched)
        moved_at = [0.0] * len(self._watched)
        while not self._is_closing.wait(period):
            now = clock.now()
            for index, watched in enumerate(self._watched):
                if num_moves[index] != watched.num_moves or not watched.is_busy:
                    num_moves[index], moved_at[index] = watched.num_moves, now
            self._judge(is_stalled=now - min(moved_at, default=now) > self._stall_seconds)
            self._safely(self._beat)

    def _judge(self, *, is_stalled: bool) -> None:
        if is_stalled == self._is_stalled:
            return
        if is_stalled:
            self._is_stalled = True
            _logger.error("nothing has moved for %g s; this is where all are:", self._stall_seconds)
            self._safely(lambda: faulthandler.dump_traceback(_STDERR))
            self._safely(self._on_stall)
        else:
            _logger.warning("things move again after a stall")
            self._safely(self._on_move)
            self._is_stalled = False  # last: requests are served once this is seen

    def _safely(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException:  # no other thread watches
            _logger.exception("an action of the watchdog failed")
