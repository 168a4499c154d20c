"""Which requests have run out of time: two deadlines each, watched in O(log n) per request."""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass

from inflight_scheduler import LlmRequest

_MIN_CLEAN = 1024  # entries before a look for those of requests that have ended

_Entry = tuple[float, int, bool]  # when, the number of the request, is it that of the queue


@dataclass(frozen=True, slots=True)
class Expired:
    """A request whose deadline (on the clock of `time.monotonic`) has passed."""

    deadline: float
    request: LlmRequest
    is_queue_deadline: bool


class DeadlineWatch:
    """Owner of the deadlines of the active requests.

    A request counts as ended once it has left `ActiveRequests`, its ``tracker``. Of one that was
    forgotten two numbers stay for a while, not its tokens: those of a thousand may be gigabytes.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._requests: dict[int, LlmRequest] = {}  # by number: an id may come again
        self._numbers: dict[int, int] = {}  # by id
        self._count = itertools.count()
        self._clean_at = _MIN_CLEAN

    def add(self, request: LlmRequest) -> None:
        """Watch an active request; it costs nothing if it has no deadline."""
        if request.queue_deadline is None and request.run_deadline is None:
            return
        if len(self._heap) >= self._clean_at:
            self._heap = [entry for entry in self._heap if self._is_active(entry[1])]
            heapq.heapify(self._heap)
            self._clean_at = max(_MIN_CLEAN, 2 * len(self._heap))
        number = self._numbers[request.request_id] = next(self._count)
        self._requests[number] = request
        if request.queue_deadline is not None:
            heapq.heappush(self._heap, (request.queue_deadline, number, True))
        if request.run_deadline is not None:
            heapq.heappush(self._heap, (request.run_deadline, number, False))

    def forget(self, request: LlmRequest) -> None:
        """Let go of a request that ends; nothing if it was not watched."""
        number = self._numbers.pop(request.request_id, None)
        if number is not None:
            del self._requests[number]

    def take_expired(self) -> list[Expired]:
        """Deadlines that have passed, each once, of requests that missed them."""
        if not self._heap:
            return []
        now = time.monotonic()
        expired = []
        while self._heap and self._heap[0][0] <= now:
            deadline, number, is_of_queue = heapq.heappop(self._heap)
            if self._is_active(number):
                request = self._requests[number]
                if not (is_of_queue and request.has_started):
                    expired.append(Expired(deadline, request, is_of_queue))
        return expired

    def _is_active(self, number: int) -> bool:
        request = self._requests.get(number)
        return request is not None and request.tracker is not None
