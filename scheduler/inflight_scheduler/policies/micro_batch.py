"""Which requests run in this iteration, and how long their context chunks are.

This is the second of the two steps of scheduling. The rules are those of TensorRT-LLM's
``microBatchScheduler.cpp`` and ``setCtxRequestsChunkSize``; where its two published generations
differ, the newer one: tokens found in the reuse cache are free, so all lengths here count what
must be computed. Without chunking a context runs whole; with it, contexts share what generation
leaves of the token budget. A last chunk takes draft tokens along and is charged only for those it
keeps (the older rule charged the whole rest of the unit).

One departure: when generation leaves too little for a step of the first context, no context runs.
By the published rule shorter ones behind it would take what is left, one after another, and with
enough of them the first would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import add
from typing import NamedTuple

from inflight_scheduler.errors import ContextTooLong
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import LlmRequestState

_UNBOUNDED = 2**62


class ContextChunkingPolicy(IntEnum):
    """Which contexts get tokens when not all contexts fit (values of the Executor API; the last is
    that of TensorRT-LLM's Python scheduler)."""

    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1
    FORCE_CHUNK = 2
    PIPELINE_AWARE = 3


@dataclass(frozen=True, slots=True)
class ContextChunking:
    """Cut contexts by ``policy``: a chunk is a multiple of ``unit_size`` tokens, or the rest.

    ``max_context_length`` bounds every chunk; None leaves that to the token budget. ``num_stages``:
    of the pipeline, of which PIPELINE_AWARE makes as many chunks of a prompt, that each may be at
    another stage (``_chunk_pipeline_aware`` of that Python scheduler).
    """

    policy: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    unit_size: int = 32
    max_context_length: int | None = None
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.num_stages < 1:
            raise ValueError(f"num_stages must be at least 1, not {self.num_stages}")
        if self.unit_size < 1:
            raise ValueError(f"unit_size must be at least 1, not {self.unit_size}")
        if self.max_context_length is not None and self.unit_size > self.max_context_length:
            raise ValueError(
                f"unit_size {self.unit_size} exceeds max_context_length={self.max_context_length}"
            )

    def chunks(
        self,
        lengths: Sequence[int],
        num_drafts: Sequence[int],
        capacity: int | None,
        totals: Sequence[int] | None = None,
        up_to_snapshots: Sequence[int] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Prompt tokens of each context that run now, 0 for none, and drafts next to them.

        ``lengths`` are the prompt tokens each has left, in order, ``num_drafts`` the guesses that
        may follow its last chunk. What runs is at most ``capacity`` in all; None means unbounded.
        ``totals``: tokens of their whole prompts; None: the same as ``lengths``.
        ``up_to_snapshots``: those up to where each keeps a state next, or has ended, at which a
        chunk ends under FORCE_CHUNK; None: the same as ``lengths``.
        Contexts that all fit with their drafts run whole, except under FORCE_CHUNK and
        PIPELINE_AWARE, which always cut. Otherwise a last chunk keeps the drafts that complete its
        unit, as far as there is room. Where the first gets nothing, none does.
        """
        longest = _UNBOUNDED if self.max_context_length is None else self.max_context_length
        num_left = _UNBOUNDED if capacity is None else capacity
        whole = list(map(add, lengths, num_drafts))
        if self.policy == ContextChunkingPolicy.FORCE_CHUNK:
            wanted = list(map(min, lengths, up_to_snapshots or lengths))
            sizes = self._first_come(lengths, num_left, longest, wanted)
        elif self.policy == ContextChunkingPolicy.PIPELINE_AWARE:
            targets = [self._even_chunk(total) for total in totals or lengths]
            wanted = list(map(min, lengths, targets))
            sizes = self._first_come(lengths, num_left, longest, wanted)
        elif sum(whole) <= num_left and max(whole, default=0) <= longest:
            return list(lengths), list(num_drafts)
        elif self.policy == ContextChunkingPolicy.EQUAL_PROGRESS:
            sizes = self._equal_progress(lengths, num_left, longest)
        else:
            sizes = self._first_come(lengths, num_left, longest)
        if sizes[:1] == [0]:
            sizes = [0] * len(sizes)
        num_left -= sum(sizes)
        kept = [0] * len(sizes)
        for index, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
            if size == length:
                in_unit = -size % self.unit_size
                kept[index] = min(num_drafts[index], in_unit, longest - size, num_left)
                num_left -= kept[index]
        return sizes, kept

    def _even_chunk(self, total: int) -> int:
        """Of a prompt of ``total`` tokens: a chunk for each stage, in whole units; prompts that
        have not so many are parted less."""
        num_chunks = min(self.num_stages, max(total // self.unit_size, 1))
        if num_chunks == 1:
            return total
        size = total // num_chunks
        return size - size % self.unit_size

    def _first_come(
        self,
        lengths: Sequence[int],
        num_left: int,
        longest: int,
        wanted: Sequence[int] | None = None,
    ) -> list[int]:
        """The rest of each in turn, or of that what is ``wanted``; less is in whole units."""
        sizes = []
        for most in wanted or lengths:
            size = min(most, longest, num_left)
            if size < most:
                size -= size % self.unit_size
            num_left -= size
            sizes.append(size)
        return sizes

    def _equal_progress(self, lengths: Sequence[int], num_left: int, longest: int) -> list[int]:
        """One unit each per round. One that was skipped stays skipped: room only shrinks."""
        sizes = [0] * len(lengths)
        growing = list(range(len(lengths)))
        while growing:
            still_growing = []
            for index in growing:
                size = sizes[index]
                step = min(self.unit_size, lengths[index] - size)
                if 0 < step <= min(num_left, longest - size):
                    sizes[index] += step
                    num_left -= step
                    still_growing.append(index)
            growing = still_growing
        return sizes


class BatchWalk(NamedTuple):
    """How the walk over the fitting requests went: what was taken, and where it ended.

    ``num_tokens`` are those of encoders, generation and contexts that run whole. ``end`` is the
    first request that was refused: ``end_cost`` tokens are too many, or, if that is 0, the batch is
    full. Requests before it that were not taken have another beam width, or cannot run.
    """

    encoders: list[LlmRequest]
    context: list[LlmRequest]
    generation: list[LlmRequest]
    num_tokens: int
    end: LlmRequest | None
    end_cost: int


class MicroBatchScheduler:
    """Fills one iteration, in order, up to ``max_batch_size`` requests and ``max_num_tokens``.

    A context costs its tokens, a generation step its beam width, both also their draft tokens (a
    context with its last chunk), an encoder its input. ``max_num_tokens`` None means unbounded.
    ``chunking`` None: contexts run whole. ``count_reusable_tokens`` says how many tokens of a fresh
    context need not be computed, ``snapshot_points`` after how many of its prompt it keeps a state.
    A decision changes nothing but the ``context_chunk_size`` and ``num_chunk_drafts`` of the
    contexts it lets run.
    """

    __slots__ = (
        "chunking",
        "count_reusable_tokens",
        "max_batch_size",
        "max_num_tokens",
        "no_schedule_after_state",
        "no_schedule_until_state",
        "snapshot_points",
    )

    def __init__(
        self,
        max_batch_size: int,
        max_num_tokens: int | None = None,
        *,
        chunking: ContextChunking | None = None,
        count_reusable_tokens: Callable[[LlmRequest], int] | None = None,
        snapshot_points: Callable[[LlmRequest], Sequence[int]] | None = None,
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
        self.snapshot_points = snapshot_points
        self.no_schedule_until_state = no_schedule_until_state
        self.no_schedule_after_state = no_schedule_after_state

    def schedule(
        self, fitting_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int] = ()
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Return ``(context_requests, generation_requests)``; encoders are with the contexts.

        The walk ends at the batch size or at the first request over the token budget, so none is
        overtaken; a generation whose beam width differs from the first one's is passed over. With
        chunking, a context that gets no token this time still counts towards the batch size, and
        contexts that are not at their last chunk come first in the result. Then each part is in
        the order of its adapters (``lora_task_id``), those without one first.
        Raises `ContextTooLong` for a context that no iteration can hold.
        """
        walk = self.walk(fitting_requests, inflight_request_ids)
        chosen = _by_adapter(walk.encoders) + self.set_chunks(walk.context, walk.num_tokens)
        return chosen, _by_adapter(walk.generation)

    def walk(
        self, fitting_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int] = ()
    ) -> BatchWalk:
        """The first half of `schedule`: which requests are taken, before contexts are cut."""
        end, end_cost = None, 0
        encoders: list[LlmRequest] = []
        context: list[LlmRequest] = []
        generation: list[LlmRequest] = []
        until, after = self.no_schedule_until_state, self.no_schedule_after_state
        budget = self.max_num_tokens
        num_left, num_tokens = self.max_batch_size, 0
        for request in fitting_requests:
            if num_left == 0:
                end = request
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
                end, end_cost = request, cost
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
        return BatchWalk(encoders, context, generation, num_tokens, end, end_cost)

    def is_schedulable(self, request: LlmRequest) -> bool:
        """True when the state of ``request`` lies inside the gate."""
        return self.no_schedule_until_state <= request.state < self.no_schedule_after_state

    def num_tokens_to_compute(self, request: LlmRequest) -> int:
        """Prompt tokens left, without those that a fresh context finds in the reuse cache."""
        num_tokens = request.context_remaining_length
        if self.count_reusable_tokens is not None and request.is_first_context_chunk:
            num_tokens -= self.count_reusable_tokens(request)
        return num_tokens

    def set_chunks(self, context: list[LlmRequest], num_other_tokens: int) -> list[LlmRequest]:
        """The contexts that run, cut to what ``num_other_tokens`` leave of the budget."""
        if self.chunking is None or not context:
            return _by_adapter(context)
        unfinished: list[LlmRequest] = []
        last: list[LlmRequest] = []
        for request, length, size, num_drafts in self.cut(context, num_other_tokens, self.chunking):
            if size > 0:
                request.context_chunk_size = size
                request.num_chunk_drafts = num_drafts
                (last if size == length else unfinished).append(request)
        return _by_adapter(unfinished) + _by_adapter(last)

    def cut(
        self, context: list[LlmRequest], num_other_tokens: int, chunking: ContextChunking
    ) -> Iterable[tuple[LlmRequest, int, int, int]]:
        """Each context with the tokens it has left, how many of them run, and drafts beside them.

        None starts behind one that would start and gets nothing, however little it needs:
        beside a long prompt that is cut, short ones would pass the next long one without end. That
        is a departure from the published rule; less than a unit is left over.
        """
        budget = self.max_num_tokens
        capacity = None if budget is None else budget - num_other_tokens
        lengths, sizes, kept = self._chunks(context, chunking, capacity)
        allowed = _without_held_up(context, sizes)
        if len(allowed) < len(context):
            context = allowed
            lengths, sizes, kept = self._chunks(context, chunking, capacity)
        return zip(context, lengths, sizes, kept, strict=True)

    def _chunks(
        self, context: list[LlmRequest], chunking: ContextChunking, capacity: int | None
    ) -> tuple[list[int], list[int], list[int]]:
        lengths = [self.num_tokens_to_compute(request) for request in context]
        num_drafts = [len(request.draft_tokens) for request in context]
        totals = [request.prompt_len for request in context]
        up_to = None
        if chunking.policy == ContextChunkingPolicy.FORCE_CHUNK:
            up_to = [self._up_to_snapshot(*each) for each in zip(context, lengths, strict=True)]
        return lengths, *chunking.chunks(lengths, num_drafts, capacity, totals, up_to)

    def _up_to_snapshot(self, request: LlmRequest, length: int) -> int:
        """Of the ``length`` tokens that are left of a prompt, those up to its next snapshot."""
        if self.snapshot_points is None:
            return length
        start = request.prompt_len - length
        points = self.snapshot_points(request)
        return next((point - start for point in points if point > start), length)

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
