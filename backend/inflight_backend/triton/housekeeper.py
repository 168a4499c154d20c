"""What must happen now and then beside the generation loop: one thread, no callback from Triton.

Triton tells a Python model neither that a client has gone nor that the server is about to leave,
so somebody has to look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inflight_backend.private_log import get_logger
from inflight_backend.triton.watchdog import Progress

_logger = get_logger(__name__)


@dataclass(slots=True)
class Chore:
    """Something to do every ``period`` seconds."""

    run: Callable[[], None]
    period: float
    next_time: float = 0.0
    is_failing: bool = False


class Housekeeper:
    """Runs chores on its own thread; one that raises is tried again next time.

    The first failure of a row is logged: there may be ten in a second, for days.
    """

    def __init__(self, chores: Sequence[Chore]) -> None:
        self._chores = chores
        self.progress = Progress()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="Housekeeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the chore that runs now, and wait for that."""
        self._is_closing.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            for chore in self._chores:
                if chore.next_time <= now:
                    chore.next_time = now + chore.period
                    self._run_chore(chore)
            wait = min(chore.next_time for chore in self._chores) - time.monotonic()
            if self._is_closing.wait(max(wait, 0.0)):
                return

    def _run_chore(self, chore: Chore) -> None:
        try:
            with self.progress:
                chore.run()
            chore.is_failing = False
        except BaseException:  # nobody else would look
            if not chore.is_failing:
                _logger.exception("a housekeeping chore failed; it is tried again and again")
            chore.is_failing = True
