"""Which requests may hold KV cache in this iteration: the first of the two steps of scheduling.

Decisions only: nothing here changes a request, a block or a slot, so a decision can be thrown
away. The rules are those of TensorRT-LLM's ``capacityScheduler.cpp`` and of its Python twin.

Requests in DISAGG_GENERATION_INIT (disaggregated serving: their KV is about to come from another
server) bypass the gate and take room, but no step runs for them. The published result names them in
a list of its own between fitting and paused. Here `CapacityResult` stays the pair that users
write, and carries that list as an attribute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from inflight_scheduler.errors import SchedulerError
from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.policies.resources import (
    Budgets,
    CrossBlocks,
    Resource,
    Shortage,
)
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import LlmRequestState


class CapacityResult(tuple[list[LlmRequest], list[LlmRequest]]):
    """``(fitting_requests, paused_requests)``, and ``fitting_disagg_gen_init`` beside them.

    ``refused`` and ``pause_causes`` say why, for `explain`. ``refused``: by id, what a request
    lacks; None if it waits for the context of another. ``pause_causes``: by id of a paused request,
    the one it was paused for, and what that lacked; None if it was a place.
    """

    fitting_disagg_gen_init: list[LlmRequest]
    refused: Mapping[int, Shortage | None]
    pause_causes: Mapping[int, tuple[LlmRequest, Shortage | None]]

    @classmethod
    def part(
        cls,
        fitting: list[LlmRequest],
        paused: list[LlmRequest],
        refused: Mapping[int, Shortage | None] = MappingProxyType({}),
        pause_causes: Mapping[int, tuple[LlmRequest, Shortage | None]] = MappingProxyType({}),
    ) -> CapacityResult:
        """Take the disaggregated ones out of ``fitting``."""
        disagg = [request for request in fitting if request.is_disagg_generation_init_state]
        if disagg:
            fitting = [r for r in fitting if not r.is_disagg_generation_init_state]
        result = cls((fitting, paused))
        result.fitting_disagg_gen_init = disagg
        result.refused, result.pause_causes = refused, pause_causes
        return result


_Policy = TypeVar("_Policy", bound="type[CapacityScheduler]")

POLICIES: dict[str, type[CapacityScheduler]] = {}
"""Name, as ``batch_scheduler_policy`` has it -> policy."""


def register_policy(name: str) -> Callable[[_Policy], _Policy]:
    """Make a class the capacity policy ``name``, which `make_scheduler` and `GptManager` accept.

    A module in this folder is all that a new policy takes: it is found, offered by
    ``batch_scheduler_policy``, recorded, replayed and offered by ``inflight whatif``. It is made
    with the arguments of `CacheCapacityScheduler`.
    """

    def register(policy: _Policy) -> _Policy:
        POLICIES[name] = policy
        return policy

    return register


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
        """Return ``(fitting_requests, paused_requests)``; disjoint, both from the active ones.

        A plain pair, or a `CapacityResult`.
        """

    def is_schedulable(self, request: LlmRequest) -> bool:
        """True when the state of ``request`` lies inside the gate, or bypasses it."""
        is_inside = self.no_schedule_until_state <= request.state < self.no_schedule_after_state
        return is_inside or request.is_disagg_generation_init_state

    def _gated(self, active_requests: Sequence[LlmRequest]) -> list[LlmRequest]:
        until, after = self.no_schedule_until_state, self.no_schedule_after_state
        bypass = LlmRequestState.DISAGG_GENERATION_INIT
        return [r for r in active_requests if until <= r.state < after or r.state is bypass]


class MaxRequestsScheduler(CapacityScheduler):
    """Without a KV cache: the first ``max_num_requests`` in order."""

    __slots__ = ()

    def schedule_request(self, active_requests: Sequence[LlmRequest]) -> CapacityResult:
        """Never pauses."""
        return CapacityResult.part(self._gated(active_requests)[: self.max_num_requests], [])


class CacheCapacityScheduler(CapacityScheduler):
    """A policy over the blocks of ``block_manager`` and further ``resources`` (see `resources`)."""

    __slots__ = ("block_manager", "resources", "two_step_lookahead")
    can_serve_encoder = True

    def __init__(
        self,
        max_num_requests: int,
        block_manager: BlockManager,
        *,
        two_step_lookahead: bool = False,
        resources: Sequence[Resource] = (),
        no_schedule_until_state: LlmRequestState = LlmRequestState.CONTEXT_INIT,
        no_schedule_after_state: LlmRequestState = LlmRequestState.GENERATION_COMPLETE,
    ) -> None:
        """``two_step_lookahead``: where the next step must fit, keep room for the one after it.

        `ValueError` for resources that cannot be together, or serve an encoder where none can run.
        """
        super().__init__(
            max_num_requests,
            no_schedule_until_state=no_schedule_until_state,
            no_schedule_after_state=no_schedule_after_state,
        )
        if not self.can_serve_encoder and any(isinstance(each, CrossBlocks) for each in resources):
            raise ValueError(
                "max_utilization cannot run a model with an encoder: a pause would lose the "
                "encoder's output; use guaranteed_no_evict or static_batch"
            )
        self.block_manager = block_manager
        self.two_step_lookahead = two_step_lookahead
        self.resources = tuple(resources)


class ReservingScheduler(CacheCapacityScheduler):
    """What GUARANTEED_NO_EVICT and STATIC_BATCH have in common: reservations to completion.

    ``resources`` are reserved like blocks. A request that lacks only one that does not end
    the walk (adapter pages) is passed over, as published; so while others keep the pages in use,
    such a request is promised no turn. An encoder is admitted without reserving blocks; the context
    after it reserves them. Requests whose KV is just coming from another server keep their
    reservation, which the published rule forgets for that while.

    ``shares_contexts``: a fresh request waits while another computes its next block.
    """

    __slots__ = ()
    shares_contexts = True

    def schedule_request(self, active_requests: Sequence[LlmRequest]) -> CapacityResult:
        """Generation, started contexts, disaggregated ones, fresh ones until one does not fit.

        Raises `SchedulerError` for an encoder without a pool of cross blocks.
        """
        budgets = Budgets(self.block_manager, self.resources, to_completion=True)
        fitting: list[LlmRequest] = []
        started: list[LlmRequest] = []
        disagg: list[LlmRequest] = []
        fresh: list[LlmRequest] = []
        for request in active_requests:
            if not self.is_schedulable(request):
                if request.state is LlmRequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS:
                    budgets.claim(request)
            elif len(fitting) >= self.max_num_requests:
                return CapacityResult.part(fitting, [])
            elif request.is_generation_in_progress_state:
                fitting.append(request)
                budgets.claim(request)
            elif request.is_disagg_generation_init_state:
                disagg.append(request)
            elif request.is_first_context_chunk:
                check_encoder(request, self.resources)
                fresh.append(request)
            else:
                started.append(request)
        num_generating = len(fitting)
        if self._admit(started, budgets, fitting) and self.may_start(num_generating):
            self._admit(disagg, budgets, fitting)
            if self.shares_contexts:
                budgets.blocks.promise(started)
            self._admit(fresh, budgets, fitting, may_skip=self.shares_contexts)
        return CapacityResult.part(fitting, [], budgets.refused)

    def may_start(self, num_generating: int) -> bool:
        """True when requests may start next to ``num_generating`` that generate."""
        del num_generating
        return True

    def _admit(
        self,
        pending: Sequence[LlmRequest],
        budgets: Budgets,
        fitting: list[LlmRequest],
        may_skip: bool = False,
    ) -> bool:
        """Append ``pending`` to ``fitting`` in order; False when one did not fit, and no further.

        ``may_skip`` passes over a request for which waiting is better.
        """
        for request in pending:
            if may_skip and budgets.blocks.is_beneficial_to_skip(request):
                budgets.refused[request.request_id] = None
                continue
            if len(fitting) >= self.max_num_requests:
                return False
            shortage = budgets.try_claim(request)
            if shortage is None:
                fitting.append(request)
            elif shortage.ends_walk:
                return False
        return True


@register_policy("guaranteed_no_evict")
class GuaranteedNoEvictScheduler(ReservingScheduler):
    """GUARANTEED_NO_EVICT: a request starts when its blocks to completion can be reserved.

    The guarantee rests on every running request having been admitted under it: to take over in the
    middle from a scheduler that reserves less, use `MaxUtilizationScheduler`, which can pause.

    One departure from the published rule: contexts past their first chunk, which hold blocks
    already, are looked at before fresh ones. In arrival order this changes nothing. With a fresh
    request of higher priority in front that does not fit, the published rule would leave them
    holding their blocks for ever.
    """

    __slots__ = ()


@register_policy("static_batch")
class StaticBatchScheduler(ReservingScheduler):
    """STATIC_BATCH: a new batch starts only when no request of the last one is generating.

    Chunked contexts of the running batch continue (they hold blocks already, see
    `GuaranteedNoEvictScheduler`); none waits for a prefix that another computes.
    """

    __slots__ = ()
    shares_contexts = False

    def may_start(self, num_generating: int) -> bool:
        """Once no request generates."""
        return num_generating == 0


@register_policy("max_utilization")
class MaxUtilizationScheduler(CacheCapacityScheduler):
    """MAX_UTILIZATION: only the next step must fit; when it does not, the last started is paused.

    The walk with its moving end (``P`` started, ``.`` fresh, ``^`` the request looked at)::

        P P P . P .        no room at ^: pause the last started one at or behind ^, move the end
            ^     |end     there, try again; ^ may be its own victim, earlier ones never are.
        P P P . x .        None started behind ^ (nor ^ itself): stop.
            ^   |end

    So every started request inside the gate is either fitting or paused, and the first request of
    the list always makes progress. A shortage of any of the ``resources`` looks for a victim, as a
    shortage of blocks does; models with an encoder need GUARANTEED_NO_EVICT or STATIC_BATCH.
    """

    __slots__ = ()
    can_serve_encoder = False

    def schedule_request(self, active_requests: Sequence[LlmRequest]) -> CapacityResult:
        """Linear: each request is looked at once and passed by the moving end at most once.

        Raises `SchedulerError` for an encoder.
        """
        candidates = self._gated(active_requests)
        budgets = Budgets(
            self.block_manager,
            self.resources,
            to_completion=False,
            two_step_lookahead=self.two_step_lookahead,
        )
        forecast = budgets.blocks
        if self.block_manager.enable_reuse:
            forecast.promise(filter(is_started_context, candidates))
        fitting: list[LlmRequest] = []
        paused: list[LlmRequest] = []
        causes: dict[int, tuple[LlmRequest, Shortage | None]] = {}
        current, end = 0, len(candidates)
        while current < end:
            request = candidates[current]
            if forecast.is_beneficial_to_skip(request):
                budgets.refused[request.request_id] = None
                current += 1
                continue
            check_encoder(request, self.resources)
            has_place = len(fitting) < self.max_num_requests
            shortage = budgets.try_claim(request) if has_place else None
            if has_place and shortage is None:
                fitting.append(request)
                current += 1
                continue
            victim = _last_started(candidates, current, end)
            if victim is None:
                break
            end = victim
            paused.append(candidates[victim])
            causes[candidates[victim].request_id] = request, shortage
            budgets.release(candidates[victim])
        return CapacityResult.part(fitting, paused, budgets.refused, causes)


def check_encoder(request: LlmRequest, resources: Sequence[Resource]) -> None:
    """Raise `SchedulerError` if ``request`` waits for an encoder and nothing serves one."""
    if not request.is_encoder_init_state:
        return
    if not any(isinstance(resource, CrossBlocks) for resource in resources):
        raise SchedulerError(
            f"request {request.request_id} has {request.encoder_length} tokens for an encoder, but "
            "there is no pool of cross KV blocks; give the scheduler CrossBlocks"
        )


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
