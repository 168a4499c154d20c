"""Draft tokens from arrival to the plan: cost, fitting, room, and when they are dropped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler_world import generating, ids, make_request

from inflight_scheduler import (
    ActiveRequests,
    BatchPlanner,
    BlockManager,
    ContextChunk,
    ContextChunking,
    ContextChunkingPolicy,
    ContextTooLong,
    FinishReason,
    InvalidDecision,
    LlmRequest,
    MicroBatchScheduler,
    VerifiedSlot,
    check_decision,
    refusal_reason,
)


def drafting(request: LlmRequest, num_drafts: int) -> LlmRequest:
    request.set_draft_tokens([0] * num_drafts)
    return request


def running(request_id: int, num_drafts: int) -> LlmRequest:
    return drafting(generating(make_request(request_id, 1), BlockManager(4, 4)), num_drafts)


class TestCost:
    def test_generation(self) -> None:
        micro_batch = MicroBatchScheduler(8, 8)
        assert ids(*micro_batch.schedule([running(1, 3), running(2, 3)])) == ([], [1, 2])
        assert ids(*micro_batch.schedule([running(1, 3), running(2, 4)])) == ([], [1])

    def test_context(self) -> None:
        micro_batch = MicroBatchScheduler(8, 8)
        assert ids(*micro_batch.schedule([make_request(1, 5, num_drafts=3)])) == ([1], [])
        two = [make_request(1, 3, num_drafts=1), make_request(2, 4, num_drafts=1)]
        assert ids(*micro_batch.schedule(two)) == ([1], [])
        with pytest.raises(ContextTooLong, match="request 1: a context of 9 tokens exceeds"):
            micro_batch.schedule([make_request(1, 5, num_drafts=4)])


class TestFitting:
    """lengths, drafts, capacity -> sizes, kept drafts; units of 4."""

    @pytest.mark.parametrize(
        ("lengths", "drafts", "capacity", "sizes", "kept"),
        [
            ([6], [9], 15, [6], [9]),  # all fits, so nothing is cut
            ([6], [9], 14, [6], [2]),  # completes the unit
            ([8], [9], 14, [8], [0]),  # the chunk is exact
            ([6], [1], 6, [6], [0]),  # no capacity left
            ([6, 5], [9, 9], 13, [6, 5], [2, 0]),  # only what is kept is charged
            ([6, 5], [0, 9], 13, [6, 5], [0, 2]),  # nothing for who has none
            ([20], [3], 11, [8], [0]),  # not the last chunk
            ([5, 2], [0, 8], 8, [5, 2], [0, 1]),
        ],
    )
    def test_first_come(
        self,
        lengths: list[int],
        drafts: list[int],
        capacity: int,
        sizes: list[int],
        kept: list[int],
    ) -> None:
        assert ContextChunking(unit_size=4).chunks(lengths, drafts, capacity) == (sizes, kept)

    def test_the_longest_context_bounds_them(self) -> None:
        chunking = ContextChunking(unit_size=4, max_context_length=7)
        assert chunking.chunks([6], [3], None) == ([6], [1])
        assert chunking.chunks([6], [1], None) == ([6], [1])

    def test_force_chunk_always_fits_them(self) -> None:
        chunking = ContextChunking(ContextChunkingPolicy.FORCE_CHUNK, 4)
        assert chunking.chunks([3, 4], [9, 9], None) == ([3, 4], [1, 0])

    @given(
        policy=st.sampled_from(ContextChunkingPolicy),
        unit_size=st.integers(1, 5),
        contexts=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), max_size=5),
        capacity=st.none() | st.integers(0, 30),
        longest=st.none() | st.integers(5, 9),
    )
    def test_no_bound_is_exceeded(
        self,
        policy: ContextChunkingPolicy,
        unit_size: int,
        contexts: list[tuple[int, int]],
        capacity: int | None,
        longest: int | None,
    ) -> None:
        lengths, drafts = [c[0] for c in contexts], [c[1] for c in contexts]
        chunking = ContextChunking(policy, unit_size, longest)
        sizes, kept = chunking.chunks(lengths, drafts, capacity)
        assert sum(sizes) + sum(kept) <= (10**9 if capacity is None else capacity)
        for (length, num_drafts), size, num_kept in zip(contexts, sizes, kept, strict=True):
            assert 0 <= num_kept <= num_drafts
            assert num_kept == 0 or size == length
            assert longest is None or size + num_kept <= longest

    def test_the_kept_ones_are_decided_with_the_chunk(self) -> None:
        micro_batch = MicroBatchScheduler(8, 7, chunking=ContextChunking(unit_size=4))
        request = make_request(1, 6, num_drafts=5)
        micro_batch.schedule([request])
        assert (request.context_chunk_size, request.num_chunk_drafts) == (6, 1)
        assert request.num_draft_tokens == 5, "a decision can be thrown away"


class TestPlan:
    def test_what_a_chunk_cannot_take_is_dropped_when_it_runs(self) -> None:
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

    def test_a_first_chunk_takes_room_for_all(self) -> None:
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

    def test_a_generation_step_takes_room_for_all(self) -> None:
        manager = BlockManager(8, 2)
        active = ActiveRequests(manager)
        planner = BatchPlanner(manager, 2, active)
        request = make_request(1, 2, 9)
        active.add(request)
        planner.update(planner.plan([request], []), [1])
        drafting(request, 4)
        assert active.num_with_drafts == 1
        batch = planner.plan([], active.generation)
        assert len(batch.new_blocks) == 3
        planner.update(batch, [0, 1, 2, 3, 4])  # one of them was right
        assert request.tokens[2:] == [1, 0, 1]
        assert (active.num_with_drafts, request.num_draft_tokens) == (0, 0)
        for num_blocks in (4, 4, 4, 4, 5):
            active.check_integrity()
            planner.update(planner.plan([], active.generation), [1])
            assert manager.num_blocks_of(1) == num_blocks

    def test_others_open_their_blocks_in_time(self) -> None:
        """The calendar of who opens a block is not read in a step with drafts."""
        manager = BlockManager(8, 4)
        active = ActiveRequests(manager)
        planner = BatchPlanner(manager, 2, active)
        plain, guessing = make_request(1, 2, 9), make_request(2, 1, 9)
        for request in (plain, guessing):
            active.add(request)
        planner.update(planner.plan([plain, guessing], []), [1, 1])
        for _ in range(3):  # tokens 3 to 5 of the plain one
            drafting(guessing, 1 if plain.num_tokens == 3 else 0)
            batch = planner.plan([], active.generation)
            planner.update(batch, [1] * batch.num_drawn)
        assert (plain.num_cached_tokens, manager.num_blocks_of(1)) == (5, 2)

    def test_only_drafts_that_can_become_tokens_run(self) -> None:
        planner = BatchPlanner(BlockManager(8, 2), 2)
        request = make_request(1, 2, 3, num_drafts=6)
        batch = planner.plan([request], [])
        assert batch.context_chunks[0].drafts == (0, 0), "a third token comes in any case"
        planner.update(batch, [0, 0, 5])
        assert (request.tokens[2:], request.finish_reason) == ([0, 0, 5], FinishReason.LENGTH)
        assert (request.num_verified_drafts, request.num_accepted_drafts) == (2, 2)

    def test_the_run_of_a_generation_and_where_its_slot_stands_then(self) -> None:
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

    def test_nothing_comes_after_the_end(self) -> None:
        planner = BatchPlanner(BlockManager(8, 2), 2)
        request = make_request(1, 2, 9, end_id=6, num_drafts=3)
        planner.update(planner.plan([request], []), [0, 0, 6, 1])
        assert request.tokens[2:] == [0, 0, 6]
        assert (request.finish_reason, request.num_accepted_drafts) == (FinishReason.END_ID, 2)
        request = make_request(2, 2, 9, end_id=0, num_drafts=3)
        planner.update(planner.plan([request], []), [0, 0, 0, 1])
        assert (request.tokens[2:], request.num_accepted_drafts) == ([0], 1)

    def test_a_block_is_kept_as_far_as_tokens_count(self) -> None:
        manager = BlockManager(8, 2, enable_reuse=True)
        planner = BatchPlanner(manager, 2)
        request = make_request(1, 3, 9, num_drafts=4)
        planner.update(planner.plan([request], []), [0, 0, 5, 5, 5])
        assert manager.num_blocks_of(1) == 4
        request.finish(FinishReason.CANCELLED)
        planner.release(request)
        assert manager.num_idle_blocks == 2, "five tokens are cached, the sixth is not"

    def test_one_draw_of_a_row_that_failed(self) -> None:
        planner = BatchPlanner(BlockManager(8, 2), 2)
        request = make_request(1, 2, 9, num_drafts=2)
        planner.update(planner.plan([request], []), [0, -1, 0])
        assert request.tokens[2:] == [0, -1]

    def test_a_pause_drops_them(self) -> None:
        request = running(1, 3)
        request.pause()
        assert request.num_draft_tokens == 0


def test_the_guard_counts_them() -> None:
    manager = BlockManager(2, 2)
    request = drafting(generating(make_request(1, 2, 9), manager), 3)

    def check(max_num_tokens: int) -> object:
        return check_decision(
            ([], [request], []),
            [request],
            block_manager=manager,
            num_free_slots=1,
            max_batch_size=8,
            max_num_tokens=max_num_tokens,
        )

    with pytest.raises(InvalidDecision, match="4 tokens are scheduled, but max_num_tokens is 3"):
        check(3)
    with pytest.raises(InvalidDecision, match="2 blocks are scheduled, but free blocks is 1"):
        check(4)
    drafting(request, 1)
    assert check(4) == ([], [request], [])


@pytest.mark.parametrize(
    ("num_drafts", "may_chunk", "message"),
    [
        (3, False, None),
        (4, False, "prompt of 5 plus 4 draft tokens exceeds max_num_tokens=8"),
        (7, True, None),
        (8, True, "a generation step of 1 beams and 8 draft tokens exceeds max_num_tokens=8"),
    ],
)
def test_what_no_iteration_can_hold_is_refused(
    num_drafts: int, may_chunk: bool, message: str | None
) -> None:
    reason = refusal_reason(
        make_request(1, 5, 4, num_drafts=num_drafts),
        block_manager=None,
        max_num_tokens=8,
        may_pause=True,
        may_chunk=may_chunk,
    )
    assert reason is None if message is None else message in str(reason)
