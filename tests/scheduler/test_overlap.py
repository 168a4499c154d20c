"""Planning ahead of the tokens: the same answers, whatever happens while a step runs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_engine import VOCAB_SIZE, tokens_alone
from support.overlapped_world import OverlappedWorld
from support.scheduler_world import CHUNKINGS, make_request

from inflight_scheduler import (
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    FinishReason,
    LlmRequest,
    LlmRequestState,
    ScheduledBatch,
    make_scheduler,
)

Spec = tuple[int, int, int, int, float, int, bytes]
# prompt, output, end id, min length, priority, family of prompts, salt
SPECS = st.tuples(
    st.integers(1, 8),
    st.integers(1, 12),
    st.just(-1) | st.integers(0, VOCAB_SIZE - 1),
    st.integers(0, 4),
    st.sampled_from([0.5, 0.1, 0.9]),
    st.integers(0, 3),
    st.sampled_from([b"", b"", b"tenant"]),
)
GUARANTEED = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


def make_world(
    policy: CapacitySchedulerPolicy = GUARANTEED,
    num_blocks: int = 8,
    tokens_per_block: int = 4,
    num_slots: int = 4,
    *,
    enable_reuse: bool = False,
    chunking: ContextChunking | None = None,
    max_num_tokens: int | None = None,
) -> OverlappedWorld:
    manager = BlockManager(
        num_blocks, tokens_per_block, enable_reuse=enable_reuse, may_copy_blocks=True
    )
    scheduler = make_scheduler(
        policy,
        manager,
        max_batch_size=num_slots,
        max_num_tokens=max_num_tokens,
        chunking=chunking,
    )
    return OverlappedWorld(scheduler, manager, num_slots)


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


def test_a_token_behind_the_end_is_discarded() -> None:
    answer = answer_alone(make_request(0, 3, 8))
    world = make_world()
    request = make_request(0, 3, 8, end_id=answer[4])
    world.arrive(request)
    world.drain()
    assert request.finish_reason is FinishReason.END_ID
    assert request.tokens == answer[:5]
    world.step()
    assert world.num_discarded_tokens == 1


def test_who_has_ended_while_a_step_ran_is_passed_by() -> None:
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


def test_those_whom_the_next_step_leaves_out_get_their_tokens() -> None:
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
    fail(world, is_running_lost=is_running_lost)
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
def test_numbers_that_failed_of_one_who_has_left_are_not_reused(is_by_token: bool) -> None:
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


@pytest.mark.parametrize("policy", CapacitySchedulerPolicy)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    specs=st.lists(SPECS, min_size=1, max_size=7),
    gaps=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    stops=st.dictionaries(st.integers(0, 20), st.integers(0, 6), max_size=3),
    failures=st.dictionaries(st.integers(0, 20), st.booleans(), max_size=1),
    num_blocks=st.integers(2, 8),
    tokens_per_block=st.integers(1, 4),
    num_slots=st.integers(1, 4),
    enable_reuse=st.booleans(),
    chunking=CHUNKINGS,
)
def test_answers_are_those_of_a_request_alone(
    policy: CapacitySchedulerPolicy,
    specs: list[Spec],
    gaps: list[int],
    stops: dict[int, int],
    failures: dict[int, bool],
    num_blocks: int,
    tokens_per_block: int,
    num_slots: int,
    enable_reuse: bool,
    chunking: ContextChunking | None,
) -> None:
    world = make_world(
        policy,
        num_blocks,
        tokens_per_block,
        num_slots,
        enable_reuse=enable_reuse,
        chunking=chunking,
    )
    alone: dict[int, list[int]] = {}
    for number, (spec, gap) in enumerate(zip(specs, gaps, strict=False)):
        answer = arrive_if_it_fits(world, number, spec)
        if answer is not None:
            alone[number] = answer
        for _ in range(gap):
            world.step()
    for tick in range(21):
        stopped = world.active.get(stops.get(tick, -1))
        if stopped is not None:
            world.stop(stopped)
        if tick in failures and world.active:
            fail(world, is_running_lost=failures[tick])
        world.step()
    world.drain()
    world.step()
    assert world.running is None
    for request in world.finished:
        expected = alone[request.request_id]
        if request.finish_reason is FinishReason.CANCELLED:
            expected = expected[: len(request.tokens)]
        assert request.tokens == expected
    assert len(world.finished) == len(alone)


def arrive_if_it_fits(world: OverlappedWorld, number: int, spec: Spec) -> list[int] | None:
    """The answer it must get; None if this world refuses it."""
    num_prompt, max_new, end_id, min_length, priority, family, salt = spec
    request = make_request(
        number,
        num_prompt,
        max_new,
        end_id=end_id,
        min_length=min(min_length, max_new),
        priority=priority,
        family=family,
        cache_salt=salt,
    )
    if not world.manager.can_ever_fit(request):
        return None
    world.arrive(request)
    return answer_alone(request)


def fail(world: OverlappedWorld, *, is_running_lost: bool) -> None:
    """A step fails, and everybody in it ends."""
    for request in world.fail(is_running_lost=is_running_lost):
        if world.active.get(request.request_id) is request:
            world.stop(request)
    world.check_invariants()
