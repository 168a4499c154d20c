"""Why a request did not run: derived from the state before the decision, by the same rules.

`explain` looks at what a scheduler has decided and asks, for everybody who was left out, which
bound was met and with which numbers. It must be called before the decision is carried out. The
first of those who were left out is the one for whom a bound was met; the others stand behind it,
because nobody is overtaken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from inflight_scheduler.block_manager import BlockManager
from inflight_scheduler.capacity import (
    CapacityScheduler,
    MaxRequestsScheduler,
    MaxUtilizationScheduler,
)
from inflight_scheduler.micro_batch import MicroBatchScheduler
from inflight_scheduler.recording.simulation import Lists
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.scheduler import RequestScheduler, SimpleScheduler


class ReasonCode(str, Enum):
    """Which bound was met."""

    BLOCKS = "waiting for blocks"
    REQUESTS = "request limit"
    BATCH = "batch limit"
    TOKENS = "token budget"
    BEHIND = "behind"
    VICTIM = "paused as victim"
    BEAMS = "other beam width"
    IN_FLIGHT = "still running"
    STATE = "not schedulable"
    PASSED = "passed over"
    SCHEDULER = "decided by the scheduler"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one request did not run.

    By code: BLOCKS ``needed`` blocks with ``available`` left. TOKENS likewise with tokens. REQUESTS
    and BATCH ``available`` is the limit. VICTIM the blocks (or, if ``needed`` is None, the place)
    that ``other_id`` needed. BEHIND ``other_id`` is the first who waits, ``num_ahead`` wait before
    this one.
    """

    code: ReasonCode
    needed: int | None = None
    available: int | None = None
    other_id: int | None = None
    num_ahead: int = 0

    def __str__(self) -> str:
        return _SENTENCES[self.code].format(
            needed=self.needed,
            available=self.available,
            other=self.other_id,
            ahead=f"{self.num_ahead} other" + ("s" if self.num_ahead != 1 else ""),
            cause=f"needed {_count(self.needed, 'block')}, {self.available} free"
            if self.needed is not None
            else "needed its place",
        )


_SENTENCES = {
    ReasonCode.BLOCKS: "waiting for blocks: needs {needed}, free {available}",
    ReasonCode.REQUESTS: "request limit: {available} requests hold cache already",
    ReasonCode.BATCH: "batch limit: {available} requests run already",
    ReasonCode.TOKENS: "token budget: needs {needed} tokens, {available} left in this iteration",
    ReasonCode.BEHIND: "behind {ahead}, first of them request {other}",
    ReasonCode.VICTIM: "paused as victim of request {other}, which {cause}",
    ReasonCode.BEAMS: "its beam width differs from that of request {other}, which runs",
    ReasonCode.IN_FLIGHT: "its last step is still running",
    ReasonCode.STATE: "its state lets no step run now",
    ReasonCode.PASSED: "passed over: the scheduler prefers to wait with it",
    ReasonCode.SCHEDULER: "the scheduler did not choose it",
}


def _count(number: int | None, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def explain(
    scheduler: RequestScheduler,
    active_requests: Sequence[LlmRequest],
    decision: Lists,
    inflight_request_ids: Collection[int] = (),
) -> dict[int, Reason]:
    """A reason for every active request that does not run, by its id; none for those that do.

    Of a scheduler other than `SimpleScheduler` nothing is known but who was paused.
    """
    context, generation, paused = decision
    is_running = {id(request) for request in (*context, *generation)}
    left_out = [request for request in active_requests if id(request) not in is_running]
    if not left_out:
        return {}
    if not isinstance(scheduler, SimpleScheduler):
        return {request.request_id: Reason(ReasonCode.SCHEDULER) for request in left_out}
    reasons: dict[int, Reason] = {}
    capacity = scheduler.capacity_scheduler
    fitting, _ = capacity.schedule_request(active_requests)
    reasons.update(_explain_victims(capacity, active_requests, fitting, paused))
    reasons.update(_explain_waiting(capacity, active_requests, fitting, reasons))
    reasons.update(
        _explain_idle(scheduler.micro_batch_scheduler, fitting, decision, inflight_request_ids)
    )
    return reasons


def _explain_waiting(
    capacity: CapacityScheduler,
    active_requests: Sequence[LlmRequest],
    fitting: Sequence[LlmRequest],
    paused: Collection[int],
) -> Iterator[tuple[int, Reason]]:
    """Those who may not hold cache: a bound for the first, a place for the others.

    Where somebody was paused the walk has ended, so whoever stands behind waits for that one.
    """
    is_fitting = {id(request) for request in fitting}
    waiting: list[LlmRequest] = []
    for request in active_requests:
        if id(request) in is_fitting:
            continue
        if capacity.is_schedulable(request):
            waiting.append(request)
        else:
            yield request.request_id, Reason(ReasonCode.STATE)
    # Contexts that hold blocks already are looked at before those that hold none.
    waiting.sort(key=lambda request: request.is_first_context_chunk and not paused)
    available = _blocks_left(capacity, fitting, active_requests, paused)
    first_id: int | None = None
    for num_ahead, request in enumerate(waiting):
        request_id = request.request_id
        if request_id in paused:
            first_id = request_id if first_id is None else first_id
        elif first_id is not None:
            yield request_id, Reason(ReasonCode.BEHIND, other_id=first_id, num_ahead=num_ahead)
        else:
            reason = _capacity_bound(capacity, request, len(fitting), available)
            if reason.code is not ReasonCode.PASSED:
                first_id = request_id
            yield request_id, reason


def _capacity_bound(
    capacity: CapacityScheduler, request: LlmRequest, num_fitting: int, available: int | None
) -> Reason:
    if num_fitting >= capacity.max_num_requests:
        return Reason(ReasonCode.REQUESTS, available=capacity.max_num_requests)
    needed = _blocks_needed(capacity, request)
    if available is not None and needed > available:
        return Reason(ReasonCode.BLOCKS, needed=needed, available=available)
    return Reason(ReasonCode.PASSED)


def _block_manager(capacity: CapacityScheduler) -> BlockManager | None:
    if isinstance(capacity, MaxRequestsScheduler):
        return None
    manager = getattr(capacity, "block_manager", None)
    return manager if isinstance(manager, BlockManager) else None


def _blocks_needed(capacity: CapacityScheduler, request: LlmRequest) -> int:
    """Blocks that the policy wants to see free before it takes ``request``."""
    manager = _block_manager(capacity)
    if manager is None:
        return 0
    if isinstance(capacity, MaxUtilizationScheduler):
        return manager.get_needed_blocks_one_step(request, capacity.two_step_lookahead)
    return manager.get_remaining_blocks_to_completion(request)


def _blocks_left(
    capacity: CapacityScheduler,
    fitting: Sequence[LlmRequest],
    active_requests: Sequence[LlmRequest],
    paused: Collection[int],
) -> int | None:
    """Free blocks once all of ``fitting`` have theirs and the paused have given theirs back."""
    manager = _block_manager(capacity)
    if manager is None:
        return None
    left = manager.num_free_blocks
    left -= sum(_blocks_needed(capacity, request) for request in fitting)
    released = (r.request_id for r in active_requests if r.request_id in paused)
    return left + sum(manager.num_releasable_blocks(request_id) for request_id in released)


def _explain_victims(
    capacity: CapacityScheduler,
    active_requests: Sequence[LlmRequest],
    fitting: Sequence[LlmRequest],
    paused: Sequence[LlmRequest],
) -> Iterator[tuple[int, Reason]]:
    """For whom each request was paused: the walk again, with its outcome known.

    A request that has room takes it; one that has not gets the next victim's. Victims left at the
    end were paused for the first request that does not run.
    """
    manager = _block_manager(capacity)
    if manager is None or not paused:
        return
    left = manager.num_free_blocks
    victims = list(paused)
    for num_fitting, request in enumerate(fitting):
        needed = _blocks_needed(capacity, request)
        while victims and (needed > left or num_fitting >= capacity.max_num_requests):
            victim = victims.pop(0)
            yield victim.request_id, _victim_reason(request, needed, left)
            left += manager.num_releasable_blocks(victim.request_id)
        left -= needed
    taken = {id(request) for request in fitting}
    rest = (r for r in active_requests if id(r) not in taken and capacity.is_schedulable(r))
    current = next(rest, None)
    for victim in victims:
        assert current is not None, "a victim is not fitting"
        needed = _blocks_needed(capacity, current)
        yield victim.request_id, _victim_reason(current, needed, left)
        left += manager.num_releasable_blocks(victim.request_id)


def _victim_reason(request: LlmRequest, needed: int, left: int) -> Reason:
    if needed <= left:
        return Reason(ReasonCode.VICTIM, other_id=request.request_id)
    return Reason(ReasonCode.VICTIM, needed=needed, available=left, other_id=request.request_id)


def _explain_idle(
    micro_batch: MicroBatchScheduler,
    fitting: Sequence[LlmRequest],
    decision: Lists,
    inflight_request_ids: Collection[int],
) -> Iterator[tuple[int, Reason]]:
    """Those who hold cache, or may, and still do not run in this iteration."""
    context, generation, _ = decision
    running = {id(request) for request in (*context, *generation)}
    num_running = num_tokens = 0
    first_id: int | None = None
    num_idle = 0
    for request in fitting:
        if id(request) in running:
            num_running += 1
            num_tokens += _num_tokens_now(request)
            continue
        if first_id is not None:
            reason = Reason(ReasonCode.BEHIND, other_id=first_id, num_ahead=num_idle)
        else:
            reason = _batch_bound(
                micro_batch, request, num_running, num_tokens, generation, inflight_request_ids
            )
            if reason.code in (ReasonCode.BATCH, ReasonCode.TOKENS):
                first_id = request.request_id
        num_idle += 1
        yield request.request_id, reason


def _num_tokens_now(request: LlmRequest) -> int:
    if request.is_context_init_state:
        return request.context_chunk_size
    return request.beam_width


def _batch_bound(
    micro_batch: MicroBatchScheduler,
    request: LlmRequest,
    num_running: int,
    num_tokens: int,
    generation: Sequence[LlmRequest],
    inflight_request_ids: Collection[int],
) -> Reason:
    if request.request_id in inflight_request_ids:
        return Reason(ReasonCode.IN_FLIGHT)
    until, after = micro_batch.no_schedule_until_state, micro_batch.no_schedule_after_state
    if not until <= request.state < after:
        return Reason(ReasonCode.STATE)
    if num_running >= micro_batch.max_batch_size:
        return Reason(ReasonCode.BATCH, available=micro_batch.max_batch_size)
    is_context = request.is_context_init_state
    cost = request.context_remaining_length if is_context else request.beam_width
    budget = micro_batch.max_num_tokens
    if budget is not None and num_tokens + cost > budget:
        return Reason(ReasonCode.TOKENS, needed=cost, available=budget - num_tokens)
    if not is_context and generation and generation[0].beam_width != request.beam_width:
        return Reason(ReasonCode.BEAMS, other_id=generation[0].request_id)
    return Reason(ReasonCode.PASSED)
