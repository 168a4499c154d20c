"""Both questions together, and the factory."""

from __future__ import annotations

import pytest
from support.fake_engine import tokens_alone
from support.scheduler_world import World, generating, ids, make_request

from inflight_scheduler import (
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    GuaranteedNoEvictScheduler,
    MaxRequestsScheduler,
    MaxUtilizationScheduler,
    TrtGptModelType,
    make_scheduler,
)

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
GUARANTEED_NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


def test_values_of_the_published_enums() -> None:
    assert [(kind.name, kind.value) for kind in TrtGptModelType] == [
        ("V1", 0),
        ("InflightBatching", 1),
        ("InflightFusedBatching", 2),
    ]
    assert (MAX_UTILIZATION.value, GUARANTEED_NO_EVICT.value) == (0, 1)
    assert CapacitySchedulerPolicy.STATIC_BATCH.value == 2
    assert [(policy.name, policy.value) for policy in ContextChunkingPolicy] == [
        ("FIRST_COME_FIRST_SERVED", 0),
        ("EQUAL_PROGRESS", 1),
        ("FORCE_CHUNK", 2),
        ("PIPELINE_AWARE", 3),
    ]


def test_factory() -> None:
    manager = BlockManager(4, 4)
    utilization = make_scheduler(MAX_UTILIZATION, manager, max_batch_size=3, max_num_tokens=7)
    assert isinstance(utilization.capacity_scheduler, MaxUtilizationScheduler)
    assert not utilization.capacity_scheduler.two_step_lookahead
    assert utilization.capacity_scheduler.max_num_requests == 3
    assert utilization.micro_batch_scheduler.max_num_tokens == 7
    no_evict = make_scheduler(GUARANTEED_NO_EVICT, manager, max_batch_size=3, max_num_requests=5)
    assert isinstance(no_evict.capacity_scheduler, GuaranteedNoEvictScheduler)
    assert no_evict.capacity_scheduler.max_num_requests == 5
    without_kv = make_scheduler(MAX_UTILIZATION, None, max_batch_size=3)
    assert isinstance(without_kv.capacity_scheduler, MaxRequestsScheduler)


def test_only_what_fits_is_asked_to_run() -> None:
    manager = BlockManager(num_blocks=3, tokens_per_block=4)
    scheduler = make_scheduler(GUARANTEED_NO_EVICT, manager, max_batch_size=8, max_num_tokens=5)
    running = generating(make_request(1, num_prompt=2, max_new=2), manager)
    requests = [running, make_request(2, 4, 1), make_request(3, 1, 1)]
    # 1 and 2 take the three blocks; 3 has room in the batch and none in the cache.
    assert ids(*scheduler.schedule_request(requests, frozenset())) == ([2], [1], [])
    assert ids(*scheduler.schedule_request(requests, {1})) == ([2], [], [])


@pytest.mark.parametrize(
    ("policy", "num_iterations", "num_pauses"),
    [(GUARANTEED_NO_EVICT, 16, 0), (MAX_UTILIZATION, 11, 1)],
)
def test_story_of_a_tiny_pool(
    policy: CapacitySchedulerPolicy, num_iterations: int, num_pauses: int
) -> None:
    # Two requests that take 3 blocks each share a pool of 4.
    manager = BlockManager(num_blocks=4, tokens_per_block=4)
    world = World(make_scheduler(policy, manager, max_batch_size=4), manager, num_slots=4)
    requests = [make_request(i, num_prompt=4, max_new=8) for i in (1, 2)]
    for request in requests:
        world.arrive(request)
    iterations = 0
    while world.active:
        world.step()
        iterations += 1
    assert (iterations, world.num_pauses) == (num_iterations, num_pauses)
    for request in requests:
        assert request.tokens == tokens_alone(request.tokens[:4], 8, end_id=-1, min_length=0)
