"""Small worlds, completely: every order of arrivals, stops and steps, every invariant, no dead end.

A state is all that later decisions depend on, so states that are equal are explored once. From
every state steps alone must lead to the end: there is no circle among them.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Hashable, Iterator
from unittest.mock import patch

import pytest
from support.fake_engine import tokens_alone
from support.overlapped_world import OverlappedWorld
from support.scheduler_world import World, make_request

from inflight_scheduler import (
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    ContextChunkingPolicy,
    FinishReason,
    LlmRequest,
    make_scheduler,
)

pytestmark = pytest.mark.slow

Spec = tuple[int, int]  # prompt, output
STEP = "step"


class Explorer:
    """All states that are reachable with ``specs`` as the requests, each arriving once.

    ``stops_in_steps``: requests stop between the plan of a step and its tokens, too. Where steps
    overlap, every stop is one while a step runs.
    """

    def __init__(self, world: World, specs: list[Spec], stops_in_steps: bool = False) -> None:
        self.specs = specs
        self.stops_in_steps = stops_in_steps
        self.alone = [tokens_alone(self._make(i).tokens, specs[i][1], -1, 0) for i in self._ids()]
        # State -> the state one step later, None where nobody is active.
        self.next_state: dict[Hashable, Hashable | None] = {}
        self.worlds: dict[Hashable, tuple[bytes, tuple[int, ...]]]
        self.worlds = {self._key(world, ()): (pickle.dumps(world), ())}

    def explore(self) -> int:
        """Visit everything; returns the number of states."""
        while self.worlds:
            key, (stored, arrived) = self.worlds.popitem()
            self.next_state[key] = None
            for action in self._actions(pickle.loads(stored), arrived):
                world = pickle.loads(stored)
                now_arrived = self._do(world, action, arrived)
                new_key = self._key(world, now_arrived)
                if new_key not in self.next_state and new_key not in self.worlds:
                    self.worlds[new_key] = (pickle.dumps(world), now_arrived)
                if action == STEP:
                    self.next_state[key] = new_key
        self._check_every_end()
        return len(self.next_state)

    def _ids(self) -> range:
        return range(len(self.specs))

    def _make(self, index: int) -> LlmRequest:
        priority = 1.0 if index == 3 else 0.5
        return make_request(index, *self.specs[index], family=index % 2, priority=priority)

    def _actions(self, world: World, arrived: tuple[int, ...]) -> Iterator[str | tuple[str, int]]:
        if world.active:
            yield STEP
        for index in self._ids():
            if index not in arrived:
                yield "arrive", index
        for request in world.active:
            yield "stop", request.request_id
            if self.stops_in_steps:
                yield "stop in a step", request.request_id

    def _do(
        self, world: World, action: str | tuple[str, int], arrived: tuple[int, ...]
    ) -> tuple[int, ...]:
        if action == STEP:
            world.step()
            assert world.num_running > 0, "active requests and nothing runs"
        elif action[0] == "arrive":
            world.arrive(self._make(int(action[1])))
            arrived = (*arrived, int(action[1]))
        else:
            self._stop(world, int(action[1]), is_in_step=action[0] == "stop in a step")
        for request in world.finished:
            alone = self.alone[request.request_id]
            is_stopped = request.finish_reason == FinishReason.CANCELLED
            assert request.tokens == (alone[: request.num_tokens] if is_stopped else alone)
        world.finished.clear()
        return arrived

    def _stop(self, world: World, request_id: int, *, is_in_step: bool) -> None:
        """Between two steps, or between the plan of one and its tokens."""
        batch = world.plan(world.decide()) if is_in_step else None
        request = world.active.get(request_id)
        assert request is not None
        world.stop(request)
        if batch is not None:
            world.complete(batch)
        world.check_invariants()

    def _key(self, world: World, arrived: tuple[int, ...]) -> Hashable:
        manager = world.manager
        requests = tuple(
            (
                request.request_id,
                request.state,
                request.num_tokens,
                request.prompt_len,
                request.context_current_position,
                request.num_pending_tokens,
                manager.num_blocks_of(request.request_id),
            )
            for request in world.active
        )
        is_running = isinstance(world, OverlappedWorld) and world.running is not None
        return frozenset(arrived), requests, is_running, _cache_of(world)

    def _check_every_end(self) -> None:
        """Following steps alone, each state ends: the chains form no circle."""
        ends: set[Hashable | None] = {None}
        for start in self.next_state:
            chain: dict[Hashable, None] = {}
            state: Hashable | None = start
            while state not in ends:
                assert state not in chain, "steps that lead nowhere"
                chain[state] = None
                state = self.next_state[state]
            ends.update(chain)


def _cache_of(world: World) -> Hashable:
    """What later decisions depend on of the reuse cache.

    Block ids are names: what counts is who holds which, and in which order they are given up. So
    they are numbered anew in the order of the tables and then of the idle list, and states that
    differ in names alone are one.
    """
    manager = world.manager
    if manager._index is None:
        return None
    pool, index = manager._pool, manager._index
    tables = [manager.block_table(request.request_id) for request in world.active]
    idle = pool._idle.ids()
    numbers: dict[int, int] = {}
    for block_id in [*itertools.chain(*tables), *idle]:
        numbers.setdefault(block_id, len(numbers))
    return (
        tuple(tuple(numbers[block_id] for block_id in table) for table in tables),
        len(idle),
        frozenset((key, numbers[block_id]) for key, block_id in index._keys_to_blocks[0].items()),
        frozenset((key, numbers[block_id]) for key, block_id in index._beginnings.items()),
    )


def make_world(
    policy: CapacitySchedulerPolicy,
    num_blocks: int,
    specs: list[Spec],
    chunking: ContextChunking | None = None,
    enable_reuse: bool = False,
    max_num_tokens: int | None = None,
    world_class: type[World] = World,
) -> World:
    with patch("secrets.token_bytes", lambda _: b"key"):  # equal texts have equal keys everywhere
        manager = BlockManager(
            num_blocks, 2, enable_reuse=enable_reuse, may_copy_blocks=enable_reuse
        )
    for index, spec in enumerate(specs):
        assert manager.can_ever_fit(make_request(index, *spec))
    scheduler = make_scheduler(
        policy, manager, max_batch_size=3, max_num_tokens=max_num_tokens, chunking=chunking
    )
    return world_class(scheduler, manager, num_slots=3)


SPECS: list[Spec] = [(3, 3), (2, 4), (5, 2), (4, 3)]
THREE = SPECS[:3]
POLICIES = pytest.mark.parametrize(
    "policy", list(CapacitySchedulerPolicy), ids=lambda policy: policy.name
)


def explore(world: World, specs: list[Spec], min_states: int, stops_in_steps: bool = False) -> None:
    num_states = Explorer(world, specs, stops_in_steps).explore()
    assert num_states >= min_states, "requests that get nowhere are soon explored"


@POLICIES
@pytest.mark.parametrize("num_blocks", [4, 6])
def test_four_requests(policy: CapacitySchedulerPolicy, num_blocks: int) -> None:
    explore(make_world(policy, num_blocks, SPECS), SPECS, 370)


@POLICIES
@pytest.mark.parametrize("chunking", list(ContextChunkingPolicy), ids=lambda each: each.name)
def test_chunked_contexts(policy: CapacitySchedulerPolicy, chunking: ContextChunkingPolicy) -> None:
    explore(
        make_world(policy, 6, SPECS, ContextChunking(chunking, 2), max_num_tokens=4), SPECS, 430
    )


@POLICIES
@pytest.mark.parametrize("num_blocks", [4, 6])
def test_reused_blocks(policy: CapacitySchedulerPolicy, num_blocks: int) -> None:
    explore(make_world(policy, num_blocks, SPECS, enable_reuse=True), SPECS, 1300)


@POLICIES
def test_stops_between_the_plan_and_the_tokens(policy: CapacitySchedulerPolicy) -> None:
    explore(make_world(policy, 4, THREE), THREE, 98, stops_in_steps=True)


@POLICIES
def test_chunked_contexts_with_reused_blocks(policy: CapacitySchedulerPolicy) -> None:
    chunking = ContextChunking(ContextChunkingPolicy.FIRST_COME_FIRST_SERVED, 2)
    world = make_world(policy, 4, THREE, chunking, enable_reuse=True, max_num_tokens=4)
    explore(world, THREE, 290, stops_in_steps=True)


@POLICIES
@pytest.mark.parametrize("enable_reuse", [False, True])
def test_overlapped_steps(policy: CapacitySchedulerPolicy, enable_reuse: bool) -> None:
    world = make_world(policy, 4, THREE, enable_reuse=enable_reuse, world_class=OverlappedWorld)
    explore(world, THREE, 340 if enable_reuse else 150)
