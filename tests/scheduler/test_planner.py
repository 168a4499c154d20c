"""Stories of the planner, with exact slots and block ids."""

from __future__ import annotations

import pytest
from support.scheduler_world import make_request

from inflight_scheduler import (
    BatchPlanner,
    BlockAssignment,
    BlockManager,
    ContextChunk,
    FinishReason,
    LlmRequest,
    SamplingParams,
    ScheduledBatch,
    SlotSetup,
)


def make_planner(num_blocks: int = 6, num_slots: int = 4) -> BatchPlanner:
    return BatchPlanner(BlockManager(num_blocks, tokens_per_block=4), num_slots)


@pytest.mark.parametrize(
    ("size", "expected"),
    [  # tokens of each slot by part; 7 generates, 6 verifies a draft
        (99, [{0: 5, 1: 4, 2: 7, 6: 2, 7: 1}]),
        (10, [{0: 5, 1: 4, 2: 1}, {2: 6, 6: 2, 7: 1}]),
        (9, [{0: 5, 1: 4}, {2: 7, 6: 2, 7: 1}]),
        (7, [{0: 5, 1: 2}, {1: 2, 2: 7, 6: 2, 7: 1}]),
        (4, [{0: 4}, {0: 1, 1: 3}, {1: 1, 2: 3}, {2: 4, 6: 2, 7: 1}]),
    ],
)
def test_parts_of_a_plan(size: int, expected: list[dict[int, int]]) -> None:
    """Together they are the plan: every token once, draws in their order, all else at first."""
    chunks = (
        ContextChunk(0, 8, (1, 2, 3, 4, 5), is_last=True),
        ContextChunk(1, 0, (6, 7, 8, 9), is_last=False),
        ContextChunk(2, 0, (10, 11, 12, 13, 14), is_last=True, drafts=(15, 16)),
    )
    plan = ScheduledBatch(
        3,
        setups=(SlotSetup(0, 1, SamplingParams()),),
        new_blocks=(BlockAssignment(0, 0, 3),),
        context_chunks=chunks,
        generation_slots=(7,),
        draft_runs=(ContextChunk(6, 4, (17,), True, (18,)),),
    )
    parts = plan.in_parts(size)
    found: list[dict[int, int]] = []
    for part in parts:
        tokens = {run.slot: run.num_tokens for run in part.runs}
        found.append(tokens | dict.fromkeys(part.generation_slots, 1))
    assert found == expected
    texts: dict[int, list[int]] = {}
    for run in (run for part in parts for run in part.context_chunks):
        (whole,) = (each for each in chunks if each.slot == run.slot)
        text = texts.setdefault(run.slot, [])
        assert run.start == whole.start + len(text)
        text += run.tokens
        is_end = len(text) == len(whole.tokens)
        assert (run.is_last, run.drafts) == (
            (whole.is_last, whole.drafts) if is_end else (False, ())
        )
    assert texts == {each.slot: list(each.tokens) for each in chunks}
    assert sum(part.num_drawn for part in parts) == plan.num_drawn
    assert (parts[0].setups, parts[0].new_blocks) == (plan.setups, plan.new_blocks)
    assert not any(part.setups or part.new_blocks for part in parts[1:])


def test_story_of_two_requests() -> None:
    planner = make_planner()
    one = make_request(1, num_prompt=4, max_new=3, end_id=10, min_length=2)
    two = make_request(2, num_prompt=2, max_new=2)

    first = planner.plan([one, two], [])
    assert first.iteration == 1
    assert first.setups == (
        SlotSetup(
            0, 1, SamplingParams(min_length=2), end_id=10, min_end_position=4 + 2, prompt_len=4
        ),
        SlotSetup(1, 2, SamplingParams(), end_id=-1, min_end_position=2, prompt_len=2),
    )
    assert first.new_blocks == (BlockAssignment(0, 0, 0), BlockAssignment(1, 0, 1))
    assert first.context_chunks == (
        ContextChunk(slot=0, start=0, tokens=tuple(one.tokens), is_last=True),
        ContextChunk(slot=1, start=0, tokens=tuple(two.tokens), is_last=True),
    )
    assert first.generation_slots == ()
    assert planner.update(first, [5, 6]) == [one, two]
    assert (one.tokens[-1], two.tokens[-1]) == (5, 6)

    # One has four tokens cached: the fifth opens block 2. Two still has room.
    second = planner.plan([], [two, one])
    assert (second.setups, second.context_chunks) == ((), ())
    assert second.new_blocks == (BlockAssignment(0, 1, 2),)
    assert second.generation_slots == (1, 0)
    assert planner.update(second, [7, 8]) == [two, one]
    assert (one.tokens[-1], two.tokens[-1]) == (8, 7)
    assert (two.is_finished, two.finish_reason) == (True, FinishReason.LENGTH)
    assert planner.num_free_slots == 2, "finished requests keep slot and blocks until released"
    planner.release(two)
    assert (planner.num_free_slots, planner.block_manager.num_free_blocks) == (3, 4)
    assert two.seq_slot is None

    # The slot and the block freed last are the first ones used again.
    three = make_request(3, num_prompt=1)
    third = planner.plan([three], [one])
    assert third.setups[0].slot == 1
    assert third.new_blocks == (BlockAssignment(1, 0, 1),)


def test_chunks_take_the_blocks_of_the_whole_prompt_at_once() -> None:
    planner = make_planner()
    request = make_request(1, num_prompt=9, max_new=2)
    request.context_chunk_size = 4
    first = planner.plan([request], [])
    assert [new.block_id for new in first.new_blocks] == [0, 1, 2]
    assert (first.num_context_tokens, first.context_chunks[0].is_last) == (4, False)
    assert planner.update(first, []) == [], "no token before the last chunk"
    last = planner.plan([request], [])
    assert (last.setups, last.new_blocks) == ((), ())
    assert (last.context_chunks[0].start, last.context_chunks[0].is_last) == (4, True)
    assert planner.update(last, [3]) == [request]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_a_wrong_number_of_tokens_is_refused(tokens: list[int]) -> None:
    planner = make_planner()
    requests = [make_request(1), make_request(2)]
    batch = planner.plan(requests, [])
    with pytest.raises(ValueError, match=rf"returned {len(tokens)} tokens, expected 2"):
        planner.update(batch, tokens)
    assert all(request.is_context_init_state for request in requests)
    assert planner.discard(batch) == requests


class Unsteady(BlockManager):
    """Has a bug: once armed, it fails when something computed is to be kept or forgotten."""

    __slots__ = ("is_armed",)
    is_armed: bool

    def store(self, request: LlmRequest) -> None:
        self._check()
        super().store(request)

    def forget(self, request_id: int) -> None:
        self._check()
        super().forget(request_id)

    def _check(self) -> None:
        if self.is_armed:
            self.is_armed = False
            raise RuntimeError("a bug")


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_tokens_applied_in_part_only_leave_the_batch_to_be_discarded(is_overlapped: bool) -> None:
    """A request that got its token, even its last one, is among those to be ended."""
    manager = Unsteady(6, tokens_per_block=4, enable_reuse=True)
    manager.is_armed = False
    planner = BatchPlanner(manager, num_slots=4)
    one, two = make_request(1, 2, max_new=2), make_request(2, 2)
    planner.update(planner.plan([one], []), [1])
    batch = planner.plan([two], [one])
    if is_overlapped:
        planner.assume_step(batch)
    manager.is_armed = True
    apply = planner.apply_tokens if is_overlapped else planner.update
    with pytest.raises(RuntimeError, match="a bug"):
        apply(batch, [-1, 3])
    assert planner.discard(batch) == [two, one]
    for request in (one, two):
        planner.release(request)
    assert planner.discard(batch) == []
    assert (planner.num_free_slots, manager.num_free_blocks) == (4, 6)
    manager.check_integrity()


def test_an_empty_batch_leaves_nothing_behind() -> None:
    planner = make_planner()
    batch = planner.plan([], [])
    assert batch.is_empty
    assert planner.update(batch, []) == []
    assert planner.discard(batch) == []


def test_releasing_twice_or_never_started_is_harmless() -> None:
    planner = make_planner()
    request = make_request(1)
    planner.release(request)
    planner.plan([request], [])
    planner.release(request)
    planner.release(request)
    assert planner.num_free_slots == 4
    planner.slots.check_integrity([])
    planner.block_manager.check_integrity()


def test_scheduling_without_room_is_our_bug() -> None:
    planner = make_planner(num_blocks=1)
    with pytest.raises(AssertionError, match="request 1 was scheduled without room for 5 tokens"):
        planner.plan([make_request(1, num_prompt=5)], [])
    planner = make_planner(num_slots=1)
    with pytest.raises(AssertionError, match="all 1 slots are taken"):
        planner.plan([make_request(1), make_request(2)], [])
