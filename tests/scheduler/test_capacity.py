"""The capacity policies of contract 4.2, one rule per test."""

from __future__ import annotations

import pytest
from support.scheduler_world import generating, ids, make_request

from inflight_scheduler import (
    BlockManager,
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    LlmRequest,
    LlmRequestState,
    MaxRequestsScheduler,
    MaxUtilizationScheduler,
)


def started_context(request: LlmRequest, manager: BlockManager) -> LlmRequest:
    """A context past its first chunk of one token; it holds the blocks of its whole prompt."""
    request.context_chunk_size = 1
    request.move_to_next_context_chunk()
    assert manager.allocate(request.request_id, request.prompt_len) is not None
    return request


class TestMaxRequests:
    def test_takes_the_first_in_order(self) -> None:
        requests = [make_request(i) for i in range(4)]
        assert ids(*MaxRequestsScheduler(3).schedule_request(requests)) == ([0, 1, 2], [])


@pytest.mark.parametrize(
    "scheduler",
    [
        MaxRequestsScheduler(8),
        GuaranteedNoEvictScheduler(8, BlockManager(8, 4)),
        MaxUtilizationScheduler(8, BlockManager(8, 4)),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
class TestGate:
    def test_default_gate(self, scheduler: CapacityScheduler) -> None:
        states = [
            LlmRequestState.ENCODER_INIT,
            LlmRequestState.CONTEXT_INIT,
            LlmRequestState.GENERATION_COMPLETE,
        ]
        requests = [make_request(i) for i in range(3)]
        for request, state in zip(requests, states, strict=True):
            request.state = state
        assert ids(*scheduler.schedule_request(requests)) == ([1], [])
        assert [scheduler.is_schedulable(request) for request in requests] == [False, True, False]

    def test_nothing_active(self, scheduler: CapacityScheduler) -> None:
        assert scheduler.schedule_request([]) == ([], [])


def test_the_gate_can_be_moved() -> None:
    scheduler = MaxRequestsScheduler(
        8,
        no_schedule_until_state=LlmRequestState.ENCODER_INIT,
        no_schedule_after_state=LlmRequestState.CONTEXT_INIT,
    )
    encoder, context = make_request(1), make_request(2)
    encoder.state = LlmRequestState.ENCODER_INIT
    assert ids(*scheduler.schedule_request([context, encoder])) == ([1], [])


def test_no_requests_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_requests must be at least 1, not 0"):
        MaxRequestsScheduler(0)


class TestGuaranteedNoEvict:
    def test_generation_reserves_to_completion(self) -> None:
        manager = BlockManager(num_blocks=6, tokens_per_block=4)
        running = generating(make_request(1, num_prompt=4, max_new=12), manager)  # 1 held, 3 to go
        too_big = make_request(2, num_prompt=8, max_new=4)  # 3 blocks; 5 free - 3 reserved = 2
        scheduler = GuaranteedNoEvictScheduler(8, manager)
        assert ids(*scheduler.schedule_request([running, too_big])) == ([1], [])
        fits = make_request(3, num_prompt=4, max_new=4)
        assert ids(*scheduler.schedule_request([running, fits])) == ([1, 3], [])

    def test_the_first_that_does_not_fit_ends_the_list(self) -> None:
        scheduler = GuaranteedNoEvictScheduler(8, BlockManager(4, 4))
        requests = [make_request(1, 4, 4), make_request(2, 8, 8), make_request(3, 1, 1)]
        assert ids(*scheduler.schedule_request(requests)) == ([1], [])

    def test_generation_comes_first_in_the_result(self) -> None:
        manager = BlockManager(16, 4)
        fresh, running = make_request(1), generating(make_request(2), manager)
        scheduler = GuaranteedNoEvictScheduler(8, manager)
        assert ids(*scheduler.schedule_request([fresh, running])) == ([2, 1], [])

    def test_count_limits_both_walks(self) -> None:
        manager = BlockManager(16, 4)
        running = [generating(make_request(i), manager) for i in range(3)]
        fresh = make_request(9)
        scheduler = GuaranteedNoEvictScheduler(2, manager)
        assert ids(*scheduler.schedule_request([fresh, *running])) == ([0, 1], [])
        assert ids(*scheduler.schedule_request([fresh, make_request(8), running[0]])) == (
            [0, 9],
            [],
        )

    def test_a_pool_without_room_never_pauses(self) -> None:
        manager = BlockManager(4, 4)
        running = [generating(make_request(i, num_prompt=4, max_new=4), manager) for i in (1, 2)]
        scheduler = GuaranteedNoEvictScheduler(8, manager)
        assert ids(*scheduler.schedule_request([*running, make_request(3)])) == ([1, 2], [])

    def test_started_contexts_pass_fresh_ones(self) -> None:
        manager = BlockManager(4, 4)
        started = started_context(make_request(1, num_prompt=8, max_new=4), manager)
        in_front = make_request(2, num_prompt=12, max_new=4)  # never fits next to the started one
        scheduler = GuaranteedNoEvictScheduler(8, manager)
        assert ids(*scheduler.schedule_request([in_front, started])) == ([1], [])


class TestMaxUtilization:
    def test_only_the_next_step_must_fit(self) -> None:
        manager = BlockManager(num_blocks=2, tokens_per_block=4)
        requests = [make_request(i, num_prompt=4, max_new=4) for i in (1, 2)]
        assert [manager.get_blocks_at_completion(request) for request in requests] == [2, 2]
        scheduler = MaxUtilizationScheduler(8, manager)
        assert ids(*scheduler.schedule_request(requests)) == ([1, 2], [])

    def test_blocks_taken_this_round_count(self) -> None:
        scheduler = MaxUtilizationScheduler(8, BlockManager(3, 4))
        requests = [make_request(i, num_prompt=8) for i in (1, 2)]
        assert ids(*scheduler.schedule_request(requests)) == ([1], [])

    def test_the_last_started_is_the_victim(self) -> None:
        manager = BlockManager(3, 4)
        requests = [generating(make_request(i, num_prompt=4), manager) for i in (1, 2, 3)]
        fresh = make_request(4)
        scheduler = MaxUtilizationScheduler(8, manager)
        # 1 and 2 each need a block: 3 is paused for 1, then 2 is its own victim.
        fitting, paused = scheduler.schedule_request([*requests, fresh])
        assert ids(fitting, paused) == ([1], [3, 2])

    def test_one_victim_can_be_enough(self) -> None:
        manager = BlockManager(4, 4)
        first = generating(make_request(1, num_prompt=4), manager)
        second = generating(make_request(2, num_prompt=5), manager)
        third = generating(make_request(3, num_prompt=2), manager)
        scheduler = MaxUtilizationScheduler(8, manager)
        fitting, paused = scheduler.schedule_request([first, second, third])
        assert ids(fitting, paused) == ([1, 2], [3])

    def test_a_request_may_be_its_own_victim(self) -> None:
        manager = BlockManager(2, 4)
        at_ease = generating(make_request(1, num_prompt=2), manager)
        at_border = generating(make_request(2, num_prompt=4), manager)
        scheduler = MaxUtilizationScheduler(8, manager)
        assert ids(*scheduler.schedule_request([at_ease, at_border])) == ([1], [2])

    def test_earlier_requests_are_never_victims(self) -> None:
        manager = BlockManager(2, 4)
        earlier = [generating(make_request(i, num_prompt=2), manager) for i in (1, 2)]
        scheduler = MaxUtilizationScheduler(8, manager)
        assert ids(*scheduler.schedule_request([*earlier, make_request(3)])) == ([1, 2], [])

    def test_a_fresh_one_with_priority_takes_from_the_back(self) -> None:
        manager = BlockManager(2, 4)
        running = [generating(make_request(i, num_prompt=2), manager) for i in (1, 2)]
        scheduler = MaxUtilizationScheduler(8, manager)
        assert ids(*scheduler.schedule_request([make_request(9), *running])) == ([9, 1], [2])

    def test_the_end_moves_to_the_victim(self) -> None:
        # Request 4 is fresh and would fit, but it lies behind the victim.
        manager = BlockManager(3, 4)
        first = generating(make_request(1, num_prompt=4), manager)
        victim = generating(make_request(2, num_prompt=5), manager)
        scheduler = MaxUtilizationScheduler(8, manager)
        fresh = make_request(4, num_prompt=1)
        assert ids(*scheduler.schedule_request([first, victim, fresh])) == ([1], [2])

    def test_a_context_past_its_first_chunk_is_started(self) -> None:
        manager = BlockManager(3, 4)
        first = generating(make_request(1, num_prompt=4), manager)
        context = started_context(make_request(2, num_prompt=8), manager)
        scheduler = MaxUtilizationScheduler(8, manager)
        assert ids(*scheduler.schedule_request([first, context])) == ([1], [2])

    def test_a_fresh_context_is_no_victim(self) -> None:
        manager = BlockManager(2, 4)
        running = generating(make_request(1, num_prompt=2), manager)
        big, small = make_request(2, num_prompt=8), make_request(3)
        scheduler = MaxUtilizationScheduler(8, manager)
        assert ids(*scheduler.schedule_request([running, big, small])) == ([1], [])

    def test_the_count_also_makes_victims(self) -> None:
        manager = BlockManager(9, 4)
        running = [generating(make_request(i), manager) for i in (1, 2)]
        scheduler = MaxUtilizationScheduler(2, manager)
        assert ids(*scheduler.schedule_request([make_request(9), *running])) == ([9, 1], [2])

    def test_outside_the_gate_nobody_is_a_victim(self) -> None:
        manager = BlockManager(2, 4)
        first = generating(make_request(1, num_prompt=4), manager)
        done = generating(make_request(2, num_prompt=4), manager)
        done.state = LlmRequestState.GENERATION_COMPLETE
        scheduler = MaxUtilizationScheduler(8, manager)
        assert ids(*scheduler.schedule_request([first, done])) == ([], [1])

    def test_two_step_lookahead_reserves_for_both_steps(self) -> None:
        manager = BlockManager(1, 4)
        request = generating(make_request(1, num_prompt=3), manager)
        assert ids(*MaxUtilizationScheduler(8, manager).schedule_request([request])) == ([1], [])
        ahead = MaxUtilizationScheduler(8, manager, two_step_lookahead=True)
        assert ids(*ahead.schedule_request([request])) == ([], [1])
