"""Which requests have run out of time: two deadlines each, watched in O(log n) per request."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field

from inflight_scheduler import LlmRequest

_MIN_CLEAN = 1024  # entries before a look for those of requests that have ended


@dataclass(frozen=True, slots=True, order=True)
class Expired:
    """A request whose deadline (on the clock of `time.monotonic`) has passed."""

    deadline: float
    request: LlmRequest = field(compare=False)
    is_queue_deadline: bool = field(compare=False)


class DeadlineWatch:
    """Owner of the deadlines of the active requests; those that end earlier are forgotten.

    A request counts as ended once it has left `ActiveRequests`, its ``tracker``.
    """

    def __init__(self) -> None:
        self._heap: list[Expired] = []
        self._clean_at = _MIN_CLEAN

    def add(self, request: LlmRequest) -> None:
        """Watch an active request; it costs nothing if it has no deadline."""
        if len(self._heap) >= self._clean_at:
            self._heap = [entry for entry in self._heap if entry.request.tracker is not None]
            heapq.heapify(self._heap)
            self._clean_at = max(_MIN_CLEAN, 2 * len(self._heap))
        if request.queue_deadline is not None:
            heapq.heappush(self._heap, Expired(request.queue_deadline, request, True))
        if request.run_deadline is not None:
            heapq.heappush(self._heap, Expired(request.run_deadline, request, False))

    def take_expired(self) -> list[Expired]:
        """Deadlines that have passed, each once, of requests that missed them."""
        if not self._heap:
            return []
        now = time.monotonic()
        expired = []
        while self._heap and self._heap[0].deadline <= now:
            entry = heapq.heappop(self._heap)
            is_met = entry.is_queue_deadline and entry.request.has_started
            if not is_met and entry.request.tracker is not None:
                expired.append(entry)
        return expired
