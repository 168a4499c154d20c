"""Stories of block reuse, with exact block ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import FakeEngine
from support.scheduler_world import World, ids, make_request

from inflight_scheduler import (
    BatchPlanner,
    BlockCopy,
    BlockForecast,
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    FinishReason,
    LlmRequest,
    make_scheduler,
)
from inflight_scheduler.request import PrefixMatch

GUARANTEED = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
STATIC = CapacitySchedulerPolicy.STATIC_BATCH


class Server:
    """A planner with a block manager that reuses, and a fake engine."""

    def __init__(
        self,
        num_blocks: int = 8,
        tokens_per_block: int = 4,
        may_copy: bool = False,
    ) -> None:
        self.manager = BlockManager(
            num_blocks, tokens_per_block, enable_reuse=True, may_copy_blocks=may_copy
        )
        self.planner = BatchPlanner(self.manager, num_slots=4)
        self.engine = FakeEngine(num_blocks, tokens_per_block)

    def start(self, request: LlmRequest) -> None:
        """Its whole context."""
        batch = self.planner.plan([request], [])
        self.planner.update(batch, self.engine.execute(batch))

    def finish(self, request: LlmRequest) -> None:
        """All its tokens, and release."""
        while not request.is_finished:
            batch = self.planner.plan([], [request])
            self.planner.update(batch, self.engine.execute(batch))
        self.planner.release(request)

    def run(self, request: LlmRequest) -> None:
        """From arrival to the end."""
        self.start(request)
        self.finish(request)
        self.manager.check_integrity()


def request_with(
    request_id: int, prompt: Sequence[int], max_new: int = 2, salt: bytes = b""
) -> LlmRequest:
    return LlmRequest(request_id, prompt, max_new, cache_salt=salt)


PROMPT = list(range(10))  # two full blocks of 4 and two tokens


def test_story_of_a_second_request_with_the_same_prompt() -> None:
    server = Server()
    first, second = request_with(1, PROMPT, 1), request_with(2, PROMPT, 1)
    server.run(first)
    assert server.manager.num_used_blocks == 0
    assert server.manager.num_idle_blocks == 2, "the third block was never full"
    batch = server.planner.plan([second], [])
    assert server.manager.block_table(2) == (0, 1, 2)
    assert [new.block_id for new in batch.new_blocks] == [0, 1, 2], "the engine hears of all"
    (chunk,) = batch.context_chunks
    assert (chunk.start, chunk.tokens, chunk.is_last) == (8, (8, 9), True)
    server.planner.update(batch, server.engine.execute(batch))
    assert second.tokens == first.tokens
    assert second.num_reused_blocks == 2
    assert server.manager.reuse_stats.num_reused_blocks == 2
    assert server.manager.reuse_stats.hit_rate == 2 / 6


def test_a_prompt_of_110_tokens_reuses_four_blocks_and_takes_one() -> None:
    server = Server(num_blocks=16, tokens_per_block=32, may_copy=True)
    prompt = [i % 7 for i in range(110)]
    server.run(request_with(1, prompt, 20))
    assert server.manager.num_idle_blocks == 4, "110 + 19 tokens are computed"
    second = request_with(2, prompt, 20)
    num_free = server.manager.num_free_blocks
    batch = server.planner.plan([second], [])
    assert second.num_reused_blocks == 4
    assert num_free - server.manager.num_free_blocks == 4, "three shared, one new"
    assert batch.block_copies == (BlockCopy(source=3, destination=4),)
    assert server.manager.block_table(2) == (0, 1, 2, 4)
    assert batch.context_chunks[0].start == 109, "one prompt token is always computed"
    server.planner.update(batch, server.engine.execute(batch))
    server.finish(second)


def test_a_copy_may_come_from_a_block_that_is_evicted_in_the_same_plan() -> None:
    server = Server(num_blocks=2, may_copy=True)
    server.run(request_with(1, [1, 2, 3, 4], 1))
    server.run(request_with(2, [5, 6, 7, 8], 1))
    assert server.manager.num_idle_blocks == 2
    both = [request_with(3, [5, 6, 9], 1), request_with(4, [1, 2, 9], 1)]
    batch = server.planner.plan(both, [])
    # Each gets the block the other one copies from: sources are read before anything is written.
    assert [(c.source, c.destination) for c in batch.block_copies] == [(1, 0), (0, 1)]
    server.planner.update(batch, server.engine.execute(batch))
    assert [request.num_generated_tokens for request in both] == [1, 1]


@pytest.mark.case(66)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
            st.sampled_from([b"", b"", b"one", b"on", b"one ", b"one\0"]),
            st.sampled_from([None, None, 1, 2]),
            st.sampled_from([0, 0, 0, 3]),
        ),
        min_size=2,
        max_size=12,
    )
)
def test_a_prompt_finds_the_longest_beginning_that_was_left(
    requests: list[tuple[list[int], bytes, int | None, int]],
) -> None:
    """Full blocks of the same salt and adapter, prompt and answer; an encoder shares nothing.

    The last token of a prompt is always computed, and that of an answer never is.
    """
    server = Server(num_blocks=200, tokens_per_block=2)
    left: set[tuple[object, ...]] = set()

    def beginnings(tokens: list[int]) -> list[tuple[object, ...]]:
        return [(salt, adapter, *tokens[:end]) for end in range(2, len(tokens), 2)]

    for number, (prompt, salt, adapter, encoder_length) in enumerate(requests):
        request = LlmRequest(number, prompt, 4, cache_salt=salt, lora_task_id=adapter)
        request.encoder_length = encoder_length  # and its output is there
        shared = [] if encoder_length else list(takewhile(left.__contains__, beginnings(prompt)))
        assert server.manager.count_reusable_tokens(request) == 2 * len(shared)
        server.run(request)
        if not encoder_length:
            left.update(beginnings(request.tokens))


def test_the_hash_key_is_of_this_process_only() -> None:
    request, other = request_with(1, PROMPT), request_with(1, PROMPT)
    for each in (request, other):
        BlockManager(4, 4, enable_reuse=True).match_prefix(each)
    assert request.block_keys[0] != other.block_keys[0]


def test_context_blocks_are_shared_while_the_first_still_runs() -> None:
    server = Server()
    first, second = request_with(1, PROMPT, 9), request_with(2, PROMPT, 9)
    server.start(first)
    server.start(second)
    assert server.manager.block_table(1)[:2] == server.manager.block_table(2)[:2] == (0, 1)
    assert server.manager.num_used_blocks == 4
    assert server.manager.num_releasable_blocks(1) == 1
    server.planner.release(first)
    assert server.manager.ref_count(0) == 1
    server.finish(second)
    server.manager.check_integrity()


@pytest.mark.case(66)
def test_stopped_in_its_context_leaves_only_what_is_computed() -> None:
    server = Server()
    request = request_with(1, PROMPT)
    request.context_chunk_size = 5
    batch = server.planner.plan([request], [])
    server.planner.update(batch, server.engine.execute(batch))
    request.finish(FinishReason.CANCELLED)
    server.planner.release(request)
    assert server.manager.count_reusable_tokens(request_with(2, PROMPT)) == 4


@pytest.mark.case(66)
def test_nothing_of_a_failed_step_is_kept() -> None:
    server = Server()
    server.planner.discard(server.planner.plan([request_with(1, PROMPT)], []))
    assert server.manager.num_idle_blocks == 0
    not_finite = request_with(2, PROMPT)
    server.planner.update(server.planner.plan([not_finite], []), [-1])
    server.planner.release(not_finite)
    assert (server.manager.num_idle_blocks, server.manager.num_free_blocks) == (0, 8)


def test_the_longest_idle_goes_first_and_the_end_before_the_beginning() -> None:
    server = Server(num_blocks=5)
    server.run(request_with(1, PROMPT, 1))
    server.run(request_with(2, [50, 51, 52, 53, 54], 1))
    assert server.manager.num_idle_blocks == 3
    server.run(request_with(3, [60] * 12, 1))  # takes two free blocks and evicts one
    assert server.manager.count_reusable_tokens(request_with(4, PROMPT)) == 4
    assert server.manager.count_reusable_tokens(request_with(4, [50, 51, 52, 53, 54])) == 4


def test_what_was_found_for_a_request_that_waits_does_not_outlive_its_blocks() -> None:
    server = Server(num_blocks=4)
    server.run(request_with(1, PROMPT, 1))
    waiting = request_with(2, PROMPT, 1)
    assert server.manager.count_reusable_tokens(waiting) == 8
    server.manager.allocate(3, 16)  # all blocks there are
    assert server.manager.match_prefix(waiting) == PrefixMatch((), None, 0)


def test_a_context_that_has_begun_finds_nothing_more() -> None:
    """What it holds is written already, by itself."""
    server = Server()
    begun = request_with(2, PROMPT, 1)
    begun.context_chunk_size = 4
    server.start(begun)
    server.run(request_with(1, PROMPT, 1))
    assert server.manager.count_reusable_tokens(request_with(3, PROMPT, 1)) == 8
    assert server.manager.count_reusable_tokens(begun) == 0


def test_a_request_waits_for_the_context_that_computes_its_beginning() -> None:
    manager = BlockManager(16, 4, enable_reuse=True)
    scheduler = make_scheduler(GUARANTEED, manager, max_batch_size=4)
    world = World(scheduler, manager, num_slots=4)
    same = [make_request(i, 9, max_new=3, family=1) for i in (1, 2, 3)]
    for request in [*same, make_request(4, 9, max_new=3, family=2)]:
        world.arrive(request)
    decision = world.decide()
    assert ids(*decision) == ([1, 4], [], []), "2 and 3 would compute the same block"
    world.step(decision)
    assert ids(*world.decide()) == ([2, 3], [1, 4], [])
    batch = world.step()
    assert [chunk.start for chunk in batch.context_chunks] == [8, 8]
    world.drain()
    assert world.engine.num_computed == 2 * 9 + 2 * 1 + 4 * 2


def test_in_a_static_batch_none_waits_for_what_another_computes() -> None:
    manager = BlockManager(16, 4, enable_reuse=True)
    scheduler = make_scheduler(STATIC, manager, max_batch_size=4)
    world = World(scheduler, manager, num_slots=4)
    for request_id in (1, 2, 3):
        world.arrive(make_request(request_id, 9, max_new=3, family=1))
    assert ids(*world.decide()) == ([1, 2, 3], [], [])
    world.drain()


@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
def test_a_context_that_was_cut_is_waited_for_too(policy: CapacitySchedulerPolicy) -> None:
    """The last of 13 tokens is left, and of the budget of 12 there would be 11 for the other."""
    manager = BlockManager(16, 4, enable_reuse=True)
    scheduler = make_scheduler(
        policy, manager, max_batch_size=4, max_num_tokens=12, chunking=ContextChunking(unit_size=4)
    )
    world = World(scheduler, manager, num_slots=4)
    world.arrive(make_request(1, 13, max_new=3, family=1))
    world.step()
    world.arrive(make_request(2, 13, max_new=3, family=1))
    assert ids(*world.decide()) == ([1], [], [])
    world.step()
    assert [chunk.start for chunk in world.step().context_chunks] == [12]
    world.drain()


def test_a_victim_does_not_give_back_what_another_counts_on() -> None:
    manager = BlockManager(6, 4, enable_reuse=True)
    planner = BatchPlanner(manager, num_slots=4)
    holder, sharer = request_with(1, PROMPT, 9), request_with(2, PROMPT, 9)
    planner.update(planner.plan([holder], []), [1])
    forecast = BlockForecast(manager)
    assert forecast.needed_one_step(sharer) == 1
    forecast.claim(sharer, 1)
    forecast.release(holder)
    assert forecast.num_available == 3 - 1 + 1, "two of its three blocks are claimed"
    late = BlockForecast(manager)
    late.release(holder)
    assert (late.num_available, late.needed_one_step(sharer)) == (6, 3)


def test_what_is_given_up_does_not_hide_a_block_that_begins_alike() -> None:
    server = Server(num_blocks=3, may_copy=True)
    server.run(request_with(1, [1, 2, 3, 4, 0], 1))
    server.run(request_with(2, [1, 5, 6, 7, 0], 1))
    begins_alike = request_with(3, [1, 5, 6, 8, 0], 1)
    assert server.manager.count_reusable_tokens(begins_alike) == 3
    server.start(request_with(4, [9] * 8, 9))
    assert server.manager.num_idle_blocks == 1, "the block of the first one was given up"
    assert server.manager.count_reusable_tokens(begins_alike) == 3


def test_a_resumed_request_computes_little_again() -> None:
    server = Server()
    request = request_with(1, PROMPT, 9)
    server.start(request)
    paused = server.planner.plan([], [], [request])
    assert paused.is_empty
    batch = server.planner.plan([request], [])
    assert batch.num_context_tokens == 3, "8 of 11 tokens are cached"


def test_another_adapter_shares_nothing() -> None:
    server = Server(may_copy=True)
    server.run(LlmRequest(1, PROMPT, 2, lora_task_id=1))
    found = server.manager.count_reusable_tokens
    assert found(LlmRequest(2, PROMPT, 2, lora_task_id=2)) == found(LlmRequest(3, PROMPT, 2)) == 0
    assert found(LlmRequest(4, PROMPT, 2, lora_task_id=1)) == 8
    assert found(LlmRequest(5, PROMPT, 2, lora_task_id=1, cache_salt=b"other")) == 0


def test_text_that_a_pause_of_beams_throws_away_is_not_remembered() -> None:
    manager = BlockManager(8, 4, enable_reuse=True)
    request = LlmRequest(1, PROMPT, 8, beam_width=2)
    planner = BatchPlanner(manager, num_slots=1)
    planner.update(planner.plan([request], []), [1])
    for token in (1, 1, 1):
        planner.update(planner.plan([], [request]), [token])
    planner.release(request)  # what was generated is part of the third block
    request.pause()
    planner.update(planner.plan([request], []), [2])
    for token in (2, 2, 2):
        planner.update(planner.plan([], [request]), [token])
    planner.release(request)
    assert manager.count_reusable_tokens(LlmRequest(2, [*PROMPT, 2, 2, 0], 1)) == 12
