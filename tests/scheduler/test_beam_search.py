"""Which continuations a search follows, and the block tables of its beams."""

from __future__ import annotations

import pytest

from inflight_scheduler import (
    BatchPlanner,
    BeamParams,
    BeamSearch,
    BlockCopy,
    BlockManager,
    LlmRequest,
)


def searching(width: int, prompt: list[int], max_new: int) -> LlmRequest:
    beams = BeamSearch(BeamParams(width, width), max_new_tokens=max_new)
    return LlmRequest(1, prompt, max_new, beam_width=width, beams=beams)


def test_beams_share_what_is_full_and_copy_the_block_that_is_not() -> None:
    manager = BlockManager(16, 4)
    planner = BatchPlanner(manager, num_slots=2, max_beam_width=3)
    request = searching(3, [5] * 6, 8)
    first = planner.plan([request], [])
    assert [setup.slot for setup in first.setups] == [0, 1, 2]
    assert [setup.num_candidates for setup in first.setups] == [6, 6, 6]
    assert manager.num_used_blocks == 4, "one shared, and one for each beam"
    planner.update(first, [0], {0: [(k, -float(k)) for k in range(6)]})

    second = planner.plan([], [request])
    assert second.generation_slots == (0, 1, 2)
    assert [(m.parent, m.token, m.own_block) for m in second.beam_moves] == [
        (0, 0, -1),
        (0, 1, 2),
        (0, 2, 3),
    ]
    assert second.block_copies == (BlockCopy(1, 2), BlockCopy(1, 3))
    assert second.num_generation_requests == 1
    # Row 0 becomes the parent of two beams and row 2 of none: it follows row 0.
    near = [(7, -0.1), (8, -0.2), (9, -0.3)]
    planner.update(second, [0] * 3, {0: near, 1: near[:1], 2: [(1, -90.0)]})

    third = planner.plan([], [request])
    assert [(m.slot, m.parent) for m in third.beam_moves] == [(0, 0), (1, 0), (2, 0)]
    assert [manager.table_of(1), *manager.beam_tables_of(1)] == [[0, 1], [0, 2], [0, 3]]
    planner.update(third, [0] * 3, {row: [(row, -1.0 - row)] for row in range(3)})
    fourth = planner.plan([], [request])
    assert [new.index for new in fourth.new_blocks] == [2, 2, 2], "position 8 opens a block"
    assert fourth.block_copies == ()
    assert manager.num_used_blocks == 7
    planner.release(request)
    assert manager.num_used_blocks == 0
    manager.check_integrity()


def test_a_beam_that_dies_frees_what_only_it_held() -> None:
    manager = BlockManager(16, 2)
    planner = BatchPlanner(manager, num_slots=1, max_beam_width=2)
    request = searching(2, [5] * 2, 8)
    both = [(1, -1.0), (2, -1.1)]
    planner.update(planner.plan([request], []), [0], {0: both})
    for _ in range(2):  # each goes on by itself
        planner.update(planner.plan([], [request]), [0] * 2, {0: both[:1], 1: both[:1]})
    assert (manager.num_used_blocks, manager.num_blocks_of(1)) == (3, 2)
    planner.update(planner.plan([], [request]), [0] * 2, {0: both, 1: [(1, -50.0)]})
    assert manager.num_used_blocks == 4, "both have a last block of their own"
    assert manager.ref_count(manager.table_of(1)[1]) == 2
    manager.check_integrity()


def test_of_a_search_only_the_prompt_is_found_again() -> None:
    """Its text is that of the best beam; whose text a block holds changes with every step."""
    manager = BlockManager(16, 2, enable_reuse=True)
    planner = BatchPlanner(manager, num_slots=1, max_beam_width=2)
    request = searching(2, [5] * 4, 5)
    planner.update(planner.plan([request], []), [0], {0: [(1, -1.0), (2, -1.1)]})
    while not request.is_finished:  # the first row is behind from now on
        rows = {0: [(3, -9.0), (4, -9.5)], 1: [(6, -0.1), (7, -9.0)]}
        planner.update(planner.plan([], [request]), [0] * 2, rows)
    planner.release(request)
    assert request.tokens == [5, 5, 5, 5, 2, 6, 6, 6, 6]
    assert manager.num_idle_blocks == 2
    assert manager.count_reusable_tokens(LlmRequest(2, request.tokens, 1)) == 4


@pytest.mark.parametrize(
    ("rate", "winners"),
    [
        (0.0, [(1, 5), (1, 6)]),  # the likelier beam leaves the other one no place
        (0.1, [(1, 5), (2, 7)]),  # -1.1 and -1.25 + 0.1, before -1.2
        (2.0, [(2, 7), (2, 8)]),
        (-2.0, [(1, 5), (1, 6)]),
    ],
)
def test_a_diversity_rate_is_added_per_rank_of_the_beam_gone_on_from(
    rate: float, winners: list[tuple[int, int]]
) -> None:
    params = BeamParams(width=2, num_returned=2, diversity_rate=rate)
    search = BeamSearch(params, end_id=-1, max_new_tokens=9)
    assert search.advance([[(1, -0.1), (2, -1.0), (3, -9.0), (4, -9.5)]])
    first, second = [(5, -1.0), (6, -1.1)], [(7, -0.25), (8, -0.5)]
    assert search.advance([first, second])
    assert [beam.tokens for beam in search.hypotheses()] == winners
