"""A request as the scheduler sees it: progress in tokens, one state, no tensors.

`LlmRequest` is owned by the worker thread of `GptManager`; no other thread touches it. Names and
state values follow TensorRT-LLM (`cpp/include/tensorrt_llm/batch_manager/llmRequest.h`), so that
its documentation applies here.

The token list over the life of a request (beam width 1)::

    tokens   | prompt ............................ | generated ............... |
             0                          prompt_len ^                num_tokens ^
    after pause(): what was generated is prompt too; `orig_prompt_len` keeps the first border,
    so `num_generated_tokens` and everything a client sees do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import NamedTuple, Protocol

from inflight_scheduler.beam_search import Beams, Candidate
from inflight_scheduler.sampling import (
    NO_OUTPUTS,
    OutputParams,
    SamplingParams,
    Word,
    all_end_ids,
    num_continuations,
)
from inflight_scheduler.states import FinishReason, LlmRequestState


class PrefixMatch(NamedTuple):
    """The part of a prompt that is cached.

    ``block_ids`` are full blocks to share. ``copy_source`` is a block that starts like the rest
    of the prompt: a copy of it serves as the next block. ``num_tokens`` counts all those tokens.
    ``window_sources``: for each group of layers with a window its number, the index of the first
    block that it sees, and what to copy into this and the following ones. ``snapshot``: of the
    state of recurrences behind all that, and ``num_stored_blocks`` are the blocks that are cached,
    with a snapshot behind them or without.
    """

    block_ids: tuple[int, ...] = ()
    copy_source: int | None = None
    num_tokens: int = 0
    window_sources: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    snapshot: int | None = None
    num_stored_blocks: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of text whose content is used, shared or copied."""
        if not self.block_ids and self.window_sources:
            _, first, sources = self.window_sources[0]
            return first + len(sources)
        return len(self.block_ids) + (self.copy_source is not None)

    @property
    def num_entries(self) -> int:
        """Entries of block tables whose content was cached, of all groups of layers."""
        num_copies = sum([len(sources) for _, _, sources in self.window_sources])
        return len(self.block_ids) + (self.copy_source is not None) + num_copies


NO_MATCH = PrefixMatch()


# The loops of the scheduler read states some thousand times per iteration.
_ENCODER_INIT = LlmRequestState.ENCODER_INIT
_DISAGG_GENERATION_INIT = LlmRequestState.DISAGG_GENERATION_INIT
_TRANS_COMPLETE = LlmRequestState.DISAGG_GENERATION_TRANS_COMPLETE
_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT
_CONTEXT_INIT_AND_TRANS = LlmRequestState.DISAGG_CONTEXT_INIT_AND_TRANS
_GENERATION_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE
_GENERATION_COMPLETE = LlmRequestState.GENERATION_COMPLETE

_DEFAULT_SAMPLING = SamplingParams()


class PhaseTracker(Protocol):
    """Is told when a request has moved on (`ActiveRequests`)."""

    def phase_changed(self, request: LlmRequest) -> None:
        """The state or the place in the context of ``request`` is another one now."""

    def drafts_changed(self, request: LlmRequest, num_before: int) -> None:
        """``request`` has other draft tokens now than the ``num_before`` it had."""

    def pending_dropped(self, request: LlmRequest) -> None:
        """``request`` wants no token of the steps that run."""


@dataclass(slots=True, eq=False, repr=False)
class LlmRequest:
    """One request inside the batch manager: its tokens, limits and progress.

    ``tokens`` is prompt plus everything generated; treat it as read-only and grow it through
    `add_new_token`. ``context_current_position`` counts prompt tokens whose KV is computed or was
    found cached. Requests share cached blocks only if ``cache_salt`` and adapter are the same;
    ``block_keys`` and ``prefix_match`` are the memory of `ReuseIndex` for this text.

    While steps of it run (overlapped loop), the tokens that they will draw are pending: they count
    wherever tokens are counted, and come into ``tokens`` one after the other. ``shared_steps`` are
    those of these steps that are counted for all requests in the generation phase at once (see
    `ActiveRequests`), since a step that goes to thousands of requests to count is slow;
    ``num_own_pending`` is how many more it expects, or fewer if below 0.

    ``queue_deadline`` is when it must have started at the latest, ``run_deadline`` when it must
    have finished, on the clock of `time.monotonic`; the owner of the loop watches them, and
    ``stop_words`` too. ``rank`` is its place in `ActiveRequests`, which is also its ``tracker``;
    ``arrival`` is its number among all requests, if a queue before that has counted it.

    ``lora_task_id`` names the adapter it needs, None for none; that takes ``lora_pages`` and has
    weights of the digest ``lora_digest``. With an ``encoder_length`` (tokens of the encoder's
    input, which are ``encoder_tokens`` where they are known) it begins in ENCODER_INIT.
    ``draft_tokens`` are guesses at what comes next, verified by its next step; treat them as
    read-only and set them with `set_draft_tokens`.
    ``num_chunk_drafts`` of them run with the last chunk of its context. In all,
    ``num_verified_drafts`` were verified and ``num_accepted_drafts`` of them became tokens.

    ``end_ids`` has every token that ends it: ``end_id`` (-1: none) and those of its sampling.

    ``beams`` searches with ``beam_width`` beams: each generates in a row of its own, and ``tokens``
    is the prompt with the best of them. All of them have as many.
    """

    request_id: int
    input_tokens: InitVar[Sequence[int]]
    max_new_tokens: int
    _: KW_ONLY
    sampling: SamplingParams = _DEFAULT_SAMPLING
    end_id: int = -1
    pad_id: int = -1
    is_streaming: bool = False
    exclude_input_in_output: bool = False
    beam_width: int = 1
    beams: Beams | None = None
    priority: float = 0.5
    cache_salt: bytes = b""
    queue_deadline: float | None = None
    run_deadline: float | None = None
    lora_task_id: int | None = None
    lora_digest: bytes = b""
    lora_pages: int = 1
    encoder_length: int = 0
    encoder_tokens: tuple[int, ...] = ()
    draft_tokens: tuple[int, ...] = ()
    stop_words: tuple[Word, ...] = ()
    outputs: OutputParams = NO_OUTPUTS

    tokens: list[int] = field(init=False)
    prompt_len: int = field(init=False)
    orig_prompt_len: int = field(init=False)
    max_num_tokens: int = field(init=False)
    end_ids: frozenset[int] = field(init=False)
    state: LlmRequestState = field(init=False)
    finish_reason: FinishReason = field(init=False, default=FinishReason.NOT_FINISHED)
    context_current_position: int = field(init=False, default=0)
    context_chunk_size: int = field(init=False)
    num_chunk_drafts: int = field(init=False)
    num_verified_drafts: int = field(init=False, default=0)
    num_accepted_drafts: int = field(init=False, default=0)
    block_keys: list[bytes] = field(init=False, default_factory=list)
    prefix_match: tuple[tuple[int, int], PrefixMatch] | None = field(init=False, default=None)
    seq_slot: int | None = field(init=False, default=None)
    num_own_pending: int = field(init=False, default=0)
    shared_steps: Sequence[object] = field(init=False, default=())
    num_sent_tokens: int = field(init=False, default=0)
    num_pauses: int = field(init=False, default=0)
    num_reused_blocks: int = field(init=False, default=0)
    num_reused_tokens: int = field(init=False, default=0)
    arrival: int | None = field(init=False, default=None)
    rank: tuple[float, int] = field(init=False, default=(0.0, 0))
    tracker: PhaseTracker | None = field(init=False, default=None)

    def __post_init__(self, input_tokens: Sequence[int]) -> None:
        self.tokens = list(input_tokens)
        self.prompt_len = self.orig_prompt_len = self.context_chunk_size = len(self.tokens)
        self.max_num_tokens = self.prompt_len + self.max_new_tokens  # a pause keeps the sum
        self.end_ids = all_end_ids(self.end_id, self.sampling.stop_token_ids)
        self.num_chunk_drafts = len(self.draft_tokens)
        self.state = self._first_state

    def __repr__(self) -> str:
        return (
            f"LlmRequest({self.request_id}, {self.state.name}, prompt={self.prompt_len}, "
            f"generated={self.num_generated_tokens}, left={self.num_remaining_tokens})"
        )

    @property
    def num_tokens(self) -> int:
        """Prompt plus generated tokens, pending ones included."""
        return len(self.tokens) + self.num_own_pending + len(self.shared_steps)

    @property
    def num_drawn_tokens(self) -> int:
        """Prompt plus generated tokens that are known: none of them is pending."""
        return len(self.tokens)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that running steps will draw."""
        return self.num_own_pending + len(self.shared_steps)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated and known since the request arrived; a pause does not change it."""
        return len(self.tokens) - self.orig_prompt_len

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV is computed; the last one drawn is not, until the next step feeds it."""
        if self.context_current_position < self.prompt_len:  # also of one stopped in its context
            return self.context_current_position
        return self.num_tokens - 1

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.max_num_tokens - self.num_tokens

    @property
    def is_context_init_state(self) -> bool:
        """True while some of the prompt is not computed yet (also where KV leaves meanwhile)."""
        return self.state is _CONTEXT_INIT or self.state is _CONTEXT_INIT_AND_TRANS

    @property
    def is_encoder_init_state(self) -> bool:
        """True while the encoder has not run."""
        return self.state is _ENCODER_INIT

    @property
    def is_encoded(self) -> bool:
        """True once its encoder has run."""
        return self.encoder_length > 0 and self.state > _ENCODER_INIT

    @property
    def is_disagg_generation_init_state(self) -> bool:
        """True while its context is computed on another server and no KV has arrived."""
        return self.state is _DISAGG_GENERATION_INIT

    @property
    def is_generation_in_progress_state(self) -> bool:
        """True while tokens are generated step by step (also right after the KV has come)."""
        return _TRANS_COMPLETE <= self.state <= _GENERATION_TO_COMPLETE

    @property
    def num_draft_tokens(self) -> int:
        """Guesses that its next step verifies."""
        return len(self.draft_tokens)

    @property
    def has_started(self) -> bool:
        """True once a step has run for this request, or one runs now."""
        return self.seq_slot is not None or self.num_pauses > 0

    @property
    def is_finished(self) -> bool:
        """True once no further step will run for this request."""
        return self.state is _GENERATION_COMPLETE

    @property
    def is_first_context_chunk(self) -> bool:
        """True until the first chunk of the (possibly resumed) prompt has run."""
        return self.context_current_position == 0

    @property
    def context_remaining_length(self) -> int:
        """Prompt tokens whose KV is not computed yet."""
        return self.prompt_len - self.context_current_position

    @property
    def is_last_context_chunk(self) -> bool:
        """True when the chunk of this iteration reaches the end of the prompt."""
        return self.context_current_position + self.context_chunk_size >= self.prompt_len

    def skip_context(self, num_tokens: int) -> None:
        """The first ``num_tokens`` of the prompt are cached: compute what comes after them."""
        self.context_current_position = num_tokens
        self.context_chunk_size = min(self.context_chunk_size, self.context_remaining_length)
        self._tell_phase()

    def move_to_next_context_chunk(self) -> None:
        """Book the chunk that just ran; the last one starts the generation phase."""
        self.context_current_position += self.context_chunk_size
        self.context_chunk_size = self.context_remaining_length
        if self.context_remaining_length == 0:
            self.state = LlmRequestState.GENERATION_IN_PROGRESS
        self._tell_phase()

    def finish_encoder(self) -> None:
        """The encoder has run: the context comes next."""
        self.state = LlmRequestState.CONTEXT_INIT
        self._tell_phase()

    def set_draft_tokens(self, tokens: Sequence[int]) -> None:
        """Take ``tokens`` as the guesses of the next step, instead of those it had.

        A context that has started reserved room for the drafts it had then, so it may only drop
        some: `ValueError` for more. Keep beam width + drafts within the token budget.
        """
        num_before = len(self.draft_tokens)
        has_reserved = self.is_context_init_state and self.seq_slot is not None
        if has_reserved and len(tokens) > num_before:
            raise ValueError(
                f"request {self.request_id}: {len(tokens)} draft tokens, but its context started "
                f"with {num_before}; give no more until it generates"
            )
        self.draft_tokens = tuple(tokens)
        self.num_chunk_drafts = len(self.draft_tokens)
        if self.tracker is not None:
            self.tracker.drafts_changed(self, num_before)

    def add_new_token(self, token: int) -> None:
        """Append a generated token and finish on one of ``end_ids`` or at ``max_new_tokens``."""
        self.tokens.append(token)
        if token in self.end_ids:
            self.finish(FinishReason.END_ID)
        elif len(self.tokens) >= self.max_num_tokens:
            self.finish(FinishReason.LENGTH)

    def expect_token(self) -> None:
        """A step that samples the next token has started; `add_pending_token` brings the token.

        The last token that may come makes the state GENERATION_TO_COMPLETE: nothing more runs.
        """
        self.num_own_pending += 1
        if self.num_tokens >= self.max_num_tokens:
            self.await_last_token()

    def await_last_token(self) -> None:
        """A running step draws the last token there may be."""
        self.state = LlmRequestState.GENERATION_TO_COMPLETE
        self._tell_phase()

    def add_pending_token(self, token: int) -> None:
        """Append the oldest of the pending tokens, which has been drawn; it may end the request."""
        self.num_own_pending -= 1
        self.tokens.append(token)
        if token in self.end_ids:
            self.finish(FinishReason.END_ID)
        elif self.num_pending_tokens == 0 and self.state is _GENERATION_TO_COMPLETE:
            self.finish(FinishReason.LENGTH)

    def share_steps(self, steps: Sequence[object]) -> None:
        """From now on each of ``steps``, as long as it is there, is a token that is pending.

        How many are pending now does not change.
        """
        self.num_own_pending += len(self.shared_steps) - len(steps)
        self.shared_steps = steps

    def advance_beams(self, rows: Sequence[Sequence[Candidate]]) -> bool:
        """A step of the search has run; its token was pending or not. May end the request.

        False if no token could follow: then the last token is -1, as for any failed draw.
        """
        assert self.beams is not None
        self.drop_pending_tokens()
        has_gone_on = self.beams.advance(rows)
        self.beams.write(self.tokens, self.prompt_len)
        if not has_gone_on:
            self.tokens.append(-1)
        elif self.beams.finish_reason is not FinishReason.NOT_FINISHED:
            self.finish(self.beams.finish_reason)
        return has_gone_on

    @property
    def num_rows(self) -> int:
        """Rows of a generation step that are its own."""
        return 1 if self.beams is None else self.beam_width

    @property
    def num_candidates(self) -> int:
        """Likely tokens that its search wants to know of each row; 0 without one."""
        return 0 if self.beams is None else num_continuations(self.beam_width, self.end_ids)

    def drop_pending_tokens(self) -> None:
        """Whatever running steps draw is not wanted any more."""
        if self.num_pending_tokens:
            self.num_own_pending = -len(self.shared_steps)
            if self.tracker is not None:
                self.tracker.pending_dropped(self)

    def finish(self, reason: FinishReason) -> None:
        """End the request; the caller frees its blocks and slot."""
        self.drop_pending_tokens()
        self.state = LlmRequestState.GENERATION_COMPLETE
        self.finish_reason = reason
        self._tell_phase()

    def pause(self) -> None:
        """Go back to the first phase with all tokens so far as prompt.

        With beams these are thrown away and generated again. Drafts are dropped. The caller frees
        blocks and slot. What was sent stays counted in ``num_sent_tokens``, so a streaming client
        sees neither a gap nor a duplicate after the resume.
        """
        assert self.num_pending_tokens == 0, f"request {self.request_id} pauses in a running step"
        if self.beam_width > 1:
            del self.tokens[self.prompt_len :]
            self.block_keys.clear()  # what comes now may be another text
            if self.beams is not None:
                self.beams.reset()
        moved = len(self.tokens) - self.prompt_len
        self.prompt_len += moved
        self.max_new_tokens -= moved
        if self.draft_tokens:
            self.set_draft_tokens(())
        self.context_current_position = 0
        self.context_chunk_size = self.prompt_len
        self.seq_slot = None
        self.num_pauses += 1
        self.state = self._first_state
        self._tell_phase()

    @property
    def _first_state(self) -> LlmRequestState:
        return LlmRequestState.CONTEXT_INIT if self.encoder_length == 0 else _ENCODER_INIT

    def _tell_phase(self) -> None:
        if self.tracker is not None:
            self.tracker.phase_changed(self)
