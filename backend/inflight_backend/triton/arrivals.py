"""Requests between Triton and the batch manager: the queue, the ids, and the stop signals."""

from __future__ import annotations

import itertools
import threading

from inflight_backend.errors import CapacityExceeded, InvalidRequest, RequestInFlight
from inflight_backend.inference_request import InferenceRequest


class ArrivalQueue:
    """Requests that wait for a place among the active ones. Thread-safe, bounded, FIFO."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._waiting: dict[int, InferenceRequest] = {}
        self._stops: set[int] = set()
        self._lock = threading.Lock()
        self._is_draining = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_draining(self) -> bool:
        """True once `drain` was called."""
        return self._is_draining

    def put(self, *requests: InferenceRequest) -> None:
        """Add requests, all or none; `CapacityExceeded` when there is no room or when draining."""
        with self._lock:
            if self._is_draining:
                raise CapacityExceeded("the server is shutting down; send the request elsewhere")
            if len(self._waiting) + len(requests) > self._max_size:
                raise CapacityExceeded(
                    f"the request queue is full: max_queue_size = {self._max_size}; try again later"
                )
            for request in requests:
                self._waiting[request.request_id] = request

    def take(self, max_num_requests: int) -> list[InferenceRequest]:
        """The get-inference-requests callback; a negative number takes all."""
        if not self._waiting or max_num_requests == 0:
            return []
        with self._lock:
            limit = None if max_num_requests < 0 else max_num_requests
            ids = list(itertools.islice(self._waiting, limit))
            return [self._waiting.pop(request_id) for request_id in ids]

    def stop(self, request_id: int) -> bool:
        """Stop a request: True if it was still waiting (and is gone now), else it is signalled."""
        with self._lock:
            if self._waiting.pop(request_id, None) is not None:
                return True
            self._stops.add(request_id)
            return False

    def find_place(self, request_id: int) -> tuple[int, int] | None:
        """Place of a request that still waits, from 1, and how many do; None if it does not."""
        with self._lock:
            if request_id not in self._waiting:
                return None
            return list(self._waiting).index(request_id) + 1, len(self._waiting)

    def poll_stop_signals(self) -> set[int]:
        """The poll-stop-signals callback: ids to stop, each named once."""
        if not self._stops:
            return set()
        with self._lock:
            stops, self._stops = self._stops, set()
            return stops

    def drain(self) -> None:
        """Refuse everything from now on; what waits already is served."""
        with self._lock:
            self._is_draining = True


class RequestIds:
    """The ids clients chose, and the numbers the batch manager knows their requests by.

    A client's id is any string; equal strings may not be in flight at once. Requests without an id
    get a number too, but cannot be stopped by id.
    """

    _MAX_LENGTH = 1024

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._name_to_number: dict[str, int] = {}
        self._lock = threading.Lock()

    def reserve(self, name: str) -> int:
        """A number for a new request; `RequestInFlight` if its id is in use."""
        if len(name) > self._MAX_LENGTH:
            raise InvalidRequest(
                f"the request id has {len(name)} characters, more than {self._MAX_LENGTH}"
            )
        with self._lock:
            number = next(self._numbers)
            if name and self._name_to_number.setdefault(name, number) != number:
                raise RequestInFlight(
                    "a request with this id is still being processed; this one was not accepted"
                )
            return number

    def release(self, name: str) -> None:
        """The id may be used again."""
        with self._lock:
            self._name_to_number.pop(name, None)

    def find(self, name: str) -> int | None:
        """The number of the request in flight with this id."""
        return self._name_to_number.get(name)
