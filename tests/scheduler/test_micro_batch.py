"""The micro-batch rules of contract 4.6 (without chunking), one per test."""

from __future__ import annotations

import pytest
from support.scheduler_world import generating, ids, make_request

from inflight_scheduler import (
    BlockManager,
    ContextTooLong,
    LlmRequest,
    LlmRequestState,
    MicroBatchScheduler,
)


def running(request_id: int, beam_width: int = 1) -> LlmRequest:
    return generating(make_request(request_id, beam_width=beam_width), BlockManager(4, 4))


def test_contexts_and_generation_are_parted_in_order() -> None:
    requests = [make_request(1), running(2), make_request(3), running(4)]
    assert ids(*MicroBatchScheduler(8, 100).schedule(requests)) == ([1, 3], [2, 4])


def test_stops_at_the_batch_size() -> None:
    requests = [make_request(1), running(2), running(3)]
    assert ids(*MicroBatchScheduler(2, 100).schedule(requests)) == ([1], [2])


def test_inflight_requests_are_passed_over() -> None:
    requests = [running(1), running(2), make_request(3)]
    assert ids(*MicroBatchScheduler(1, 100).schedule(requests, {1})) == ([], [2])


def test_gate_leaves_out_what_finishes_with_the_running_step() -> None:
    ending, encoder = running(1), make_request(2)
    ending.state = LlmRequestState.GENERATION_TO_COMPLETE
    encoder.state = LlmRequestState.ENCODER_INIT
    assert ids(*MicroBatchScheduler(8).schedule([ending, encoder, running(3)])) == ([], [3])


def test_encoders_come_first_and_each_part_is_in_the_order_of_its_adapters() -> None:
    requests = [
        make_request(number, lora_task_id=adapter, encoder_length=encoder_length)
        for number, adapter, encoder_length in (
            (1, 3, 0),
            (2, 3, 1),
            (3, None, 0),
            (4, 1, 1),
            (5, None, 1),
        )
    ]
    micro_batch = MicroBatchScheduler(8, no_schedule_until_state=LlmRequestState.ENCODER_INIT)
    assert ids(*micro_batch.schedule(requests)) == ([5, 4, 2, 3, 1], [])


def test_a_context_over_budget_ends_the_walk() -> None:
    requests = [make_request(1, 6), make_request(2, 5), make_request(3, 1), running(4)]
    assert ids(*MicroBatchScheduler(8, 10).schedule(requests)) == ([1], [])


def test_the_budget_can_be_used_up_exactly() -> None:
    requests = [make_request(1, 6), running(2), make_request(3, 3), running(4)]
    assert ids(*MicroBatchScheduler(8, 10).schedule(requests)) == ([1, 3], [2])


def test_generation_over_budget_ends_the_walk() -> None:
    requests = [running(1), running(2), running(3)]
    assert ids(*MicroBatchScheduler(8, 2).schedule(requests)) == ([], [1, 2])


def test_generation_costs_its_beam_width() -> None:
    requests = [running(1, beam_width=3), running(2, beam_width=3)]
    assert ids(*MicroBatchScheduler(8, 5).schedule(requests)) == ([], [1])


def test_another_beam_width_is_passed_over_and_costs_nothing() -> None:
    requests = [running(1), running(2, beam_width=2), running(3)]
    assert ids(*MicroBatchScheduler(2, 3).schedule(requests)) == ([], [1, 3])


def test_without_a_budget_only_the_batch_size_limits() -> None:
    requests = [make_request(1, 10_000), make_request(2, 10_000)]
    assert ids(*MicroBatchScheduler(8, None).schedule(requests)) == ([1, 2], [])


def test_a_context_that_can_never_run_is_an_error_that_names_it() -> None:
    requests = [running(1), make_request(7, num_prompt=11)]
    with pytest.raises(ContextTooLong, match=r"request 7: .* 11 tokens .* max_num_tokens=10") as e:
        MicroBatchScheduler(8, 10).schedule(requests)
    assert e.value.request_id == 7


@pytest.mark.parametrize(("size", "budget"), [(0, None), (1, 0)])
def test_empty_limits_are_refused(size: int, budget: int | None) -> None:
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        MicroBatchScheduler(size, budget)
    assert ids(*MicroBatchScheduler(1, 1).schedule([make_request(1)])) == ([1], [])
