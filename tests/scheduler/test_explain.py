"""Why a request waits: the reasons, their texts and their numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler_soak import Soak
from support.scheduler_world import Make, fresh, generating, make_request, running, started

from inflight_scheduler import (
    BlockManager,
    CacheCapacityScheduler,
    CapacitySchedulerPolicy,
    ContextChunking,
    LlmRequest,
    LlmRequestState,
    RequestScheduler,
    SimpleScheduler,
    WaitCode,
    WaitReason,
    explain,
    explain_left_out,
    make_scheduler,
)

GUARANTEED = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH


def reasons_of(
    scheduler: RequestScheduler, active: list[LlmRequest], inflight: tuple[int, ...] = ()
) -> dict[int, str]:
    found = explain(scheduler, active, inflight)
    return {request_id: str(reason) for request_id, reason in found.items()}


UNITS_OF_4 = ContextChunking(unit_size=4)
BEHIND_2 = "behind 1 other, first of them request 2"
Row = tuple[str, CapacitySchedulerPolicy, int, dict[str, Any], list[Make], dict[int, str]]
ROWS: list[Row] = [
    (
        "the first reserves 4 of 10 blocks, the second would need 7",
        GUARANTEED,
        10,
        {},
        [fresh(1, 8, 8), fresh(2, 8, 20), fresh(3, 1, 1), fresh(4, 1, 1)],
        {
            2: "waiting for KV blocks: needs 7, free 6",
            3: BEHIND_2,
            4: "behind 2 others, first of them request 2",
        },
    ),
    (
        "token budget",
        GUARANTEED,
        100,
        {"max_num_tokens": 20},
        [fresh(1, 8, 8), fresh(2, 15, 2), fresh(3, 1, 1)],
        {2: "token budget: needs 15 tokens, 12 left", 3: BEHIND_2},
    ),
    (
        "batch limit and places",
        GUARANTEED,
        100,
        {"max_batch_size": 1, "max_num_requests": 2},
        [fresh(1, 8, 8), fresh(2, 15, 2), fresh(3, 1, 1)],
        {2: "batch limit: 1 requests run in this iteration", 3: "all 2 places are taken"},
    ),
    (
        # Of 10 tokens the first one's units take 8; the third would find room for its one.
        "one that would start behind a prompt that gets nothing waits for it",
        GUARANTEED,
        40,
        {"max_num_tokens": 10, "chunking": UNITS_OF_4},
        [fresh(1, 40, 4), fresh(2, 40, 4), fresh(3, 1, 4)],
        {2: "token budget: needs 4 tokens, 2 left", 3: BEHIND_2},
    ),
    (
        "a context for which generation leaves no chunk",
        GUARANTEED,
        40,
        {"max_num_tokens": 4, "chunking": UNITS_OF_4},
        [running(1, 2, 9), fresh(2, 9), fresh(3, 2)],
        {2: "token budget: needs 4 tokens, 3 left", 3: BEHIND_2},
    ),
    (
        # Both at a border of 4 blocks: one more is needed, so the last started goes.
        "a victim knows for which request",
        MAX_UTILIZATION,
        4,
        {},
        [running(1, 8), running(2, 8), fresh(3, 1, 1)],
        {2: "paused as victim of request 1, which needs 1 KV blocks, free 0", 3: BEHIND_2},
    ),
    (
        # All at a border: what the last one gives back is enough for two of them.
        "each victim knows for which request",
        MAX_UTILIZATION,
        8,
        {},
        [running(1, 8), running(2, 8), running(3, 8), running(4, 8)],
        {
            4: "paused as victim of request 1, which needs 1 KV blocks, free 0",
            3: "paused as victim of request 3, which needs 1 KV blocks, free 0",
        },
    ),
    (
        # The first one is at no border; the second is, and none behind it has started.
        "its own victim",
        MAX_UTILIZATION,
        4,
        {},
        [running(1, 7), running(2, 8)],
        {2: "paused as victim of request 2, which needs 1 KV blocks, free 0"},
    ),
    (
        "a victim of the count",
        MAX_UTILIZATION,
        9,
        {"max_num_requests": 1},
        [fresh(1), running(2)],
        {2: "paused as victim of request 2, which takes its place"},
    ),
    (
        "a static batch that is being formed lacks blocks",
        STATIC_BATCH,
        10,
        {},
        [fresh(1, 8, 8), fresh(2, 8, 20)],
        {2: "waiting for KV blocks: needs 7, free 6"},
    ),
    (
        "a static batch that runs must end",
        STATIC_BATCH,
        10,
        {},
        [running(1, 8), fresh(2, 8, 20), fresh(3)],
        {2: "waiting until the running batch has ended", 3: BEHIND_2},
    ),
    (
        # 3 of 6 blocks are held: there are too few for either, and the started one is first.
        "a context that holds blocks is looked at before a fresh one in front of it",
        GUARANTEED,
        6,
        {},
        [fresh(1, 20, 9), started(2, 12, 13)],
        {2: "waiting for KV blocks: needs 4, free 3", 1: BEHIND_2},
    ),
]


@pytest.mark.parametrize(
    ("policy", "num_blocks", "limits", "makes", "reasons"),
    [row[1:] for row in ROWS],
    ids=[row[0] for row in ROWS],
)
def test_reasons(
    policy: CapacitySchedulerPolicy,
    num_blocks: int,
    limits: dict[str, Any],
    makes: list[Make],
    reasons: dict[int, str],
) -> None:
    """Blocks of 4 tokens, and 8 places unless the row says otherwise."""
    manager = BlockManager(num_blocks, 4)
    scheduler = make_scheduler(policy, manager, **({"max_batch_size": 8} | limits))
    assert reasons_of(scheduler, [make(manager) for make in makes]) == reasons


def test_a_request_paused_by_a_user_scheduler_needs_blocks_for_all_its_text() -> None:
    """10 blocks of 4: 8 + 6 tokens, of which the last is not cached yet, start again in 4."""
    manager = BlockManager(10, 4)
    paused = generating(make_request(1, 8, 20), manager, 6)
    goes_on = generating(make_request(2, 8, 20), manager, 6)
    reasons = explain_left_out(
        "Mine",
        [paused, goes_on],
        ([], [goes_on], [paused]),
        block_manager=manager,
        max_batch_size=8,
        max_num_tokens=40,
        num_free_blocks=6,
    )
    text = "left out by the scheduler Mine: needs 4 KV blocks, free 6; 1 of 8 places and 1 of 40"
    assert {id_: str(reason) for id_, reason in reasons.items()} == {1: f"{text} tokens are taken"}


def test_of_those_left_out_each_is_told_what_its_next_step_needs() -> None:
    """A prompt of 9 takes 3 blocks of 4; of those who generate one is at a border."""
    manager = BlockManager(10, 4)
    active = [
        generating(make_request(1, 8, 8), manager),
        generating(make_request(2, 7, 8), manager),
        make_request(3, 9, 8),
    ]
    reasons = explain_left_out(
        "Mine", active, ([], [], []), block_manager=manager, max_batch_size=8, max_num_tokens=None
    )
    assert {id_: reason.num_needed for id_, reason in reasons.items()} == {1: 1, 2: 0, 3: 3}
    assert str(reasons[3]) == (
        "left out by the scheduler Mine: needs 3 KV blocks, free 6; 0 of 8 places and 0 tokens are "
        "taken"
    )


def test_a_request_whose_last_token_is_being_computed_waits_for_nothing() -> None:
    manager = BlockManager(10, 4)
    scheduler = make_scheduler(GUARANTEED, manager, max_batch_size=8)
    completing = generating(make_request(1, 8, 3), manager, 2)
    completing.expect_token()
    assert completing.state is LlmRequestState.GENERATION_TO_COMPLETE
    assert reasons_of(scheduler, [completing, make_request(2, 8, 20)]) == {}


def test_a_request_whose_kv_is_on_its_way_to_another_server_cannot_run() -> None:
    scheduler = make_scheduler(GUARANTEED, BlockManager(8, 4), max_batch_size=8)
    request = make_request(1)
    request.state = LlmRequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS
    assert reasons_of(scheduler, [request]) == {1: "not in a state that can run"}


def test_a_step_still_running_and_beams() -> None:
    manager = BlockManager(40, 4)
    scheduler = make_scheduler(GUARANTEED, manager, max_batch_size=8)
    active = [
        generating(make_request(1, 8, 8), manager),
        generating(make_request(2, 8, 8), manager),
        generating(make_request(3, 8, 8, beam_width=2), manager),
    ]
    assert reasons_of(scheduler, active, (1,)) == {
        1: "still running in another step",
        3: "its beam width differs from that of request 2, which runs",
    }


def test_a_foreign_scheduler_keeps_its_reasons() -> None:
    class RunsNone(RequestScheduler):
        """Lets no request run."""

        def schedule_request(self, active_requests, inflight_request_ids):  # type: ignore[no-untyped-def]
            return [], [], []

    assert reasons_of(RunsNone(), [make_request(1)]) == {1: "the scheduler does not say why"}


def test_a_request_that_waits_for_a_shared_context_does_not_hold_up_the_others() -> None:
    manager = BlockManager(16, 4, enable_reuse=True)
    scheduler = make_scheduler(GUARANTEED, manager, max_batch_size=8)
    same = [make_request(i, 9, 3, family=1) for i in (1, 2)]
    assert reasons_of(scheduler, [*same, make_request(3)]) == {
        2: "waiting for a request that computes the same text"
    }


def check(scheduler: SimpleScheduler, active: Sequence[LlmRequest]) -> set[WaitCode]:
    """The property: exactly those that do not run have a reason, and its numbers are true."""
    context, generation, paused = scheduler.schedule_request(active, ())
    running = {r.request_id for r in (*context, *generation)}
    reasons = explain(scheduler, active)
    assert set(reasons) == {r.request_id for r in active} - running
    assert {r.request_id for r in paused} == {
        request_id for request_id, r in reasons.items() if r.code is WaitCode.PAUSED
    }
    order = [r.request_id for r in active]
    for request_id, reason in reasons.items():
        assert str(reason)
        match reason.code:
            case WaitCode.UNKNOWN:
                raise AssertionError("our scheduler knows why")
            case WaitCode.BLOCKS | WaitCode.TOKENS | WaitCode.RESOURCE:
                assert reason.num_needed > reason.num_available
            case WaitCode.BATCH:
                assert reason.num_available == scheduler.micro_batch_scheduler.max_batch_size
            case WaitCode.BEHIND | WaitCode.PAUSED:
                assert reason.behind_id is not None
                is_behind = reason.code is WaitCode.BEHIND
                assert (reason.behind_id not in running) or not is_behind
                assert (reason.num_ahead >= 1) == is_behind
                assert order.index(reason.behind_id) <= order.index(request_id)
        if reason.code is WaitCode.BLOCKS:
            check_one_block_more(scheduler, list(active), request_id, reason)
    return {reason.code for reason in reasons.values()}


def check_one_block_more(
    scheduler: SimpleScheduler, active: list[LlmRequest], request_id: int, reason: WaitReason
) -> None:
    """With exactly the missing blocks, and not with one less, the request would not lack blocks."""
    capacity = scheduler.capacity_scheduler
    assert isinstance(capacity, CacheCapacityScheduler)
    free, num_blocks = capacity.block_manager._pool._free, capacity.block_manager.num_blocks
    missing = reason.num_needed - reason.num_available
    for extra in (missing - 1, missing):
        free.extend(range(num_blocks, num_blocks + extra))
        again = explain(scheduler, active).get(request_id)
        del free[len(free) - extra :]
        lacks_blocks = again is not None and again.code is WaitCode.BLOCKS
        assert lacks_blocks == (extra < missing)


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy), ids=lambda policy: policy.name)
@settings(max_examples=15, deadline=None)
@given(dice=st.randoms(use_true_random=False))
def test_exactly_those_that_do_not_run_have_a_true_reason(
    policy: CapacitySchedulerPolicy, dice: random.Random
) -> None:
    soak = Soak(dice, policy)
    for _ in range(20):
        soak.run_one(dice.random() < 0.7)
        soak.world.settle_running()
        check(soak.world.scheduler, soak.world.active)
