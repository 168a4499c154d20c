"""Draft tokens from arrival to the plan: cost, fitting, room, and when they are dropped."""

from __future__ import annotations

import pytest
from support.scheduler_world import generating, make_request

from inflight_scheduler import (
    BatchPlanner,
    BlockManager,
    ContextChunk,
    FinishReason,
    VerifiedSlot,
)


def test_what_a_chunk_cannot_take_is_dropped_when_it_runs() -> None:
    manager = BlockManager(8, 2)
    planner = BatchPlanner(manager, 2)
    request = make_request(1, 3, num_drafts=5)
    request.num_chunk_drafts = 1
    batch = planner.plan([request], [])
    assert (request.num_draft_tokens, manager.num_blocks_of(1)) == (1, 2)
    assert batch.context_chunks[0].drafts == (0,)
    planner.update(batch, [1, 2])
    assert request.num_draft_tokens == 0, "they are verified"
    assert request.tokens[3:] == [1], "it was wrong"


def test_a_first_chunk_takes_room_for_all() -> None:
    manager = BlockManager(8, 2)
    planner = BatchPlanner(manager, 2)
    request = make_request(1, 4, 3, num_drafts=9)
    request.context_chunk_size = 2
    planner.update(planner.plan([request], []), [])
    assert (request.num_draft_tokens, manager.num_blocks_of(1)) == (9, 4)
    with pytest.raises(ValueError, match="10 draft tokens, but its context started with 9"):
        request.set_draft_tokens([0] * 10)
    planner.plan([request], [])
    assert manager.num_blocks_of(1) == 4


def test_only_drafts_that_can_become_tokens_run() -> None:
    planner = BatchPlanner(BlockManager(8, 2), 2)
    request = make_request(1, 2, 3, num_drafts=6)
    batch = planner.plan([request], [])
    assert batch.context_chunks[0].drafts == (0, 0), "a third token comes in any case"
    planner.update(batch, [0, 0, 5])
    assert (request.tokens[2:], request.finish_reason) == ([0, 0, 5], FinishReason.LENGTH)
    assert (request.num_verified_drafts, request.num_accepted_drafts) == (2, 2)


def test_the_run_of_a_generation_and_where_its_slot_stands_then() -> None:
    planner = BatchPlanner(BlockManager(8, 2), 3)
    first, second = make_request(1, 2, 9), make_request(2, 3, 9)
    planner.update(planner.plan([first, second], []), [4, 6])
    second.set_draft_tokens([7, 8])
    batch = planner.plan([], [first, second])
    assert first.seq_slot is not None
    assert second.seq_slot is not None
    slots = (first.seq_slot, second.seq_slot)
    assert (batch.generation_slots, batch.verified) == (slots[:1], ())
    assert batch.draft_runs == (ContextChunk(slots[1], 3, (6,), True, (7, 8)),)
    assert (batch.num_tokens, batch.num_context_tokens, batch.num_drawn) == (4, 0, 4)
    assert planner.token_owners(batch) == [second] * 3 + [first]
    assert planner.update(batch, [7, 9, 1, 5]) == [second, first]
    assert (second.tokens[3:], first.tokens[2:]) == ([6, 7, 9], [4, 5])
    second.set_draft_tokens([3])
    batch = planner.plan([], [second])
    assert (batch.verified, batch.draft_runs[0].start) == ((), 5), "the run says it"
    planner.update(batch, [3, 2])
    batch = planner.plan([], [first, second])
    assert batch.verified == (VerifiedSlot(slots[1], 7, 2),)
    planner.update(batch, [0, 0])
    assert planner.plan([], [first, second]).verified == (), "told once"


def test_a_block_is_kept_as_far_as_tokens_count() -> None:
    manager = BlockManager(8, 2, enable_reuse=True)
    planner = BatchPlanner(manager, 2)
    request = make_request(1, 3, 9, num_drafts=4)
    planner.update(planner.plan([request], []), [0, 0, 5, 5, 5])
    assert manager.num_blocks_of(1) == 4
    request.finish(FinishReason.CANCELLED)
    planner.release(request)
    assert manager.num_idle_blocks == 2, "five tokens are cached, the sixth is not"


def test_one_draw_of_a_row_that_failed() -> None:
    planner = BatchPlanner(BlockManager(8, 2), 2)
    request = make_request(1, 2, 9, num_drafts=2)
    planner.update(planner.plan([request], []), [0, -1, 0])
    assert request.tokens[2:] == [0, -1]


def test_a_pause_drops_them() -> None:
    request = generating(make_request(1, 1), BlockManager(4, 4))
    request.set_draft_tokens([0, 0, 0])
    request.pause()
    assert request.num_draft_tokens == 0
