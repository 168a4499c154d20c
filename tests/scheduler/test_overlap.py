"""Planning ahead of the tokens: the same answers, whatever happens while a step runs."""

from __future__ import annotations

import pytest
from support.fake_engine import tokens_alone
from support.overlapped_world import OverlappedWorld
from support.scheduler_world import make_request

from inflight_scheduler import (
    BlockManager,
    CapacitySchedulerPolicy,
    FinishReason,
    LlmRequest,
    LlmRequestState,
    ScheduledBatch,
    make_scheduler,
)

GUARANTEED = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


def make_world(*, enable_reuse: bool = False) -> OverlappedWorld:
    manager = BlockManager(8, 4, enable_reuse=enable_reuse, may_copy_blocks=True)
    return OverlappedWorld(make_scheduler(GUARANTEED, manager, max_batch_size=4), manager, 4)


def answer_alone(request: LlmRequest) -> list[int]:
    return tokens_alone(
        request.tokens[: request.orig_prompt_len],
        request.max_new_tokens,
        request.end_id,
        request.sampling.min_length,
    )


def test_the_last_token_is_expected_and_nothing_runs_beyond_it() -> None:
    world = make_world()
    request = make_request(0, 3, 2)
    world.arrive(request)
    assert world.step().num_tokens == 3
    assert request.num_pending_tokens == 1
    assert request.num_drawn_tokens == 3
    world.step()
    assert request.state is LlmRequestState.GENERATION_TO_COMPLETE
    assert world.planner.num_free_slots == 3, "its slot is its own until its token is there"
    last_one = world.step()
    assert last_one.generation_slots, "the step before"
    assert world.running is None, "nothing more was planned"
    assert request.finish_reason is FinishReason.LENGTH
    assert world.num_discarded_tokens == 0


def test_a_request_that_ends_while_a_step_runs_gets_no_token() -> None:
    """Even if nothing is left of its answer, as where that begins with a stop word."""
    world = make_world()
    requests = [make_request(number, 1, 8) for number in range(3)]
    for request in requests:
        world.arrive(request)
    world.step()
    world.step()
    first, second, third = requests
    second.drop_pending_tokens()
    del second.tokens[1:]
    world.stop(second)
    world.drain()
    assert second.tokens == make_request(1, 1).tokens
    assert [first.tokens, third.tokens] == [answer_alone(make_request(k, 1, 8)) for k in (0, 2)]


def test_requests_that_the_next_step_leaves_out_get_their_tokens() -> None:
    world = make_world()
    requests = [make_request(number, 2, 8) for number in range(3)]
    for request in requests:
        world.arrive(request)
    world.step()
    world.step()
    world.step(([], requests[1:2], []))
    assert [request.num_pending_tokens for request in requests] == [0, 1, 0]
    world.drain()
    assert [r.tokens for r in requests] == [answer_alone(make_request(k, 2, 8)) for k in range(3)]


def test_a_prompt_is_shared_while_its_step_runs() -> None:
    world = make_world(enable_reuse=True)
    world.arrive(make_request(0, 8, 4, family=1))
    world.step()
    second = make_request(1, 8, 4, family=1)
    world.arrive(second)
    world.step()
    assert second.num_reused_blocks == 2
    world.drain()
    assert second.tokens == answer_alone(make_request(1, 8, 4, family=1))


@pytest.mark.parametrize("is_running_lost", [True, False])
def test_nothing_that_a_lost_step_has_computed_is_reused(is_running_lost: bool) -> None:
    world = make_world(enable_reuse=True)
    world.arrive(make_request(0, 8, 4, family=1))
    world.step()
    world.arrive(make_request(1, 8, 4, family=1))
    for request in world.fail(is_running_lost=is_running_lost):
        world.stop(request)
    world.check_invariants()
    assert (world.manager.num_idle_blocks == 0) == is_running_lost


def one_that_runs() -> tuple[OverlappedWorld, LlmRequest, ScheduledBatch]:
    """A world with reuse, its only request, and the step of that, whose token is to come."""
    world, request = make_world(enable_reuse=True), make_request(0, 8, 4)
    world.arrive(request)
    world.step()
    assert world.running is not None
    batch, _ = world.running
    world.running = None
    return world, request, batch


@pytest.mark.case(66, 87)
@pytest.mark.parametrize("is_by_token", [False, True])
def test_numbers_that_failed_of_a_released_request_are_not_reused(is_by_token: bool) -> None:
    """Unless it left by its own last token: then the step ran in vain, and wrote nothing kept."""
    world, request, batch = one_that_runs()
    request.finish(FinishReason.END_ID if is_by_token else FinishReason.CANCELLED)
    world.planner.release(request)
    world.active.remove(request)
    assert world.manager.num_idle_blocks > 0
    assert world.planner.apply_tokens(batch, [-1]) == []
    assert world.planner.has_forgotten == (not is_by_token)
    assert (world.manager.num_idle_blocks > 0) == is_by_token
    world.manager.check_integrity()


@pytest.mark.case(66, 87)
def test_numbers_that_failed_are_not_reused() -> None:
    world, request, batch = one_that_runs()
    assert world.planner.apply_tokens(batch, [-1]) == [request]
    world.stop(request)
    world.check_invariants()
    assert world.manager.num_idle_blocks == 0
