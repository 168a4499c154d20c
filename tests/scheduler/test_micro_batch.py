"""The micro-batch rules and chunking policies of contract 4.6, with drafts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler_world import generating, ids, make_request

from inflight_scheduler import (
    BlockManager,
    ContextChunking,
    ContextChunkingPolicy,
    ContextTooLong,
    LlmRequest,
    LlmRequestState,
    MicroBatchScheduler,
)

FIRST_COME = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
EQUAL = ContextChunkingPolicy.EQUAL_PROGRESS
FORCE = ContextChunkingPolicy.FORCE_CHUNK


def running(request_id: int, beam_width: int = 1, num_drafts: int = 0) -> LlmRequest:
    request = generating(make_request(request_id, beam_width=beam_width), BlockManager(4, 4))
    request.set_draft_tokens([0] * num_drafts)
    return request


WALKS: list[tuple[str, int, int | None, list[LlmRequest], list[int], list[int]]] = [
    (
        "contexts and generation are parted in order",
        8,
        100,
        [make_request(1), running(2), make_request(3), running(4)],
        [1, 3],
        [2, 4],
    ),
    ("the batch size", 2, 100, [make_request(1), running(2), running(3)], [1], [2]),
    (
        "a context over budget ends the walk",
        8,
        10,
        [make_request(1, 6), make_request(2, 5), make_request(3, 1), running(4)],
        [1],
        [],
    ),
    (
        "the budget can be used up exactly",
        8,
        10,
        [make_request(1, 6), running(2), make_request(3, 3), running(4)],
        [1, 3],
        [2],
    ),
    ("generation over budget", 8, 2, [running(1), running(2), running(3)], [], [1, 2]),
    ("a step costs its beams", 8, 5, [running(1, 3), running(2, 3)], [], [1]),
    ("a step costs its drafts", 8, 8, [running(1, 1, 3), running(2, 1, 4)], [], [1]),
    ("drafts that fit exactly", 8, 8, [running(1, 1, 3), running(2, 1, 3)], [], [1, 2]),
    ("a context with drafts", 8, 8, [make_request(1, 5, num_drafts=3)], [1], []),
    (
        "drafts of contexts count",
        8,
        8,
        [make_request(1, 3, num_drafts=1), make_request(2, 4, num_drafts=1)],
        [1],
        [],
    ),
    (
        "another beam width is passed over and costs nothing",
        2,
        3,
        [running(1), running(2, 2), running(3)],
        [],
        [1, 3],
    ),
    ("no budget", 8, None, [make_request(1, 10_000), make_request(2, 10_000)], [1, 2], []),
]


@pytest.mark.parametrize(
    ("max_batch_size", "budget", "requests", "context", "generation"),
    [row[1:] for row in WALKS],
    ids=[row[0] for row in WALKS],
)
def test_walk(
    max_batch_size: int,
    budget: int | None,
    requests: list[LlmRequest],
    context: list[int],
    generation: list[int],
) -> None:
    micro_batch = MicroBatchScheduler(max_batch_size, budget)
    assert ids(*micro_batch.schedule(requests)) == (context, generation)


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


def test_a_context_that_can_never_run_is_an_error_that_names_it() -> None:
    requests = [running(1), make_request(7, num_prompt=11)]
    with pytest.raises(ContextTooLong, match=r"request 7: .* 11 tokens .* max_num_tokens=10") as e:
        MicroBatchScheduler(8, 10).schedule(requests)
    assert e.value.request_id == 7
    with pytest.raises(ContextTooLong, match="request 1: a context of 11 tokens exceeds"):
        MicroBatchScheduler(8, 10).schedule([make_request(1, 5, num_drafts=6)])


@pytest.mark.parametrize(("size", "budget"), [(0, None), (1, 0)])
def test_empty_limits_are_refused(size: int, budget: int | None) -> None:
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        MicroBatchScheduler(size, budget)
    assert ids(*MicroBatchScheduler(1, 1).schedule([make_request(1)])) == ([1], [])


@pytest.mark.parametrize(
    ("policy", "lengths", "capacity", "longest", "expected"),
    [
        (FIRST_COME, [9, 3, 5], 17, 9, [9, 3, 5]),
        (EQUAL, [9, 3, 5], 17, 9, [9, 3, 5]),
        (FIRST_COME, [9, 3, 5], None, 9, [9, 3, 5]),
        (EQUAL, [9, 3, 5], None, 9, [9, 3, 5]),
        (FIRST_COME, [10, 10], 12, None, [10, 0]),  # the second is cut to 2, no whole unit
        (FIRST_COME, [10, 10], 14, None, [10, 4]),
        (FIRST_COME, [10, 3], 9, None, [8, 0]),  # 1 token is left over
        (FIRST_COME, [10, 1], 9, None, [8, 1]),  # the rest of a context need not be a whole unit
        (FIRST_COME, [30, 30], 100, 10, [8, 8]),  # max_context_length cuts as well
        (FIRST_COME, [30], None, 10, [8]),
        (FIRST_COME, [5, 5], 3, None, [0, 0]),
        (FIRST_COME, [5, 2], 3, None, [0, 0]),  # the first gets nothing: none does
        (EQUAL, [20, 20, 20], 24, None, [8, 8, 8]),
        (EQUAL, [20, 20, 20], 20, None, [8, 8, 4]),  # the last round ends with the room
        (EQUAL, [20, 2, 20], 18, None, [8, 2, 8]),  # one that is done leaves the rest to others
        (EQUAL, [20, 3, 2], 6, None, [4, 0, 2]),  # a step over the room is passed over, not a stop
        (EQUAL, [20, 20], 100, 10, [8, 8]),
        (EQUAL, [20, 20], None, 10, [8, 8]),
        (EQUAL, [20, 2], 3, None, [0, 0]),
        (FORCE, [20, 3], None, None, [20, 3]),
        (FORCE, [20, 20, 20], 9, None, [8, 0, 0]),
        (FORCE, [20, 20, 1], 9, None, [8, 0, 1]),
        (FORCE, [20, 1], 3, None, [0, 0]),
    ],
)
def test_sizes_of_chunks(
    policy: ContextChunkingPolicy,
    lengths: list[int],
    capacity: int | None,
    longest: int | None,
    expected: list[int],
) -> None:
    chunking = ContextChunking(policy, 4, longest)
    assert chunking.chunks(lengths, [0] * len(lengths), capacity)[0] == expected


@pytest.mark.parametrize(
    ("lengths", "up_to_snapshots", "capacity", "longest", "expected"),
    [
        ([20, 9], [16, 9], None, None, [16, 9]),  # even if all would fit
        ([20, 9], [6, 9], None, None, [6, 9]),  # where a state is kept need not be a whole unit
        ([20], [16], 16, None, [16]),
        ([20], [15], 14, None, [12]),  # what is cut is
        ([20], [16], None, 10, [8]),
        ([20, 20], [16, 16], 23, None, [16, 4]),
        ([20, 3], [16, 3], 18, None, [16, 0]),  # nor is a rest taken in part
        ([4], [4], None, None, [4]),
        ([20, 20], [16, 16], 3, None, [0, 0]),
    ],
)
def test_chunks_that_end_where_a_state_is_kept(
    lengths: list[int],
    up_to_snapshots: list[int],
    capacity: int | None,
    longest: int | None,
    expected: list[int],
) -> None:
    """FORCE_CHUNK as TensorRT-LLM's Python scheduler has it."""
    chunking = ContextChunking(FORCE, 4, longest)
    num_drafts = [0] * len(lengths)
    found = chunking.chunks(lengths, num_drafts, capacity, up_to_snapshots=up_to_snapshots)
    assert found[0] == expected


def test_the_next_snapshot_of_a_context_ends_its_chunk() -> None:
    """Counted from the beginning of the prompt, of which the first tokens may be cached."""
    chunking = ContextChunking(FORCE, 4)
    micro_batch = MicroBatchScheduler(
        8,
        100,
        chunking=chunking,
        count_reusable_tokens=lambda request: 4,
        snapshot_points=lambda request: (4, 10, 16),
    )
    request = make_request(1, 18)
    found = []
    while request.context_remaining_length:
        micro_batch.schedule([request])
        found.append(request.context_chunk_size)
        if len(found) == 1:
            request.context_current_position = 4
        request.move_to_next_context_chunk()
    assert found == [6, 6, 2]


@pytest.mark.parametrize(
    ("num_stages", "totals", "max_num_tokens", "expected"),
    [
        (2, [512], 2048, [[256], [256]]),
        (4, [1024], 2048, [[256]] * 4),
        (3, [500], 4096, [[128], [128], [128], [116]]),  # whole units: one chunk more
        (4, [100], 4096, [[100]]),  # too short for two
        (16, [200], 4096, [[64], [64], [64], [8]]),
        (2, [512, 256], 4096, [[256, 128], [256, 128]]),
        (2, [512], 128, [[128]] * 4),  # the budget cuts as well
        (1, [512, 60], 2048, [[512, 60]]),
    ],
)
def test_even_chunks_for_a_pipeline(
    num_stages: int, totals: list[int], max_num_tokens: int, expected: list[list[int]]
) -> None:
    """The cases of TensorRT-LLM's tests of the policy, each to the end of its prompts."""
    chunking = ContextChunking(ContextChunkingPolicy.PIPELINE_AWARE, 64, num_stages=num_stages)
    micro_batch = MicroBatchScheduler(8, max_num_tokens, chunking=chunking)
    requests = [make_request(number, total) for number, total in enumerate(totals)]
    found = []
    while requests[0].context_remaining_length:
        contexts, _ = micro_batch.schedule(requests)
        contexts = sorted(contexts, key=lambda request: request.request_id)
        found.append([request.context_chunk_size for request in contexts])
        for request in contexts:
            request.move_to_next_context_chunk()
    assert found == expected
    assert all(request.context_remaining_length == 0 for request in requests)
    assert micro_batch.schedule([make_request(9, 512)], {9}) == ([], [])


@pytest.mark.parametrize(
    ("policy", "lengths", "drafts", "capacity", "longest", "sizes", "kept"),
    [
        (FIRST_COME, [6], [9], 15, None, [6], [9]),  # all fits, so nothing is cut
        (FIRST_COME, [6], [9], 14, None, [6], [2]),  # completes the unit
        (FIRST_COME, [8], [9], 14, None, [8], [0]),  # the chunk is exact
        (FIRST_COME, [6], [1], 6, None, [6], [0]),  # no capacity left
        (FIRST_COME, [6, 5], [9, 9], 13, None, [6, 5], [2, 0]),  # only what is kept is charged
        (FIRST_COME, [6, 5], [0, 9], 13, None, [6, 5], [0, 2]),
        (FIRST_COME, [20], [3], 11, None, [8], [0]),  # not the last chunk
        (FIRST_COME, [5, 2], [0, 8], 8, None, [5, 2], [0, 1]),
        (FIRST_COME, [6], [3], None, 7, [6], [1]),
        (FIRST_COME, [6], [1], None, 7, [6], [1]),
        (FORCE, [3, 4], [9, 9], None, None, [3, 4], [1, 0]),
    ],
)
def test_drafts_that_run_with_last_chunks(
    policy: ContextChunkingPolicy,
    lengths: list[int],
    drafts: list[int],
    capacity: int | None,
    longest: int | None,
    sizes: list[int],
    kept: list[int],
) -> None:
    chunking = ContextChunking(policy, 4, longest)
    assert chunking.chunks(lengths, drafts, capacity) == (sizes, kept)


@given(
    policy=st.sampled_from(ContextChunkingPolicy),
    unit_size=st.integers(1, 9),
    contexts=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 6)), max_size=12),
    capacity=st.none() | st.integers(0, 100),
    extra=st.none() | st.integers(0, 20),
)
def test_every_policy_keeps_the_bounds(
    policy: ContextChunkingPolicy,
    unit_size: int,
    contexts: list[tuple[int, int]],
    capacity: int | None,
    extra: int | None,
) -> None:
    lengths, drafts = [c[0] for c in contexts], [c[1] for c in contexts]
    longest = None if extra is None else unit_size + extra
    sizes, kept = ContextChunking(policy, unit_size, longest).chunks(lengths, drafts, capacity)
    assert sum(sizes) + sum(kept) <= (10**9 if capacity is None else capacity)
    for (length, num_drafts), size, num_kept in zip(contexts, sizes, kept, strict=True):
        assert 0 <= size <= length
        assert 0 <= num_kept <= num_drafts
        assert num_kept == 0 or size == length
        assert longest is None or size + num_kept <= longest
        assert size == length or size % unit_size == 0
    if lengths and (capacity is None or capacity >= unit_size):
        assert sizes[0] > 0, "with room for a unit, the first one makes progress"
    assert not any(sizes) or sizes[0] > 0, "the first must not be passed for ever"


class TestChunkedContexts:
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
        assert other.context_chunk_size == 40, "one that does not run is not changed"

    def test_unfinished_contexts_come_before_last_chunks(self) -> None:
        short, long = make_request(1, 3), make_request(2, 40)
        context, _ = self.schedule([short, long], EQUAL)
        assert ids(context) == ([2, 1],)
        assert [request.context_chunk_size for request in context] == [8, 3]

    @pytest.mark.parametrize("policy", list(ContextChunkingPolicy), ids=lambda each: each.name)
    def test_none_starts_behind_one_that_would_start_and_gets_nothing(
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
        assert ids(context) == ([1, 4],), "a started one goes on, wherever it stands"
        assert [request.context_chunk_size for request in context] == [4, 1]
        assert third.context_chunk_size == 2, "one that does not run is not changed"

    @pytest.mark.parametrize("policy", list(ContextChunkingPolicy), ids=lambda each: each.name)
    def test_none_runs_behind_a_first_one_that_gets_nothing(
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

    def test_behind_contexts_that_start_others_start_too(self) -> None:
        """Though one that has started gets nothing this time."""
        one, two, started = make_request(1, 2), make_request(2, 2), make_request(3, 40)
        started.context_chunk_size = 4
        started.move_to_next_context_chunk()
        micro_batch = MicroBatchScheduler(8, 6, chunking=ContextChunking(unit_size=4))
        assert ids(*micro_batch.schedule([one, two, started])) == ([1, 2], [])

    def test_the_kept_ones_are_decided_with_the_chunk(self) -> None:
        micro_batch = MicroBatchScheduler(8, 7, chunking=ContextChunking(unit_size=4))
        request = make_request(1, 6, num_drafts=5)
        micro_batch.schedule([request])
        assert (request.context_chunk_size, request.num_chunk_drafts) == (6, 1)
        assert request.num_draft_tokens == 5, "a decision can be thrown away"

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
