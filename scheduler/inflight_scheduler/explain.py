"""Why a request does not run: the decision once more, with the numbers it was made of.

Deciding is a pure function of what is active and of the blocks, so the reasons need not be
collected on the way: `explain` makes the same decision again and says for everybody who does not
run what stands in the way. Nothing is changed but what deciding changes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from inflight_scheduler.capacity import (
    CapacityScheduler,
    MaxUtilizationScheduler,
    ReservingScheduler,
    StaticBatchScheduler,
    is_started_context,
)
from inflight_scheduler.forecast import BlockForecast
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.scheduler import SimpleScheduler


class WaitCode(Enum):
    """What stands in the way of a request."""

    BLOCKS = "blocks"
    BEHIND = "behind"
    MAX_REQUESTS = "max_requests"
    STATIC_BATCH = "static_batch"
    SHARED_CONTEXT = "shared_context"
    PAUSED = "paused"
    IN_FLIGHT = "in_flight"
    BATCH = "batch"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why one request does not run now; the numbers that its code speaks of, else 0."""

    code: WaitCode
    num_needed: int = 0
    num_available: int = 0
    behind_id: int | None = None

    def __str__(self) -> str:
        return _TEXTS[self.code].format(self)


_TEXTS = {
    WaitCode.BLOCKS: "waiting for KV blocks: needs {0.num_needed}, free {0.num_available}",
    WaitCode.BEHIND: "behind request {0.behind_id}",
    WaitCode.MAX_REQUESTS: "all {0.num_available} places are taken",
    WaitCode.STATIC_BATCH: "waiting until the running batch has ended",
    WaitCode.SHARED_CONTEXT: "waiting for a request that computes the same text",
    WaitCode.PAUSED: "paused with {0.num_available} tokens: an earlier request needs its KV blocks",
    WaitCode.IN_FLIGHT: "still running in another step",
    WaitCode.BATCH: "no room in this iteration: batch size or tokens are used up",
    WaitCode.STATE: "not in a state that can run",
}


def explain(
    scheduler: SimpleScheduler,
    active_requests: Sequence[LlmRequest],
    inflight_request_ids: Collection[int] = (),
) -> dict[int, WaitReason]:
    """The reason of every active request that ``scheduler`` would not run now, by id."""
    requests = list(active_requests)
    capacity = scheduler.capacity_scheduler
    context, generation, _ = scheduler.schedule_request(requests, inflight_request_ids)
    running = {request.request_id for request in (*context, *generation)}
    fitting, paused = capacity.schedule_request(requests)
    reasons = _not_fitting(capacity, requests, fitting, paused)
    for request in fitting:
        if request.request_id in inflight_request_ids:
            reasons[request.request_id] = WaitReason(WaitCode.IN_FLIGHT)
        elif request.request_id not in running:
            reasons[request.request_id] = WaitReason(WaitCode.BATCH)
    return reasons


def _not_fitting(
    capacity: CapacityScheduler,
    requests: Sequence[LlmRequest],
    fitting: Sequence[LlmRequest],
    paused: Sequence[LlmRequest],
) -> dict[int, WaitReason]:
    """Reasons of those that the capacity scheduler left out, in order."""
    forecast = _forecast(capacity, requests, fitting, paused)
    known = {request.request_id for request in (*fitting, *paused)}
    reasons = {
        request.request_id: WaitReason(WaitCode.PAUSED, 0, len(request.tokens))
        for request in paused
    }
    first_id: int | None = None
    for request in requests:
        if request.request_id in known:
            continue
        if not capacity.is_schedulable(request):
            reason = WaitReason(WaitCode.STATE)
        elif first_id is not None:
            reason = WaitReason(WaitCode.BEHIND, behind_id=first_id)
        else:
            reason = _reason_of_first(capacity, request, fitting, paused, forecast)
            if reason.code is not WaitCode.SHARED_CONTEXT:
                first_id = request.request_id
        reasons[request.request_id] = reason
    return reasons


def _reason_of_first(
    capacity: CapacityScheduler,
    request: LlmRequest,
    fitting: Sequence[LlmRequest],
    paused: Sequence[LlmRequest],
    forecast: BlockForecast | None,
) -> WaitReason:
    """What stopped the walk; a request that waits for another's context does not."""
    is_static = isinstance(capacity, StaticBatchScheduler)
    if forecast is not None and not is_static and forecast.is_beneficial_to_skip(request):
        return WaitReason(WaitCode.SHARED_CONTEXT)
    if len(fitting) >= capacity.max_num_requests or forecast is None:
        return WaitReason(WaitCode.MAX_REQUESTS, 1, capacity.max_num_requests)
    if is_static and any(other.is_generation_in_progress_state for other in fitting):
        return WaitReason(WaitCode.STATIC_BATCH)
    num_needed = _needed(capacity, forecast, request)
    if num_needed <= forecast.num_available and paused:
        # The moving end of MAX_UTILIZATION passed it when somebody in front was paused.
        return WaitReason(WaitCode.BEHIND, behind_id=paused[-1].request_id)
    return WaitReason(WaitCode.BLOCKS, num_needed, forecast.num_available)


def _forecast(
    capacity: CapacityScheduler,
    requests: Sequence[LlmRequest],
    fitting: Sequence[LlmRequest],
    paused: Sequence[LlmRequest],
) -> BlockForecast | None:
    """The blocks after the decision; None for a scheduler that knows no blocks."""
    if not isinstance(capacity, (ReservingScheduler, MaxUtilizationScheduler)):
        return None
    forecast = BlockForecast(capacity.block_manager)
    for request in fitting:
        forecast.claim(request, _needed(capacity, forecast, request))
    for request in paused:
        forecast.release(request)
    forecast.promise(filter(is_started_context, requests))
    return forecast


def _needed(capacity: CapacityScheduler, forecast: BlockForecast, request: LlmRequest) -> int:
    if isinstance(capacity, MaxUtilizationScheduler):
        return forecast.needed_one_step(request, capacity.two_step_lookahead)
    return forecast.needed_to_completion(request)
