"""A look at the books whenever the last request has left: what is held then is lost for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

from inflight_backend.manager.inflight_batcher import InflightBatcher
from inflight_backend.private_log import get_logger

_logger = get_logger(__name__)

FULL_SECONDS = 60.0
"""So often, at most, are all books compared, which takes O(blocks); free places and blocks are
counted every time."""


class IdleCheck:
    """Knows when the loop comes to rest; of its thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_due = False
        self._next_full = clock()
        self.num_repairs = 0
        """How often a fault was found, and the books made anew."""

    def finds_fault(self, batcher: InflightBatcher, *, is_running: bool) -> bool:
        """Call it in every turn. True, with a line in the log, if nobody is active, no step
        `is_running`, and yet not everything is free or the books do not agree."""
        if is_running or batcher.active:
            self._is_due = True
            return False
        if not self._is_due:
            return False
        self._is_due = False
        is_full = self._clock() >= self._next_full
        if is_full:
            self._next_full = self._clock() + FULL_SECONDS
        if batcher.is_idle_and_intact() if is_full else batcher.is_idle_and_free():
            return False
        self.num_repairs += 1
        _logger.error(
            "with nobody active %d blocks and %d places are taken, or the books do not agree: "
            "they are made anew",
            batcher.block_manager.num_used_blocks,
            batcher.num_used_places,
        )
        return True
