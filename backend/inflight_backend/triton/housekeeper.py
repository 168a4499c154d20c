"""What must happen now and then beside the generation loop: one thread, no callback from Triton.

Triton tells a Python model neither that a client has gone nor that the server is about to leave,
so somebody has to look. While no request is there most of that can wait.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inflight_backend.private_log import get_logger
from inflight_backend.triton.watchdog import Progress

_logger = get_logger(__name__)


@dataclass(slots=True)
class Chore:
    """Something to do every ``period`` seconds, every ``idle_period`` while no request is there;
    by default not at all then."""

    run: Callable[[], None]
    period: float
    idle_period: float = math.inf
    next_time: float = 0.0
    is_failing: bool = False


class Housekeeper:
    """Runs chores on its own thread; one that raises is tried again next time.

    The first failure of a row is logged: there may be ten in a second, for days.
    """

    def __init__(self, chores: Sequence[Chore], is_busy: Callable[[], bool]) -> None:
        """``is_busy``: is a request there? Who makes it true calls `wake` after that."""
        self._chores = chores
        self._is_busy = is_busy
        self._was_busy = False
        self.progress = Progress()
        self._is_closing = False
        self._event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="Housekeeper", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """A request is there, or was and is refused already: the periods of idle times are over, at
        least for once; from any thread."""
        if not self._was_busy:  # else it sees for itself
            self._event.set()

    def close(self) -> None:
        """Stop after the chore that runs now, and wait for that."""
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
            for chore in self._chores:
                if is_busy:
                    chore.next_time = min(chore.next_time, now + chore.period)
                if chore.next_time <= now:
                    # Behind the last request each runs once more, to see that it has gone.
                    chore.next_time = now + (chore.period if is_busy else chore.idle_period)
                    self._run_chore(chore)
            wait = min(chore.next_time for chore in self._chores) - time.monotonic()
            self._event.wait(None if wait == math.inf else max(wait, 0.0))

    def _run_chore(self, chore: Chore) -> None:
        try:
            with self.progress:
                chore.run()
            chore.is_failing = False
        except BaseException:  # nobody else would look
            if not chore.is_failing:
                _logger.exception("a housekeeping chore failed; it is tried again and again")
            chore.is_failing = True
