"""The capacity policies of contract 4.2, one rule per test or row."""

from __future__ import annotations

import pytest
from support.scheduler_world import Make, fresh, ids, make_request, running, started

from inflight_scheduler import (
    BlockManager,
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    LlmRequestState,
    MaxRequestsScheduler,
    MaxUtilizationScheduler,
)


def test_without_a_cache_the_first_in_order_fit() -> None:
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


GUARANTEED: list[tuple[str, int, int, list[Make], list[int]]] = [
    # 1 holds a block and takes three more; 2 would need 3 of the 5 - 3 left, 3 needs 2.
    ("generation reserves to completion", 6, 8, [running(1, 4, 12), fresh(2, 8, 4)], [1]),
    ("what is left can be taken", 6, 8, [running(1, 4, 12), fresh(3, 4, 4)], [1, 3]),
    (
        "the first that does not fit ends it",
        4,
        8,
        [fresh(1, 4, 4), fresh(2, 8), fresh(3, 1, 1)],
        [1],
    ),
    ("generation comes first", 8, 8, [fresh(1), running(2)], [2, 1]),
    ("count limits generation", 16, 2, [fresh(9), running(0), running(1), running(2)], [0, 1]),
    ("count limits fresh ones", 16, 2, [fresh(9), fresh(8), running(0)], [0, 9]),
    ("never pauses", 4, 8, [running(1, 4, 4), running(2, 4, 4), fresh(3)], [1, 2]),
    # The fresh one never fits next to the started one.
    ("started contexts pass fresh ones", 4, 8, [fresh(2, 12, 4), started(1, 8, 4)], [1]),
]


@pytest.mark.parametrize(
    ("num_blocks", "max_num_requests", "makes", "fitting"),
    [row[1:] for row in GUARANTEED],
    ids=[row[0] for row in GUARANTEED],
)
def test_guaranteed_no_evict(
    num_blocks: int, max_num_requests: int, makes: list[Make], fitting: list[int]
) -> None:
    manager = BlockManager(num_blocks, 4)
    scheduler = GuaranteedNoEvictScheduler(max_num_requests, manager)
    requests = [make(manager) for make in makes]
    assert ids(*scheduler.schedule_request(requests)) == (fitting, [])


UTILIZATION: list[tuple[str, int, int, list[Make], list[int], list[int]]] = [
    # Until their end both would need two blocks.
    ("only the next step must fit", 2, 8, [fresh(1, 4, 4), fresh(2, 4, 4)], [1, 2], []),
    ("blocks of this round count", 3, 8, [fresh(1, 8), fresh(2, 8)], [1], []),
    # 1 and 2 each need a block: 3 is paused for 1, then 2 is its own victim.
    (
        "the last started is the victim",
        3,
        8,
        [running(1, 4), running(2, 4), running(3, 4), fresh(4)],
        [1],
        [3, 2],
    ),
    ("one victim can do", 4, 8, [running(1, 4), running(2, 5), running(3, 2)], [1, 2], [3]),
    ("its own victim", 2, 8, [running(1, 2), running(2, 4)], [1], [2]),
    ("earlier ones are no victims", 2, 8, [running(1, 2), running(2, 2), fresh(3)], [1, 2], []),
    ("an urgent one", 2, 8, [fresh(9), running(1, 2), running(2, 2)], [9, 1], [2]),
    # The fresh one would fit, but lies behind the victim.
    ("the end moves to the victim", 3, 8, [running(1, 4), running(2, 5), fresh(4)], [1], [2]),
    ("a started context is a victim", 3, 8, [running(1, 4), started(2, 8)], [1], [2]),
    ("a fresh one is no victim", 2, 8, [running(1, 2), fresh(2, 8), fresh(3)], [1], []),
    ("the count makes victims, too", 9, 2, [fresh(9), running(1), running(2)], [9, 1], [2]),
]


@pytest.mark.parametrize(
    ("num_blocks", "max_num_requests", "makes", "fitting", "paused"),
    [row[1:] for row in UTILIZATION],
    ids=[row[0] for row in UTILIZATION],
)
def test_max_utilization(
    num_blocks: int,
    max_num_requests: int,
    makes: list[Make],
    fitting: list[int],
    paused: list[int],
) -> None:
    manager = BlockManager(num_blocks, 4)
    scheduler = MaxUtilizationScheduler(max_num_requests, manager)
    requests = [make(manager) for make in makes]
    assert ids(*scheduler.schedule_request(requests)) == (fitting, paused)


def test_outside_the_gate_none_is_a_victim() -> None:
    manager = BlockManager(2, 4)
    first, done = running(1, 4)(manager), running(2, 4)(manager)
    done.state = LlmRequestState.GENERATION_COMPLETE
    assert ids(*MaxUtilizationScheduler(8, manager).schedule_request([first, done])) == ([], [1])


def test_two_step_lookahead_reserves_for_both_steps() -> None:
    manager = BlockManager(1, 4)
    request = running(1, 3)(manager)
    assert ids(*MaxUtilizationScheduler(8, manager).schedule_request([request])) == ([1], [])
    ahead = MaxUtilizationScheduler(8, manager, two_step_lookahead=True)
    assert ids(*ahead.schedule_request([request])) == ([], [1])
