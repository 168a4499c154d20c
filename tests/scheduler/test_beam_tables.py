"""Beams carried out: their tables, what they share, and that nothing of another text is read."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_engine import VOCAB_SIZE, beams_alone
from support.overlapped_world import OverlappedWorld
from support.scheduler_extras import SEARCHES
from support.scheduler_world import CHUNKINGS, World, make_request

from inflight_scheduler import (
    BatchPlanner,
    BeamParams,
    BeamSearch,
    BlockCopy,
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    FinishReason,
    LlmRequest,
    make_scheduler,
    refusal_reason,
)

Spec = tuple[int, int, int, int, int, BeamParams]
# prompt, output, end id, width, family of prompts, how it searches
SPECS = st.tuples(
    st.integers(1, 9),
    st.integers(1, 9),
    st.just(-1) | st.integers(0, VOCAB_SIZE - 1),
    st.integers(1, 4),
    st.integers(0, 2),
    st.sampled_from(SEARCHES),
)


def searching(request_id: int, spec: Spec) -> LlmRequest:
    """A request with the beams of ``spec``, or with none."""
    num_prompt, max_new, end_id, width, family, params = spec
    search = BeamParams(
        width, 1, params.length_penalty, params.early_stopping, params.diversity_rate
    )
    return make_request(
        request_id,
        num_prompt,
        max_new,
        end_id=end_id,
        beam_width=width,
        family=family,
        search=search if width > 1 else None,
    )


def test_beams_share_what_is_full_and_copy_the_block_that_is_not() -> None:
    manager = BlockManager(16, 4)
    planner = BatchPlanner(manager, num_slots=2, max_beam_width=3)
    request = LlmRequest(
        1, [5] * 6, 8, beam_width=3, beams=BeamSearch(BeamParams(3, 3), max_new_tokens=8)
    )
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
    assert [manager.table_of(1), *manager.beams.rows_of(1)] == [[0, 1], [0, 2], [0, 3]]
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
    request = LlmRequest(
        1, [5] * 2, 8, beam_width=2, beams=BeamSearch(BeamParams(2, 2), max_new_tokens=8)
    )
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
    request = LlmRequest(
        1, [5] * 4, 5, beam_width=2, beams=BeamSearch(BeamParams(2, 2), max_new_tokens=5)
    )
    planner.update(planner.plan([request], []), [0], {0: [(1, -1.0), (2, -1.1)]})
    while not request.is_finished:  # the first row is behind from now on
        rows = {0: [(3, -9.0), (4, -9.5)], 1: [(6, -0.1), (7, -9.0)]}
        planner.update(planner.plan([], [request]), [0] * 2, rows)
    planner.release(request)
    assert request.tokens == [5, 5, 5, 5, 2, 6, 6, 6, 6]
    assert manager.num_idle_blocks == 2
    assert manager.count_reusable_tokens(LlmRequest(2, request.tokens, 1)) == 4


@pytest.mark.parametrize("is_overlapped", [False, True])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    specs=st.lists(SPECS, min_size=1, max_size=6),
    policy=st.sampled_from(CapacitySchedulerPolicy),
    num_blocks=st.integers(6, 24),
    tokens_per_block=st.integers(1, 4),
    enable_reuse=st.booleans(),
    chunking=CHUNKINGS,
    max_num_tokens=st.none() | st.integers(12, 24),
    stops=st.dictionaries(st.integers(0, 12), st.integers(0, 5), max_size=2),
)
def test_nobody_reads_another_text_and_promises_hold(
    is_overlapped: bool,
    specs: list[Spec],
    policy: CapacitySchedulerPolicy,
    num_blocks: int,
    tokens_per_block: int,
    enable_reuse: bool,
    chunking: ContextChunking | None,
    max_num_tokens: int | None,
    stops: dict[int, int],
) -> None:
    manager = BlockManager(
        num_blocks, tokens_per_block, enable_reuse=enable_reuse, may_copy_blocks=True
    )
    scheduler = make_scheduler(
        policy,
        manager,
        max_batch_size=4,
        max_num_tokens=max_num_tokens,
        chunking=chunking,
    )
    world = (OverlappedWorld if is_overlapped else World)(scheduler, manager, 4, max_beams=4)
    requests: dict[int, LlmRequest] = {}
    for request_id, spec in enumerate(specs):
        request = searching(request_id, spec)
        reason = refusal_reason(
            request,
            block_manager=manager,
            max_num_tokens=max_num_tokens,
            may_pause=policy == CapacitySchedulerPolicy.MAX_UTILIZATION,
            may_chunk=chunking is not None,
        )
        if reason is None:
            requests[request_id] = request
            world.arrive(request)
    for number in range(13):
        stopped = requests.get(stops.get(number, -1))
        if stopped is not None and world.active.get(stopped.request_id) is stopped:
            world.stop(stopped)
        world.step()
    world.drain()
    for request_id, request in requests.items():
        if request.beams is None or request.finish_reason is FinishReason.CANCELLED:
            continue
        fresh = searching(request_id, specs[request_id])
        assert isinstance(fresh.beams, BeamSearch)
        assert isinstance(request.beams, BeamSearch)
        assert request.tokens == beams_alone(fresh.tokens, fresh.beams, 0)
        assert request.beams.hypotheses() == fresh.beams.hypotheses()
