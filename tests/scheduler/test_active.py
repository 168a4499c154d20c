"""The order of the active requests, and how long they wait."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler_world import World, ids, make_request

from inflight_scheduler import (
    DEFAULT_PRIORITY_SPAN,
    ActiveRequests,
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    ContextChunkingPolicy,
    ContextTooLong,
    FinishReason,
    LlmRequest,
    MaxUtilizationScheduler,
    MicroBatchScheduler,
    make_scheduler,
)
from inflight_scheduler.planning.active_requests import MAX_CHANGES

UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION


def active_with(*priorities: float, span: float = DEFAULT_PRIORITY_SPAN) -> ActiveRequests:
    active = ActiveRequests(BlockManager(8, 4), span)
    for request_id, priority in enumerate(priorities):
        active.add(make_request(request_id, priority=priority))
    return active


def test_priority_descends_and_arrival_decides_among_equals() -> None:
    assert ids(active_with(0.5, 0.1, 0.9, 0.5, 0.9)) == ([2, 4, 0, 3, 1],)


def test_the_span_bounds_how_many_pass() -> None:
    # With a span of 4, a request of priority 0.5 is passed by fewer than 4 * (1 - 0.5) = 2.
    assert ids(active_with(0.5, 1.0, 1.0, 1.0, span=4)) == ([1, 0, 2, 3],)
    assert ids(active_with(0.0, 1.0, 0.0, span=0)) == ([0, 1, 2],), "0: in order of arrival"


@given(
    priorities=st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]), max_size=40),
    span=st.sampled_from([0.0, 1.0, 3.0, 10.0, 1000.0]),
)
def test_no_request_is_passed_by_more_than_the_documented_number(
    priorities: list[float], span: float
) -> None:
    order = ids(active_with(*priorities, span=span))[0]
    for place, request_id in enumerate(order):
        num_passed_by = sum(other > request_id for other in order[:place])
        bound = span * (1 - priorities[request_id])
        assert num_passed_by < bound or num_passed_by == 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), policy=st.sampled_from(CapacitySchedulerPolicy))
@pytest.mark.case(80)
def test_a_request_of_low_priority_starts_in_a_stream_of_high_ones(
    seed: int, policy: CapacitySchedulerPolicy
) -> None:
    """The stream never ends, and fewer than ``span * (1 - p)`` later ones start before it."""
    dice = random.Random(seed)
    span = 6
    manager = BlockManager(dice.randint(4, 8), 2)
    scheduler = make_scheduler(policy, manager, max_batch_size=dice.randint(1, 3))
    world = World(scheduler, manager, num_slots=3, priority_span=span)
    low = make_request(0, dice.randint(1, 4), 3, priority=0.0)
    world.arrive(make_request(1, 2, 4))
    world.arrive(low)
    num_arrivals, started_first = 2, set[int]()
    while not low.has_started:
        world.arrive(make_request(num_arrivals, dice.randint(1, 4), 3, priority=1.0))
        num_arrivals += 1
        batch = world.step()
        started_first |= {setup.request_id for setup in batch.setups}
        assert num_arrivals < 200, "it starves"
    assert len(started_first - {0, 1}) <= span + scheduler.micro_batch_scheduler.max_batch_size - 1


def test_changes_of_generation_lead_from_one_view_to_the_next() -> None:
    """A recorder that noted the view before need not note all of the next one."""
    active = active_with(*[0.5] * 6)
    zero, one, two, three, four, five = active
    assert active.generation_changes(active.generation) is None, "nobody has asked before"
    for request in (one, three, four):
        request.move_to_next_context_chunk()
    before = active.generation
    assert active.generation_changes([]) is None, "that was no view"
    for request in (five, zero, two):
        request.move_to_next_context_chunk()
    three.finish(FinishReason.CANCELLED)
    one.pause()
    assert ids(before, active.generation) == ([1, 3, 4], [0, 2, 4, 5])
    known = active.generation
    assert active.generation_changes(before) == (3, 5, 0, 0, 2, 2, ~3, ~1)
    assert active.generation_changes(before) is None, "the changes are those since the last time"
    assert active.generation_changes(known) == ()


def test_unread_changes_are_bounded() -> None:
    active = active_with(0.5, 0.5)
    before, request = active.generation, active[0]
    assert active.generation_changes(before) is None
    for _ in range(MAX_CHANGES):
        request.move_to_next_context_chunk()
        request.pause()
    assert len(active._generation._changes) <= MAX_CHANGES + 1
    assert active.generation_changes(before) is None, "some are not known"
    before = active.generation
    request.move_to_next_context_chunk()
    assert active.generation_changes(before) == (0, 0)


def test_bad_additions_are_refused() -> None:
    active = active_with(0.5)
    with pytest.raises(ValueError, match="request 0 is active already"):
        active.add(make_request(0))
    for number in (-1, 2**64):
        with pytest.raises(ValueError, match="no unsigned 64-bit number"):
            active.add(make_request(number))
    for priority in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"outside 0\.\.1"):
            active.add(make_request(1, priority=priority))
    with pytest.raises(ValueError, match="priority_span must be at least 0"):
        active_with(span=-1)


def test_the_usual_step_looks_only_at_requests_that_open_a_block() -> None:
    manager = BlockManager(64, 8)
    scheduler = make_scheduler(UTILIZATION, manager, max_batch_size=16)
    world = World(scheduler, manager, num_slots=16)
    requests: list[LlmRequest] = [make_request(i, 1 + i % 8, 20) for i in range(16)]
    for request in requests:
        world.arrive(request)
    world.step()
    for _ in range(10):
        due = {request.request_id for request in world.active.due_requests()}
        assert due == {r.request_id for r in requests if r.num_cached_tokens % 8 == 0}
        assert len(due) == 2
        world.step()


@pytest.mark.parametrize("enable_reuse", [False, True])
def test_a_pause_needs_no_walk_over_all_requests(
    enable_reuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each step two of 16 open a block, and the pool is full."""
    manager = BlockManager(17, 8, enable_reuse=enable_reuse)
    scheduler = make_scheduler(UTILIZATION, manager, max_batch_size=16)
    world = World(scheduler, manager, num_slots=16)
    for request_id in range(16):
        world.arrive(make_request(request_id, 1 + request_id % 8, 20))
    world.step()
    by_rules = scheduler.schedule_request(list(world.active), ())
    assert ids(*by_rules) == ([], list(range(15)), [15])
    assert len(world.active.due_requests()) == 2, "now it is known of all when they open one"
    looked_at = []
    num_places_left = BlockManager.num_places_left

    def look(manager: BlockManager, request: LlmRequest) -> int:
        looked_at.append(request.request_id)
        return num_places_left(manager, request)

    monkeypatch.setattr(BlockManager, "num_places_left", look)
    monkeypatch.delattr(MaxUtilizationScheduler, "schedule_request")
    decision = scheduler.schedule_request(world.active, ())
    assert ids(*decision) == ids(*by_rules)
    batch = world.planner.plan(*decision)
    assert len(batch.new_blocks) == 1, "of the other one that opens a block"
    assert not looked_at, "neither the decision nor the plan looks again"
    monkeypatch.undo()
    world.complete(batch)
    world.drain()


@pytest.mark.parametrize("policy", [UTILIZATION, CapacitySchedulerPolicy.GUARANTEED_NO_EVICT])
def test_more_prompts_than_an_iteration_holds_need_no_walk_over_all_requests(
    policy: CapacitySchedulerPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait from the first one on that is over the budget; one that can never run is named."""
    manager = BlockManager(64, 8)
    scheduler = make_scheduler(policy, manager, max_batch_size=16, max_num_tokens=20)
    world = World(scheduler, manager, num_slots=16)
    for request_id in range(6):
        world.arrive(make_request(request_id, 8, 20))
    for expected in ([0, 1], [2, 3]):
        by_rules = scheduler.schedule_request(list(world.active), ())
        with monkeypatch.context() as patch:
            patch.delattr(MicroBatchScheduler, "schedule")
            decision = scheduler.schedule_request(world.active, ())
        assert ids(*decision) == ids(*by_rules)
        assert ids(decision[0]) == (expected,)
        world.step(decision)
    world.arrive(make_request(9, 21, 1, priority=1.0))
    with pytest.raises(ContextTooLong, match="request 9"):
        scheduler.schedule_request(world.active, ())


@pytest.mark.parametrize("policy", CapacitySchedulerPolicy)
@pytest.mark.parametrize("chunking", ContextChunkingPolicy)
def test_a_long_prompt_is_not_starved_by_short_ones(
    policy: CapacitySchedulerPolicy, chunking: ContextChunkingPolicy
) -> None:
    """What generation leaves is less than a unit, and enough for each of an endless stream."""
    manager = BlockManager(100, 4)
    scheduler = make_scheduler(
        policy, manager, max_batch_size=8, max_num_tokens=8, chunking=ContextChunking(chunking, 8)
    )
    world = World(scheduler, manager, num_slots=8)
    world.arrive(make_request(0, 2, 30))
    world.step()
    long = make_request(1, 40, 4)
    world.arrive(long)
    num_arrivals = 2
    while not long.is_finished:
        while len(world.active) < 8:
            world.arrive(make_request(num_arrivals, 2, 12))
            num_arrivals += 1
        world.step()
        assert num_arrivals < 100, "it starves"
