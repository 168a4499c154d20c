"""What a request in flight does right now, and why it does not run; asked from other threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from inflight_backend.errors import CapacityText
from inflight_backend.log import get_logger
from inflight_protocol import NOT_IN_FLIGHT as NOT_IN_FLIGHT_STATE
from inflight_scheduler import LlmRequest, WaitReason

if TYPE_CHECKING:
    from inflight_backend.manager.batcher import Batcher
    from inflight_backend.manager.health import Expired
    from inflight_backend.manager.statistics import IterationStats


_logger = get_logger(__name__)

_Result = TypeVar("_Result")


class LoopCalls:
    """Waiting questions; asked from any thread, answered on the owner's, in order.

    Once they are closed the owner changes nothing any more, and each is answered where it is asked.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """``wake`` has the owner come to `answer`."""
        self._wake = wake
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_closed = False
        self._lock = threading.RLock()

    def ask(self, question: Callable[[], _Result]) -> Future[_Result]:
        """Its answer, or what it raised, once the owner has come to it."""
        future: Future[_Result] = Future()
        with self._lock:
            if self._is_closed:
                _answer(future, question)
            else:
                self._waiting.put(lambda: _answer(future, question))
                self._wake()
        return future

    def answer(self) -> None:
        """Answer all that wait; nothing is raised."""
        while True:
            try:
                answer = self._waiting.get_nowait()
            except queue.Empty:
                return
            answer()

    def close(self) -> None:
        """Answer all that wait, for the last time."""
        with self._lock:  # who has it asks either before the last look or after it
            self._is_closed = True
            self.answer()


def _answer(future: Future[_Result], question: Callable[[], _Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return  # who has asked waits no more
    try:
        _settle(future, question)
    except BaseException:  # only from a callback of who has asked: the future is done by then
        _logger.exception("a callback of a question has failed")


def _settle(future: Future[_Result], question: Callable[[], _Result]) -> None:
    try:
        result = question()
    except BaseException as error:  # a question may fail, the loop goes on
        future.set_exception(error)
    else:
        future.set_result(result)


NOT_IN_FLIGHT: dict[str, Any] = {
    "state": NOT_IN_FLIGHT_STATE,
    "reason": "no request with this id waits or runs (it has ended, or never was)",
}


class QueuePosition(Protocol):
    """What has places for active requests; `GptManager` is one."""

    max_num_requests: int

    def get_num_active_requests(self) -> int:
        """QueuePosition that are taken; from any thread."""


@dataclass(frozen=True, slots=True)
class WaitReasons:
    """The active requests that would not run now, by id: which place each has among them, from 1,
    and why."""

    by_id: dict[int, tuple[int, WaitReason]]

    @classmethod
    def of(cls, batcher: Batcher) -> WaitReasons:
        """Call it on the thread of the batcher, between two iterations."""
        reasons = batcher.explain()
        waiting = [
            request.request_id for request in batcher.active if request.request_id in reasons
        ]
        return cls({each: (place, reasons[each]) for place, each in enumerate(waiting, start=1)})

    def add_to(self, text: str, request_id: int, otherwise: str) -> str:
        """``text`` with place and reason behind it; of one that would run, with ``otherwise``."""
        if request_id not in self.by_id:
            return f"{text}: {otherwise}"
        place, reason = self.by_id[request_id]
        return f"{text} (place {place} of {len(self.by_id)}): {reason}"


def describe_wait(batcher: Batcher, *request_ids: int) -> dict[str, Any]:
    """The answer as plain values: always ``state`` and ``reason``, else what is known.

    Of several requests it is about the first that is active, which ``request`` names.
    ``place`` counts those who do not run, in their order, from 1. Call it on the thread of the
    batcher, between two iterations: the reason is the one of the coming iteration.
    """
    active = (batcher.active.get(request_id) for request_id in request_ids)
    request = next(filter(None, active), None)
    if request is None:
        return NOT_IN_FLIGHT
    request_id = request.request_id
    waits = WaitReasons.of(batcher)
    place, reason = waits.by_id.get(request_id, (0, None))
    answer: dict[str, Any] = {
        "state": _state(request, reason is None),
        "reason": "runs in the coming iteration" if reason is None else str(reason),
        "request": request_id,
        "prompt_tokens": request.orig_prompt_len,
        "generated_tokens": request.num_generated_tokens,
        "max_new_tokens": request.max_num_tokens - request.orig_prompt_len,
        "num_pauses": request.num_pauses,
        "held_blocks": batcher.block_manager.num_blocks_of(request_id),
        "free_blocks": batcher.block_manager.num_free_blocks,
        "num_blocks": batcher.block_manager.num_blocks,
    }
    if reason is not None:
        answer |= _numbers(reason)
        answer |= {"place": place, "num_waiting": len(waits.by_id)}
    return answer


def why_queued(places: QueuePosition) -> str:
    """Why a request is still in the queue before the batch manager."""
    num_taken, num_places = places.get_num_active_requests(), places.max_num_requests
    if num_taken < num_places:
        taken = f"{num_taken} of {num_places} places of max_batch_size are taken"
        return f"the iteration that runs has not ended ({taken})"
    return f"all {num_places} places of max_batch_size are taken"


PREPARING = "its grammar is being compiled"
"""Why a guided request is still there."""


def describe_queued(place: int, num_waiting: int, reason: str) -> dict[str, Any]:
    """The answer for a request that the batch manager has not taken yet."""
    return {"state": "queued", "reason": reason, "place": place, "num_waiting": num_waiting}


def expiry_error(expired: Expired, waits: WaitReasons) -> str:
    """What a client whose deadline has passed is told, with numbers and its place among those who
    wait; "" if it has tokens instead.

    It is the server that had no room in time: UNAVAILABLE, as where Triton's own queue lets a
    request expire.

    ``waits``: as it was before anybody was ended.
    """
    request = expired.request
    if expired.is_queue_deadline or not request.has_started:
        text, otherwise = "not started before its deadline", "its turn has just come"
    elif request.num_generated_tokens > 0:
        return ""
    else:
        text = "no token before its run deadline"
        num_computed = request.context_current_position
        otherwise = f"{num_computed} of {request.prompt_len} prompt tokens computed"
    return CapacityText(waits.add_to(text, request.request_id, otherwise))


def describe_load(stats: IterationStats) -> str:
    """What keeps new requests out, for whoever refuses one: places, blocks, those who wait."""
    return (
        f"{stats.num_active_requests} of {stats.max_num_requests} places are taken, "
        f"{stats.num_waiting_requests} of those requests wait, and {stats.num_free_blocks} of "
        f"{stats.max_num_blocks} KV blocks are free"
    )


def _state(request: LlmRequest, is_running: bool) -> str:
    if not is_running:
        return "paused" if request.num_pauses and request.seq_slot is None else "waiting"
    return "context" if request.is_context_init_state else "generation"


def _numbers(reason: WaitReason) -> dict[str, Any]:
    numbers: dict[str, Any] = {"code": reason.code.value}
    if reason.num_needed:
        numbers |= {"needed": reason.num_needed, "available": reason.num_available}
    if reason.behind_id is not None:
        numbers["behind_request"] = reason.behind_id
    if reason.left_out is not None:
        numbers |= asdict(reason.left_out)
    return numbers
