"""What `Settings` mean: who decides, who takes over from a user's scheduler, what is possible."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inflight_recorder.records import Settings
from inflight_scheduler.planning.planner import BatchPlanner
from inflight_scheduler.policies.check_decision import check_decision
from inflight_scheduler.policies.scheduler import (
    CapacitySchedulerPolicy,
    SimpleScheduler,
    make_scheduler,
)
from inflight_scheduler.request import LlmRequest

Lists = tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]
"""Context, generation and paused requests: a decision."""


def scheduler_of(
    policy: CapacitySchedulerPolicy, settings: Settings, planner: BatchPlanner
) -> SimpleScheduler:
    """Our scheduler for ``policy``, with the other settings; `ValueError` if these contradict one
    another."""
    return make_scheduler(
        policy,
        planner.block_manager,
        max_batch_size=settings.max_batch_size,
        max_num_tokens=settings.max_num_tokens,
        chunking=settings.chunking,
    )


def stand_in(settings: Settings, planner: BatchPlanner) -> SimpleScheduler:
    """Our scheduler that decides where the user's cannot.

    A foreign scheduler may have admitted more than any reservation holds, so whoever takes over
    from it must be able to pause.
    """
    return scheduler_of(CapacitySchedulerPolicy.MAX_UTILIZATION, settings, planner)


def check_possible(
    decision: object,
    active_requests: Sequence[LlmRequest],
    settings: Settings,
    planner: BatchPlanner,
    inflight_request_ids: Collection[int] = (),
) -> Lists:
    """`check_decision` with these settings, and what ``planner`` has free now."""
    return check_decision(
        decision,
        active_requests,
        inflight_request_ids,
        block_manager=planner.block_manager,
        num_free_slots=planner.num_free_slots,
        max_batch_size=settings.max_batch_size,
        max_num_tokens=settings.max_num_tokens,
        may_chunk=settings.chunking is not None,
    )
