"""Who runs in this iteration: the second of the two questions of scheduling.

The rules are those of TensorRT-LLM's ``microBatchScheduler.cpp`` without context chunking: a
context runs whole. A chunking policy has its place between the walk and the return of
`MicroBatchScheduler.schedule`: it sets ``context_chunk_size`` of the chosen contexts so that they
fit what generation leaves of the token budget.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inflight_scheduler.errors import ContextTooLong
from inflight_scheduler.request import LlmRequest, LlmRequestState


class MicroBatchScheduler:
    """Fills one iteration, in order, up to ``max_batch_size`` requests and ``max_num_tokens``.

    A context costs its tokens, a generation step its beam width. ``max_num_tokens`` None means
    unbounded. Nothing is changed by a decision.
    """

    __slots__ = (
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
        no_schedule_until_state: LlmRequestState = LlmRequestState.CONTEXT_INIT,
        no_schedule_after_state: LlmRequestState = LlmRequestState.GENERATION_TO_COMPLETE,
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, not {max_batch_size}")
        if max_num_tokens is not None and max_num_tokens < 1:
            raise ValueError(f"max_num_tokens must be at least 1, not {max_num_tokens}")
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.no_schedule_until_state = no_schedule_until_state
        self.no_schedule_after_state = no_schedule_after_state

    def schedule(
        self, fitting_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int] = ()
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Return ``(context_requests, generation_requests)``.

        The walk ends at the batch size or at the first request over the token budget, so nobody is
        overtaken; a generation whose beam width differs from the first one's is passed over.
        Raises `ContextTooLong` for a context that no iteration can hold.
        """
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
            is_context = state is LlmRequestState.CONTEXT_INIT
            cost = self._context_cost(request) if is_context else request.beam_width
            if budget is not None and num_tokens + cost > budget:
                break
            if is_context:
                context.append(request)
            elif generation and generation[0].beam_width != request.beam_width:
                continue
            else:
                generation.append(request)
            num_tokens += cost
            num_left -= 1
        return context, generation

    def _context_cost(self, request: LlmRequest) -> int:
        num_tokens = request.context_remaining_length
        if self.max_num_tokens is not None and num_tokens > self.max_num_tokens:
            raise ContextTooLong(request.request_id, num_tokens, self.max_num_tokens)
        return num_tokens
