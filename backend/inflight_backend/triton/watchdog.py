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

from inflight_backend.log import get_logger


class AwakeClock:
    """Seconds in which its owner has run; of one thread, which looks at it again and again."""

    def __init__(self, longest_turn: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``longest_turn``: what passes at most between two looks of an owner who runs."""
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


@dataclass(slots=True)
class PeriodicTask:
    """Something to do every ``period`` seconds, every ``idle_period`` while no request is there;
    by default not at all then."""

    run: Callable[[], None]
    period: float
    idle_period: float = math.inf
    next_time: float = 0.0
    is_failing: bool = False


class PeriodicTasks:
    """Runs tasks on its own thread; one that raises is tried again next time.

    The first failure of a row is logged: there may be ten in a second, for days.
    """

    def __init__(self, tasks: Sequence[PeriodicTask], is_busy: Callable[[], bool]) -> None:
        """``is_busy``: is a request there? Who makes it true calls `wake` after that."""
        self._tasks = tasks
        self._is_busy = is_busy
        self._was_busy = False
        self.progress = Progress()
        self._is_closing = False
        self._event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="PeriodicTasks", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """A request is there, or was and is refused already: the periods of idle times are over, at
        least for once; from any thread."""
        if not self._was_busy:  # else it sees for itself
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
            self._was_busy = False  # who comes from here on wakes it, or is seen in the next line
            self._was_busy = is_busy = self._is_busy() or was_woken
            now = time.monotonic()
            for task in self._tasks:
                if is_busy:
                    task.next_time = min(task.next_time, now + task.period)
                if task.next_time <= now:
                    # Behind the last request each runs once more, to see that it has gone.
                    task.next_time = now + (task.period if is_busy else task.idle_period)
                    self._run_task(task)
            wait = min(task.next_time for task in self._tasks) - time.monotonic()
            self._event.wait(None if wait == math.inf else max(wait, 0.0))

    def _run_task(self, task: PeriodicTask) -> None:
        try:
            with self.progress:
                task.run()
            task.is_failing = False
        except BaseException:  # no other thread checks
            if not task.is_failing:
                _logger.exception("a housekeeping task failed; it is tried again and again")
            task.is_failing = True


_STDERR = 2

BEAT_SECONDS = 1.0
"""How often the model process shows that it lives, at least."""


class Progress:
    """What one thread gets done: ``with progress:`` around its work, `moved` for parts of that.

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


@dataclass(frozen=True, slots=True)
class ProgressSource:
    """One who must move: ``num_moves`` grows with everything done, at least while ``is_busy``."""

    is_busy: Callable[[], bool]
    num_moves: Callable[[], int]

    @classmethod
    def of(cls, progress: Progress) -> ProgressSource:
        """A thread that notes its progress."""
        return cls(lambda: progress.is_busy, lambda: progress.num_moves)


@dataclass(frozen=True, slots=True)
class WatchdogTargets:
    """What the watchdog looks at and what it does; all of it is called on its thread.

    ``on_stall`` ends the streams; ``on_move`` says that things move again; ``beat`` runs every
    time.
    """

    movers: Sequence[ProgressSource]
    on_stall: Callable[[], None]
    on_move: Callable[[], None]
    beat: Callable[[], None]


class _Watch:
    """When one mover moved last."""

    def __init__(self, mover: ProgressSource) -> None:
        self._mover = mover
        self._num_moves = -1
        self._since = 0.0

    def is_stuck(self, limit: float, now: float) -> bool:
        """True from ``limit`` busy seconds without a move until the next one."""
        num_moves = self._mover.num_moves()
        if num_moves != self._num_moves or not self._mover.is_busy():
            self._num_moves, self._since = num_moves, now
        return now - self._since > limit


class Watchdog:
    """Detects a stall: a thread that is busy for ``stall_seconds`` without progress."""

    def __init__(self, watched: WatchdogTargets, stall_seconds: float) -> None:
        self._watched = watched
        self._stall_seconds = stall_seconds
        self._period = min(BEAT_SECONDS, stall_seconds / 4)
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
        watches = [_Watch(mover) for mover in self._watched.movers]
        limit = self._stall_seconds
        clock = AwakeClock(longest_turn=limit / 2)
        while not self._is_closing.wait(self._period):
            now = clock.now()
            self._judge(any([watch.is_stuck(limit, now) for watch in watches]))
            self._safely(self._watched.beat)

    def _judge(self, is_stalled: bool) -> None:
        if is_stalled == self._is_stalled:
            return
        if is_stalled:
            self._is_stalled = True
            _logger.error("nothing has moved for %g s; this is where all are:", self._stall_seconds)
            self._safely(lambda: faulthandler.dump_traceback(_STDERR))
            self._safely(self._watched.on_stall)
        else:
            _logger.warning("things move again after a stall")
            self._safely(self._watched.on_move)
            self._is_stalled = False  # last: requests are served once this is seen

    def _safely(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException:  # no other thread watches
            _logger.exception("an action of the watchdog failed")
