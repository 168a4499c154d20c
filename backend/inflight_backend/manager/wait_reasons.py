"""The state of a request in flight and why it waits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from inflight_backend.errors import CapacityExceeded, ErrorText
from inflight_protocol import NOT_IN_FLIGHT as NOT_IN_FLIGHT_STATE
from inflight_scheduler import LlmRequest, WaitReason

if TYPE_CHECKING:
    from inflight_backend.manager.batcher import Batcher
    from inflight_backend.manager.health import Expired


NOT_IN_FLIGHT: dict[str, Any] = {
    "state": NOT_IN_FLIGHT_STATE,
    "reason": "no request with this id waits or runs (it has ended, or never was)",
}


@dataclass(frozen=True, slots=True)
class WaitReasons:
    """Active requests that would not run now: by id, the place among them (from 1) and why."""

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
        """``text`` with place and reason; of a request that would run, with ``otherwise``."""
        if request_id not in self.by_id:
            return f"{text}: {otherwise}"
        place, reason = self.by_id[request_id]
        return f"{text} (place {place} of {len(self.by_id)}): {reason}"


def describe_wait(batcher: Batcher, *request_ids: int) -> dict[str, Any]:
    """The state of the first active one of these requests, as plain values.

    There are always ``state`` and ``reason``; ``request`` is the id. ``place`` counts the waiting
    requests in their order, from 1. Call it on the thread of the batcher, between two iterations:
    the reason is that of the coming iteration.
    """
    active = (batcher.active.get(request_id) for request_id in request_ids)
    request = next(filter(None, active), None)
    if request is None:
        return NOT_IN_FLIGHT
    request_id = request.request_id
    waits = WaitReasons.of(batcher)
    place, reason = waits.by_id.get(request_id, (0, None))
    answer: dict[str, Any] = {
        "state": state_of(request, is_running=reason is None),
        "reason": "runs in the coming iteration" if reason is None else str(reason),
        "request": request_id,
        "prompt_tokens": request.orig_prompt_len,
        "generated_tokens": request.num_generated_tokens,
        "max_new_tokens": request.max_num_tokens - request.orig_prompt_len,
        "num_pauses": request.num_pauses,
        "held_blocks": batcher.block_manager.num_distinct_blocks_of(request_id),
        "free_blocks": batcher.block_manager.num_free_blocks,
        "num_blocks": batcher.block_manager.num_blocks,
    }
    if reason is not None:
        answer |= _numbers(reason)
        answer |= {"place": place, "num_waiting": len(waits.by_id)}
    return answer


def why_queued(num_taken: int, num_places: int) -> str:
    """Why a request is still in the queue before the batch manager, of whose places some or all are
    taken."""
    if num_taken < num_places:
        taken = f"{num_taken} of {num_places} places of max_batch_size are taken"
        return f"the iteration that runs has not ended ({taken})"
    return f"all {num_places} places of max_batch_size are taken"


PREPARING = "its grammar is being compiled"
"""Why a guided request is still in the queue."""


def describe_queued(place: int, num_waiting: int, reason: str) -> dict[str, Any]:
    """The same for a request that the batch manager has not fetched yet."""
    return {"state": "queued", "reason": reason, "place": place, "num_waiting": num_waiting}


def expiry_error(expired: Expired, waits: WaitReasons) -> str:
    """The error for a request past its deadline, with the reason it waited; "" if it has tokens.

    The server had no room in time: UNAVAILABLE, as when a request expires in Triton's own queue.
    ``waits``: from before any expired request was ended.
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
    return ErrorText.of(CapacityExceeded(waits.add_to(text, request.request_id, otherwise)))


def state_of(request: LlmRequest, *, is_running: bool) -> str:
    """What ``request`` does, in a word; ``is_running``: in the coming iteration."""
    if not is_running:
        return "paused" if request.num_pauses and request.seq_slot is None else "waiting"
    if request.is_encoder_init_state:
        return "encoder"
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
