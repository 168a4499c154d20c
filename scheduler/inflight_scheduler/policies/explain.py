"""Why a request does not run: the decision once more, with what it noted on its way.

Deciding is a pure function of what is active and of the blocks, and the walks of `capacity` and
`micro_batch` say what each refused request lacked. A bound is met by one request; those behind it
wait because requests are not overtaken. Explaining changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.policies.capacity import (
    CapacityResult,
    CapacityScheduler,
    MaxUtilizationScheduler,
    StaticBatchScheduler,
)
from inflight_scheduler.policies.check_decision import count_step_tokens
from inflight_scheduler.policies.micro_batch import BatchWalk, MicroBatchScheduler
from inflight_scheduler.policies.resources import Shortage
from inflight_scheduler.policies.scheduler import RequestScheduler, SimpleScheduler
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import LlmRequestState

Lists = tuple[Sequence[LlmRequest], Sequence[LlmRequest], Sequence[LlmRequest]]
"""Context, generation and paused requests: a decision."""


class WaitCode(Enum):
    """What stands in the way of a request: its name, and a text with the fields of `WaitReason`."""

    text: str

    def __new__(cls, name: str, text: str) -> WaitCode:
        """The value is the name alone."""
        code = object.__new__(cls)
        code._value_, code.text = name, text
        return code

    BLOCKS = "blocks", "waiting for KV blocks: needs {0.num_needed}, free {0.num_available}"
    RESOURCE = (
        "resource",
        "waiting for {0.resource}: needs {0.num_needed}, free {0.num_available}",
    )
    BEHIND = "behind", "behind {others}, first of them request {0.behind_id}"
    MAX_REQUESTS = "max_requests", "all {0.num_available} places are taken"
    STATIC_BATCH = "static_batch", "waiting until the running batch has ended"
    SHARED_CONTEXT = "shared_context", "waiting for a request that computes the same text"
    PAUSED = "paused", "paused as victim of request {0.behind_id}, which {cause}"
    IN_FLIGHT = "in_flight", "still running in another step"
    BATCH = "batch", "batch limit: {0.num_available} requests run in this iteration"
    TOKENS = "tokens", "token budget: needs {0.num_needed} tokens, {0.num_available} left"
    BEAMS = "beams", "its beam width differs from that of request {0.behind_id}, which runs"
    STATE = "state", "not in a state that can run"
    LEFT_OUT = (
        "left_out",
        "left out by the scheduler {0.left_out.scheduler}: needs {0.num_needed} KV blocks, free "
        "{0.num_available}; {0.left_out}",
    )
    UNKNOWN = "unknown", "the scheduler does not say why"


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
        return self.code.text.format(
            self,
            others="1 other" if self.num_ahead == 1 else f"{self.num_ahead} others",
            cause=f"needs {self.num_needed} KV blocks, free {self.num_available}"
            if self.num_needed
            else "takes its place",
        )


def explain(
    scheduler: RequestScheduler,
    active_requests: Sequence[LlmRequest],
    inflight_request_ids: Collection[int] = (),
) -> dict[int, WaitReason]:
    """The reason of every active request that ``scheduler`` would not run now, by id.

    Of another scheduler than `SimpleScheduler`, subclasses included, the reasons are unknown.
    """
    requests = list(active_requests)
    if type(scheduler) is not SimpleScheduler:
        context, generation, _ = scheduler.schedule_request(requests, inflight_request_ids)
        running = {id(request) for request in (*context, *generation)}
        waiting = (request for request in requests if id(request) not in running)
        return {request.request_id: WaitReason(WaitCode.UNKNOWN) for request in waiting}
    fits = scheduler.capacity_scheduler.schedule_request(requests)
    if not isinstance(fits, CapacityResult):
        fits = CapacityResult.part(*fits)
    reasons = _explain_capacity(scheduler.capacity_scheduler, requests, fits)
    return reasons | _explain_batch(scheduler.micro_batch_scheduler, fits[0], inflight_request_ids)


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
    """What is known of the requests that the user's scheduler ``name`` does not run, by id.

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
            return block_manager.get_context_blocks(request.num_tokens)
        return block_manager.get_needed_blocks_one_step(request)

    return {
        request.request_id: WaitReason(WaitCode.LEFT_OUT, needed(request), free, left_out=facts)
        for request in active_requests
        if id(request) not in running
    }


class _Waiting:
    """Reasons in the order of a walk; behind the request that ends it, all wait for that one."""

    def __init__(self) -> None:
        self.reasons: dict[int, WaitReason] = {}
        self._first_id: int | None = None
        self._num_ahead = 0

    def add(
        self, request: LlmRequest, reason: WaitReason, *, is_end: bool = False, is_own: bool = False
    ) -> None:
        """``request`` waits for ``reason``, unless one before it has ended the walk.

        ``is_end``: it ends the walk. ``is_own``: the reason holds in any case.
        """
        request_id = request.request_id
        if self._first_id is not None and not is_own:
            reason = WaitReason(
                WaitCode.BEHIND, behind_id=self._first_id, num_ahead=self._num_ahead
            )
        elif is_end and self._first_id is None:
            self._first_id = request_id
        self.reasons[request_id] = reason
        self._num_ahead += 1


def _explain_capacity(
    capacity: CapacityScheduler, requests: Sequence[LlmRequest], result: CapacityResult
) -> dict[int, WaitReason]:
    """Requests that may not hold cache: what each lacks, what it was paused for, or its place."""
    fitting, paused = result
    is_fitting = {id(request) for request in (*fitting, *result.fitting_disagg_gen_init)}
    others = [request for request in requests if id(request) not in is_fitting]
    if not paused:  # contexts that hold blocks already are looked at first
        others.sort(key=lambda request: request.is_first_context_chunk)
    waiting = _Waiting()
    is_full = len(is_fitting) >= capacity.max_num_requests
    for request in others:
        request_id = request.request_id
        if not capacity.is_schedulable(request):
            waiting.reasons[request_id] = WaitReason(WaitCode.STATE)
        elif request_id in result.pause_causes:
            cause, shortage = result.pause_causes[request_id]
            numbers = (0, 0) if shortage is None or shortage.resource is not None else shortage[1:]
            reason = WaitReason(WaitCode.PAUSED, *numbers, behind_id=cause.request_id)
            waiting.add(request, reason, is_end=True, is_own=True)
        elif request_id in result.refused:
            shortage = result.refused[request_id]
            is_end = shortage is not None and (
                shortage.ends_walk or isinstance(capacity, MaxUtilizationScheduler)
            )
            waiting.add(request, _reason_of(shortage), is_end=is_end)
        elif is_full:
            reason = WaitReason(WaitCode.MAX_REQUESTS, 1, capacity.max_num_requests)
            waiting.add(request, reason, is_end=True)
        elif isinstance(capacity, StaticBatchScheduler):
            waiting.add(request, WaitReason(WaitCode.STATIC_BATCH), is_end=True)
        else:
            waiting.add(request, WaitReason(WaitCode.UNKNOWN))
    return waiting.reasons


def _reason_of(shortage: Shortage | None) -> WaitReason:
    if shortage is None:
        return WaitReason(WaitCode.SHARED_CONTEXT)
    resource, num_needed, num_available = shortage
    if resource is None:
        return WaitReason(WaitCode.BLOCKS, num_needed, num_available)
    return WaitReason(WaitCode.RESOURCE, num_needed, num_available, resource=resource.name)


def _explain_batch(
    micro_batch: MicroBatchScheduler,
    fitting: Sequence[LlmRequest],
    inflight_request_ids: Collection[int],
) -> dict[int, WaitReason]:
    """Requests that hold cache, or may, and still do not run in this iteration."""
    walk = micro_batch.walk(fitting, inflight_request_ids)
    reasons = _explain_cut(micro_batch, walk)
    taken = {id(request) for request in (*walk.encoders, *walk.context, *walk.generation)}
    waiting = _Waiting()
    bound: WaitReason | None = None
    for request in fitting:
        if request is walk.end:
            bound = _bound_of(micro_batch, walk)
        if request.request_id in reasons:
            waiting.add(request, reasons[request.request_id], is_own=True)
        elif id(request) in taken or request.state is LlmRequestState.GENERATION_TO_COMPLETE:
            continue  # it runs, or its last token is being computed
        elif bound is not None:
            waiting.add(request, bound, is_end=True)
        elif request.request_id in inflight_request_ids:
            waiting.add(request, WaitReason(WaitCode.IN_FLIGHT))
        elif not micro_batch.is_schedulable(request):
            waiting.add(request, WaitReason(WaitCode.STATE))
        else:
            first = walk.generation[0].request_id
            waiting.add(request, WaitReason(WaitCode.BEAMS, behind_id=first))
    return waiting.reasons


def _bound_of(micro_batch: MicroBatchScheduler, walk: BatchWalk) -> WaitReason:
    """What ended the walk: the tokens of the request at its end, or the size of the batch."""
    budget = micro_batch.max_num_tokens
    if budget is None or walk.end_cost == 0:
        return WaitReason(WaitCode.BATCH, 1, micro_batch.max_batch_size)
    return WaitReason(WaitCode.TOKENS, walk.end_cost, budget - walk.num_tokens)


def _explain_cut(micro_batch: MicroBatchScheduler, walk: BatchWalk) -> dict[int, WaitReason]:
    """Contexts that may be cut and get nothing.

    If even the first does not, none does; and none starts behind one that would start.
    """
    chunking, budget = micro_batch.chunking, micro_batch.max_num_tokens
    if chunking is None or budget is None:
        return {}
    running: set[int] = set()
    num_left = budget - walk.num_tokens
    for request, _, size, num_drafts in micro_batch.cut(walk.context, walk.num_tokens, chunking):
        num_left -= size + num_drafts
        if size > 0:
            running.add(id(request))
    waiting = _Waiting()
    for request in walk.context:
        if id(request) not in running:
            smallest = min(micro_batch.num_tokens_to_compute(request), chunking.unit_size)
            would_start = request.is_first_context_chunk or not running
            reason = WaitReason(WaitCode.TOKENS, smallest, num_left)
            waiting.add(request, reason, is_end=would_start, is_own=not would_start)
    return waiting.reasons
