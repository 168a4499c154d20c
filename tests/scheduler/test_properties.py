"""Anything may happen, in any order: every invariant after every step, and everybody finishes."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.fake_engine import VOCAB_SIZE, tokens_alone
from support.scheduler_extras import ADAPTERS, Extras, Spec, admit, guess
from support.scheduler_world import CHUNKINGS, Decision, World, ids, make_request

from inflight_scheduler import (
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    FinishReason,
    InvalidDecision,
    LlmRequest,
    make_scheduler,
    refusal_reason,
)

SPECS = st.builds(
    Spec,
    num_prompt=st.integers(1, 8),
    max_new=st.integers(1, 12),
    end_id=st.just(-1) | st.integers(0, VOCAB_SIZE - 1),
    min_length=st.integers(0, 4),
    priority=st.sampled_from([0.5, 0.5, 0.5, 0.1, 0.9]),
    family=st.integers(0, 3),
    cache_salt=st.sampled_from([b"", b"", b"tenant"]),
    beam_width=st.sampled_from([1, 1, 2, 3]),
    lora_task_id=st.none() | st.sampled_from(ADAPTERS),
    encoder_length=st.sampled_from([0, 1, 4]),
    num_drafts=st.integers(0, 3),
)
# Each seldom: what is usual takes the short way.
EXTRAS = st.builds(
    Extras,
    window_size=st.sampled_from([None, None, None, 2, 5, 8]),
    further_windows=st.sampled_from([(), (), (), (), (4,), (3, None)]),
    num_cross_blocks=st.sampled_from([None, None, 2, 5]),
    num_pages=st.sampled_from([None, None, 3, 6]),
    max_drafts=st.sampled_from([0, 0, 1, 4]),
    max_beams=st.sampled_from([1, 1, 3]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Scheduler, block manager, planner and a fake engine under one policy."""

    policy: ClassVar[CapacitySchedulerPolicy]

    @initialize(
        num_blocks=st.integers(2, 8),
        tokens_per_block=st.integers(1, 4),
        max_batch_size=st.integers(1, 5),
        num_spare_requests=st.integers(0, 3),
        max_num_tokens=st.none() | st.integers(4, 24),
        two_step_lookahead=st.booleans(),
        chunking=CHUNKINGS,
        enable_reuse=st.booleans(),
        may_copy_blocks=st.booleans(),
        priority_span=st.sampled_from([0, 2, 1000]),
        extras=EXTRAS,
    )
    def build(
        self,
        num_blocks: int,
        tokens_per_block: int,
        max_batch_size: int,
        num_spare_requests: int,
        max_num_tokens: int | None,
        two_step_lookahead: bool,
        chunking: ContextChunking | None,
        enable_reuse: bool,
        may_copy_blocks: bool,
        priority_span: float,
        extras: Extras,
    ) -> None:
        self.extras = extras = extras.possible(self.policy, enable_reuse)
        resources = extras.resources(num_blocks, tokens_per_block)
        manager = BlockManager(
            num_blocks,
            tokens_per_block,
            enable_reuse=enable_reuse,
            may_copy_blocks=may_copy_blocks,
            window_size=extras.window_size,
        )
        num_slots = max_batch_size + num_spare_requests
        scheduler = make_scheduler(
            self.policy,
            manager,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_num_requests=num_slots,
            chunking=chunking,
            two_step_lookahead=two_step_lookahead,
            resources=resources,
        )
        self.world = World(
            scheduler,
            manager,
            num_slots,
            priority_span,
            resources,
            extras.max_drafts,
            max_beams=extras.max_beams,
        )
        self.max_num_tokens = max_num_tokens
        self.may_chunk = chunking is not None
        self.alone: dict[int, list[int]] = {}

    @rule(specs=st.lists(SPECS, min_size=1, max_size=5))
    def arrive(self, specs: list[Spec]) -> None:
        """What is too large for this world is cut until it is admitted."""
        for wish in specs:
            request_id = len(self.alone)
            request, spec = admit(wish.within(self.extras), request_id, self.refusal_reason)
            self.alone[request_id] = spec.alone(self.extras.window_size, request.tokens)
            self.world.arrive(request)

    def refusal_reason(self, request: LlmRequest) -> str | None:
        return refusal_reason(
            request,
            block_manager=self.world.manager,
            max_num_tokens=self.max_num_tokens,
            may_pause=self.policy == CapacitySchedulerPolicy.MAX_UTILIZATION,
            may_chunk=self.may_chunk,
            resources=self.world.resources,
        )

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            has_work = len(self.world.active) > 0
            self.world.step()
            assert (self.world.num_running > 0) == has_work

    @precondition(lambda self: self.extras.max_drafts > 0)
    @rule(seed=st.integers(0, 2**16))
    def draft(self, seed: int) -> None:
        guess(self.world, random.Random(seed), self.alone)
        self.world.check_invariants()

    @precondition(lambda self: self.world.active)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.world.stop(data.draw(st.sampled_from(self.world.active)))
        self.world.check_invariants()

    @precondition(lambda self: self.world.active)
    @rule(data=st.data())
    def stop_while_the_batch_runs(self, data: st.DataObject) -> None:
        batch = self.world.plan(self.world.decide())
        self.world.stop(data.draw(st.sampled_from(self.world.active)))
        self.world.complete(batch)

    @rule()
    def fail(self) -> None:
        batch = self.world.plan(self.world.decide())
        for request in self.world.planner.discard(batch):
            request.finish(FinishReason.CANCELLED)
            self.world.end(request)
        self.world.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.drain()
        for request in self.world.finished:
            alone = self.alone[request.request_id]
            if request.finish_reason == FinishReason.CANCELLED:
                is_search = request.beams is not None  # whose best beam may still have changed
                assert is_search or request.tokens == alone[: request.num_tokens]
            else:
                assert request.tokens == alone
                is_cut = request.num_remaining_tokens == 0
                assert is_cut or request.finish_reason == FinishReason.END_ID


class GuaranteedNoEvictMachine(SchedulerMachine):
    policy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


class StaticBatchMachine(SchedulerMachine):
    policy = CapacitySchedulerPolicy.STATIC_BATCH


class MaxUtilizationMachine(SchedulerMachine):
    """Also hears now and then from a scheduler that decides at random."""

    policy = CapacitySchedulerPolicy.MAX_UTILIZATION

    @precondition(lambda self: self.world.active)
    @rule(seed=st.integers(0, 2**16))
    def foreign_scheduler(self, seed: int) -> None:
        """What the guard lets pass can be carried out; what it refuses changes nothing."""
        decision = random_decision(self.world, random.Random(seed))
        before = ids(self.world.active), self.world.manager.num_free_blocks
        if passes(self.world, decision):
            self.world.step(decision)
        else:
            assert before == (ids(self.world.active), self.world.manager.num_free_blocks)
            self.world.check_invariants()


def random_decision(world: World, dice: random.Random) -> Decision:
    """As much as the guard lets pass, in any order; or careless, and sometimes nonsense."""
    decision: Decision = ([], [], [])
    context, generation, paused = decision
    is_careful = dice.random() < 0.7
    for request in dice.sample(world.active, len(world.active)):
        right = context if request.is_context_init_state else generation
        chosen = dice.choice([right, right, paused, None])
        if chosen is not None:
            chosen.append(request)
            if is_careful and not passes(world, decision):
                chosen.pop()
    return decision


def passes(world: World, decision: Decision) -> bool:
    try:
        world.check(decision)
    except InvalidDecision:
        return False
    return True


SETTINGS = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestGuaranteedNoEvict = GuaranteedNoEvictMachine.TestCase
TestGuaranteedNoEvict.settings = SETTINGS
TestStaticBatch = StaticBatchMachine.TestCase
TestStaticBatch.settings = SETTINGS
TestMaxUtilization = MaxUtilizationMachine.TestCase
TestMaxUtilization.settings = SETTINGS


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy), ids=lambda policy: policy.name)
@pytest.mark.case(78)
def test_a_crowd_in_a_pool_of_a_quarter(policy: CapacitySchedulerPolicy) -> None:
    num_pauses = most_pauses = 0
    for seed in range(25):
        dice = random.Random(seed)
        manager = BlockManager(num_blocks=12, tokens_per_block=dice.choice([1, 2, 3]))
        scheduler = make_scheduler(
            policy,
            manager,
            max_batch_size=8,
            max_num_tokens=dice.choice([None, 16]),
            two_step_lookahead=dice.random() < 0.5,
        )
        world = World(scheduler, manager, num_slots=8)
        alone = {}
        for request_id in range(16):
            request = make_request(request_id, dice.randint(1, 5), dice.randint(3, 7))
            alone[request_id] = tokens_alone(request.tokens, request.max_new_tokens, -1, 0)
            world.arrive(request)
            if dice.random() < 0.3:
                world.step()
        world.drain()
        assert {request.request_id: request.tokens for request in world.finished} == alone
        num_pauses += world.num_pauses
        most_pauses = max(most_pauses, *(request.num_pauses for request in world.finished))
    if policy != CapacitySchedulerPolicy.MAX_UTILIZATION:
        assert num_pauses == 0
    else:
        assert num_pauses > 100, "this crowd must be a crowd"
        assert most_pauses > 1, "somebody is paused again and again"


@pytest.mark.slow
def test_a_crowd_with_long_prompts_that_begin_alike() -> None:
    """Victims hold what others count on, since whoever is urgent comes in between: what is free
    once they have gone must never be taken to be more than it is."""
    num_pauses = num_reused = 0
    for seed in range(60):
        dice = random.Random(seed)
        manager = BlockManager(
            dice.randint(10, 24), 1, enable_reuse=True, may_copy_blocks=dice.random() < 0.5
        )
        num_slots = dice.randint(3, 8)
        scheduler = make_scheduler(
            CapacitySchedulerPolicy.MAX_UTILIZATION, manager, max_batch_size=num_slots
        )
        world = World(scheduler, manager, num_slots)
        alone = {}
        for request_id in range(30):
            request = make_request(
                request_id,
                dice.randint(8, 16),
                dice.randint(1, 6),
                family=dice.randint(0, 1),
                priority=dice.choice([0.0, 0.5, 1.0]),
            )
            if manager.can_ever_fit(request):
                alone[request_id] = tokens_alone(request.tokens, request.max_new_tokens, -1, 0)
                world.arrive(request)
            for _ in range(dice.choice([0, 0, 0, dice.randint(1, 8)])):
                world.step()
        world.drain()
        assert {request.request_id: request.tokens for request in world.finished} == alone
        num_pauses += world.num_pauses
        num_reused += manager.reuse_stats.num_reused_blocks
    assert num_pauses > 100
    assert num_reused > 1000
