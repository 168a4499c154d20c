"""Progress of the loop and deadlines of requests.

A server can answer "ready" while no token is produced. So the loop reports whether it has work,
counts its progress and its consecutive failures; the watchdog reads that. An idle loop counts as
healthy. Each request has up to two deadlines, watched in O(log n).
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from inflight_backend.log import get_logger
from inflight_scheduler import ActiveRequests, LlmRequest

_MIN_CLEAN = 1024  # entries before those of ended requests are removed


class Expired(NamedTuple):
    """A request whose deadline has passed."""

    request: LlmRequest
    is_queue_deadline: bool


class DeadlineWatch:
    """Owner of the deadlines of the ``active`` requests, on the clock of `time.monotonic`.

    Entries of ended requests stay in the heap for a while; they hold no request, whose tokens may
    be gigabytes. One counts while an active request has its id and its deadline.
    """

    def __init__(self, active: ActiveRequests) -> None:
        self._active = active
        self._heap: list[tuple[float, int, bool]] = []  # deadline, request id, is of the queue
        self._clean_at = _MIN_CLEAN

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: LlmRequest) -> None:
        """Watch an active request, if it has a deadline."""
        if len(self._heap) >= self._clean_at:
            self._heap = [each for each in self._heap if self._find(*each) is not None]
            heapq.heapify(self._heap)
            self._clean_at = max(_MIN_CLEAN, 2 * len(self._heap))
        deadlines = ((request.queue_deadline, True), (request.run_deadline, False))
        for deadline, is_of_queue in deadlines:
            if deadline is not None:
                heapq.heappush(self._heap, (deadline, request.request_id, is_of_queue))

    def take_expired(self) -> list[Expired]:
        """Deadlines that have passed, each once, of active requests that missed them."""
        if not self._heap:
            return []
        now = time.monotonic()
        expired = []
        while self._heap and self._heap[0][0] <= now:
            deadline, request_id, is_of_queue = heapq.heappop(self._heap)
            request = self._find(deadline, request_id, is_of_queue)
            if request is not None and not (is_of_queue and request.has_started):
                expired.append(Expired(request, is_of_queue))
        return expired

    def _find(self, deadline: float, request_id: int, is_of_queue: bool) -> LlmRequest | None:
        """The active request of an entry; a later one with its id has other deadlines."""
        request = self._active.get(request_id)
        if request is None:
            return None
        found = request.queue_deadline if is_of_queue else request.run_deadline
        return request if found == deadline else None


_logger = get_logger(__name__)

MAX_FAILURES_IN_A_ROW = 3
"""So many failed steps, or failures of the loop, without a success between them mean unhealthy.

A bad request fails its own step and the next step succeeds; a lost device fails all steps.
"""


# Errors of a single call of CUDA's runtime, after which others work: an invalid value or launch,
# out of memory, a missing kernel or one that needs too many resources, a failed capture.
_OF_ONE_CALL = frozenset({1, 2, 9, 98, 209, 701, *range(900, 909)})


def means_lost_device(error: BaseException) -> bool:
    """True for an error of the accelerator that every later call will also raise (an illegal
    access, ECC, Xid): only a new process helps."""
    torch = sys.modules.get("torch")  # an engine need not import it
    if torch is None or not isinstance(error, torch.AcceleratorError):
        return False
    return getattr(error, "error_code", None) not in _OF_ONE_CALL


class LoopHealth:
    """Progress and failures of one loop; the loop's thread writes, any thread reads."""

    def __init__(self) -> None:
        self.is_busy = False
        """True during a turn of the loop, and between two while a request is active."""
        self.num_moves = 0
        """Steps completed, requests ended and turns without active requests; while the loop
        `is_busy` this must grow."""
        self._num_failures_in_a_row = 0
        self._num_rescues_in_a_row = 0
        self._is_recovering = self._is_device_lost = False

    @property
    def is_healthy(self) -> bool:
        """False while the loop resets, after too many failures in a row, and for good once the
        device is lost."""
        is_failing = self._num_failures_in_a_row >= MAX_FAILURES_IN_A_ROW
        return not (self._is_recovering or self._is_device_lost or is_failing)

    @property
    def has_failed_again(self) -> bool:
        """True after at least two failures in a row."""
        return self._num_failures_in_a_row > 1

    def iteration_begins(self) -> None:
        """A turn of the loop starts."""
        self.is_busy = True

    def iteration_ends(self, *, has_work: bool) -> None:
        """A turn ends; ``has_work``: requests are active."""
        if not has_work:
            self.num_moves += 1
            self.is_busy = False

    def ended(self) -> None:
        """A request ended, with or without an error."""
        self.num_moves += 1

    def note(self, *, is_completed: bool, has_failed: bool, is_device_lost: bool = False) -> None:
        """The result of one turn, which may complete one step and fail in the next.

        Once the device is lost it stays so (see `means_lost_device`).
        """
        if is_completed:
            self.num_moves += 1
            self._num_failures_in_a_row = self._num_rescues_in_a_row = 0
        self._num_failures_in_a_row += has_failed
        self._is_device_lost |= is_device_lost

    @contextmanager
    def recovering(self, iteration: int) -> Iterator[None]:
        """Wrap the reset after a failure of the loop, while that exception is handled; exceptions
        of the reset are only logged.

        Of failures in a row the first, second, fourth, eighth and so on are logged: an idle loop
        may fail 20 times a second, for days. Failed steps do not count; each of them is logged.
        """
        self._is_recovering = True
        self._num_failures_in_a_row += 1
        self._num_rescues_in_a_row += 1
        number = self._num_rescues_in_a_row
        is_logged = number.bit_count() == 1
        if is_logged:
            _logger.exception(
                "the batch manager failed in iteration %d (failure %d in a row)", iteration, number
            )
        try:
            yield
        except BaseException:  # only this thread can end the requests
            if is_logged:
                _logger.exception("the rescue of the batch manager failed")
        finally:
            self._is_recovering = False
