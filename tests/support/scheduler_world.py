"""A small world around the scheduler: the loop of a manager, with every invariant checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from support.fake_engine import VOCAB_SIZE, FakeEngine

from inflight_scheduler import (
    DEFAULT_PRIORITY_SPAN,
    ActiveRequests,
    BatchPlanner,
    BeamParams,
    BeamSearch,
    BlockManager,
    CrossBlocks,
    FinishReason,
    GuaranteedNoEvictScheduler,
    LlmRequest,
    LlmRequestState,
    MaxUtilizationScheduler,
    Resource,
    SamplingParams,
    ScheduledBatch,
    SimpleScheduler,
    StaticBatchScheduler,
    check_decision,
)
from inflight_scheduler.policies.resources import Budgets


def make_request(
    request_id: int,
    num_prompt: int = 1,
    max_new: int = 8,
    *,
    end_id: int = -1,
    min_length: int = 0,
    beam_width: int = 1,
    priority: float = 0.5,
    family: int | None = None,
    cache_salt: bytes = b"",
    lora_task_id: int | None = None,
    encoder_length: int = 0,
    num_drafts: int = 0,
    search: BeamParams | None = None,
) -> LlmRequest:
    """A request whose prompt depends on its id; those of one ``family`` begin alike.

    Without ``search`` its beams are counted and not carried out.
    """
    first = request_id if family is None else family
    prompt = [(7 * first + 3 * i) % VOCAB_SIZE for i in range(num_prompt)]
    return LlmRequest(
        request_id,
        prompt,
        max_new,
        end_id=end_id,
        beam_width=beam_width,
        beams=None if search is None else BeamSearch(search, max_new, end_id),
        priority=priority,
        cache_salt=cache_salt,
        sampling=SamplingParams(min_length=min_length),
        lora_task_id=lora_task_id,
        encoder_length=encoder_length,
        draft_tokens=(0,) * num_drafts,
    )


def generating(request: LlmRequest, manager: BlockManager, num_generated: int = 1) -> LlmRequest:
    """``request`` as it is after its context and ``num_generated - 1`` generation steps."""
    request.move_to_next_context_chunk()
    for _ in range(num_generated):
        request.add_new_token(1)
    assert manager.allocate(request.request_id, request.num_cached_tokens) is not None
    return request


Make = Callable[[BlockManager], LlmRequest]
"""How a row of a table describes a request; the blocks it holds are taken from the manager."""


def fresh(request_id: int, num_prompt: int = 1, max_new: int = 8) -> Make:
    """A context that has not started."""
    return lambda _: make_request(request_id, num_prompt, max_new)


def running(request_id: int, num_prompt: int = 1, max_new: int = 8) -> Make:
    """A request with one generated token."""
    return lambda manager: generating(make_request(request_id, num_prompt, max_new), manager)


def started(request_id: int, num_prompt: int, max_new: int = 8) -> Make:
    """A context past its first chunk of one token; it holds the blocks of its whole prompt."""

    def make(manager: BlockManager) -> LlmRequest:
        request = make_request(request_id, num_prompt, max_new)
        request.context_chunk_size = 1
        request.move_to_next_context_chunk()
        assert manager.allocate(request_id, num_prompt) is not None
        return request

    return make


def ids(*groups: Sequence[LlmRequest]) -> tuple[list[int], ...]:
    """The ids of each list, so that a test reads as one line."""
    return tuple([request.request_id for request in group] for group in groups)


Decision = tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]


class World:
    """The loop of a manager without its callbacks; a step checks every invariant."""

    def __init__(
        self,
        scheduler: SimpleScheduler,
        manager: BlockManager,
        num_slots: int,
        priority_span: float = DEFAULT_PRIORITY_SPAN,
        resources: Sequence[Resource] = (),
        max_drafts: int = 0,
        max_beams: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.manager = manager
        self.active = ActiveRequests(manager, priority_span)
        self.planner = BatchPlanner(manager, num_slots, self.active, max_beams)
        self.engine = FakeEngine(
            manager.num_blocks,
            manager.tokens_per_block,
            manager.windows,
            None if manager.snapshots is None else manager.snapshots.num_snapshots,
        )
        self.resources = resources
        self.cross = [r.block_manager for r in resources if isinstance(r, CrossBlocks)]
        self.max_drafts = max_drafts
        self.finished: list[LlmRequest] = []
        self.num_pauses = 0
        self.num_running = 0  # in the last plan, encoders included
        self.num_right_guesses = 0

    def arrive(self, request: LlmRequest) -> None:
        """It gets its place."""
        self.active.add(request)

    def decide(self) -> Decision:
        """The decision by what changed, which is the one by the rules; deciding changes nothing."""
        by_rules = self.scheduler.schedule_request(list(self.active), frozenset())
        chunks_by_rules = self._chunks(by_rules)
        decision = self.scheduler.schedule_request(self.active, frozenset())
        assert ids(*decision) == ids(*by_rules)
        assert self._chunks(decision) == chunks_by_rules
        self._check_policy(decision)
        return decision

    def check(self, decision: Decision) -> Decision:
        """The guard, with the limits of this world."""
        micro_batch = self.scheduler.micro_batch_scheduler
        return check_decision(
            decision,
            self.active,
            block_manager=self.manager,
            num_free_slots=self.planner.num_free_slots,
            max_batch_size=micro_batch.max_batch_size,
            max_num_tokens=micro_batch.max_num_tokens,
            may_chunk=micro_batch.chunking is not None,
            resources=self.resources,
        )

    def plan(self, decision: Decision) -> ScheduledBatch:
        """Carry out; nobody takes more of anything than was estimated."""
        encoders = [request for request in decision[0] if request.is_encoder_init_state]
        context = [request for request in decision[0] if not request.is_encoder_init_state]
        _, generation, paused = decision
        self.num_running = len(decision[0]) + len(generation)
        lists = (context, generation, paused)
        left = self._expect([*encoders, *context, *generation], paused)
        assert ids(*self.check(lists)) == ids(*lists)
        batch = self.planner.plan(*lists)
        self._take(*lists)
        for (name, num_left), num_free in zip(left, self._num_free(), strict=True):
            assert 0 <= num_left <= num_free, f"more {name} were taken than was estimated"
        for request in encoders:
            request.finish_encoder()
        self.num_pauses += len(paused)
        limit = self.scheduler.micro_batch_scheduler.max_num_tokens
        assert limit is None or batch.num_tokens <= limit
        self._check_snapshots(batch, context)
        return batch

    def step(self, decision: Decision | None = None) -> ScheduledBatch:
        """Decide (unless decided), execute, update, release."""
        batch = self.plan(self.decide() if decision is None else decision)
        self.complete(batch)
        return batch

    def complete(self, batch: ScheduledBatch) -> None:
        """Execute, update and release."""
        tokens = self.engine.execute(batch)
        advanced = self.planner.update(batch, tokens, self.engine.candidates)
        for request in advanced:
            assert not request.draft_tokens, "they are verified"
            if request.is_finished:
                self.num_right_guesses += request.num_accepted_drafts
                self.end(request)
        self.check_invariants()

    def stop(self, request: LlmRequest) -> None:
        """What a stop signal does."""
        request.finish(FinishReason.CANCELLED)
        self.end(request)

    def end(self, request: LlmRequest) -> None:
        """Release, and take from the active list."""
        self.planner.release(request)
        self._give_back(request)
        self.active.remove(request)
        self.finished.append(request)

    def drain(self) -> None:
        """All requests finish, each in as many steps as all texts together have tokens."""
        patience = sum(request.num_tokens + request.num_remaining_tokens for request in self.active)
        num_steps_left = (patience + 1) * len(self.active)
        while self.active and num_steps_left:
            self.step()
            assert self.num_running > 0, "active requests and nothing runs"
            num_steps_left -= 1
        assert not self.active
        for manager in (self.manager, *self.cross):
            assert manager.num_used_blocks == 0
        assert self.planner.num_free_slots == self.planner.slots.num_slots
        self.check_invariants()

    def check_invariants(self) -> None:
        """The list of the design document."""
        self.manager.check_integrity()
        self.active.check_integrity()
        owned = [request.seq_slot for request in self.active if request.seq_slot is not None]
        self.planner.slots.check_integrity(owned)
        num_held = num_used = 0
        for request in self.active:
            num_blocks = self.manager.num_blocks_of(request.request_id)
            num_held += num_blocks if self.manager.windows[0] is None else 0
            num_held += self.manager.num_window_blocks_of(request.request_id)
            num_distinct = self.manager.num_distinct_blocks_of(request.request_id)
            num_used += num_distinct
            assert (num_blocks > 0) == (request.seq_slot is not None)
            assert num_distinct <= self.manager.get_blocks_at_completion(request)
            if num_blocks:
                self._check_room(request, num_blocks)
        self._check_further()
        assert num_held == self.manager.num_held_blocks, "blocks of nobody active"
        if not self.manager.enable_reuse:
            assert num_used == self.manager.num_used_blocks
        for request in self.finished:
            assert request.seq_slot is None

    def _check_room(self, request: LlmRequest, num_blocks: int) -> None:
        size, num_tokens = self.manager.tokens_per_block, request.num_cached_tokens
        if self.manager.windows[0] is None:
            num_tokens = max(num_tokens, request.prompt_len)
            assert (num_blocks - 1) * size < num_tokens + self.max_drafts
        assert num_tokens <= num_blocks * size
        for group in self.manager.window_groups:
            first, held = group.held(request.request_id)
            assert num_tokens <= request.prompt_len or num_tokens <= (first + len(held)) * size
            assert first <= group.first_seen(num_tokens)
            if request.is_generation_in_progress_state:
                assert len(held) <= group.span(1 + self.max_drafts), "more than the window"

    def _check_further(self) -> None:
        for manager in self.cross:
            manager.check_integrity()
            holders = [r for r in self.active if manager.num_blocks_of(r.request_id) > 0]
            assert len(holders) == manager.num_holders, "blocks of nobody active"
            assert all(request.seq_slot is not None for request in holders)

    def _expect(
        self, scheduled: Sequence[LlmRequest], paused: Sequence[LlmRequest]
    ) -> list[tuple[str, int]]:
        """What is left of everything after this decision, at least."""
        budgets = Budgets(self.manager, self.resources, to_completion=False)
        for request in paused:
            budgets.release(request)
        for request in scheduled:
            budgets.claim(request)
        return budgets.left()

    def _chunks(self, decision: Decision) -> list[tuple[int, int]]:
        return [(request.context_chunk_size, request.num_chunk_drafts) for request in decision[0]]

    def _num_free(self) -> list[int]:
        """Of each resource, blocks first; adapters do not stay between decisions."""
        free = [self.manager.num_free_blocks]
        for resource in self.resources:
            if isinstance(resource, CrossBlocks):
                free.append(resource.block_manager.num_free_blocks)
            else:
                free.append(resource.num_total)
        return free

    def _check_snapshots(self, batch: ScheduledBatch, context: Sequence[LlmRequest]) -> None:
        """Each gets one state; contexts of the same text may share one."""
        texts: dict[int, tuple[bytes, int | None, list[int]]] = {}
        for request, chunk in zip(context, batch.context_chunks, strict=True):
            for end, snapshot in chunk.snapshots:
                text = request.cache_salt, request.lora_task_id, request.tokens[:end]
                assert texts.setdefault(snapshot, text) == text, "two texts in one snapshot"
        written = set(texts)
        for each in batch.saved:
            assert each.snapshot not in written, "two states are written to one snapshot"
            written.add(each.snapshot)

    def _take(
        self,
        context: Sequence[LlmRequest],
        generation: Sequence[LlmRequest],
        paused: Sequence[LlmRequest],
    ) -> None:
        """What the planner does with the KV blocks, with all other pools."""
        for request in paused:
            self._give_back(request)
        for request in context:
            for manager in self.cross:
                assert manager.allocate(request.request_id, request.encoder_length) is not None

    def _give_back(self, request: LlmRequest) -> None:
        for manager in self.cross:
            manager.free(request.request_id)

    def _check_policy(self, decision: Decision) -> None:
        capacity = self.scheduler.capacity_scheduler
        fitting, paused = capacity.schedule_request(self.active)
        assert len(fitting) <= capacity.max_num_requests
        assert {id(request) for request in decision[0] + decision[1]} <= set(map(id, fitting))
        if isinstance(capacity, (GuaranteedNoEvictScheduler, StaticBatchScheduler)):
            assert not paused
            budgets = Budgets(self.manager, self.resources, to_completion=True)
            for request in fitting:
                budgets.claim(request)
            assert all(num_left >= 0 for _, num_left in budgets.left())
        if isinstance(capacity, MaxUtilizationScheduler):
            place = {id(request): index for index, request in enumerate(self.active)}
            last_fitting = max((place[id(request)] for request in fitting), default=-1)
            assert all(place[id(request)] > last_fitting for request in paused)
            started = [r for r in self.active if r.state > LlmRequestState.CONTEXT_INIT]
            assert set(map(id, started)) <= set(map(id, fitting + paused))
