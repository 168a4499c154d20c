"""The queue between Triton and the batch manager, request ids, and stop signals."""

from __future__ import annotations

import itertools
import math
import re
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from inflight_backend.errors import CapacityExceeded, InvalidRequest, RequestInFlight
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_protocol import MAX_QUEUE_SIZE
from inflight_scheduler import DEFAULT_PRIORITY_SPAN, rank_at_arrival

_WAITING = '"Waiting Requests": '
_NUMBER = re.compile(r"\d+")

# rank, number of arrival (unique), request, deadline
_Entry = tuple[float, int, InferenceRequest, float]

DRAINING = "the server is shutting down; send the request to another server"


@dataclass(frozen=True, slots=True)
class OverdueRequest:
    """A request that left the queue because its time was up.

    ``place`` is where it stood among the ``num_waiting`` that waited, from 1.
    """

    request: InferenceRequest
    place: int
    num_waiting: int


class RequestQueue:
    """Validated requests that wait for a place among the active ones. Thread-safe and bounded.

    It numbers requests as they arrive and hands them out by rank, the order in which
    `ActiveRequests` then keeps them: priority decides, and no request is passed by more than
    ``priority_span`` allows, here and there together. Give both the same span.
    """

    def __init__(
        self,
        max_size: int,
        priority_span: float = DEFAULT_PRIORITY_SPAN,
        describe_load: Callable[[], str] = str,
    ) -> None:
        """``max_size`` 0: as many as `MAX_QUEUE_SIZE`. ``describe_load`` says why requests have to
        wait, for the error of a full queue."""
        self._max_size = max_size or MAX_QUEUE_SIZE
        self._priority_span = priority_span
        self._describe_load = describe_load
        self._num_arrivals = 0
        self._order: list[_Entry] = []  # sorted
        self._entries: dict[int, _Entry] = {}
        self._next_deadline = math.inf  # of those that wait, or earlier
        self._stops: set[int] = set()
        self._lock = threading.Lock()
        self._is_draining = False
        self._refusal = ""

    def __len__(self) -> int:
        return len(self._order)

    @property
    def is_draining(self) -> bool:
        """True once `drain` was called."""
        return self._is_draining

    def check_room(self, num_requests: int, *, continues: bool = False) -> None:
        """`CapacityExceeded` when there is no room for so many or when draining.

        ``continues``: they go on with an answer that was begun before, for which there is room.
        """
        if self._is_draining and not continues:
            raise CapacityExceeded(DRAINING)
        if self._refusal:
            raise CapacityExceeded(self._refusal)
        if not continues and len(self._order) + num_requests > self._max_size:
            load = f"; {text}" if (text := self._describe_load()) else ""
            raise CapacityExceeded(
                f"Maximum queue size of {self._max_size} has been reached (max_queue_size); "
                f"try again later{load}"
            )

    def put(self, *requests: InferenceRequest, continues: bool = False) -> None:
        """Add requests, all or none; raises what `check_room` does."""
        with self._lock:
            self.check_room(len(requests), continues=continues)
            for request in requests:
                self._add(request)

    def _add(self, request: InferenceRequest) -> None:
        llm_request = request.llm_request
        assert llm_request is not None, "validate the request first"
        self._num_arrivals += 1
        arrival = llm_request.arrival = self._num_arrivals
        rank = rank_at_arrival(arrival, llm_request.priority, self._priority_span)
        deadlines = (llm_request.queue_deadline, llm_request.run_deadline)
        deadline = min((each for each in deadlines if each is not None), default=math.inf)
        entry = self._entries[request.request_id] = (rank, arrival, request, deadline)
        insort(self._order, entry)
        self._next_deadline = min(self._next_deadline, deadline)

    def take(self, max_num_requests: int) -> list[InferenceRequest]:
        """The get-inference-requests callback; a negative number takes all that are ready."""
        if not self._order or max_num_requests == 0:
            return []
        with self._lock:
            limit = None if max_num_requests < 0 else max_num_requests
            ready = (entry for entry in self._order if entry[2].is_ready)
            taken = list(itertools.islice(ready, limit))
            if taken == self._order[: len(taken)]:
                del self._order[: len(taken)]
            else:  # a request before them waits for its grammar
                gone = {entry[1] for entry in taken}
                self._order = [each for each in self._order if each[1] not in gone]
            for _, _, request, _ in taken:
                del self._entries[request.request_id]
            return [request for _, _, request, _ in taken]

    def take_overdue(self) -> list[OverdueRequest]:
        """Take out the requests whose deadline has passed before they could start."""
        if (now := time.monotonic()) < self._next_deadline:
            return []
        with self._lock:
            overdue = [
                OverdueRequest(request, place, len(self._order))
                for place, (_, _, request, deadline) in enumerate(self._order, start=1)
                if deadline <= now
            ]
            for each in overdue:
                del self._entries[each.request.request_id]
            self._order = [entry for entry in self._order if entry[3] > now]
            self._next_deadline = min((entry[3] for entry in self._order), default=math.inf)
        return overdue

    def stop(self, request_id: int) -> InferenceRequest | None:
        """Stop a request: the request if it was still waiting, which it does no more; else it is
        signalled."""
        with self._lock:
            entry = self._entries.pop(request_id, None)
            if entry is not None:
                del self._order[bisect_left(self._order, entry)]
                return entry[2]
            self._stops.add(request_id)
            return None

    def find_place(self, request_id: int) -> tuple[int, int] | None:
        """Place of a request that still waits, from 1, and how many do; None if it does not."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                return None
            return bisect_left(self._order, entry) + 1, len(self._order)

    def first(self, most: int) -> list[InferenceRequest]:
        """The ``most`` requests that wait in front, in their order."""
        with self._lock:
            return [request for _, _, request, _ in self._order[:most]]

    def add_to(self, stats_json: str) -> str:
        """Statistics of the batch manager, which does not know the requests queued here, with them
        among its `Waiting Requests`."""
        if not (num_queued := len(self._order)):
            return stats_json
        # Once an iteration: this takes 1 us, to parse and write it 15.
        head, key, rest = stats_json.rpartition(_WAITING)
        number = _NUMBER.match(rest)
        assert number is not None, "statistics of the batch manager have waiting requests"
        return f"{head}{key}{int(number[0]) + num_queued}{rest[number.end() :]}"

    def is_preparing(self, request_id: int) -> bool:
        """True for a request that waits for its grammar."""
        entry = self._entries.get(request_id)
        return entry is not None and not entry[2].is_ready

    def poll_stop_signals(self) -> set[int]:
        """The poll-stop-signals callback: ids to stop, each named once."""
        if not self._stops:
            return set()
        with self._lock:
            stops, self._stops = self._stops, set()
            return stops

    @property
    def refusal(self) -> str:
        """Why new requests are refused, other than for draining; "" while they are not."""
        return self._refusal

    def refuse(self, reason: str) -> None:
        """Refuse new requests because of ``reason``; with "" accept them again."""
        with self._lock:
            self._refusal = reason

    def drain(self) -> None:
        """Refuse everything from now on; what waits already is served."""
        with self._lock:
            self._is_draining = True


NUM_RELEASED = 512
"""Ids of ended requests that are remembered."""


class RequestIds:
    """The ids clients chose, and the numbers the batch manager knows their requests by.

    A client's id is any string; equal strings may not be in flight at once. Requests without an id
    get a number too, but cannot be stopped by id.
    """

    _MAX_LENGTH = 1024

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._name_to_number: dict[str, int] = {}
        self._released: deque[tuple[int, str]] = deque(maxlen=NUM_RELEASED)
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

    def release(self, name: str, number: int) -> None:
        """The id of the request ``number`` may be used again; not if another request has it now."""
        with self._lock:
            if self._name_to_number.get(name) == number:
                del self._name_to_number[name]
                self._released.append((number, name))

    def names(self) -> dict[int, str]:
        """By number the ids of the requests in flight that have one, and of those that had one and
        ended lately."""
        with self._lock:
            known = dict(self._released)
            return known | {number: name for name, number in self._name_to_number.items()}

    def find(self, name: str) -> int | None:
        """The number of the request in flight with this id."""
        return self._name_to_number.get(name)
