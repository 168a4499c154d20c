"""Progress of the loop and deadlines of requests.

Being alive is not enough: a server can answer "ready" while no token moves. So the loop writes
whether it has work, counts what it gets done, and counts consecutive failures; the watchdog reads
that. An idle loop counts as healthy. Each request has up to two deadlines, watched in O(log n).
"""

from __future__ import annotations

import heapq
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from inflight_backend.log import get_logger
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


_logger = get_logger(__name__)

MAX_FAILURES_IN_A_ROW = 3
"""As many failed steps, or failures of the loop, with no success between them mean: unhealthy.

One bad request fails its own step and the next step succeeds; a lost device fails them all.
"""


# Errors of one call of CUDA's runtime, after which others work: a value or launch that is refused,
# memory that ran out, a kernel that is not there or takes too much, a capture that went wrong.
_OF_ONE_CALL = frozenset({1, 2, 9, 98, 209, 701, *range(900, 909)})


def means_lost_device(error: BaseException) -> bool:
    """True for an error of the accelerator that every later call will have as well (an illegal
    access, ECC, Xid): only a new process helps."""
    torch = sys.modules.get("torch")  # an engine may do without
    if torch is None or not isinstance(error, torch.AcceleratorError):
        return False
    return getattr(error, "error_code", None) not in _OF_ONE_CALL


class LoopHealth:
    """Progress and failures of one loop; the loop's thread writes, any thread reads."""

    def __init__(self) -> None:
        self._is_busy = False
        self._num_moves = 0
        self._num_failures_in_a_row = 0
        self._num_rescues_in_a_row = 0
        self._is_recovering = self._is_device_lost = False

    @property
    def is_busy(self) -> bool:
        """True during a turn of the loop, and between two while a request is active."""
        return self._is_busy

    @property
    def num_moves(self) -> int:
        """Steps completed, requests ended and turns with nobody active so far; while the loop
        `is_busy` this must grow."""
        return self._num_moves

    @property
    def is_healthy(self) -> bool:
        """False while the loop starts afresh, after too many failures in a row, and for good once
        the device is lost."""
        is_failing = self._num_failures_in_a_row >= MAX_FAILURES_IN_A_ROW
        return not (self._is_recovering or self._is_device_lost or is_failing)

    @property
    def has_failed_again(self) -> bool:
        """True when nothing was done since the failure before the last."""
        return self._num_failures_in_a_row > 1

    def iteration_begins(self) -> None:
        """The loop looks whether there is something to do, and does it."""
        self._is_busy = True

    def iteration_ends(self, *, has_work: bool) -> None:
        """``has_work``: somebody is active, whom the next turn has to serve."""
        if not has_work:
            self._num_moves += 1
            self._is_busy = False

    def moved(self) -> None:
        """A step was completed."""
        self._num_moves += 1
        self._num_failures_in_a_row = self._num_rescues_in_a_row = 0

    def ended(self) -> None:
        """A request was ended, however."""
        self._num_moves += 1

    def failed(self) -> None:
        """A step failed."""
        self._num_failures_in_a_row += 1

    def note(self, *, is_completed: bool, has_failed: bool) -> None:
        """What one turn of the loop did: it may have completed one step and failed in the next."""
        if is_completed:
            self.moved()
        if has_failed:
            self.failed()

    def note_device(self, *, is_lost: bool) -> None:
        """Once it is lost it stays so (see `means_lost_device`)."""
        self._is_device_lost |= is_lost

    @contextmanager
    def recovering(self, iteration: int) -> Iterator[None]:
        """Around the rescue after a failure of the loop, while that is handled; what the rescue
        raises is logged only.

        In a row the first failure is logged, the second, the fourth, the eighth and so on: a loop
        with nobody to serve may fail 20 times in a second, for days. Failed steps are not counted,
        each of which is logged.
        """
        self._is_recovering = True
        self.failed()
        self._num_rescues_in_a_row += 1
        number = self._num_rescues_in_a_row
        is_told = number.bit_count() == 1
        if is_told:
            _logger.exception(
                "the batch manager failed in iteration %d (failure %d in a row)", iteration, number
            )
        try:
            yield
        except BaseException:  # the thread must live: nobody else can end its requests
            if is_told:
                _logger.exception("the rescue of the batch manager failed")
        finally:
            self._is_recovering = False
