"""Who may hold KV cache in this iteration: the first of the two questions of scheduling.

Decisions only: nothing here changes a request, a block or a slot, so a decision can be thrown
away. The rules are those of TensorRT-LLM's ``capacityScheduler.cpp`` and of its Python twin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from inflight_scheduler.block_manager import BlockManager
from inflight_scheduler.request import LlmRequest, LlmRequestState


class CapacityScheduler(ABC):
    """Chooses, from the active requests in list order, which fit and which must be paused.

    A request is looked at when it has reached ``no_schedule_until_state`` and has not reached
    ``no_schedule_after_state``; the others are left alone.
    """

    __slots__ = ("max_num_requests", "no_schedule_after_state", "no_schedule_until_state")

    def __init__(
        self,
        max_num_requests: int,
        *,
        no_schedule_until_state: LlmRequestState = LlmRequestState.CONTEXT_INIT,
        no_schedule_after_state: LlmRequestState = LlmRequestState.GENERATION_COMPLETE,
    ) -> None:
        if max_num_requests < 1:
            raise ValueError(f"max_num_requests must be at least 1, not {max_num_requests}")
        self.max_num_requests = max_num_requests
        self.no_schedule_until_state = no_schedule_until_state
        self.no_schedule_after_state = no_schedule_after_state

    @abstractmethod
    def schedule_request(
        self, active_requests: Sequence[LlmRequest]
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Return ``(fitting_requests, paused_requests)``; disjoint, both from the active ones."""

    def is_schedulable(self, request: LlmRequest) -> bool:
        """True when the state of ``request`` lies inside the gate."""
        return self.no_schedule_until_state <= request.state < self.no_schedule_after_state

    def _gated(self, active_requests: Sequence[LlmRequest]) -> list[LlmRequest]:
        until, after = self.no_schedule_until_state, self.no_schedule_after_state
        return [request for request in active_requests if until <= request.state < after]


class MaxRequestsScheduler(CapacityScheduler):
    """Without a KV cache: the first ``max_num_requests`` in order."""

    __slots__ = ()

    def schedule_request(
        self, active_requests: Sequence[LlmRequest]
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Never pauses."""
        return self._gated(active_requests)[: self.max_num_requests], []


class GuaranteedNoEvictScheduler(CapacityScheduler):
    """GUARANTEED_NO_EVICT: who starts can finish, because its blocks to completion are reserved.

    The guarantee rests on every running request having been admitted under it: to take over in the
    middle from a scheduler that reserves less, use `MaxUtilizationScheduler`, which can pause.

    One departure from the published rule: contexts past their first chunk, which hold blocks
    already, are looked at before fresh ones. In arrival order this changes nothing. With a fresh
    request of higher priority in front that does not fit, the published rule would leave them
    holding their blocks for ever.
    """

    __slots__ = ("block_manager",)

    def __init__(
        self,
        max_num_requests: int,
        block_manager: BlockManager,
        *,
        no_schedule_until_state: LlmRequestState = LlmRequestState.CONTEXT_INIT,
        no_schedule_after_state: LlmRequestState = LlmRequestState.GENERATION_COMPLETE,
    ) -> None:
        super().__init__(
            max_num_requests,
            no_schedule_until_state=no_schedule_until_state,
            no_schedule_after_state=no_schedule_after_state,
        )
        self.block_manager = block_manager

    def schedule_request(
        self, active_requests: Sequence[LlmRequest]
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Generation first, then started contexts, then fresh ones until one does not fit."""
        remaining_blocks = self.block_manager.get_remaining_blocks_to_completion
        fitting: list[LlmRequest] = []
        started: list[LlmRequest] = []
        fresh: list[LlmRequest] = []
        num_available = self.block_manager.num_free_blocks
        for request in self._gated(active_requests):
            if len(fitting) >= self.max_num_requests:
                return fitting, []
            if request.is_generation_in_progress_state:
                fitting.append(request)
                num_available -= remaining_blocks(request)
            elif request.is_first_context_chunk:
                fresh.append(request)
            else:
                started.append(request)
        for pending in (started, fresh):
            for request in pending:
                num_needed = remaining_blocks(request)
                if len(fitting) >= self.max_num_requests or num_needed > num_available:
                    return fitting, []
                fitting.append(request)
                num_available -= num_needed
        return fitting, []


class MaxUtilizationScheduler(CapacityScheduler):
    """MAX_UTILIZATION: only the next step must fit; when it does not, the last started is paused.

    The walk with its moving end (``P`` started, ``.`` fresh, ``^`` the request looked at)::

        P P P . P .        no room at ^: pause the last started one at or behind ^, move the end
            ^     |end     there, try again; ^ may be its own victim, earlier ones never are.
        P P P . x .        Nobody started behind ^ (nor ^ itself): stop.
            ^   |end

    So every started request inside the gate is either fitting or paused, and the first request of
    the list always makes progress.
    """

    __slots__ = ("block_manager", "two_step_lookahead")

    def __init__(
        self,
        max_num_requests: int,
        block_manager: BlockManager,
        *,
        two_step_lookahead: bool = False,
        no_schedule_until_state: LlmRequestState = LlmRequestState.CONTEXT_INIT,
        no_schedule_after_state: LlmRequestState = LlmRequestState.GENERATION_COMPLETE,
    ) -> None:
        super().__init__(
            max_num_requests,
            no_schedule_until_state=no_schedule_until_state,
            no_schedule_after_state=no_schedule_after_state,
        )
        self.block_manager = block_manager
        self.two_step_lookahead = two_step_lookahead

    def schedule_request(
        self, active_requests: Sequence[LlmRequest]
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Linear: each request is looked at once and passed by the moving end at most once."""
        candidates = self._gated(active_requests)
        manager = self.block_manager
        needed_blocks, lookahead = manager.get_needed_blocks_one_step, self.two_step_lookahead
        fitting: list[LlmRequest] = []
        paused: list[LlmRequest] = []
        num_available = manager.num_free_blocks
        current, end = 0, len(candidates)
        while current < end:
            request = candidates[current]
            num_needed = needed_blocks(request, lookahead)
            if len(fitting) < self.max_num_requests and num_needed <= num_available:
                fitting.append(request)
                num_available -= num_needed
                current += 1
                continue
            victim = _last_started(candidates, current, end)
            if victim is None:
                break
            end = victim
            paused.append(candidates[victim])
            num_available += manager.num_releasable_blocks(candidates[victim].request_id)
        return fitting, paused


def _last_started(candidates: Sequence[LlmRequest], first: int, end: int) -> int | None:
    """Index in ``first .. end - 1`` of the last request that holds cache, or None."""
    for index in range(end - 1, first - 1, -1):
        request = candidates[index]
        if request.is_generation_in_progress_state or not request.is_first_context_chunk:
            return index
    return None
