"""Who may hold KV cache in this iteration: the first of the two questions of scheduling.

Decisions only: nothing here changes a request, a block or a slot, so a decision can be thrown
away. The rules are those of TensorRT-LLM's ``capacityScheduler.cpp`` and of its Python twin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from inflight_scheduler.block_manager import BlockManager
from inflight_scheduler.forecast import BlockForecast
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


class ReservingScheduler(CapacityScheduler):
    """What GUARANTEED_NO_EVICT and STATIC_BATCH have in common: reservations to completion."""

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
        forecast = BlockForecast(self.block_manager)
        fitting: list[LlmRequest] = []
        started: list[LlmRequest] = []
        fresh: list[LlmRequest] = []
        for request in self._gated(active_requests):
            if len(fitting) >= self.max_num_requests:
                return fitting, []
            if request.is_generation_in_progress_state:
                fitting.append(request)
                forecast.claim(request, forecast.needed_to_completion(request))
            elif request.is_first_context_chunk:
                fresh.append(request)
            else:
                started.append(request)
        num_generating = len(fitting)
        if self.admit(started, forecast, fitting):
            self.admit_fresh(fresh, forecast, fitting, num_generating)
        return fitting, []

    @abstractmethod
    def admit_fresh(
        self,
        fresh: Sequence[LlmRequest],
        forecast: BlockForecast,
        fitting: list[LlmRequest],
        num_generating: int,
    ) -> None:
        """Append to ``fitting`` those of ``fresh`` that may start."""

    def admit(
        self,
        pending: Sequence[LlmRequest],
        forecast: BlockForecast,
        fitting: list[LlmRequest],
        may_skip: bool = False,
    ) -> bool:
        """Append ``pending`` to ``fitting`` in order; False when one did not fit, and no further.

        ``may_skip`` passes over a request for which waiting is better.
        """
        for request in pending:
            if may_skip and forecast.is_beneficial_to_skip(request):
                continue
            num_needed = forecast.needed_to_completion(request)
            if len(fitting) >= self.max_num_requests or num_needed > forecast.num_available:
                return False
            fitting.append(request)
            forecast.claim(request, num_needed)
        return True


class GuaranteedNoEvictScheduler(ReservingScheduler):
    """GUARANTEED_NO_EVICT: who starts can finish, because its blocks to completion are reserved.

    The guarantee rests on every running request having been admitted under it: to take over in the
    middle from a scheduler that reserves less, use `MaxUtilizationScheduler`, which can pause.

    One departure from the published rule: contexts past their first chunk, which hold blocks
    already, are looked at before fresh ones. In arrival order this changes nothing. With a fresh
    request of higher priority in front that does not fit, the published rule would leave them
    holding their blocks for ever.
    """

    __slots__ = ()

    def admit_fresh(
        self,
        fresh: Sequence[LlmRequest],
        forecast: BlockForecast,
        fitting: list[LlmRequest],
        num_generating: int,
    ) -> None:
        """As many as fit; one whose next block is being computed by another waits for it."""
        forecast.promise(fitting[num_generating:])
        self.admit(fresh, forecast, fitting, may_skip=True)


class StaticBatchScheduler(ReservingScheduler):
    """STATIC_BATCH: a new batch starts only when no request of the last one is generating.

    Contexts of the running batch that were cut go on (they hold blocks already, see
    `GuaranteedNoEvictScheduler`); nobody waits for what another computes.
    """

    __slots__ = ()

    def admit_fresh(
        self,
        fresh: Sequence[LlmRequest],
        forecast: BlockForecast,
        fitting: list[LlmRequest],
        num_generating: int,
    ) -> None:
        """All that fit, once nobody generates."""
        if num_generating == 0:
            self.admit(fresh, forecast, fitting)


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
        forecast, lookahead = BlockForecast(self.block_manager), self.two_step_lookahead
        if self.block_manager.enable_reuse:
            forecast.promise(filter(is_started_context, candidates))
        fitting: list[LlmRequest] = []
        paused: list[LlmRequest] = []
        current, end = 0, len(candidates)
        while current < end:
            request = candidates[current]
            if forecast.is_beneficial_to_skip(request):
                current += 1
                continue
            num_needed = forecast.needed_one_step(request, lookahead)
            if len(fitting) < self.max_num_requests and num_needed <= forecast.num_available:
                fitting.append(request)
                forecast.claim(request, num_needed)
                current += 1
                continue
            victim = _last_started(candidates, current, end)
            if victim is None:
                break
            end = victim
            paused.append(candidates[victim])
            forecast.release(candidates[victim])
        return fitting, paused


def is_started_context(request: LlmRequest) -> bool:
    """True for a context past its first chunk: it holds the blocks of its whole prompt."""
    return request.is_context_init_state and not request.is_first_context_chunk


def _last_started(candidates: Sequence[LlmRequest], first: int, end: int) -> int | None:
    """Index in ``first .. end - 1`` of the last request that holds cache, or None."""
    for index in range(end - 1, first - 1, -1):
        request = candidates[index]
        if request.is_generation_in_progress_state or not request.is_first_context_chunk:
            return index
    return None
