"""Anything may happen, in any order: every invariant after every step, and all requests finish."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_engine import tokens_alone
from support.scheduler_soak import Soak
from support.scheduler_world import World, make_request

from inflight_scheduler import BlockManager, CapacitySchedulerPolicy, LlmRequest, make_scheduler

POLICIES = pytest.mark.parametrize(
    "policy", list(CapacitySchedulerPolicy), ids=lambda policy: policy.name
)


@pytest.mark.fast(1)
@POLICIES
@settings(max_examples=100, deadline=None)
@given(dice=st.randoms(use_true_random=False))
def test_any_order_of_events(policy: CapacitySchedulerPolicy, dice: random.Random) -> None:
    """Decisions by what changed are those by the rules, and the answers those of a request alone.

    Steps run alone or overlap; requests have drafts, beams, adapters and encoders, are stopped at
    any moment, and lose their step; foreign schedulers decide in between.
    """
    Soak(dice, policy).run(25)


@pytest.mark.slow
@pytest.mark.case(85)
@POLICIES
def test_soak(policy: CapacitySchedulerPolicy) -> None:
    """Every invariant after every step; in the end ids, blocks and queues are at baseline."""
    soaks = [Soak(random.Random(seed), policy) for seed in range(75)]
    for soak in soaks:
        soak.run(120)
    worlds = [soak.world for soak in soaks]
    assert sum(soak.num_arrivals for soak in soaks) > 1500
    assert sum(world.num_right_guesses for world in worlds) > 100
    assert sum(world.num_alone for world in worlds) > 1000
    assert sum(world.num_overlapped for world in worlds) > 1000
    assert sum(world.num_discarded_tokens for world in worlds) > 30


def run_crowd(
    world: World, dice: random.Random, requests: Iterable[LlmRequest], max_gap: int
) -> None:
    """All requests, with up to ``max_gap`` steps after some arrivals, and their answers."""
    alone = {}
    for request in requests:
        if world.manager.can_ever_fit(request):
            alone[request.request_id] = tokens_alone(request.tokens, request.max_new_tokens, -1, 0)
            world.arrive(request)
        for _ in range(dice.choice([0, 0, 0, dice.randint(1, max_gap)])):
            world.step()
    world.drain()
    assert {request.request_id: request.tokens for request in world.finished} == alone


@pytest.mark.fast(1)
@POLICIES
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
        requests = [make_request(i, dice.randint(1, 5), dice.randint(3, 7)) for i in range(16)]
        run_crowd(world, dice, requests, max_gap=1)
        num_pauses += world.num_pauses
        most_pauses = max(most_pauses, *(request.num_pauses for request in world.finished))
    if policy != CapacitySchedulerPolicy.MAX_UTILIZATION:
        assert num_pauses == 0
    else:
        assert num_pauses > 100, "this crowd must be a crowd"
        assert most_pauses > 1, "some request is paused again and again"


@pytest.mark.slow
def test_a_crowd_with_long_prompts_that_begin_alike() -> None:
    """Victims hold blocks that others count on, since urgent requests come in between: what is
    free once they have gone must never be taken to be more than it is."""
    num_pauses = num_reused = 0
    for seed in range(60):
        dice = random.Random(seed)
        manager = BlockManager(
            dice.randint(10, 24), 1, enable_reuse=True, may_copy_blocks=dice.random() < 0.5
        )
        num_slots = dice.randint(3, 8)
        policy = CapacitySchedulerPolicy.MAX_UTILIZATION
        world = World(make_scheduler(policy, manager, max_batch_size=num_slots), manager, num_slots)
        requests = [
            make_request(
                request_id,
                dice.randint(8, 16),
                dice.randint(1, 6),
                family=dice.randint(0, 1),
                priority=dice.choice([0.0, 0.5, 1.0]),
            )
            for request_id in range(30)
        ]
        run_crowd(world, dice, requests, max_gap=8)
        num_pauses += world.num_pauses
        num_reused += manager.reuse_stats.num_reused_blocks
    assert num_pauses > 100
    assert num_reused > 1000
