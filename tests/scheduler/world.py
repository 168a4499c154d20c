"""A small world around the scheduler: a fake engine that really reads its paged memory.

The model is a function of the whole text, which the engine can only know through the block tables
it was given: a block given twice, freed too early or forgotten changes the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight_scheduler import (
    DEFAULT_PRIORITY_SPAN,
    ActiveRequests,
    BatchPlanner,
    BlockForecast,
    BlockManager,
    FinishReason,
    GuaranteedNoEvictScheduler,
    LlmRequest,
    LlmRequestState,
    MaxUtilizationScheduler,
    SamplingParams,
    ScheduledBatch,
    SimpleScheduler,
    SlotSetup,
    StaticBatchScheduler,
    check_decision,
)

VOCAB_SIZE = 11
EMPTY = -1


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
) -> LlmRequest:
    """A request whose prompt depends on its id; those of one ``family`` begin alike."""
    first = request_id if family is None else family
    prompt = [(7 * first + 3 * i) % VOCAB_SIZE for i in range(num_prompt)]
    return LlmRequest(
        request_id,
        prompt,
        max_new,
        end_id=end_id,
        beam_width=beam_width,
        priority=priority,
        cache_salt=cache_salt,
        sampling=SamplingParams(min_length=min_length),
    )


def generating(request: LlmRequest, manager: BlockManager, num_generated: int = 1) -> LlmRequest:
    """``request`` as it is after its context and ``num_generated - 1`` generation steps."""
    request.move_to_next_context_chunk()
    for _ in range(num_generated):
        request.add_new_token(1)
    assert manager.allocate(request.request_id, request.num_cached_tokens) is not None
    return request


def ids(*groups: Sequence[LlmRequest]) -> tuple[list[int], ...]:
    """The ids of each list, so that a test reads as one line."""
    return tuple([request.request_id for request in group] for group in groups)


def draw(text: Sequence[int], end_id: int, min_end_position: int) -> int:
    """The model: a token that depends on every token of ``text`` and on their order."""
    state = 17
    for token in text:
        state = (state * 31 + token + 1) % 1_000_003
    token = state % VOCAB_SIZE
    if token == end_id and len(text) < min_end_position:
        return (token + 1) % VOCAB_SIZE
    return token


def tokens_alone(prompt: Sequence[int], max_new: int, end_id: int, min_length: int) -> list[int]:
    """What a request generates when nobody else is there."""
    text = list(prompt)
    while len(text) < len(prompt) + max_new:
        text.append(draw(text, end_id, len(prompt) + min_length))
        if text[-1] == end_id:
            break
    return text


@dataclass
class SlotState:
    """What the fake engine keeps for one slot."""

    setup: SlotSetup
    table: list[int] = field(default_factory=list)
    num_cached: int = 0
    last_token: int = EMPTY


class FakeEngine:
    """Executes batches with nothing but what they say.

    A cell holds a token and, as KV does, what came before it: a block that is reused behind
    another text than its own is found out.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.memory: list[tuple[int, int]] = [(EMPTY, EMPTY)] * (num_blocks * tokens_per_block)
        self.slots: dict[int, SlotState] = {}
        self.num_computed = 0

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """One token per last context chunk, then one per generation slot."""
        self._copy(batch)
        for setup in batch.setups:
            self.slots[setup.slot] = SlotState(setup)
        for new in batch.new_blocks:
            assert new.index == len(self.slots[new.slot].table), "a hole in a block table"
            self.slots[new.slot].table.append(new.block_id)
        drawn = []
        for chunk in batch.context_chunks:
            state = self.slots[chunk.slot]
            if state.num_cached == 0:
                state.num_cached = chunk.start  # the rest is in blocks that are reused
            assert chunk.start == state.num_cached
            self._write(state, chunk.tokens)
            if chunk.is_last:
                drawn.append(self._draw(state))
        for slot in batch.generation_slots:
            self._write(self.slots[slot], (self.slots[slot].last_token,))
            drawn.append(self._draw(self.slots[slot]))
        return drawn

    def _copy(self, batch: ScheduledBatch) -> None:
        size = self.tokens_per_block
        contents = [
            self.memory[c.source * size : (c.source + 1) * size] for c in batch.block_copies
        ]
        for copy, content in zip(batch.block_copies, contents, strict=True):
            self.memory[copy.destination * size : (copy.destination + 1) * size] = content

    def _cell(self, state: SlotState, position: int) -> int:
        index, offset = divmod(position, self.tokens_per_block)
        return state.table[index] * self.tokens_per_block + offset

    def _write(self, state: SlotState, tokens: Sequence[int]) -> None:
        position = state.num_cached
        before = self.memory[self._cell(state, position - 1)][1] if position else 0
        for token in tokens:
            before = hash((before, token))
            self.memory[self._cell(state, state.num_cached)] = (token, before)
            state.num_cached += 1
        self.num_computed += len(tokens)

    def _draw(self, state: SlotState) -> int:
        text = []
        before = 0
        for position in range(state.num_cached):
            token, content = self.memory[self._cell(state, position)]
            before = hash((before, token))
            assert content == before, f"position {position} holds KV of another text"
            text.append(token)
        state.last_token = draw(text, state.setup.end_id, state.setup.min_end_position)
        return state.last_token


Decision = tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]


class World:
    """The loop of a manager without its callbacks; every step checks every invariant."""

    def __init__(
        self,
        scheduler: SimpleScheduler,
        manager: BlockManager,
        num_slots: int,
        priority_span: float = DEFAULT_PRIORITY_SPAN,
    ) -> None:
        self.scheduler = scheduler
        self.manager = manager
        self.active = ActiveRequests(manager, priority_span)
        self.planner = BatchPlanner(manager, num_slots, self.active)
        self.engine = FakeEngine(manager.num_blocks, manager.tokens_per_block)
        self.finished: list[LlmRequest] = []
        self.num_pauses = 0

    def arrive(self, request: LlmRequest) -> None:
        """It gets its place."""
        self.active.add(request)

    def decide(self) -> Decision:
        """The decision by what changed, which is the one by the rules; deciding changes nothing."""
        by_rules = self.scheduler.schedule_request(list(self.active), frozenset())
        chunks_by_rules = [request.context_chunk_size for request in by_rules[0]]
        decision = self.scheduler.schedule_request(self.active, frozenset())
        assert ids(*decision) == ids(*by_rules)
        assert [request.context_chunk_size for request in decision[0]] == chunks_by_rules
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
        )

    def plan(self, decision: Decision) -> ScheduledBatch:
        """Carry out; nobody takes more blocks than was estimated."""
        assert ids(*self.check(decision)) == ids(*decision)
        context, generation, paused = decision
        forecast = BlockForecast(self.manager)
        for request in paused:
            forecast.release(request)
        for request in [*context, *generation]:
            forecast.claim(request, forecast.needed_one_step(request))
        batch = self.planner.plan(context, generation, paused)
        assert self.manager.num_free_blocks >= forecast.num_available
        self.num_pauses += len(paused)
        limit = self.scheduler.micro_batch_scheduler.max_num_tokens
        assert limit is None or batch.num_tokens <= limit
        return batch

    def step(self, decision: Decision | None = None) -> ScheduledBatch:
        """Decide (unless decided), execute, update, release."""
        batch = self.plan(self.decide() if decision is None else decision)
        self.complete(batch)
        return batch

    def complete(self, batch: ScheduledBatch) -> None:
        """Execute, update and release."""
        for request in self.planner.update(batch, self.engine.execute(batch)):
            if request.is_finished:
                self.end(request)
        self.check_invariants()

    def stop(self, request: LlmRequest) -> None:
        """What a stop signal does."""
        request.finish(FinishReason.CANCELLED)
        self.end(request)

    def end(self, request: LlmRequest) -> None:
        """Release, and take from the active list."""
        self.planner.release(request)
        self.active.remove(request)
        self.finished.append(request)

    def drain(self) -> None:
        """Everybody finishes: a token comes at least once in as many steps as there are prompts."""
        patience = sum(request.num_tokens + request.num_remaining_tokens for request in self.active)
        num_steps_left = patience
        while self.active and num_steps_left:
            num_before = sum(request.num_tokens for request in self.active)
            num_before += sum(request.num_tokens for request in self.finished)
            assert not self.step().is_empty, "active requests and nothing runs"
            num_after = sum(request.num_tokens for request in [*self.active, *self.finished])
            num_steps_left = patience if num_after > num_before else num_steps_left - 1
        assert not self.active
        assert self.manager.num_used_blocks == 0
        assert self.planner.num_free_slots == self.planner.slots.num_slots

    def check_invariants(self) -> None:
        """The list of the design document."""
        self.manager.check_integrity()
        self.active.check_integrity()
        owned = [request.seq_slot for request in self.active if request.seq_slot is not None]
        self.planner.slots.check_integrity(owned)
        num_held = 0
        for request in self.active:
            num_blocks = self.manager.num_blocks_of(request.request_id)
            num_held += num_blocks
            assert (num_blocks > 0) == (request.seq_slot is not None)
            assert num_blocks <= self.manager.get_blocks_at_completion(request)
            if num_blocks:
                num_tokens = max(request.num_cached_tokens, request.prompt_len)
                room = num_blocks * self.manager.tokens_per_block
                assert room - self.manager.tokens_per_block < num_tokens <= room
        assert num_held == self.manager.num_held_blocks, "blocks of nobody active"
        if not self.manager.enable_reuse:
            assert num_held == self.manager.num_used_blocks
        for request in self.finished:
            assert request.seq_slot is None

    def _check_policy(self, decision: Decision) -> None:
        capacity = self.scheduler.capacity_scheduler
        fitting, paused = capacity.schedule_request(self.active)
        assert len(fitting) <= capacity.max_num_requests
        assert {id(request) for request in decision[0] + decision[1]} <= set(map(id, fitting))
        if isinstance(capacity, (GuaranteedNoEvictScheduler, StaticBatchScheduler)):
            assert not paused
            forecast = BlockForecast(self.manager)
            for request in fitting:
                forecast.claim(request, forecast.needed_to_completion(request))
            assert forecast.num_available >= 0
        if isinstance(capacity, MaxUtilizationScheduler):
            place = {id(request): index for index, request in enumerate(self.active)}
            last_fitting = max((place[id(request)] for request in fitting), default=-1)
            assert all(place[id(request)] > last_fitting for request in paused)
            started = [r for r in self.active if r.state > LlmRequestState.CONTEXT_INIT]
            assert set(map(id, started)) <= set(map(id, fitting + paused))
