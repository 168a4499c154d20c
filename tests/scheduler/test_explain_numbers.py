"""Who did not run has a reason with true numbers; who ran has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.recorder_worlds import (
    GUARANTEED,
    MAX_UTILIZATION,
    RecordedWorld,
    play,
    small_settings,
)
from support.scheduler_world import generating, make_request

from inflight_recorder.settings import Lists, Settings
from inflight_scheduler import (
    BlockManager,
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

STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH


def reasons_of(
    scheduler: RequestScheduler, active: list[LlmRequest], inflight: tuple[int, ...] = ()
) -> dict[int, str]:
    found = explain(scheduler, active, inflight)
    return {request_id: str(reason) for request_id, reason in found.items()}


def test_blocks_to_completion_and_the_queue_behind() -> None:
    """10 blocks of 4: the first reserves 4 of them, the second would need 7."""
    manager = BlockManager(10, 4)
    scheduler = make_scheduler(GUARANTEED, manager, max_batch_size=8)
    active = [make_request(1, 8, 8), make_request(2, 8, 20)]
    active += [make_request(3, 1, 1), make_request(4, 1, 1)]
    assert reasons_of(scheduler, active) == {
        2: "waiting for KV blocks: needs 7, free 6",
        3: "behind 1 other, first of them request 2",
        4: "behind 2 others, first of them request 2",
    }


def test_whom_a_foreign_scheduler_pauses_needs_blocks_for_all_its_text() -> None:
    """10 blocks of 4: 8 + 6 tokens, of which the last is not cached yet, begin anew in 4."""
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


def test_token_budget_then_batch_limit() -> None:
    manager = BlockManager(100, 4)
    scheduler = make_scheduler(GUARANTEED, manager, max_batch_size=8, max_num_tokens=20)
    active = [make_request(1, 8, 8), make_request(2, 15, 2), make_request(3, 1, 1)]
    assert reasons_of(scheduler, active) == {
        2: "token budget: needs 15 tokens, 12 left",
        3: "behind 1 other, first of them request 2",
    }
    scheduler = make_scheduler(GUARANTEED, manager, max_batch_size=1, max_num_requests=2)
    assert reasons_of(scheduler, active) == {
        2: "batch limit: 1 requests run in this iteration",
        3: "all 2 places are taken",
    }


def test_who_would_start_behind_a_prompt_that_gets_nothing_waits_for_it() -> None:
    """Of 10 tokens the first one's units take 8; the third would find room for its one."""
    chunking = ContextChunking(unit_size=4)
    scheduler = make_scheduler(
        GUARANTEED, BlockManager(40, 4), max_batch_size=8, max_num_tokens=10, chunking=chunking
    )
    assert reasons_of(
        scheduler, [make_request(i, n, 4) for i, n in ((1, 40), (2, 40), (3, 1))]
    ) == {
        2: "token budget: needs 4 tokens, 2 left",
        3: "behind 1 other, first of them request 2",
    }


def test_victims_know_for_whom() -> None:
    """4 blocks of 4, both at a border: one more block is needed, so the last started goes."""
    manager = BlockManager(4, 4)
    scheduler = make_scheduler(MAX_UTILIZATION, manager, max_batch_size=8)
    active = [
        generating(make_request(1, 8, 8), manager),
        generating(make_request(2, 8, 8), manager),
        make_request(3, 1, 1),
    ]
    assert reasons_of(scheduler, active) == {
        2: "paused as victim of request 1, which needs 1 KV blocks, free 0",
        3: "behind 1 other, first of them request 2",
    }


def test_each_victim_knows_whom_it_was_paused_for() -> None:
    """All at a border of 4 blocks of 2: what the last one gives back is enough for two of them."""
    manager = BlockManager(8, 4)
    scheduler = make_scheduler(MAX_UTILIZATION, manager, max_batch_size=8)
    active = [generating(make_request(i, 8, 8), manager) for i in (1, 2, 3, 4)]
    assert reasons_of(scheduler, active) == {
        4: "paused as victim of request 1, which needs 1 KV blocks, free 0",
        3: "paused as victim of request 3, which needs 1 KV blocks, free 0",
    }


def test_a_request_can_be_its_own_victim() -> None:
    """The first one is at no border; the second is, and nobody behind it has started."""
    manager = BlockManager(4, 4)
    scheduler = make_scheduler(MAX_UTILIZATION, manager, max_batch_size=8)
    active = [
        generating(make_request(1, 7, 8), manager),
        generating(make_request(2, 8, 8), manager),
    ]
    assert reasons_of(scheduler, active) == {
        2: "paused as victim of request 2, which needs 1 KV blocks, free 0"
    }


def test_a_static_batch_that_is_being_formed_lacks_blocks_and_one_that_runs_must_end() -> None:
    """10 blocks of 4: the first needs 4 of them until its end, the second 7."""
    manager = BlockManager(10, 4)
    scheduler = make_scheduler(STATIC_BATCH, manager, max_batch_size=8)
    waits = make_request(2, 8, 20)
    assert reasons_of(scheduler, [make_request(1, 8, 8), waits]) == {
        2: "waiting for KV blocks: needs 7, free 6"
    }
    assert reasons_of(scheduler, [generating(make_request(1, 8, 8), manager), waits]) == {
        2: "waiting until the running batch has ended"
    }


def test_nobody_waits_for_the_text_of_another_in_a_static_batch() -> None:
    """One of the batch generates, and another of it has computed a part of the same prompt."""
    manager = BlockManager(20, 4, enable_reuse=True)
    chunking = ContextChunking(unit_size=4)
    scheduler = make_scheduler(
        STATIC_BATCH, manager, max_batch_size=8, max_num_tokens=8, chunking=chunking
    )
    cut, waits = (make_request(number, 12, 4, family=1) for number in (2, 3))
    assert manager.allocate(2, 12) is not None
    cut.context_chunk_size = 4
    cut.move_to_next_context_chunk()
    active = [generating(make_request(1, 8, 8), manager), cut, waits]
    assert reasons_of(scheduler, active) == {3: "waiting until the running batch has ended"}


def test_whose_last_token_is_being_computed_waits_for_nothing() -> None:
    manager = BlockManager(10, 4)
    scheduler = make_scheduler(GUARANTEED, manager, max_batch_size=8)
    completing = generating(make_request(1, 8, 3), manager, 2)
    completing.expect_token()
    assert completing.state is LlmRequestState.GENERATION_TO_COMPLETE
    assert reasons_of(scheduler, [completing, make_request(2, 8, 20)]) == {}


def test_a_context_that_holds_blocks_is_looked_at_before_a_fresh_one_in_front_of_it() -> None:
    """6 blocks of 4, 3 of them held: there are too few for either, and the started one is first."""
    manager = BlockManager(6, 4)
    scheduler = make_scheduler(GUARANTEED, manager, max_batch_size=8)
    started = make_request(2, 12, 13)
    assert manager.allocate(2, 12) is not None
    started.context_chunk_size = 4
    started.move_to_next_context_chunk()
    assert reasons_of(scheduler, [make_request(1, 20, 9), started]) == {
        2: "waiting for KV blocks: needs 4, free 3",
        1: "behind 1 other, first of them request 2",
    }


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
    class Nobody(RequestScheduler):
        """Lets nobody run."""

        def schedule_request(self, active_requests, inflight_request_ids):  # type: ignore[no-untyped-def]
            return [], [], []

    assert reasons_of(Nobody(), [make_request(1)]) == {1: "the scheduler does not say why"}


def check(scheduler: RequestScheduler, active: Sequence[LlmRequest], lists: Lists) -> set[WaitCode]:
    """The property: exactly those who do not run have a reason, and its numbers are true."""
    assert isinstance(scheduler, SimpleScheduler)
    reasons = explain(scheduler, active)
    running = {r.request_id for r in (*lists[0], *lists[1])}
    assert set(reasons) == {r.request_id for r in active} - running
    paused = {r.request_id for r in lists[2]}
    assert paused == {i for i, r in reasons.items() if r.code is WaitCode.PAUSED}
    for request_id, reason in reasons.items():
        assert reason.code is not WaitCode.UNKNOWN
        check_numbers(scheduler, {r.request_id: r for r in active}, running, request_id, reason)
    return {reason.code for reason in reasons.values()}


def check_numbers(
    scheduler: SimpleScheduler,
    by_id: dict[int, LlmRequest],
    running: set[int],
    request_id: int,
    reason: WaitReason,
) -> None:
    micro_batch = scheduler.micro_batch_scheduler
    match reason.code:
        case WaitCode.BLOCKS | WaitCode.TOKENS:
            assert reason.num_needed > reason.num_available >= 0
        case WaitCode.BATCH:
            assert len(running) == reason.num_available == micro_batch.max_batch_size
        case WaitCode.BEHIND:
            assert reason.behind_id not in running
            assert reason.num_ahead >= 1
            order = list(by_id)
            assert reason.behind_id is not None
            assert order.index(reason.behind_id) < order.index(request_id)
        case WaitCode.PAUSED:
            assert reason.behind_id is not None
            order = list(by_id)
            assert order.index(reason.behind_id) <= order.index(request_id)
            assert reason.num_needed is None or (
                reason.num_needed > (reason.num_available or 0) >= 0
            )
    if reason.code is WaitCode.BLOCKS:
        check_one_block_more(scheduler, list(by_id.values()), request_id, reason)


def check_one_block_more(
    scheduler: SimpleScheduler, active: list[LlmRequest], request_id: int, reason: WaitReason
) -> None:
    """With exactly the missing blocks, and not with one less, the request would fit."""
    manager = scheduler.capacity_scheduler.block_manager  # type: ignore[attr-defined]
    missing = reason.num_needed - reason.num_available
    for extra in (missing - 1, missing):
        ids = range(manager.num_blocks, manager.num_blocks + extra)
        manager._pool._free.extend(ids)
        fitting, _ = scheduler.capacity_scheduler.schedule_request(active)
        del manager._pool._free[len(manager._pool._free) - extra :]
        is_fitting = request_id in {request.request_id for request in fitting}
        assert is_fitting == (extra == missing)


class CheckedWorld(RecordedWorld):
    """Checks the reasons of every decision."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.codes: set[WaitCode] = set()

    def decide(self) -> Lists:
        decision = super().decide()
        self.codes |= check(self.scheduler, self.active, decision)
        return decision


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy))
@hypothesis_settings(max_examples=40, deadline=None)
@given(settings=small_settings, seed=st.integers(0, 2**16))
def test_whoever_did_not_run_has_a_true_reason(
    policy: CapacitySchedulerPolicy, settings: Settings, seed: int
) -> None:
    settings = replace(settings, policy=policy)
    play(settings, num_requests=15, seed=seed, world=CheckedWorld(settings))


def test_every_common_reason_occurs_in_such_worlds() -> None:
    codes: set[WaitCode] = set()
    for seed, policy in enumerate([GUARANTEED, MAX_UTILIZATION] * 2):
        world = CheckedWorld(Settings(policy, 16, 2, 3, 24))
        play(Settings(policy, 16, 2, 3, 24), num_requests=30, seed=seed, world=world)
        codes |= world.codes
    assert {WaitCode.BLOCKS, WaitCode.MAX_REQUESTS, WaitCode.TOKENS} <= codes
    assert {WaitCode.BEHIND, WaitCode.PAUSED} <= codes
