"""Carries decisions out: slots and blocks in, a `ScheduledBatch` out, tokens back in.

Order of side effects in `BatchPlanner.plan`: paused requests give back blocks and slots, then
fresh contexts take a slot and share the cached blocks (before any allocation, so that none of
these can be evicted), then contexts take the other blocks of their whole prompt, then generation
steps take the block their token opens. Draft tokens take room like tokens that are sure; those for
which a last chunk has no room are dropped, and `BatchPlanner.update` drops all of the step, since
they have been verified then (see `verification`). There is no rollback, since a decision that was
made by our schedulers, or has passed `check_decision`, always has room; if it has not, that is our
bug and an `AssertionError`.

A slot and the blocks of a request are given back in one place, `BatchPlanner.release`, whatever
the reason; full computed blocks stay cached, except after a failed step. A batch remembers its
requests, so that tokens of a request which was released, paused or finished while the batch ran
are dropped and never reach the next owner of the slot.

The tokens of a batch come back in one of two ways:

- `update`, when nothing else is planned meanwhile;
- `assume_step` as soon as the step has been started, and `apply_tokens` when its tokens are there;
  not for a step with drafts, since how many of those will count is not known. Between them the next
  batch may be planned (and assumed): its requests look as if they had their tokens already. What a
  request has given back is written once more by a step that still runs, but steps run in order, so
  before the next owner of the blocks writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from operator import attrgetter

from inflight_scheduler.batch import (
    BlockAssignment,
    BlockCopy,
    ContextChunk,
    ScheduledBatch,
    SlotSetup,
    SlotSnapshot,
)
from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.planning.active_requests import ActiveRequests
from inflight_scheduler.planning.encoder_answers import EncoderAnswers
from inflight_scheduler.planning.pending_tokens import (
    SharedStep,
    apply_each,
    apply_tokens_to,
    has_failed_unseen,
)
from inflight_scheduler.planning.plan_parts import (
    NO_CANDIDATES,
    Candidates,
    append_beam_blocks,
    check_num_tokens,
    grow,
    move_beams,
    no_room,
    open_beams,
    rows_of,
    search,
    set_up_rows,
    slots_of,
)
from inflight_scheduler.planning.slot_pool import SlotPool
from inflight_scheduler.planning.verification import (
    add_verified_tokens,
    fitting_drafts,
    take_verified,
)
from inflight_scheduler.request import LlmRequest, PrefixMatch


class BatchPlanner:
    """Owner of the slots; applies decisions to requests, blocks and slots.

    With ``active`` (see `ActiveRequests`) the usual plan costs what changed. ``cross_blocks`` are
    those of an encoder's answers, where there is an encoder.
    """

    __slots__ = (
        "_assumed",
        "_generation",
        "_generation_slots",
        "_iteration",
        "_open_slots",
        "_planned",
        "active",
        "answers",
        "block_manager",
        "has_forgotten",
        "slots",
    )

    def __init__(
        self,
        block_manager: BlockManager,
        num_slots: int,
        active: ActiveRequests | None = None,
        max_beam_width: int = 1,
        cross_blocks: BlockManager | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.answers = None if cross_blocks is None else EncoderAnswers(cross_blocks)
        self.slots = SlotPool(num_slots, max_beam_width)
        self.active = active
        self._iteration = 0
        # Batches that are planned and not updated yet: their requests, contexts first.
        self._planned: dict[int, tuple[list[LlmRequest], Sequence[LlmRequest]]] = {}
        self._assumed: dict[int, SharedStep | None] = {}  # of those, the ones advanced
        self.has_forgotten = False  # whether the last `apply_tokens` emptied the cache
        # The last list of all generation requests, and their slots.
        self._generation: Sequence[LlmRequest] = []
        self._generation_slots: tuple[int, ...] = ()
        self._open_slots: set[int] = set()  # that ran with drafts last

    @property
    def num_free_slots(self) -> int:
        """Requests that could start now, as far as slots go."""
        return self.slots.num_free_slots

    @property
    def is_at_rest(self) -> bool:
        """True when no batch is planned whose tokens are to come."""
        return not self._planned

    def plan(
        self,
        context_requests: Sequence[LlmRequest],
        generation_requests: Sequence[LlmRequest],
        paused_requests: Sequence[LlmRequest] = (),
    ) -> ScheduledBatch:
        """Apply a decision and return what the engine shall run.

        Unless the batch is empty, exactly one of `update`, `assume_step` with `apply_tokens`, and
        `discard` must follow; `discard` also where one of the others has raised.
        """
        for request in paused_requests:
            self.release(request)
            request.pause()
        if self.block_manager.snapshots is not None:
            self.block_manager.snapshots.begin_plan()
        encoding: Sequence[LlmRequest] = ()
        if self.answers is not None:
            encoding, context_requests = self.answers.split(context_requests)
        if paused_requests and self.active is not None:
            generation_requests = self.active.view_of(generation_requests)
        setups: list[SlotSetup] = []
        new_blocks: list[BlockAssignment] = []
        sources: dict[int, PrefixMatch] = {}
        restored: list[SlotSnapshot] = []
        for request in context_requests:
            if request.seq_slot is None:
                setups += self._start(request, new_blocks, sources, restored)
        copies: list[BlockCopy] = []
        chunks = [
            self._plan_context(request, new_blocks, sources, copies) for request in context_requests
        ]
        runs: tuple[ContextChunk, ...] = ()
        if self._may_have_drafts:
            generation_requests, runs = self._plan_drafts(generation_requests, new_blocks)
        plain = generation_requests[len(runs) :] if runs else generation_requests
        moves = move_beams(plain, self.block_manager, copies)
        saved: list[SlotSnapshot] = []
        slots = self._plan_generation(plain, new_blocks, saved)
        self._iteration += 1
        answers = self.answers
        has_work = bool(chunks or slots or runs or encoding)  # else no step takes the batch
        batch = ScheduledBatch(
            iteration=self._iteration,
            setups=tuple(setups),
            new_blocks=tuple(new_blocks),
            context_chunks=tuple(chunks),
            generation_slots=slots,
            block_copies=tuple(copies),
            beam_moves=tuple(moves),
            num_beams=plain[0].num_rows if moves else 1,
            draft_runs=runs,
            verified=take_verified(self._open_slots, plain),
            dropped_answers=answers.drop() if answers is not None and has_work else (),
            answers=() if answers is None else answers.assign(context_requests),
            encoder_runs=() if answers is None else answers.start(self._iteration, encoding),
            restored=tuple(restored),
            saved=tuple(saved),
        )
        self._open_slots.update(run.slot for run in batch.runs if run.drafts)
        if not batch.is_empty:
            is_all_generations = self._all_generations(generation_requests) is not None
            generation = generation_requests if is_all_generations else list(generation_requests)
            self._planned[batch.iteration] = (list(context_requests), generation)
            if self.active is not None:
                self.active.tick(is_all_generations)
        return batch

    def update(
        self,
        batch: ScheduledBatch,
        tokens: Sequence[int],
        candidates: Candidates = NO_CANDIDATES,
    ) -> list[LlmRequest]:
        """Apply the engine's tokens; return the requests that got one, in that order.

        ``candidates`` of the rows of a search come in place of their tokens. Some requests may be
        finished now; the caller releases them. Raises `ValueError`, and changes nothing, when the
        number of tokens is not the one `ScheduledBatch` promises.
        """
        if batch.is_empty:
            return []
        check_num_tokens(batch, tokens)
        self._finish_encoders(batch)
        context_requests, generation_requests = self._planned[batch.iteration]
        token_iterator = iter(tokens)
        # Before contexts join: the same list means that no request has left since the plan.
        all_generations = None if batch.beam_moves else self._all_generations(generation_requests)
        if all_generations is not None:
            all_generations.add_tokens(tokens[len(tokens) - len(generation_requests) :])
        advanced: list[LlmRequest] = []
        requests = [*context_requests, *islice(generation_requests, len(batch.draft_runs))]
        for request, run in zip(requests, batch.runs, strict=True):
            drawn = tuple(islice(token_iterator, run.num_drawn))
            if request.seq_slot != run.slot or request.is_finished:
                continue
            num_added = 0
            if request.is_context_init_state:
                request.move_to_next_context_chunk()
                num_added = self._begin_answer(request, drawn, candidates)
            if drawn:
                _drop_drafts(request)
                add_verified_tokens(request, run.drafts, drawn, num_added)
                advanced.append(request)
        if all_generations is not None:
            advanced += generation_requests
        else:
            rows = zip(batch.generation_slots, token_iterator, strict=True)
            first_rows = islice(rows, 0, None, batch.num_beams)
            plain = islice(generation_requests, len(batch.draft_runs), None)
            for request, (slot, token) in zip(plain, first_rows, strict=True):
                if request.seq_slot == slot and not request.is_finished:
                    self._advance(request, token, candidates)
                    advanced.append(request)
        del self._planned[batch.iteration]  # last: what is applied in part can be discarded
        return advanced

    def assume_step(self, batch: ScheduledBatch) -> None:
        """Move the requests of a step that has been started on, before its tokens are known.

        Prompts enter the cache now: requests that share them run later.
        """
        if batch.is_empty:
            return
        assert batch.num_drafts == 0, "the number of tokens of a step with drafts is not known yet"
        context_requests, generation_requests = self._planned[batch.iteration]
        all_generations = self._all_generations(generation_requests)
        self._finish_encoders(batch)
        self._assumed[batch.iteration] = None  # first: what is applied in part can be discarded
        if all_generations is not None:
            self._assumed[batch.iteration] = all_generations.expect_tokens()
        for request in generation_requests if all_generations is None else ():
            _drop_drafts(request)
            request.expect_token()
        for request, chunk in zip(context_requests, batch.context_chunks, strict=True):
            request.move_to_next_context_chunk()
            if chunk.is_last:
                _drop_drafts(request)
                request.expect_token()
                self.block_manager.end_context(request)

    def apply_tokens(
        self,
        batch: ScheduledBatch,
        tokens: Sequence[int],
        candidates: Candidates = NO_CANDIDATES,
    ) -> list[LlmRequest]:
        """As `update`, for assumed batches, in the order in which they were planned."""
        if batch.is_empty:
            return []
        check_num_tokens(batch, tokens)
        self.has_forgotten = False
        step = self._assumed[batch.iteration]
        self._assumed[batch.iteration] = None  # what is applied in part can be discarded
        if self.must_apply_first(batch) or min(tokens, default=0) < 0:
            if step is not None:
                step.dissolve()
            owners = self.token_owners(batch)
            self.has_forgotten = has_failed_unseen(owners, tokens)
            if self.has_forgotten:
                self.block_manager.forget_all()
            updated = apply_each(owners, tokens, candidates, self.block_manager)
        elif step is None:
            updated = apply_tokens_to(self.token_owners(batch), tokens)
        else:
            first = self._drawing(batch)
            updated = apply_tokens_to(first, tokens[: len(first)])
            step.apply(tokens[len(first) :], updated)
        del self._planned[batch.iteration]  # last, as in `update`
        del self._assumed[batch.iteration]
        return updated

    def token_owners(self, batch: ScheduledBatch) -> list[LlmRequest]:
        """Whose tokens the engine returns for a batch that is not applied, in their order."""
        _, generation_requests = self._planned[batch.iteration]
        plain = islice(generation_requests, len(batch.draft_runs), None)
        rows = (request for request in plain for _ in range(batch.num_beams))
        return [*self._drawing(batch), *(plain if batch.num_beams == 1 else rows)]

    def must_apply_first(self, batch: ScheduledBatch) -> bool:
        """True when nothing can be planned before the tokens of ``batch``, which runs, are known:
        the host decides in which row a beam continues, and with which token."""
        return bool(batch.beam_moves) or any(
            request.beams is not None for request in self._planned[batch.iteration][0]
        )

    def resume(self, requests: Sequence[LlmRequest]) -> ScheduledBatch:
        """A step that runs already, of which ``requests`` expect the tokens, in this order."""
        batch = ScheduledBatch(
            iteration=self._iteration,
            generation_slots=slots_of(requests),
            num_beams=requests[0].num_rows if requests else 1,
        )
        self._planned[batch.iteration] = ([], list(requests))
        self._assumed[batch.iteration] = None
        return batch

    def discard(self, batch: ScheduledBatch) -> list[LlmRequest]:
        """Forget a batch whose step failed; return its requests, for the caller to end each.

        Their blocks are free: what the step has written is unknown, so nothing is kept. If it
        was advanced, others may have found some of that in the cache, which is emptied, and all
        batches that were advanced must be discarded with it.
        """
        context_requests, generation_requests = self._planned.pop(batch.iteration, ([], []))
        if batch.iteration in self._assumed:
            step = self._assumed.pop(batch.iteration)
            if step is not None:
                step.dissolve()
            self.block_manager.forget_all()
        encoding = () if self.answers is None else self.answers.discard(batch)
        requests = [*encoding, *context_requests, *generation_requests]
        if self.block_manager.snapshots is not None:
            self.block_manager.snapshots.forget_all()
        for request in requests:
            self.block_manager.free(request.request_id)
            request.drop_pending_tokens()
        return requests

    def release(self, request: LlmRequest) -> None:
        """Give back the request's blocks and slot; harmless when it holds none."""
        request.drop_pending_tokens()
        self.block_manager.release(request)
        if self.answers is not None:
            self.answers.release(request)
        if request.seq_slot is not None:
            self.slots.free(request.seq_slot)
            self._open_slots.discard(request.seq_slot)
            request.seq_slot = None

    def _finish_encoders(self, batch: ScheduledBatch) -> None:
        if self.answers is not None:
            self.answers.finish(batch.iteration)

    def _drawing(self, batch: ScheduledBatch) -> list[LlmRequest]:
        """The first of `token_owners`: contexts at their last chunk, and runs with drafts."""
        context_requests, generation_requests = self._planned[batch.iteration]
        runs = zip(chain(context_requests, generation_requests), batch.runs, strict=False)
        return [request for request, run in runs for _ in range(run.num_drawn)]

    @property
    def _may_have_drafts(self) -> bool:
        return self.active is None or self.active.num_with_drafts > 0

    def _all_generations(self, requests: Sequence[LlmRequest]) -> ActiveRequests | None:
        """The active requests, if ``requests`` is the list of all of them that generate, as it is
        now, and none has drafts."""
        if self._may_have_drafts or self.active is None:
            return None
        return self.active if requests is self.active.generation else None

    def _start(
        self,
        request: LlmRequest,
        new_blocks: list[BlockAssignment],
        sources: dict[int, PrefixMatch],
        restored: list[SlotSnapshot],
    ) -> list[SlotSetup]:
        """Give a fresh context its slot and what is cached of its prompt; a setup for each row."""
        slot = request.seq_slot = self.slots.assign()
        match = self.block_manager.attach_prefix(request)
        request.num_reused_blocks = match.num_entries
        request.num_reused_tokens = match.num_tokens
        if match.num_tokens > 0:
            request.skip_context(match.num_tokens)
        if match.copy_source is not None or match.window_sources:
            sources[request.request_id] = match
        if match.snapshot is not None:
            restored.append(SlotSnapshot(slot, match.snapshot))
        new_blocks.extend(
            BlockAssignment(slot, index, block_id) for index, block_id in enumerate(match.block_ids)
        )
        setup = SlotSetup(
            slot=slot,
            request_id=request.request_id,
            sampling=request.sampling,
            end_id=request.end_id,
            min_end_position=request.orig_prompt_len + request.sampling.min_length,
            prompt_len=request.orig_prompt_len,
            tokens=tuple(request.tokens) if request.sampling.looks_back else (),
            outputs=request.outputs,
            num_candidates=request.num_candidates,
        )
        return set_up_rows(setup, request.num_rows)

    def _plan_context(
        self,
        request: LlmRequest,
        new_blocks: list[BlockAssignment],
        sources: dict[int, PrefixMatch],
        copies: list[BlockCopy],
    ) -> ContextChunk:
        slot = request.seq_slot
        assert slot is not None
        first_own = len(new_blocks)
        if request.is_last_context_chunk and request.num_chunk_drafts < request.num_draft_tokens:
            request.set_draft_tokens(request.draft_tokens[: request.num_chunk_drafts])
        num_tokens = self.block_manager.num_tokens_after_step(request)
        grow(request, slot, num_tokens, new_blocks, self.block_manager)
        if request.beams is not None and first_own < len(new_blocks):
            new_blocks += open_beams(request, slot, self.block_manager)
        if request.request_id in sources:
            match = sources[request.request_id]
            if match.copy_source is not None:
                copies.append(BlockCopy(match.copy_source, new_blocks[first_own].block_id))
            if match.window_sources:
                copies += _window_copies(match, new_blocks[first_own:])
        start = request.context_current_position
        return ContextChunk(
            slot=slot,
            start=start,
            tokens=tuple(request.tokens[start : start + request.context_chunk_size]),
            is_last=request.is_last_context_chunk,
            drafts=fitting_drafts(request) if request.is_last_context_chunk else (),
            snapshots=tuple(
                self.block_manager.snapshots_of_chunk(request, request.context_chunk_size)
            ),
        )

    def _begin_answer(
        self, request: LlmRequest, drawn: Sequence[int], candidates: Candidates
    ) -> int:
        """Append the first token after a context, whose blocks are kept then; how many it was."""
        if not drawn:
            return 0
        if request.beams is None:
            request.add_new_token(drawn[0])
        else:
            search(request, candidates, self.block_manager)
        self.block_manager.end_context(request)
        return 1

    def _plan_drafts(
        self, requests: Sequence[LlmRequest], new_blocks: list[BlockAssignment]
    ) -> tuple[Sequence[LlmRequest], tuple[ContextChunk, ...]]:
        """``requests``, first those that run with drafts, and these runs."""
        drafting = [request for request in requests if fitting_drafts(request)]
        if not drafting:
            return requests, ()
        runs = []
        for request in drafting:
            slot = request.seq_slot
            assert slot is not None
            manager = self.block_manager
            grow(request, slot, manager.num_tokens_after_step(request), new_blocks, manager)
            last = (request.tokens[-1],)
            start = request.num_cached_tokens
            runs.append(ContextChunk(slot, start, last, True, fitting_drafts(request)))
        slots = {run.slot for run in runs}
        return [*drafting, *(r for r in requests if r.seq_slot not in slots)], tuple(runs)

    def _plan_generation(
        self,
        requests: Sequence[LlmRequest],
        new_blocks: list[BlockAssignment],
        saved: list[SlotSnapshot],
    ) -> tuple[int, ...]:
        """Slots of ``requests``; those that open blocks get them, and have their states saved."""
        manager, all_generations = self.block_manager, self._all_generations(requests)
        if all_generations is not None:
            due: Sequence[LlmRequest] = all_generations.due_requests()
            if manager.window_groups:  # what one gives back, the next one may take: as in a replay
                due = sorted(due, key=attrgetter("rank"))
            if requests is not self._generation:
                self._generation = requests
                self._generation_slots = rows_of(requests, all_generations.generation_slots)
            slots = self._generation_slots
        else:
            num_places_left = manager.num_places_left
            due = [r for r in requests if num_places_left(r) == 0 or r.draft_tokens]
            slots = slots_of(requests)
        if manager.snapshots is not None:
            # In an order that a replay knows, since there may be room for some only.
            for request in sorted(due, key=attrgetter("request_id")):
                snapshot = manager.snapshot_of_generation(request)
                if snapshot is not None:
                    assert request.seq_slot is not None
                    saved.append(SlotSnapshot(request.seq_slot, snapshot))
        if all_generations is not None and not manager.window_groups and not _search(due):
            new_blocks += self._open_blocks(due)
            return slots
        for request in due:
            slot = request.seq_slot
            assert slot is not None
            if request.beams is not None:
                new_blocks += append_beam_blocks(request, slot, manager)
            else:
                grow(request, slot, manager.num_tokens_after_step(request), new_blocks, manager)
        return slots

    def _open_blocks(self, due: Sequence[LlmRequest]) -> list[BlockAssignment]:
        """A block for each of ``due``, which have neither beams nor drafts."""
        manager = self.block_manager
        appended = manager.append_blocks([request.request_id for request in due])
        assert appended is not None, no_room(due[0], due[0].num_tokens, manager)
        slots = slots_of(due)
        return [BlockAssignment(slot, *entry) for slot, entry in zip(slots, appended, strict=True)]

    def _advance(self, request: LlmRequest, token: int, candidates: Candidates) -> None:
        """The step has run: append ``token`` to the text, or follow the search."""
        if request.beams is not None:
            search(request, candidates, self.block_manager)
            return
        _drop_drafts(request)
        request.add_new_token(token)


def _search(requests: Sequence[LlmRequest]) -> bool:
    """True if these search with beams: either all requests of a step do, or none."""
    return bool(requests) and requests[0].beams is not None


def _window_copies(match: PrefixMatch, new_blocks: Sequence[BlockAssignment]) -> list[BlockCopy]:
    """What is cached in groups with a window, into the first blocks of the context there."""
    own = {(new.group, new.index): new.block_id for new in new_blocks}
    return [
        BlockCopy(source, own[group, index])
        for group, first, sources in match.window_sources
        for index, source in enumerate(sources, start=first)
    ]


def _drop_drafts(request: LlmRequest) -> None:
    """The step has verified them."""
    if request.draft_tokens:
        request.set_draft_tokens(())
