"""The usual decision without a walk over all requests.

`capacity` and `micro_batch` are the rules. Here are their results for the usual case, read off the
sums of `ActiveRequests`: every running request continues, and the first waiting ones start if there
is room; or the last ones are paused, if those before them open more blocks than are free. Each
function returns None when it is not the usual case (the batch is full, beams, adapters, drafts,
further resources, steps still in flight, ...); then the rules walk. A property test checks that
both always decide alike.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import attrgetter

from inflight_scheduler.planning.active_requests import ActiveRequests
from inflight_scheduler.policies.capacity import (
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    MaxUtilizationScheduler,
    StaticBatchScheduler,
)
from inflight_scheduler.policies.forecast import BlockForecast
from inflight_scheduler.policies.micro_batch import MicroBatchScheduler
from inflight_scheduler.policies.resources import PeftPages
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import LlmRequestState

Decision = tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]

_rank = attrgetter("rank")


def schedule(
    capacity: CapacityScheduler,
    micro_batch: MicroBatchScheduler,
    active: Sequence[LlmRequest],
) -> Decision | None:
    """What both schedulers together decide, or None when only the walk can tell.

    O(contexts that run + requests that open a block + those paused); only for `ActiveRequests`.
    """
    if not isinstance(active, ActiveRequests) or not _is_usual(capacity, active):
        return None
    generation, paused = active.generation, list[LlmRequest]()
    if not isinstance(capacity, MaxUtilizationScheduler):
        contexts = _reserving(capacity, active)
    elif capacity.two_step_lookahead or not _is_fresh_last(active):
        return None
    else:
        forecast = BlockForecast(active.block_manager)
        paused = _make_room(active, forecast)
        if paused:  # none behind them runs or starts
            end = paused[-1].rank
            contexts = [request for request in active.started if request.rank < end]
            generation = generation[: bisect_left(generation, end, key=_rank)]
        else:
            fitting = list(active.started)
            limit = capacity.max_num_requests - len(generation) - len(active.completing)
            needed = forecast.needed_one_step
            contexts = _with_fresh(fitting, limit, active, forecast, needed, may_skip=True)
    if contexts is None:
        return None
    chosen = _fill(micro_batch, contexts, len(generation))
    return None if chosen is None else (chosen, generation, paused)


def is_applicable(capacity: CapacityScheduler, micro_batch: MicroBatchScheduler) -> bool:
    """True for schedulers whose rules are known here.

    Not for subclasses, moved gates and further resources, but for the pages of adapters, which none
    of the usual requests has.
    """
    policies = (GuaranteedNoEvictScheduler, StaticBatchScheduler, MaxUtilizationScheduler)
    return (
        isinstance(capacity, policies)
        and type(capacity) in policies
        and all(isinstance(each, PeftPages) for each in capacity.resources)
        and type(micro_batch) is MicroBatchScheduler
        and capacity.no_schedule_until_state == LlmRequestState.CONTEXT_INIT
        and capacity.no_schedule_after_state == LlmRequestState.GENERATION_COMPLETE
        and micro_batch.no_schedule_until_state == LlmRequestState.CONTEXT_INIT
        and micro_batch.no_schedule_after_state == LlmRequestState.GENERATION_TO_COMPLETE
    )


def _is_usual(capacity: CapacityScheduler, active: ActiveRequests) -> bool:
    """All are in a known phase, those that started hold blocks, and all of these may continue."""
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
    may_skip = isinstance(capacity, GuaranteedNoEvictScheduler)
    if not may_skip and num_generating > 0:
        return fitting
    limit = capacity.max_num_requests - num_generating
    needed = forecast.needed_to_completion
    return _with_fresh(fitting, limit, active, forecast, needed, may_skip=may_skip)


def _make_room(active: ActiveRequests, forecast: BlockForecast) -> list[LlmRequest]:
    """Give blocks to each that opens some (beam width 1), in order, and pause the request that
    started last until there is one; that may be the request itself. Returns those paused."""
    due = active.due_requests()
    needed: dict[int, int] = {}  # where that is not one block
    num_needed = len(due)
    if active.block_manager.window_groups:
        needed = {request.request_id: forecast.needed_one_step(request) for request in due}
        num_needed = sum(needed.values())
    if num_needed <= forecast.num_available:
        forecast.num_available -= num_needed
        return []
    started = (active.started, active.generation, active.completing)
    last_first = heapq.merge(*map(reversed, started), key=_rank, reverse=True)
    paused: list[LlmRequest] = []
    for request in sorted(due, key=_rank):
        num_needed = needed.get(request.request_id, 1)
        while forecast.num_available < num_needed and (
            not paused or request.rank < paused[-1].rank
        ):
            paused.append(next(last_first))
            forecast.release(paused[-1])
        if paused and request.rank >= paused[-1].rank:
            break
        forecast.claim(request, num_needed)
    return paused


def _with_fresh(
    fitting: list[LlmRequest],
    limit: int,
    active: ActiveRequests,
    forecast: BlockForecast,
    needed: Callable[[LlmRequest], int],
    *,
    may_skip: bool,
) -> list[LlmRequest]:
    """``fitting``, up to ``limit`` contexts, and the first fresh ones that fit beside them.

    None behind the first that does not fit has started, so none can be paused for it.
    """
    if may_skip:
        forecast.promise(fitting)
    for request in active.fresh:
        if may_skip and forecast.is_beneficial_to_skip(request):
            continue
        num_needed = needed(request)
        if len(fitting) >= limit or num_needed > forecast.num_available:
            break
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
    """The contexts that run next to all of generation; None if the walk may end before those."""
    budget = micro_batch.max_num_tokens
    if num_generating + len(contexts) > micro_batch.max_batch_size:
        return None
    if budget is not None and num_generating > budget:  # more urgent ones have come to generate
        return None
    if budget is not None and micro_batch.chunking is None:  # then all contexts are fresh
        num_left = budget - num_generating
        for place, request in enumerate(contexts):
            num_tokens = micro_batch.num_tokens_to_compute(request)
            if num_tokens > budget:
                return None
            if num_tokens > num_left:  # it waits, and so do those behind it
                contexts = contexts[:place]
                break
            num_left -= num_tokens
    return micro_batch.set_chunks(contexts, num_generating)
