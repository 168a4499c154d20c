"""Progress of the loop and deadlines of requests.

A server can answer "ready" while no token is produced. So the loop reports whether it has work,
counts its progress and its consecutive failures; the watchdog reads that. An idle loop counts as
healthy. Each request has up to two deadlines.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from inflight_backend.errors import EngineLost
from inflight_backend.log import get_logger
from inflight_scheduler import ActiveRequests, LlmRequest


class Expired(NamedTuple):
    """A request whose deadline has passed."""

    request: LlmRequest
    is_queue_deadline: bool


class DeadlineWatch:
    """Finds the ``active`` requests that have missed a deadline on the clock of `time.monotonic`.

    Free of cost until the next deadline, then O(active requests).
    """

    def __init__(self, active: ActiveRequests) -> None:
        self._active = active
        self._next_deadline = math.inf  # of all active requests, or earlier

    def add(self, request: LlmRequest) -> None:
        """Watch an active request, if it has a deadline."""
        self._next_deadline = min(self._next_deadline, *_deadlines(request))

    def take_expired(self) -> list[Expired]:
        """The requests with a deadline that has passed, each once; one that has started has met its
        queue deadline."""
        if (now := time.monotonic()) < self._next_deadline:
            return []
        expired, to_come = [], [math.inf]
        for request in self._active:
            queue_deadline, run_deadline = _deadlines(request)
            is_queue_deadline = queue_deadline <= now and not request.has_started
            if is_queue_deadline or run_deadline <= now:
                expired.append(Expired(request, is_queue_deadline))
            to_come += [each for each in (queue_deadline, run_deadline) if each > now]
        self._next_deadline = min(to_come)
        return expired


def _deadlines(request: LlmRequest) -> tuple[float, float]:
    """Of the queue and of the run."""
    deadlines = (request.queue_deadline, request.run_deadline)
    queue_deadline, run_deadline = (math.inf if each is None else each for each in deadlines)
    return queue_deadline, run_deadline


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
    access, ECC, Xid), or of a lost rank: only a new process helps."""
    if isinstance(error, EngineLost):
        return True
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
        self.is_engine_lost = False
        """True for good once a rank of the engine is lost: nothing can run any more."""

    @property
    def is_healthy(self) -> bool:
        """False while the loop resets, after too many failures in a row, and for good once the
        device is lost."""
        is_failing = self._num_failures_in_a_row >= MAX_FAILURES_IN_A_ROW
        is_lost = self._is_device_lost or self.is_engine_lost
        return not (self._is_recovering or is_lost or is_failing)

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

    def lose_engine(self) -> None:
        """A rank is lost; from any thread."""
        self.is_engine_lost = True

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
