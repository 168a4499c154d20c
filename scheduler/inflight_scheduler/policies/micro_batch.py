"""Who runs in this iteration: the second of the two questions of scheduling.

The rules are those of TensorRT-LLM's ``microBatchScheduler.cpp``, the newer generation where two
were published: tokens found in the reuse cache are free. Without chunking a context runs whole;
with it, contexts share what generation leaves of the token budget.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from inflight_scheduler.errors import ContextTooLong
from inflight_scheduler.policies.chunking import ContextChunking
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import LlmRequestState


class MicroBatchScheduler:
    """Fills one iteration, in order, up to ``max_batch_size`` requests and ``max_num_tokens``.

    A context costs its tokens, a generation step its beam width, both also their draft tokens (a
    context with its last chunk), an encoder its input. ``max_num_tokens`` None means unbounded.
    ``chunking`` None: contexts run whole. ``count_reusable_tokens`` says how many tokens of a fresh
    context need not be computed. A decision changes nothing but the ``context_chunk_size`` and
    ``num_chunk_drafts`` of the contexts it lets run.
    """

    __slots__ = (
        "chunking",
        "count_reusable_tokens",
        "max_batch_size",
        "max_num_tokens",
        "no_schedule_after_state",
        "no_schedule_until_state",
    )

    def __init__(
        self,
        max_batch_size: int,
        max_num_tokens: int | None = None,
        *,
        chunking: ContextChunking | None = None,
        count_reusable_tokens: Callable[[LlmRequest], int] | None = None,
        no_schedule_until_state: LlmRequestState = LlmRequestState.CONTEXT_INIT,
        no_schedule_after_state: LlmRequestState = LlmRequestState.GENERATION_TO_COMPLETE,
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, not {max_batch_size}")
        if max_num_tokens is not None and max_num_tokens < 1:
            raise ValueError(f"max_num_tokens must be at least 1, not {max_num_tokens}")
        if chunking and max_num_tokens is not None and chunking.unit_size > max_num_tokens:
            raise ValueError(
                f"unit_size {chunking.unit_size} exceeds max_num_tokens={max_num_tokens}: "
                "a context that must be cut could never run"
            )
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.chunking = chunking
        self.count_reusable_tokens = count_reusable_tokens
        self.no_schedule_until_state = no_schedule_until_state
        self.no_schedule_after_state = no_schedule_after_state

    def schedule(
        self, fitting_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int] = ()
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Return ``(context_requests, generation_requests)``; encoders are with the contexts.

        The walk ends at the batch size or at the first request over the token budget, so nobody is
        overtaken; a generation whose beam width differs from the first one's is passed over. With
        chunking, a context that gets no token this time still counts towards the batch size, and
        contexts that are not at their last chunk come first in the result. Then each part is in
        the order of its adapters (``lora_task_id``), those without one first.
        Raises `ContextTooLong` for a context that no iteration can hold.
        """
        encoders: list[LlmRequest] = []
        context: list[LlmRequest] = []
        generation: list[LlmRequest] = []
        until, after = self.no_schedule_until_state, self.no_schedule_after_state
        budget = self.max_num_tokens
        num_left, num_tokens = self.max_batch_size, 0
        for request in fitting_requests:
            if num_left == 0:
                break
            state = request.state
            if not until <= state < after or request.request_id in inflight_request_ids:
                continue
            is_context = request.is_context_init_state
            is_encoder = state is LlmRequestState.ENCODER_INIT
            if is_context:
                cost = self._context_cost(request)
            elif is_encoder:
                cost = self._fitting(request, request.encoder_length, "an encoder input")
            else:
                cost = request.beam_width + len(request.draft_tokens)
            if budget is not None and num_tokens + cost > budget:
                break
            if is_context:
                context.append(request)
            elif is_encoder:
                encoders.append(request)
            elif generation and generation[0].beam_width != request.beam_width:
                continue
            else:
                generation.append(request)
            num_tokens += cost
            num_left -= 1
        chosen = _by_adapter(encoders) + self.set_chunks(context, num_tokens)
        return chosen, _by_adapter(generation)

    def num_tokens_to_compute(self, request: LlmRequest) -> int:
        """Prompt tokens left, without those that a fresh context finds in the reuse cache."""
        num_tokens = request.context_remaining_length
        if self.count_reusable_tokens is not None and request.is_first_context_chunk:
            num_tokens -= self.count_reusable_tokens(request)
        return num_tokens

    def set_chunks(self, context: list[LlmRequest], num_other_tokens: int) -> list[LlmRequest]:
        """The contexts that run, cut to what ``num_other_tokens`` leave of the budget.

        Nobody starts behind one that would start and gets nothing, however little it asks for:
        beside a long prompt that is cut, short ones would pass the next long one without end. That
        is a departure from the published rule; less than a unit is left over.
        """
        if self.chunking is None or not context:
            return _by_adapter(context)
        budget = self.max_num_tokens
        capacity = None if budget is None else budget - num_other_tokens
        lengths, sizes, kept = self._cut(context, self.chunking, capacity)
        allowed = _without_held_up(context, sizes)
        if len(allowed) < len(context):
            context = allowed
            lengths, sizes, kept = self._cut(context, self.chunking, capacity)
        unfinished: list[LlmRequest] = []
        last: list[LlmRequest] = []
        for request, length, size, num_kept in zip(context, lengths, sizes, kept, strict=True):
            if size > 0:
                request.context_chunk_size = size
                request.num_chunk_drafts = num_kept
                (last if size == length else unfinished).append(request)
        return _by_adapter(unfinished) + _by_adapter(last)

    def _cut(
        self, context: list[LlmRequest], chunking: ContextChunking, capacity: int | None
    ) -> tuple[list[int], list[int], list[int]]:
        """What each has left, how much of that runs, and how many drafts beside it."""
        lengths = [self.num_tokens_to_compute(request) for request in context]
        num_drafts = [len(request.draft_tokens) for request in context]
        return lengths, *chunking.chunks(lengths, num_drafts, capacity)

    def _context_cost(self, request: LlmRequest) -> int:
        """Tokens booked during the walk; contexts that may be cut take what is left after it."""
        if self.chunking is not None:
            return 0
        num_tokens = self.num_tokens_to_compute(request) + len(request.draft_tokens)
        return self._fitting(request, num_tokens, "a context")

    def _fitting(self, request: LlmRequest, num_tokens: int, what: str) -> int:
        """``num_tokens``, if some iteration can hold them."""
        if self.max_num_tokens is not None and num_tokens > self.max_num_tokens:
            raise ContextTooLong(request.request_id, num_tokens, self.max_num_tokens, what)
        return num_tokens


def _without_held_up(context: list[LlmRequest], sizes: list[int]) -> list[LlmRequest]:
    """``context`` without those that would start behind the first that would and gets nothing."""
    if all(sizes):
        return context
    waits = (r.is_first_context_chunk and size == 0 for r, size in zip(context, sizes, strict=True))
    end = next((place for place, waits_here in enumerate(waits, start=1) if waits_here), None)
    if end is None:
        return context
    return context[:end] + [r for r in context[end:] if not r.is_first_context_chunk]


def _by_adapter(requests: list[LlmRequest]) -> list[LlmRequest]:
    """Those with the same adapter together, those without one first."""
    if all(request.lora_task_id is None for request in requests):
        return requests
    return sorted(requests, key=lambda r: (r.lora_task_id is not None, r.lora_task_id or 0))
