"""Checks the decisions of the operator's scheduler before they reach the block pool."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inflight_scheduler.errors import InvalidDecision
from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.policies.resources import Budgets, Resource
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import LlmRequestState


def check_decision(
    decision: object,
    active_requests: Sequence[LlmRequest],
    inflight_request_ids: Collection[int] = (),
    *,
    block_manager: BlockManager,
    num_free_slots: int,
    max_batch_size: int,
    max_num_tokens: int | None = None,
    may_chunk: bool = False,
    resources: Sequence[Resource] = (),
) -> tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]:
    """Return ``decision`` as three lists if it can be carried out; changes nothing.

    ``may_chunk``: a context may be cut, so a request of any length can be paused and run again;
    without it each context runs to its end.
    ``resources``: what there must be enough of besides blocks. Encoder steps are not checked here,
    nor planned: the caller removes them.
    Raises `InvalidDecision` that names the request and the bound otherwise.
    """
    context, generation, paused = _three_lists(decision)
    _check_membership([*context, *generation, *paused], active_requests)
    for request in context:
        _check_runnable(request, request.is_context_init_state, "context", inflight_request_ids)
        _check_chunk(request, may_chunk)
    for request in generation:
        has_last_token = request.state is LlmRequestState.GENERATION_TO_COMPLETE
        is_generation = request.is_generation_in_progress_state and not has_last_token
        _check_runnable(request, is_generation, "generation", inflight_request_ids)
    _check_paused(paused, None if may_chunk else max_num_tokens)
    _check_batch(context, generation, max_batch_size, max_num_tokens, block_manager)
    scheduled = [*context, *generation]
    _check_room(scheduled, paused, Budgets(block_manager, resources, to_completion=False))
    num_new_slots = sum(request.seq_slot is None for request in scheduled)
    num_free_slots += sum(request.seq_slot is not None for request in paused)
    _check_bound("new requests", num_new_slots, "free slots", num_free_slots)
    return context, generation, paused


def _three_lists(
    decision: object,
) -> tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]:
    if not isinstance(decision, (tuple, list)) or len(decision) != 3:
        raise InvalidDecision(
            "a scheduler returns (context_requests, generation_requests, paused_requests), "
            f"not {type(decision).__name__}"
        )
    for part in decision:
        if not isinstance(part, (tuple, list)):
            raise InvalidDecision(f"a list of requests is expected, not {type(part).__name__}")
        for request in part:
            if not isinstance(request, LlmRequest):
                raise InvalidDecision(f"a request is expected, not {type(request).__name__}")
    context, generation, paused = decision
    return list(context), list(generation), list(paused)


def _check_membership(named: Sequence[LlmRequest], active: Sequence[LlmRequest]) -> None:
    active_by_id = {request.request_id: request for request in active}
    seen: set[int] = set()
    for request in named:
        request_id = request.request_id
        if active_by_id.get(request_id) is not request:
            raise InvalidDecision(f"request {request_id} is not active")
        if request_id in seen:
            raise InvalidDecision(f"request {request_id} is named twice")
        seen.add(request_id)


def _check_runnable(
    request: LlmRequest, has_right_state: bool, phase: str, inflight_request_ids: Collection[int]
) -> None:
    if not has_right_state:
        raise InvalidDecision(
            f"request {request.request_id} is in state {request.state.name}, not in its {phase} "
            "phase"
        )
    if request.request_id in inflight_request_ids:
        raise InvalidDecision(f"request {request.request_id} is still running in another step")


def _check_chunk(request: LlmRequest, may_chunk: bool) -> None:
    num_left, size = request.context_remaining_length, request.context_chunk_size
    # A foreign scheduler may have divided: 3.0 passes as a number and cannot cut a list. Or it has
    # compared: True equals 1 in arithmetic, and is no size.
    if type(size) is int and (1 if may_chunk else num_left) <= size <= num_left:
        return
    bound = f"an int in 1..{num_left}" if may_chunk else f"{num_left}, since contexts are not cut"
    raise InvalidDecision(
        f"request {request.request_id}: a chunk of {size!r} tokens with {num_left} left; it "
        f"must be {bound}"
    )


def count_step_tokens(
    context: Sequence[LlmRequest], generation: Sequence[LlmRequest], block_manager: BlockManager
) -> int:
    """Tokens that a step with these requests computes, before it is planned."""
    num_tokens = sum(_num_context_tokens(request, block_manager) for request in context)
    return num_tokens + sum(r.beam_width + r.num_draft_tokens for r in generation)


def _num_context_tokens(request: LlmRequest, block_manager: BlockManager) -> int:
    """What the planner will run: a chunk ends at the prompt's end, wherever reuse starts it.

    A last one takes drafts along.
    """
    num_left = request.context_remaining_length - block_manager.count_reusable_tokens(request)
    if request.context_chunk_size < num_left:
        return request.context_chunk_size
    return num_left + min(request.num_chunk_drafts, request.num_draft_tokens)


def _check_paused(paused: Sequence[LlmRequest], max_num_tokens: int | None) -> None:
    for request in paused:
        if request.is_finished or request.seq_slot is None:
            raise InvalidDecision(
                f"request {request.request_id} cannot be paused: it holds no slot (leave waiting "
                "requests out of all three lists)"
            )
        if max_num_tokens is not None and request.num_tokens > max_num_tokens:
            raise InvalidDecision(
                f"request {request.request_id} cannot be paused: its {request.num_tokens} tokens "
                f"could never run again with max_num_tokens={max_num_tokens}"
            )


def _check_batch(
    context: Sequence[LlmRequest],
    generation: Sequence[LlmRequest],
    max_batch_size: int,
    max_num_tokens: int | None,
    block_manager: BlockManager,
) -> None:
    beam_widths = {request.beam_width for request in generation}
    if len(beam_widths) > 1:
        raise InvalidDecision(f"beam widths {sorted(beam_widths)} in one generation step")
    _check_bound("requests", len(context) + len(generation), "max_batch_size", max_batch_size)
    if max_num_tokens is not None:
        num_tokens = count_step_tokens(context, generation, block_manager)
        _check_bound("tokens", num_tokens, "max_num_tokens", max_num_tokens)


def _check_room(
    scheduled: Sequence[LlmRequest], paused: Sequence[LlmRequest], budgets: Budgets
) -> None:
    for request in paused:
        budgets.release(request)
    num_free = [num_left for _, num_left in budgets.left()]
    for request in scheduled:
        budgets.claim(request)
    for (name, num_left), num_before in zip(budgets.left(), num_free, strict=True):
        _check_bound(name, num_before - num_left, f"free {name}", num_before)


def _check_bound(what: str, number: int, bound_name: str, bound: int) -> None:
    if number > bound:
        raise InvalidDecision(f"{number} {what} are scheduled, but {bound_name} is {bound}")
