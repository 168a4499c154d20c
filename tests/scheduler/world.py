"""A small world around the scheduler: a fake engine that really reads its paged memory.

The model is a function of the whole text, which the engine can only know through the block tables
it was given: a block given twice, freed too early or forgotten changes the tokens.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight_scheduler import (
    BatchPlanner,
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
) -> LlmRequest:
    """A request whose prompt depends on its id."""
    prompt = [(7 * request_id + 3 * i) % VOCAB_SIZE for i in range(num_prompt)]
    return LlmRequest(
        request_id,
        prompt,
        max_new,
        end_id=end_id,
        beam_width=beam_width,
        priority=priority,
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
    """Executes batches with nothing but what they say."""

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.memory = [EMPTY] * (num_blocks * tokens_per_block)
        self.slots: dict[int, SlotState] = {}

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """One token per last context chunk, then one per generation slot."""
        for setup in batch.setups:
            self.slots[setup.slot] = SlotState(setup)
        for new in batch.new_blocks:
            assert new.index == len(self.slots[new.slot].table), "a hole in a block table"
            self.slots[new.slot].table.append(new.block_id)
        drawn = []
        for chunk in batch.context_chunks:
            state = self.slots[chunk.slot]
            assert chunk.start == state.num_cached
            self._write(state, chunk.tokens)
            if chunk.is_last:
                drawn.append(self._draw(state))
        for slot in batch.generation_slots:
            self._write(self.slots[slot], (self.slots[slot].last_token,))
            drawn.append(self._draw(self.slots[slot]))
        return drawn

    def _cell(self, state: SlotState, position: int) -> int:
        index, offset = divmod(position, self.tokens_per_block)
        return state.table[index] * self.tokens_per_block + offset

    def _write(self, state: SlotState, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.memory[self._cell(state, state.num_cached)] = token
            state.num_cached += 1

    def _draw(self, state: SlotState) -> int:
        text = [self.memory[self._cell(state, i)] for i in range(state.num_cached)]
        state.last_token = draw(text, state.setup.end_id, state.setup.min_end_position)
        return state.last_token


Decision = tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]


class World:
    """The loop of a manager without its callbacks; every step checks every invariant."""

    def __init__(self, scheduler: SimpleScheduler, manager: BlockManager, num_slots: int) -> None:
        self.scheduler = scheduler
        self.manager = manager
        self.planner = BatchPlanner(manager, num_slots)
        self.engine = FakeEngine(manager.num_blocks, manager.tokens_per_block)
        self.active: list[LlmRequest] = []
        self.finished: list[LlmRequest] = []
        self.num_pauses = 0

    def arrive(self, request: LlmRequest) -> None:
        """Descending priority, stable."""
        bisect.insort(self.active, request, key=lambda other: -other.priority)

    def decide(self) -> Decision:
        """The scheduler's decision; deciding twice gives the same and changes nothing."""
        decision = self.scheduler.schedule_request(self.active, frozenset())
        assert ids(*decision) == ids(*self.scheduler.schedule_request(self.active, frozenset()))
        self._check_policy(decision)
        return decision

    def check(self, decision: Decision) -> Decision:
        """The guard, with the limits of this world."""
        return check_decision(
            decision,
            self.active,
            block_manager=self.manager,
            num_free_slots=self.planner.num_free_slots,
            max_batch_size=self.scheduler.micro_batch_scheduler.max_batch_size,
            max_num_tokens=self.scheduler.micro_batch_scheduler.max_num_tokens,
        )

    def plan(self, decision: Decision) -> ScheduledBatch:
        """Carry out; no request takes more blocks than was estimated for it."""
        context, generation, paused = self.check(decision)
        estimates = {
            request.request_id: self.manager.get_needed_blocks_one_step(request)
            + self.manager.num_blocks_of(request.request_id)
            for request in [*context, *generation]
        }
        batch = self.planner.plan(context, generation, paused)
        self.num_pauses += len(paused)
        for request_id, estimate in estimates.items():
            assert self.manager.num_blocks_of(request_id) <= estimate
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
        """Every iteration must bring somebody forward, so the bound is exact."""
        for _ in range(sum(request.num_remaining_tokens for request in self.active)):
            if not self.active:
                break
            assert not self.step().is_empty, "active requests and nothing runs"
        assert not self.active
        assert self.manager.num_used_blocks == 0
        assert self.planner.num_free_slots == self.planner.slots.num_slots

    def check_invariants(self) -> None:
        """The list of the design document."""
        self.manager.check_integrity()
        owned = [request.seq_slot for request in self.active if request.seq_slot is not None]
        self.planner.slots.check_integrity(owned)
        num_held = 0
        for request in self.active:
            num_blocks = self.manager.num_blocks_of(request.request_id)
            num_held += num_blocks
            assert (num_blocks > 0) == (request.seq_slot is not None)
            assert num_blocks <= self.manager.get_blocks_at_completion(request)
            if num_blocks:
                room = num_blocks * self.manager.tokens_per_block
                assert room - self.manager.tokens_per_block < request.num_cached_tokens <= room
        assert num_held == self.manager.num_used_blocks, "blocks of nobody active"
        for request in self.finished:
            assert request.seq_slot is None

    def _check_policy(self, decision: Decision) -> None:
        capacity = self.scheduler.capacity_scheduler
        fitting, paused = capacity.schedule_request(self.active)
        assert len(fitting) <= capacity.max_num_requests
        assert {id(request) for request in decision[0] + decision[1]} <= set(map(id, fitting))
        if isinstance(capacity, GuaranteedNoEvictScheduler):
            assert not paused
            remaining = map(self.manager.get_remaining_blocks_to_completion, fitting)
            assert sum(remaining) <= self.manager.num_free_blocks
        if isinstance(capacity, MaxUtilizationScheduler):
            place = {id(request): index for index, request in enumerate(self.active)}
            last_fitting = max((place[id(request)] for request in fitting), default=-1)
            assert all(place[id(request)] > last_fitting for request in paused)
            started = [r for r in self.active if r.state > LlmRequestState.CONTEXT_INIT]
            assert set(map(id, started)) <= set(map(id, fitting + paused))
