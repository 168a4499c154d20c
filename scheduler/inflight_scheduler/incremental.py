"""The usual decision without a walk over all requests.

`capacity` and `micro_batch` are the rules. Here are their results for the usual case, read off the
sums of `ActiveRequests`: everybody who runs goes on, and the first waiting requests start if there
is room. Each function answers None when it is not the usual case (somebody must be paused, the
batch is full, beams, adapters, drafts, further resources, steps still in flight, ...); then the
rules walk. That both always decide alike is tested as a property.
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight_scheduler.active import ActiveRequests
from inflight_scheduler.capacity import (
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    MaxUtilizationScheduler,
    StaticBatchScheduler,
)
from inflight_scheduler.forecast import BlockForecast
from inflight_scheduler.micro_batch import MicroBatchScheduler
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import LlmRequestState

Decision = tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]


def decide(
    capacity: CapacityScheduler,
    micro_batch: MicroBatchScheduler,
    active: Sequence[LlmRequest],
) -> Decision | None:
    """What both schedulers together decide, or None when only the walk can tell.

    O(contexts that run + requests that open a block); only for `ActiveRequests`.
    """
    if not isinstance(active, ActiveRequests) or not _is_usual(capacity, active):
        return None
    if isinstance(capacity, MaxUtilizationScheduler):
        contexts = _max_utilization(capacity, active)
    else:
        contexts = _reserving(capacity, active)
    if contexts is None:
        return None
    chosen = _fill(micro_batch, contexts, len(active.generation))
    return None if chosen is None else (chosen, active.generation, [])


def can_decide(capacity: CapacityScheduler, micro_batch: MicroBatchScheduler) -> bool:
    """True for schedulers whose rules are known here.

    Not for subclasses, moved gates, further resources and attention windows.
    """
    policies = (GuaranteedNoEvictScheduler, StaticBatchScheduler, MaxUtilizationScheduler)
    return (
        isinstance(capacity, policies)
        and type(capacity) in policies
        and not capacity.resources
        and capacity.block_manager.window_size is None
        and type(micro_batch) is MicroBatchScheduler
        and capacity.no_schedule_until_state == LlmRequestState.CONTEXT_INIT
        and capacity.no_schedule_after_state == LlmRequestState.GENERATION_COMPLETE
        and micro_batch.no_schedule_until_state == LlmRequestState.CONTEXT_INIT
        and micro_batch.no_schedule_after_state == LlmRequestState.GENERATION_TO_COMPLETE
    )


def _is_usual(capacity: CapacityScheduler, active: ActiveRequests) -> bool:
    """Everybody is in a known phase, who has started holds blocks, and all of those may go on."""
    num_running = len(active.started) + len(active.generation) + len(active.completing)
    return (
        active.num_others == 0
        and active.num_with_beams_or_adapter == 0
        and active.num_with_drafts == 0
        and num_running <= capacity.max_num_requests
        and num_running == active.block_manager.num_holders
    )


def _reserving(capacity: CapacityScheduler, active: ActiveRequests) -> list[LlmRequest] | None:
    """Fitting contexts under reservations: what started takes to completion is one difference."""
    manager = active.block_manager
    forecast = BlockForecast(manager)
    forecast.num_available -= active.num_blocks_at_completion - manager.num_held_blocks
    if forecast.num_available < 0:
        return None
    num_generating = len(active.generation) + len(active.completing)
    fitting = list(active.started)
    limit = capacity.max_num_requests - num_generating
    may_skip = isinstance(capacity, GuaranteedNoEvictScheduler)
    if may_skip:
        forecast.promise(fitting)
    elif num_generating > 0:
        return fitting
    for request in active.fresh:
        if may_skip and forecast.is_beneficial_to_skip(request):
            continue
        num_needed = forecast.needed_to_completion(request)
        if len(fitting) >= limit or num_needed > forecast.num_available:
            break
        fitting.append(request)
        forecast.claim(request, num_needed)
    return fitting


def _max_utilization(
    capacity: MaxUtilizationScheduler, active: ActiveRequests
) -> list[LlmRequest] | None:
    """Fitting contexts when the next step of all who started fits and nobody must be paused."""
    if capacity.two_step_lookahead or not _is_fresh_last(active):
        return None
    manager = active.block_manager
    forecast = BlockForecast(manager)
    forecast.num_available -= len(active.due_requests())  # beam width 1: a block each
    if forecast.num_available < 0:
        return None
    fitting = list(active.started)
    forecast.promise(fitting)
    limit = capacity.max_num_requests - len(active.generation) - len(active.completing)
    for request in active.fresh:
        if forecast.is_beneficial_to_skip(request):
            continue
        num_needed = forecast.needed_one_step(request)
        if len(fitting) >= limit or num_needed > forecast.num_available:
            break  # nobody behind it has started, so nobody can be paused for it
        fitting.append(request)
        forecast.claim(request, num_needed)
    return fitting


def _is_fresh_last(active: ActiveRequests) -> bool:
    if not active.fresh:
        return True
    first_fresh = active.fresh[0].rank
    lines = (active.started, active.generation, active.completing)
    return all(line[-1].rank < first_fresh for line in lines if line)


def _fill(
    micro_batch: MicroBatchScheduler, contexts: list[LlmRequest], num_generating: int
) -> list[LlmRequest] | None:
    """The contexts that run next to all of generation; None if the walk may end early."""
    if num_generating + len(contexts) > micro_batch.max_batch_size:
        return None
    budget = micro_batch.max_num_tokens
    if micro_batch.chunking is None:
        num_tokens = num_generating + sum(map(micro_batch.num_tokens_to_compute, contexts))
    else:
        num_tokens = num_generating
    if budget is not None and num_tokens > budget:
        return None
    return micro_batch.set_chunks(contexts, num_generating)
