"""Block tables, and the arithmetic of contract 4.3 rule by rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler_world import generating, make_request

from inflight_scheduler import BlockManager, LlmRequest
from inflight_scheduler.kv.block_manager import FREE, KEPT, SHARED
from inflight_scheduler.kv.block_pool import BlockPool


def test_story_of_two_tables() -> None:
    manager = BlockManager(num_blocks=6, tokens_per_block=4)
    assert manager.allocate(1, 5) == [0, 1]
    assert manager.allocate(2, 4) == [2]
    assert manager.allocate(1, 8) == [], "the second block has room up to 8"
    assert manager.allocate(1, 9) == [3]
    assert manager.block_table(1) == (0, 1, 3)
    assert (manager.num_used_blocks, manager.num_free_blocks) == (4, 2)
    assert manager.free(1) == 3
    assert manager.block_table(1) == ()
    assert manager.allocate(3, 16) == [0, 1, 3, 4]
    manager.check_integrity()


def test_owners_tell_who_holds_each_block() -> None:
    manager = BlockManager(num_blocks=8, tokens_per_block=4, enable_reuse=True)
    first, second = LlmRequest(1, range(9), 1), LlmRequest(2, range(9), 1)
    for request in (first, second):
        manager.attach_prefix(request)
        manager.allocate(request.request_id, 9)
        request.move_to_next_context_chunk()
        manager.store(request)
    assert manager.owners() == [SHARED, SHARED, 1, 2, FREE, FREE, FREE, FREE]
    manager.release(first)
    assert manager.owners() == [2, 2, FREE, 2, FREE, FREE, FREE, FREE]
    manager.release(second)
    assert manager.owners() == [KEPT, KEPT, *[FREE] * 6]


def test_no_room_changes_nothing() -> None:
    manager = BlockManager(num_blocks=3, tokens_per_block=4)
    assert manager.allocate(1, 8) == [0, 1]
    assert manager.allocate(2, 5) is None
    assert manager.allocate(1, 17) is None
    assert manager.block_table(1) == (0, 1)
    assert manager.num_free_blocks == 1
    manager.check_integrity()


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[0, 1], [0, 1]], "block 0 has 2 holders but its reference count is 1"),
        ([[0, 0], [1]], "one holder has a block twice"),
        ([[0]], "block 1 has 0 holders"),
    ],
)
def test_integrity_names_what_is_wrong(tables: list[list[int]], message: str) -> None:
    pool = BlockPool(4)
    pool.check_integrity([pool.take(2)])
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(tables)


def test_a_block_without_holder_is_neither_dropped_nor_kept() -> None:
    pool = BlockPool(2)
    pool.drop(pool.take(1))
    for use in (lambda: pool.drop([0]), lambda: pool.keep([0])):
        with pytest.raises(AssertionError, match=r"block 0 is .* but has no holder"):
            use()
    with pytest.raises(AssertionError):
        pool.take(3)


@pytest.mark.parametrize(
    ("num_blocks", "tokens_per_block", "windows", "message"),
    [
        (0, 4, (None,), "num_blocks must be at least 1, not 0"),
        (3, 0, (None,), "tokens_per_block must be at least 1, not 0"),
        (8, 4, (None, 0), r"windows must each be at least 1 or None, not \[None, 0\]"),
        (8, 4, (), "windows must each be"),
        (8, 4, (8, None), "layers that see all are one group, the first"),
    ],
)
def test_what_holds_nothing_is_refused(
    num_blocks: int, tokens_per_block: int, windows: tuple[int | None, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BlockManager(num_blocks, tokens_per_block, windows=windows)


def test_later_chunks_need_nothing() -> None:
    request = make_request(1, num_prompt=9)
    request.context_chunk_size = 4
    request.move_to_next_context_chunk()
    assert BlockManager(10, 4).get_needed_blocks_one_step(request) == 0


def test_a_pause_does_not_change_what_completion_takes() -> None:
    manager = BlockManager(10, 4)
    request = generating(make_request(1, num_prompt=5, max_new=8), manager, num_generated=4)
    manager.free(1)
    request.pause()
    assert manager.get_remaining_blocks_to_completion(request) == 4
    assert manager.get_needed_blocks_one_step(request) == 3, "5 + 4 tokens are prompt now"


def test_can_ever_fit_is_about_the_whole_pool() -> None:
    manager = BlockManager(3, 4)
    manager.allocate(7, 12)
    assert manager.can_ever_fit(make_request(1, num_prompt=4, max_new=8))
    assert not manager.can_ever_fit(make_request(1, num_prompt=4, max_new=9))


def ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def published_one_step(manager: BlockManager, request: LlmRequest, num_steps: int) -> int:
    """The table of the contract."""
    size = manager.tokens_per_block
    num_drafts = request.num_draft_tokens
    if request.is_context_init_state:
        num_tokens = request.prompt_len + min(num_drafts, request.max_new_tokens)
        full, partial = divmod(num_tokens, size)
        return full + request.beam_width * (partial > 0)
    now = request.num_cached_tokens
    then = now + min(num_steps * (num_drafts + 1), request.num_remaining_tokens)
    return request.beam_width * (ceil(then, size) - ceil(now, size))


def published_to_completion(manager: BlockManager, request: LlmRequest) -> int:
    size = manager.tokens_per_block
    total = ceil(request.prompt_len + request.max_new_tokens, size)
    shared = request.prompt_len // size
    num_held = manager.num_blocks_of(request.request_id)
    return shared + (total - shared) * request.beam_width - num_held


@given(
    tokens_per_block=st.integers(1, 5),
    num_prompt=st.integers(1, 12),
    max_new=st.integers(1, 10),
    num_generated=st.integers(0, 10),
    num_drafts=st.integers(0, 6),
    beam_width=st.integers(1, 3),
)
def test_the_published_rules(
    tokens_per_block: int,
    num_prompt: int,
    max_new: int,
    num_generated: int,
    num_drafts: int,
    beam_width: int,
) -> None:
    manager = BlockManager(99, tokens_per_block)
    request = make_request(1, num_prompt, max_new, beam_width=beam_width)
    if 0 < num_generated < max_new:
        generating(request, manager, num_generated)
    request.set_draft_tokens([0] * num_drafts)
    one = manager.get_needed_blocks_one_step(request)
    two = manager.get_needed_blocks_one_step(request, two_step_lookahead=True)
    assert one == published_one_step(manager, request, 1)
    assert two == published_one_step(manager, request, 2)
    to_completion = manager.get_remaining_blocks_to_completion(request)
    assert to_completion == published_to_completion(manager, request)
    assert one <= two <= manager.get_blocks_at_completion(request)
    assert beam_width > 1 or two <= to_completion
    new_blocks = manager.allocate(1, manager.num_tokens_after_step(request))
    assert new_blocks is not None
    assert len(new_blocks) <= one
    assert beam_width > 1 or len(new_blocks) == one


def test_what_wrong_drafts_leave_over_is_not_taken_again() -> None:
    manager = BlockManager(8, 2)
    request = generating(make_request(1, 2, 8), manager)  # 2 tokens cached, 1 block
    request.set_draft_tokens([0, 0, 0, 0])
    assert manager.get_needed_blocks_one_step(request) == 3  # tokens 3 to 7
    assert manager.allocate(1, manager.num_tokens_after_step(request)) == [1, 2, 3]
    request.set_draft_tokens(())
    request.add_new_token(1)
    assert manager.num_places_left(request) == 5
    assert manager.get_needed_blocks_one_step(request) == 0
    request.set_draft_tokens([0, 0, 0, 0, 0])
    assert manager.get_needed_blocks_one_step(request) == 1
    assert manager.get_needed_blocks_one_step(request, two_step_lookahead=True) == 1, "capacity"
