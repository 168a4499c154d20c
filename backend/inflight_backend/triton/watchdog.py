"""The watch over forward progress: being alive is not enough while nothing moves.

A thread of its own, because every other one may be the one that is stuck: the loop in a step or a
callback, the dispatcher or Triton's own thread in a send, the housekeeper in a question to the
server. Each of them is watched by itself: one that is stuck is not excused by others that move. If
even this thread cannot run (code that never gives the interpreter lock back), its beat stops, which
`inflight serve` sees from outside.
"""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from inflight_backend.private_log import get_logger
from inflight_backend.triton.awake_clock import AwakeClock

_logger = get_logger(__name__)

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
class Mover:
    """One who must move: ``num_moves`` grows with everything done, at least while ``is_busy``."""

    is_busy: Callable[[], bool]
    num_moves: Callable[[], int]

    @classmethod
    def of(cls, progress: Progress) -> Mover:
        """A thread that notes its progress."""
        return cls(lambda: progress.is_busy, lambda: progress.num_moves)


@dataclass(frozen=True, slots=True)
class Watched:
    """What the watchdog looks at and what it does; all of it is called on its thread.

    ``on_stall`` ends the streams; ``on_move`` says that things move again; ``beat`` runs every
    time.
    """

    movers: Sequence[Mover]
    on_stall: Callable[[], None]
    on_move: Callable[[], None]
    beat: Callable[[], None]


class _Watch:
    """When one mover moved last."""

    def __init__(self, mover: Mover) -> None:
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
    """Calls it a stall when somebody is busy for ``stall_seconds`` and does not move."""

    def __init__(self, watched: Watched, stall_seconds: float) -> None:
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
            self._is_stalled = False  # last: whoever sees it is served

    def _safely(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException:  # nobody else would watch
            _logger.exception("an action of the watchdog failed")
