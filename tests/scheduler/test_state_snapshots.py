"""Snapshots of recurrent states: where they are taken and found, and what makes room."""

from __future__ import annotations

import pytest
from support.fake_engine import tokens_alone
from support.scheduler_world import World, make_request

from inflight_scheduler import (
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    LlmRequest,
    make_scheduler,
)


def make_world(num_snapshots: int, num_blocks: int = 60, max_num_tokens: int = 64) -> World:
    manager = BlockManager(num_blocks, 4, enable_reuse=True, num_snapshots=num_snapshots)
    scheduler = make_scheduler(
        CapacitySchedulerPolicy.MAX_UTILIZATION,
        manager,
        max_batch_size=4,
        max_num_tokens=max_num_tokens,
        chunking=ContextChunking(unit_size=1),
    )
    return World(scheduler, manager, 4)


def request_of(request_id: int, tokens: list[int], max_new: int = 1) -> LlmRequest:
    request = make_request(request_id, len(tokens), max_new)
    request.tokens[:] = tokens
    return request


def found_of(world: World, tokens: list[int]) -> int:
    return world.manager.match_prefix(request_of(99, tokens)).num_tokens


def serve(world: World, request: LlmRequest) -> LlmRequest:
    """Alone, until it ends; its tokens are those of the model."""
    prompt = list(request.tokens)
    world.arrive(request)
    world.drain()
    assert request.tokens == tokens_alone(prompt, request.max_new_tokens, -1, 0, None)
    return request


PREFIX = [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_prompt_goes_on_where_a_state_is() -> None:
    """The same prompt at the end of its last full block; one that parts from it before that only
    after another has, and then where that did."""
    world = make_world(8)
    first = [*PREFIX, *range(10, 18), 1, 2]
    serve(world, request_of(1, first))
    assert found_of(world, first) == 16
    assert found_of(world, [*first, 3, 4, 5, 6]) == 16
    for last, num_found in [(5, 0), (6, 8), (7, 8)]:
        prompt = [*PREFIX, *[last] * 6]
        assert found_of(world, prompt) == num_found
        serve(world, request_of(last, prompt))
        assert found_of(world, prompt) == 12


def test_in_chunks_as_in_one_piece() -> None:
    """A snapshot lies within a chunk, at its end, or in a later one."""
    for max_num_tokens in (3, 4, 5, 12):
        world = make_world(4, max_num_tokens=max_num_tokens)
        prompt = [*PREFIX, 1, 2, 3, 4, 5]
        serve(world, request_of(1, prompt))
        assert found_of(world, prompt) == 12
        serve(world, request_of(2, prompt))


def test_a_chat_goes_on_behind_its_answer() -> None:
    """At the last full block of what was cached when the request ended, also after a pause."""
    world = make_world(8)
    request = serve(world, request_of(1, PREFIX[:6], max_new=20))
    assert found_of(world, [*request.tokens, 1, 2]) == 24
    world.manager.check_integrity()


def test_requests_that_run_hold_half_of_them() -> None:
    """The others are there for prompts, and all are given back."""
    world = make_world(4)
    for number in range(4):
        world.arrive(make_request(number, 6, 12))
    for _ in range(8):
        world.step()
    assert world.manager.snapshots is not None
    state = world.manager.snapshots.state()
    assert len(state.held) == 2
    assert len(state.keys) == 2
    world.drain()
    assert world.manager.snapshots.state().held == []


def test_the_one_used_least_recently_makes_room() -> None:
    world = make_world(2)
    prompts = [[number, *PREFIX] for number in range(3)]
    serve(world, request_of(0, prompts[0]))
    serve(world, request_of(1, prompts[1]))
    serve(world, request_of(2, prompts[0]))  # used again
    serve(world, request_of(3, prompts[2]))
    assert [found_of(world, prompt) for prompt in prompts] == [8, 0, 8]


def test_a_block_takes_its_snapshot_with_it() -> None:
    world = make_world(8, num_blocks=6)
    serve(world, request_of(1, [*PREFIX, 1]))
    serve(world, make_request(7, 20, 4))
    assert found_of(world, [*PREFIX, 1]) == 0
    world.manager.check_integrity()


def test_contexts_of_a_step_keep_their_snapshots() -> None:
    """Those that take all of them, beside a request that generates to the end of a block."""
    for num_before in range(1, 9):
        world = make_world(2)
        world.arrive(request_of(1, [*range(30, 38)], max_new=12))
        for _ in range(num_before):
            world.step()
        for request_id in (2, 3):
            world.arrive(request_of(request_id, [request_id] * 6))
        world.drain()
        assert found_of(world, [2] * 6) + found_of(world, [3] * 6) >= 4


def test_a_block_that_goes_while_its_state_is_planned() -> None:
    """A prompt parts from a cached block, whose state it will keep; a later one of the same step
    takes that block, and a request that generates keeps its state, too, in another snapshot."""
    world = make_world(6, num_blocks=8)
    serve(world, request_of(1, [*PREFIX, 1]))
    world.arrive(request_of(2, [30] * 7, max_new=4))
    for _ in range(2):
        world.step()
    world.arrive(request_of(3, [*PREFIX[:4], 30, 30]))
    world.arrive(request_of(4, [31] * 11))
    batch = world.step()
    assert len(batch.context_chunks) == 2
    assert [each.slot for each in batch.saved] == list(batch.generation_slots)
    assert found_of(world, [*PREFIX, 1]) == 4
    world.drain()


def test_layers_with_a_window_have_none() -> None:
    with pytest.raises(ValueError, match="num_snapshots"):
        BlockManager(8, 4, enable_reuse=True, windows=(8,), num_snapshots=2)


def test_nothing_is_kept_of_a_step_that_failed() -> None:
    """What it has put into snapshots is unknown."""
    world = make_world(4)
    serve(world, request_of(1, [*PREFIX, 1]))
    world.arrive(request_of(2, [*PREFIX, *PREFIX, 1]))
    context, generation, paused = world.decide()
    batch = world.planner.plan(context, generation, paused)
    for request in world.planner.discard(batch):
        world.planner.release(request)
    assert found_of(world, [*PREFIX, 1]) == 0
