"""Why a request does not run: the decision once more, with the numbers it was made of.

Deciding is a pure function of what is active and of the blocks, so the reasons need not be
collected on the way: `explain` walks through a decision again, before it is carried out, and says
for each request that does not run the reason. A bound is met by one request; those behind
it wait because requests are not overtaken. It changes nothing that deciding does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.policies.capacity import (
    CapacityResult,
    CapacityScheduler,
    MaxUtilizationScheduler,
    ReservingScheduler,
    StaticBatchScheduler,
    is_started_context,
)
from inflight_scheduler.policies.check_decision import count_step_tokens
from inflight_scheduler.policies.micro_batch import MicroBatchScheduler
from inflight_scheduler.policies.resources import Budgets, Shortage
from inflight_scheduler.policies.scheduler import RequestScheduler, SimpleScheduler
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import LlmRequestState

Lists = tuple[Sequence[LlmRequest], Sequence[LlmRequest], Sequence[LlmRequest]]
"""Context, generation and paused requests: a decision."""


class WaitCode(Enum):
    """What stands in the way of a request."""

    BLOCKS = "blocks"
    RESOURCE = "resource"
    BEHIND = "behind"
    MAX_REQUESTS = "max_requests"
    STATIC_BATCH = "static_batch"
    SHARED_CONTEXT = "shared_context"
    PAUSED = "paused"
    IN_FLIGHT = "in_flight"
    BATCH = "batch"
    TOKENS = "tokens"
    BEAMS = "beams"
    STATE = "state"
    LEFT_OUT = "left_out"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class NotScheduled:
    """What is known about a decision of the operator's scheduler.

    How many requests and tokens it lets run, each with the limit (None: there is none).
    """

    scheduler: str
    num_requests: int
    max_batch_size: int
    num_tokens: int
    max_num_tokens: int | None = None

    def __str__(self) -> str:
        budget = "" if self.max_num_tokens is None else f" of {self.max_num_tokens}"
        return (
            f"{self.num_requests} of {self.max_batch_size} places and {self.num_tokens}{budget} "
            "tokens are taken"
        )


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why one request does not run now; the numbers that its code speaks of, else 0.

    BLOCKS and TOKENS: needed, and what is left; RESOURCE: the same of ``resource``. PAUSED: the
    same of the request ``behind_id``, for which this one was paused (0 needed: it took the place
    or something else than blocks). MAX_REQUESTS and BATCH: the limit is
    ``num_available``. BEHIND: ``behind_id`` waits first, and ``num_ahead`` wait before this one.
    LEFT_OUT: the blocks its next step needs and those free, beside ``left_out``.
    """

    code: WaitCode
    num_needed: int = 0
    num_available: int = 0
    behind_id: int | None = None
    num_ahead: int = 0
    left_out: NotScheduled | None = None
    resource: str = ""

    def __str__(self) -> str:
        return _TEXTS[self.code].format(
            self,
            others="1 other" if self.num_ahead == 1 else f"{self.num_ahead} others",
            cause=f"needs {self.num_needed} KV blocks, free {self.num_available}"
            if self.num_needed
            else "takes its place",
        )


_TEXTS = {
    WaitCode.BLOCKS: "waiting for KV blocks: needs {0.num_needed}, free {0.num_available}",
    WaitCode.RESOURCE: "waiting for {0.resource}: needs {0.num_needed}, free {0.num_available}",
    WaitCode.BEHIND: "behind {others}, first of them request {0.behind_id}",
    WaitCode.MAX_REQUESTS: "all {0.num_available} places are taken",
    WaitCode.STATIC_BATCH: "waiting until the running batch has ended",
    WaitCode.SHARED_CONTEXT: "waiting for a request that computes the same text",
    WaitCode.PAUSED: "paused as victim of request {0.behind_id}, which {cause}",
    WaitCode.IN_FLIGHT: "still running in another step",
    WaitCode.BATCH: "batch limit: {0.num_available} requests run in this iteration",
    WaitCode.TOKENS: "token budget: needs {0.num_needed} tokens, {0.num_available} left",
    WaitCode.BEAMS: "its beam width differs from that of request {0.behind_id}, which runs",
    WaitCode.STATE: "not in a state that can run",
    WaitCode.LEFT_OUT: "left out by the scheduler {0.left_out.scheduler}: needs {0.num_needed} KV "
    "blocks, free {0.num_available}; {0.left_out}",
    WaitCode.UNKNOWN: "the scheduler does not say why",
}


def explain(
    scheduler: RequestScheduler,
    active_requests: Sequence[LlmRequest],
    inflight_request_ids: Collection[int] = (),
    decision: Lists | None = None,
) -> dict[int, WaitReason]:
    """The reason of every active request that ``scheduler`` would not run now, by id.

    ``decision`` is what it decided just now, if that is known. Of another scheduler than
    `SimpleScheduler`, the reasons of a decision that it did not make are unknown.
    """
    requests = list(active_requests)
    if decision is None:
        decision = scheduler.schedule_request(requests, inflight_request_ids)
    running = {id(request) for request in (*decision[0], *decision[1])}
    if len(running) == len(requests):
        return {}
    if not isinstance(scheduler, SimpleScheduler):
        waiting = (request for request in requests if id(request) not in running)
        return {request.request_id: WaitReason(WaitCode.UNKNOWN) for request in waiting}
    capacity = scheduler.capacity_scheduler
    fits = capacity.schedule_request(requests)
    fitting, paused = fits
    disagg = fits.fitting_disagg_gen_init if isinstance(fits, CapacityResult) else []
    walk = _CapacityWalk(capacity, requests, [*fitting, *disagg], paused)
    reasons = dict(walk.explain_paused())
    reasons.update(walk.explain_waiting())
    reasons.update(
        _explain_idle(scheduler.micro_batch_scheduler, fitting, decision, inflight_request_ids)
    )
    return reasons


def explain_left_out(
    name: str,
    active_requests: Sequence[LlmRequest],
    decision: Lists,
    *,
    block_manager: BlockManager,
    max_batch_size: int,
    max_num_tokens: int | None,
    num_free_blocks: int | None = None,
) -> dict[int, WaitReason]:
    """What can be said of those whom the foreign scheduler ``name`` does not let run, by id.

    ``num_free_blocks`` are left when the decision is carried out; None: it is, and those free now.
    """
    context, generation, paused = decision
    running = {id(request) for request in (*context, *generation)}
    num_tokens = count_step_tokens(context, generation, block_manager)
    facts = NotScheduled(name, len(running), max_batch_size, num_tokens, max_num_tokens)
    free = block_manager.num_free_blocks if num_free_blocks is None else num_free_blocks
    pausing = {id(request) for request in paused}

    def needed(request: LlmRequest) -> int:
        if id(request) in pausing and not request.is_context_init_state:  # it starts again
            return -(-request.num_tokens // block_manager.tokens_per_block)
        return block_manager.get_needed_blocks_one_step(request)

    return {
        request.request_id: WaitReason(WaitCode.LEFT_OUT, needed(request), free, left_out=facts)
        for request in active_requests
        if id(request) not in running
    }


class _CapacityWalk:
    """The walk of a capacity scheduler again, with its outcome known."""

    def __init__(
        self,
        capacity: CapacityScheduler,
        requests: Sequence[LlmRequest],
        fitting: Sequence[LlmRequest],
        paused: Sequence[LlmRequest],
    ) -> None:
        self._capacity = capacity
        self._fitting = fitting
        self._paused = paused
        is_fitting = {id(request) for request in fitting}
        self._others = [request for request in requests if id(request) not in is_fitting]
        self._books: Budgets | None = None
        if isinstance(capacity, (ReservingScheduler, MaxUtilizationScheduler)):
            self._books = Budgets(
                capacity.block_manager,
                capacity.resources,
                to_completion=isinstance(capacity, ReservingScheduler),
                two_step_lookahead=isinstance(capacity, MaxUtilizationScheduler)
                and capacity.two_step_lookahead,
            )
            self._books.blocks.promise(filter(is_started_context, requests))

    def explain_paused(self) -> Iterator[tuple[int, WaitReason]]:
        """For whom each was paused; afterwards the forecast holds what the decision leaves.

        A request takes the room there is, or else that of the next victim. Victims left at the end
        were paused for the first request that does not run, which may be one of them.
        """
        budgets = self._books
        if budgets is None:
            return
        victims = list(reversed(self._paused))
        limit = self._capacity.max_num_requests
        for num_fitting, request in enumerate(self._fitting):
            shortage = budgets.shortage(request)
            while victims and (shortage is not None or num_fitting >= limit):
                yield self._pause(budgets, victims.pop(), request, shortage)
                shortage = budgets.shortage(request)
            budgets.claim(request)
        schedulable = (r for r in self._others if self._capacity.is_schedulable(r))
        may_skip = budgets.blocks.is_beneficial_to_skip
        current = next((r for r in schedulable if not may_skip(r)), None)
        while victims:
            assert current is not None, "a victim is not fitting"
            yield self._pause(budgets, victims.pop(), current, budgets.shortage(current))

    def explain_waiting(self) -> Iterator[tuple[int, WaitReason]]:
        """Requests that may not hold cache: a bound for the first, a place for the others.

        Where a request was paused the walk has ended, so those behind wait for that one.
        """
        paused = {id(request) for request in self._paused}
        others = self._others
        if not paused:  # contexts that hold blocks already are looked at first
            others = sorted(others, key=lambda request: request.is_first_context_chunk)
        first_id: int | None = None
        num_ahead = 0
        for request in others:
            request_id = request.request_id
            if not self._capacity.is_schedulable(request):
                yield request_id, WaitReason(WaitCode.STATE)
                continue
            if id(request) in paused:
                first_id = request_id if first_id is None else first_id
            elif first_id is not None:
                reason = WaitReason(WaitCode.BEHIND, behind_id=first_id, num_ahead=num_ahead)
                yield request_id, reason
            else:
                reason, is_end = self._bound(request)
                first_id = request_id if is_end else None
                yield request_id, reason
            num_ahead += 1

    def _bound(self, request: LlmRequest) -> tuple[WaitReason, bool]:
        """What stops the walk at ``request``, and whether it does: some are only passed over."""
        capacity, budgets = self._capacity, self._books
        is_static = isinstance(capacity, StaticBatchScheduler)
        if budgets is not None and not is_static and budgets.blocks.is_beneficial_to_skip(request):
            return WaitReason(WaitCode.SHARED_CONTEXT), False
        if len(self._fitting) >= capacity.max_num_requests or budgets is None:
            return WaitReason(WaitCode.MAX_REQUESTS, 1, capacity.max_num_requests), True
        if is_static and any(r.is_generation_in_progress_state for r in self._fitting):
            return WaitReason(WaitCode.STATIC_BATCH), True
        shortage = budgets.shortage(request)
        if shortage is not None and shortage.resource is not None:
            _, needed, left = shortage
            name = shortage.resource.name
            is_end = shortage.ends_walk or isinstance(capacity, MaxUtilizationScheduler)
            return WaitReason(WaitCode.RESOURCE, needed, left, resource=name), is_end
        num_needed = budgets.needed_blocks(request)
        return WaitReason(WaitCode.BLOCKS, num_needed, budgets.blocks.num_available), True

    def _pause(
        self, budgets: Budgets, victim: LlmRequest, other: LlmRequest, shortage: Shortage | None
    ) -> tuple[int, WaitReason]:
        needed = num_available = 0
        if shortage is not None and shortage.resource is None:
            _, needed, num_available = shortage
        budgets.release(victim)
        reason = WaitReason(WaitCode.PAUSED, needed, num_available, behind_id=other.request_id)
        return victim.request_id, reason


def _explain_idle(
    micro_batch: MicroBatchScheduler,
    fitting: Sequence[LlmRequest],
    decision: Lists,
    inflight_request_ids: Collection[int],
) -> Iterator[tuple[int, WaitReason]]:
    """Requests that hold cache, or may, and still do not run in this iteration."""
    context, generation, _ = decision
    walk = _BatchWalk(micro_batch, context, generation, inflight_request_ids)
    running = {id(request) for request in (*context, *generation)}
    first_id: int | None = None
    num_idle = 0
    for request in fitting:
        if id(request) in running:
            walk.count(request)
            continue
        if request.state is LlmRequestState.GENERATION_TO_COMPLETE:
            continue  # its last token is being computed
        if first_id is not None:
            reason = WaitReason(WaitCode.BEHIND, behind_id=first_id, num_ahead=num_idle)
        else:
            reason, is_end = walk.bound(request)
            first_id = request.request_id if is_end else None
        num_idle += 1
        yield request.request_id, reason


class _BatchWalk:
    """The walk of the micro-batch scheduler again: how much is taken before each request."""

    def __init__(
        self,
        micro_batch: MicroBatchScheduler,
        context: Sequence[LlmRequest],
        generation: Sequence[LlmRequest],
        inflight_request_ids: Collection[int],
    ) -> None:
        self._micro_batch = micro_batch
        self._inflight_request_ids = inflight_request_ids
        self._num_requests = self._num_tokens = 0
        self._beam_request = generation[0] if generation else None
        num_tokens = sum(map(self._cost, context)) + sum(map(self._cost, generation))
        budget = micro_batch.max_num_tokens
        self._num_tokens_left = 0 if budget is None else budget - num_tokens
        self._has_contexts = any(request.is_context_init_state for request in context)
        self._first_cut_id: int | None = None  # the one behind which none starts
        self._num_cut = 0

    def count(self, request: LlmRequest) -> None:
        """``request`` runs."""
        self._num_requests += 1
        # Contexts that may be cut take what is left after the walk.
        if not (request.is_context_init_state and self._micro_batch.chunking):
            self._num_tokens += self._cost(request)

    def bound(self, request: LlmRequest) -> tuple[WaitReason, bool]:
        """Why ``request`` does not run, and whether the walk ends with it."""
        micro_batch = self._micro_batch
        until, after = micro_batch.no_schedule_until_state, micro_batch.no_schedule_after_state
        if self._num_requests >= micro_batch.max_batch_size:
            return WaitReason(WaitCode.BATCH, 1, micro_batch.max_batch_size), True
        if request.request_id in self._inflight_request_ids:
            return WaitReason(WaitCode.IN_FLIGHT), False
        if not until <= request.state < after:
            return WaitReason(WaitCode.STATE), False
        chunking = micro_batch.chunking
        if request.is_context_init_state and chunking is not None:
            self._num_requests += 1
            return self._cut(request, chunking.unit_size), False
        cost, budget = self._cost(request), micro_batch.max_num_tokens
        if budget is not None and self._num_tokens + cost > budget:
            return WaitReason(WaitCode.TOKENS, cost, budget - self._num_tokens), True
        other = self._beam_request
        if other is None or other.beam_width == request.beam_width:
            return WaitReason(WaitCode.UNKNOWN), False  # another scheduler decided
        return WaitReason(WaitCode.BEAMS, behind_id=other.request_id), False

    def _cut(self, request: LlmRequest, unit_size: int) -> WaitReason:
        """A context that may be cut and gets nothing.

        If even the first does not, none does; and none starts behind one that would start.
        """
        num_ahead, self._num_cut = self._num_cut, self._num_cut + 1
        if request.is_first_context_chunk or not self._has_contexts:
            first_id = self._first_cut_id
            if first_id is not None:
                return WaitReason(WaitCode.BEHIND, behind_id=first_id, num_ahead=num_ahead)
            self._first_cut_id = request.request_id
        smallest = min(self._micro_batch.num_tokens_to_compute(request), unit_size)
        return WaitReason(WaitCode.TOKENS, smallest, self._num_tokens_left)

    def _cost(self, request: LlmRequest) -> int:
        if request.is_encoder_init_state:
            return request.encoder_length
        if not request.is_context_init_state:
            return request.beam_width + request.num_draft_tokens
        length = self._micro_batch.num_tokens_to_compute(request)
        if self._micro_batch.chunking is None:
            return length + request.num_draft_tokens
        is_last = request.context_chunk_size >= length
        return request.context_chunk_size + (request.num_chunk_drafts if is_last else 0)
