"""The scheduler of one iteration: capacity, then micro-batch.

Deciding changes nothing. The order of side effects lies with the caller: decide
(`RequestScheduler.schedule_request`), check what a foreign scheduler decided (`check_decision`),
apply (`BatchPlanner.plan`); until the last step there is nothing to roll back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum

from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.policies import fast_path
from inflight_scheduler.policies.capacity import (
    POLICIES,
    CapacityScheduler,
    MaxRequestsScheduler,
)
from inflight_scheduler.policies.micro_batch import ContextChunking, MicroBatchScheduler
from inflight_scheduler.policies.resources import CrossBlocks, Resource
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import LlmRequestState


class TrtGptModelType(IntEnum):
    """How requests are batched (values of the GptManager API)."""

    V1 = 0
    InflightBatching = 1
    InflightFusedBatching = 2


class CapacitySchedulerPolicy(IntEnum):
    """The capacity policies of the Executor API, with its values; others have a name only."""

    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1
    STATIC_BATCH = 2


class RequestScheduler(ABC):
    """Decides one iteration; subclass it to bring your own policy.

    It sees the active requests in their order (priority, then arrival) and may neither change nor
    keep them, but for the ``context_chunk_size`` of those it lets run: it may cut a context there,
    if chunked context is enabled.
    """

    __slots__ = ()

    @abstractmethod
    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]:
        """Return ``(context_requests, generation_requests, paused_requests)``.

        Disjoint and all from ``active_requests``; none of the first two has its id in
        ``inflight_request_ids`` (those steps are still running).
        """


class SimpleScheduler(RequestScheduler):
    """The default: what fits, by the capacity scheduler; of that, what runs, by the other one.

    Given `ActiveRequests`, the usual decision costs what changed instead of what is active (see
    `fast_path`); it is the same decision.
    """

    __slots__ = ("_has_fast_path", "capacity_scheduler", "micro_batch_scheduler")

    def __init__(
        self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatchScheduler
    ) -> None:
        self.capacity_scheduler = capacity_scheduler
        self.micro_batch_scheduler = micro_batch_scheduler
        self._has_fast_path = fast_path.is_applicable(capacity_scheduler, micro_batch_scheduler)

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]:
        """Raises `ContextTooLong` (see `refusal_reason`, which prevents it at admission)."""
        if self._has_fast_path and not inflight_request_ids:
            decision = fast_path.schedule(
                self.capacity_scheduler, self.micro_batch_scheduler, active_requests
            )
            if decision is not None:
                return decision
        fitting, paused = self.capacity_scheduler.schedule_request(active_requests)
        context, generation = self.micro_batch_scheduler.schedule(fitting, inflight_request_ids)
        return context, generation, paused


def policy_name(policy: CapacitySchedulerPolicy | str) -> str:
    """The name under which a policy is registered; `ValueError` if none is."""
    name = policy.name.lower() if isinstance(policy, CapacitySchedulerPolicy) else policy
    if name not in POLICIES:
        raise ValueError(f"there is no capacity policy {name!r}; known are {', '.join(POLICIES)}")
    return name


def find_policy(policy: CapacitySchedulerPolicy | str) -> CapacitySchedulerPolicy | str:
    """One spelling for each policy: the Executor API's member, else the registered name.

    `ValueError` if there is none.
    """
    name = policy_name(policy)
    return CapacitySchedulerPolicy.__members__.get(name.upper(), name)


def make_scheduler(
    policy: CapacitySchedulerPolicy | str,
    block_manager: BlockManager | None,
    *,
    max_batch_size: int,
    max_num_tokens: int | None = None,
    max_num_requests: int | None = None,
    chunking: ContextChunking | None = None,
    two_step_lookahead: bool = False,
    resources: Sequence[Resource] = (),
) -> SimpleScheduler:
    """The scheduler of ``policy``, a registered name or one of the Executor API's.

    Without a block manager only the count limits. ``max_num_requests`` None means
    ``max_batch_size``, ``chunking`` None that contexts run whole. With `CrossBlocks` among the
    ``resources`` the gate opens at ENCODER_INIT. Raises `ValueError` for these under
    MAX_UTILIZATION, and for resources without a block manager.
    """
    has_encoder = any(isinstance(resource, CrossBlocks) for resource in resources)
    first_state = LlmRequestState.ENCODER_INIT if has_encoder else LlmRequestState.CONTEXT_INIT
    if max_num_requests is None:
        max_num_requests = max_batch_size
    capacity_scheduler: CapacityScheduler
    if block_manager is not None:
        make: Callable[..., CapacityScheduler] = POLICIES[policy_name(policy)]
        capacity_scheduler = make(
            max_num_requests,
            block_manager,
            two_step_lookahead=two_step_lookahead,
            resources=resources,
            no_schedule_until_state=first_state,
        )
    elif resources:
        raise ValueError("resources need a block_manager: without one only a count limits")
    else:
        capacity_scheduler = MaxRequestsScheduler(max_num_requests)
    micro_batch_scheduler = MicroBatchScheduler(
        max_batch_size,
        max_num_tokens,
        chunking=chunking,
        count_reusable_tokens=block_manager.count_reusable_tokens
        if block_manager is not None and block_manager.enable_reuse
        else None,
        snapshot_points=None if block_manager is None else block_manager.snapshot_points,
        no_schedule_until_state=first_state,
    )
    return SimpleScheduler(capacity_scheduler, micro_batch_scheduler)
