"""Repeated pausing: how often and how long, at most. The bound is the one of docs/scheduling.md.

The first in the order is never paused and takes a step in every iteration. So the k-th one ends
within the steps that the first k need alone, and is paused at most once in each iteration.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_engine import tokens_alone
from support.scheduler_world import World, make_request

from inflight_scheduler import BlockManager, CapacitySchedulerPolicy, LlmRequest, make_scheduler

Lengths = list[tuple[int, int]]


def crowd(lengths: Lengths, num_blocks: int, *, reuse: bool) -> tuple[World, list[LlmRequest]]:
    """Requests of so many prompt and new tokens, all there from the start."""
    manager = BlockManager(num_blocks, 2, enable_reuse=reuse)
    policy = CapacitySchedulerPolicy.MAX_UTILIZATION
    world = World(make_scheduler(policy, manager, max_batch_size=8), manager, num_slots=8)
    requests = [make_request(i, prompt, new) for i, (prompt, new) in enumerate(lengths)]
    for request in requests:
        world.arrive(request)
    return world, requests


def num_steps_alone(lengths: Lengths) -> int:
    """The context draws the first token, each step after it one more."""
    return sum(num_new for _, num_new in lengths)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 8)), min_size=2, max_size=8),
    num_blocks=st.integers(7, 12),
    reuse=st.booleans(),
)
def test_a_request_that_is_paused_repeatedly_ends_within_the_bound(
    lengths: Lengths, num_blocks: int, reuse: bool
) -> None:
    world, requests = crowd(lengths, num_blocks, reuse=reuse)
    alone = [tokens_alone(r.tokens, r.max_new_tokens, -1, 0) for r in requests]
    iteration = 0
    while world.active:
        first = world.active[0]
        before = (first.num_pauses, first.num_tokens)
        is_open = [request for request in requests if not request.is_finished]
        world.step()
        iteration += 1
        assert (first.num_pauses, first.num_tokens) == (before[0], before[1] + 1)
        for request in is_open:
            assert request.num_pauses <= iteration
            if request.is_finished:
                assert iteration <= num_steps_alone(lengths[: request.request_id + 1])
    assert [request.tokens for request in requests] == alone
