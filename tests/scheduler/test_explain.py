"""Why a request waits, one reason per test; and everybody has one."""

from __future__ import annotations

import random

import pytest
from support.scheduler_soak import Soak
from support.scheduler_world import World, make_request

from inflight_scheduler import (
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    LlmRequest,
    WaitCode,
    WaitReason,
    explain,
    make_scheduler,
)

GUARANTEED = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH


def world_of(
    policy: CapacitySchedulerPolicy, *requests: LlmRequest, num_blocks: int = 8, **limits: int
) -> World:
    manager = BlockManager(num_blocks, 4, enable_reuse=bool(limits.pop("reuse", 0)))
    limits.setdefault("max_batch_size", 8)
    scheduler = make_scheduler(policy, manager, **limits)  # type: ignore[arg-type]
    world = World(scheduler, manager, num_slots=8)
    for request in requests:
        world.arrive(request)
    return world


def reasons(world: World) -> dict[int, WaitReason]:
    return explain(world.scheduler, world.active)


def test_blocks_and_who_stands_behind() -> None:
    world = world_of(GUARANTEED, *(make_request(i, 8, 12) for i in (1, 2, 3)))
    assert reasons(world) == {
        2: WaitReason(WaitCode.BLOCKS, num_needed=5, num_available=3),
        3: WaitReason(WaitCode.BEHIND, behind_id=2, num_ahead=1),
    }
    texts = [str(reason) for reason in reasons(world).values()]
    assert texts == [
        "waiting for KV blocks: needs 5, free 3",
        "behind 1 other, first of them request 2",
    ]


def test_places() -> None:
    world = world_of(GUARANTEED, make_request(1), make_request(2), max_batch_size=1)
    assert reasons(world)[2] == WaitReason(WaitCode.MAX_REQUESTS, 1, 1)


def test_contexts_behind_one_that_gets_no_chunk() -> None:
    manager = BlockManager(40, 4)
    scheduler = make_scheduler(
        GUARANTEED,
        manager,
        max_batch_size=8,
        max_num_tokens=4,
        chunking=ContextChunking(unit_size=4),
    )
    world = World(scheduler, manager, num_slots=8)
    world.arrive(make_request(1, 2, 9))
    world.step()
    for request in (make_request(2, 9), make_request(3, 2)):
        world.arrive(request)
    assert reasons(world) == {
        2: WaitReason(WaitCode.TOKENS, num_needed=4, num_available=3),
        3: WaitReason(WaitCode.BEHIND, behind_id=2, num_ahead=1),
    }


def test_tokens_of_the_iteration() -> None:
    world = world_of(GUARANTEED, make_request(1, 6), make_request(2, 6), max_num_tokens=8)
    assert reasons(world)[2] == WaitReason(WaitCode.TOKENS, 6, 2)


def test_static_batch() -> None:
    world = world_of(STATIC_BATCH, make_request(1))
    world.step()
    world.arrive(make_request(2))
    assert reasons(world)[2].code is WaitCode.STATIC_BATCH


def test_shared_context_does_not_hold_up_the_others() -> None:
    same = [make_request(i, 9, 3, family=1) for i in (1, 2)]
    world = world_of(GUARANTEED, *same, make_request(3), num_blocks=16, reuse=1)
    assert {i: reason.code for i, reason in reasons(world).items()} == {2: WaitCode.SHARED_CONTEXT}


def test_paused() -> None:
    world = world_of(MAX_UTILIZATION, *(make_request(i, 4) for i in (1, 2)), num_blocks=3)
    world.step()
    assert reasons(world)[2] == WaitReason(WaitCode.PAUSED, 1, 0, behind_id=2)


def test_in_flight() -> None:
    world = world_of(GUARANTEED, make_request(1))
    world.step()
    assert explain(world.scheduler, world.active, {1})[1].code is WaitCode.IN_FLIGHT


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy), ids=lambda policy: policy.name)
def test_everybody_who_does_not_run_has_a_reason_and_nobody_else(
    policy: CapacitySchedulerPolicy,
) -> None:
    num_reasons = 0
    for seed in range(8):
        soak = Soak(seed, policy)
        dice = random.Random(seed)
        for _ in range(40):
            soak.run_one(dice.random() < 0.7)
            context, generation, _ = soak.world.decide()
            running = {request.request_id for request in (*context, *generation)}
            found = reasons(soak.world)
            assert set(found) == {r.request_id for r in soak.world.active} - running
            assert all(str(reason) for reason in found.values())
            num_reasons += len(found)
    assert num_reasons > 100
