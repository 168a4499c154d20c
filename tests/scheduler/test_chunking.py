"""The chunking policies of contract 4.6, and what the micro-batch makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler_world import generating, ids, make_request

from inflight_scheduler import (
    BlockManager,
    ContextChunking,
    ContextChunkingPolicy,
    LlmRequest,
    MicroBatchScheduler,
)

FIRST_COME = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
EQUAL = ContextChunkingPolicy.EQUAL_PROGRESS
FORCE = ContextChunkingPolicy.FORCE_CHUNK


def sizes_of(chunking: ContextChunking, lengths: list[int], capacity: int | None) -> list[int]:
    return chunking.chunks(lengths, [0] * len(lengths), capacity)[0]


@pytest.mark.parametrize("policy", [FIRST_COME, EQUAL])
def test_contexts_that_all_fit_run_whole(policy: ContextChunkingPolicy) -> None:
    chunking = ContextChunking(policy, unit_size=4, max_context_length=9)
    assert sizes_of(chunking, [9, 3, 5], 17) == [9, 3, 5]
    assert sizes_of(chunking, [9, 3, 5], None) == [9, 3, 5]


@pytest.mark.parametrize(
    ("lengths", "capacity", "longest", "expected"),
    [
        ([10, 10], 12, None, [10, 0]),  # the second is cut to 2, and 2 is no whole unit
        ([10, 10], 14, None, [10, 4]),
        ([10, 3], 9, None, [8, 0]),  # 1 token is left over: no whole unit of the second
        ([10, 1], 9, None, [8, 1]),  # the rest of a context need not be a whole unit
        ([30, 30], 100, 10, [8, 8]),  # max_context_length cuts as well
        ([30], None, 10, [8]),
        ([5, 5], 3, None, [0, 0]),
        ([5, 2], 3, None, [0, 0]),  # the first gets nothing: nobody does
    ],
)
def test_first_come_first_served(
    lengths: list[int], capacity: int | None, longest: int | None, expected: list[int]
) -> None:
    assert sizes_of(ContextChunking(FIRST_COME, 4, longest), lengths, capacity) == expected


@pytest.mark.parametrize(
    ("lengths", "capacity", "longest", "expected"),
    [
        ([20, 20, 20], 24, None, [8, 8, 8]),
        ([20, 20, 20], 20, None, [8, 8, 4]),  # the last round ends with the room
        ([20, 2, 20], 18, None, [8, 2, 8]),  # whoever is done leaves the rest to the others
        ([20, 3, 2], 6, None, [4, 0, 2]),  # a step over the room is passed over, not a stop
        ([20, 20], 100, 10, [8, 8]),
        ([20, 20], None, 10, [8, 8]),
        ([20, 2], 3, None, [0, 0]),
    ],
)
def test_equal_progress(
    lengths: list[int], capacity: int | None, longest: int | None, expected: list[int]
) -> None:
    assert sizes_of(ContextChunking(EQUAL, 4, longest), lengths, capacity) == expected


@pytest.mark.parametrize(
    ("lengths", "capacity", "expected"),
    [
        ([20, 3], None, [4, 3]),  # even if all would fit
        ([20, 20, 20], 9, [4, 4, 0]),
        ([20, 20, 1], 9, [4, 4, 1]),
        ([20, 1], 3, [0, 0]),
    ],
)
def test_force_chunk(lengths: list[int], capacity: int | None, expected: list[int]) -> None:
    assert sizes_of(ContextChunking(FORCE, 4), lengths, capacity) == expected


@given(
    lengths=st.lists(st.integers(1, 60), max_size=12),
    capacity=st.integers(0, 100),
    unit_size=st.integers(1, 9),
    extra=st.none() | st.integers(0, 20),
    policy=st.sampled_from(ContextChunkingPolicy),
)
def test_every_policy_keeps_the_bounds(
    lengths: list[int],
    capacity: int,
    unit_size: int,
    extra: int | None,
    policy: ContextChunkingPolicy,
) -> None:
    longest = None if extra is None else unit_size + extra
    sizes = sizes_of(ContextChunking(policy, unit_size, longest), lengths, capacity)
    assert len(sizes) == len(lengths)
    assert sum(sizes) <= capacity
    for size, length in zip(sizes, lengths, strict=True):
        assert 0 <= size <= length
        assert longest is None or size <= longest
        assert size == length or size % unit_size == 0
    if lengths and capacity >= unit_size:
        assert sizes[0] > 0, "with room for a unit, the first one makes progress"
    assert not any(sizes) or sizes[0] > 0, "who is first for ever must not be passed for ever"


class TestMicroBatch:
    def schedule(
        self, requests: list[LlmRequest], policy: ContextChunkingPolicy = FIRST_COME
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        chunking = ContextChunking(policy, unit_size=4)
        return MicroBatchScheduler(8, 12, chunking=chunking).schedule(requests)

    def test_contexts_share_what_generation_leaves(self) -> None:
        running = [generating(make_request(i), BlockManager(4, 4)) for i in (7, 8)]
        long, other = make_request(1, 40), make_request(2, 40)
        assert ids(*self.schedule([long, other, *running])) == ([1], [7, 8])
        assert long.context_chunk_size == 8  # 12 - 2, in whole units
        assert other.context_chunk_size == 40, "who does not run is not changed"

    def test_unfinished_contexts_come_before_last_chunks(self) -> None:
        short, long = make_request(1, 3), make_request(2, 40)
        context, _ = self.schedule([short, long], EQUAL)
        assert ids(context) == ([2, 1],)
        assert [request.context_chunk_size for request in context] == [8, 3]

    @pytest.mark.parametrize("policy", list(ContextChunkingPolicy), ids=lambda each: each.name)
    def test_nobody_starts_behind_one_that_would_start_and_gets_nothing(
        self, policy: ContextChunkingPolicy
    ) -> None:
        """Of 6 tokens 2 are left, too few for a unit of the second."""
        first, second, third = make_request(1, 40), make_request(2, 40), make_request(3, 2)
        started = make_request(4, 40)
        for request, num_computed in ((first, 4), (started, 39)):
            request.context_chunk_size = num_computed
            request.move_to_next_context_chunk()
        micro_batch = MicroBatchScheduler(8, 6, chunking=ContextChunking(policy, unit_size=4))
        context, _ = micro_batch.schedule([first, second, third, started])
        assert ids(context) == ([1, 4],), "who has started goes on, wherever it stands"
        assert [request.context_chunk_size for request in context] == [4, 1]
        assert third.context_chunk_size == 2, "who does not run is not changed"

    @pytest.mark.parametrize("policy", list(ContextChunkingPolicy), ids=lambda each: each.name)
    def test_nobody_runs_behind_a_first_one_that_gets_nothing(
        self, policy: ContextChunkingPolicy
    ) -> None:
        """Not even who has started and needs a single token: 2 of 6 are left, too few for a unit
        of the first."""
        first, started = make_request(1, 40, priority=1.0), make_request(2, 40)
        started.context_chunk_size = 39
        started.move_to_next_context_chunk()
        manager = BlockManager(8, 4)
        running = [generating(make_request(i), manager) for i in (3, 4, 5, 6)]
        micro_batch = MicroBatchScheduler(8, 6, chunking=ContextChunking(policy, unit_size=4))
        assert ids(*micro_batch.schedule([first, started, *running])) == ([], [3, 4, 5, 6])
        assert ids(*micro_batch.schedule([started, first, *running])) == ([2], [3, 4, 5, 6])

    def test_behind_those_who_start_others_start_too(self) -> None:
        """Though one that has started gets nothing this time."""
        one, two, started = make_request(1, 2), make_request(2, 2), make_request(3, 40)
        started.context_chunk_size = 4
        started.move_to_next_context_chunk()
        micro_batch = MicroBatchScheduler(8, 6, chunking=ContextChunking(unit_size=4))
        assert ids(*micro_batch.schedule([one, two, started])) == ([1, 2], [])

    def test_the_last_chunk_is_known_by_its_end(self) -> None:
        request = make_request(1, 40)
        for expected in (12, 12, 12, 4):
            assert self.schedule([request])[0] == [request]
            assert request.context_chunk_size == expected
            assert request.is_last_context_chunk == (expected == 4)
            request.move_to_next_context_chunk()

    def test_cached_tokens_are_free(self) -> None:
        fresh = make_request(1, 40)
        scheduler = MicroBatchScheduler(
            8, 12, chunking=ContextChunking(unit_size=4), count_reusable_tokens=lambda _: 32
        )
        assert scheduler.schedule([fresh]) == ([fresh], [])
        assert fresh.context_chunk_size == 8

    def test_a_unit_over_the_budget_is_refused(self) -> None:
        with pytest.raises(ValueError, match="unit_size 13 exceeds max_num_tokens=12"):
            MicroBatchScheduler(8, 12, chunking=ContextChunking(unit_size=13))


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="unit_size must be at least 1, not 0"):
        ContextChunking(unit_size=0)
    with pytest.raises(ValueError, match="unit_size 9 exceeds max_context_length=8"):
        ContextChunking(unit_size=9, max_context_length=8)
