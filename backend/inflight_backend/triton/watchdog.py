"""The watch over forward progress: being alive is not enough while nothing moves.

A thread of its own, because every other one may be the one that is stuck: the loop in a step or a
callback, the dispatcher in a send, the housekeeper in a question to the server. If even this
thread cannot run (code that never gives the interpreter lock back), its beat stops, which
`inflight serve` sees from outside.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_logger = logging.getLogger(__name__)

_STDERR = 2

BEAT_SECONDS = 1.0
"""How often the model process shows that it lives, at least."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What the watchdog looks at and what it does; all of it is called on its thread.

    ``is_busy``: requests are in flight. ``num_moves`` grows with everything that is done.
    ``on_stall`` ends the streams; ``on_move`` says that things move again; ``beat`` runs every
    time.
    """

    is_busy: Callable[[], bool]
    num_moves: Callable[[], int]
    on_stall: Callable[[], None]
    on_move: Callable[[], None]
    beat: Callable[[], None]


class Watchdog:
    """Calls a stall what lasts ``stall_seconds`` with requests in flight and no move."""

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
        last_moves, since = -1, time.monotonic()
        while not self._is_closing.wait(self._period):
            moves = self._watched.num_moves()
            if moves != last_moves or not (self._watched.is_busy() or self._is_stalled):
                last_moves, since = moves, time.monotonic()
            self._judge(time.monotonic() - since > self._stall_seconds)
            self._safely(self._watched.beat)

    def _judge(self, is_stalled: bool) -> None:
        if is_stalled == self._is_stalled:
            return
        self._is_stalled = is_stalled
        if is_stalled:
            _logger.error("nothing has moved for %g s; this is where all are:", self._stall_seconds)
            self._safely(lambda: faulthandler.dump_traceback(_STDERR))
            self._safely(self._watched.on_stall)
        else:
            _logger.warning("things move again after a stall")
            self._safely(self._watched.on_move)

    def _safely(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            _logger.exception("an action of the watchdog failed")
