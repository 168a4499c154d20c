"""Block tables, and the arithmetic of contract 4.3 rule by rule."""

from __future__ import annotations

import pytest
from support.scheduler_world import generating, make_request

from inflight_scheduler import BlockManager


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


def test_no_room_changes_nothing() -> None:
    manager = BlockManager(num_blocks=3, tokens_per_block=4)
    assert manager.allocate(1, 8) == [0, 1]
    assert manager.allocate(2, 5) is None
    assert manager.allocate(1, 17) is None
    assert manager.block_table(1) == (0, 1)
    assert manager.num_free_blocks == 1
    manager.check_integrity()


def test_freeing_nothing_is_harmless() -> None:
    assert BlockManager(3, 4).free(99) == 0


def test_integrity_sees_a_table_that_was_tampered_with() -> None:
    manager = BlockManager(3, 4)
    manager.allocate(1, 4)
    manager._tables[2] = [0]
    manager._num_held += 1
    with pytest.raises(AssertionError, match="2 holders"):
        manager.check_integrity()


@pytest.mark.parametrize(("num_prompt", "needed"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2)])
def test_first_chunk_needs_the_whole_prompt(num_prompt: int, needed: int) -> None:
    manager = BlockManager(10, 4)
    request = make_request(1, num_prompt, max_new=20)
    request.context_chunk_size = 1
    assert manager.get_needed_blocks_one_step(request) == needed


def test_later_chunks_need_nothing() -> None:
    request = make_request(1, num_prompt=9)
    request.context_chunk_size = 4
    request.move_to_next_context_chunk()
    assert BlockManager(10, 4).get_needed_blocks_one_step(request) == 0


@pytest.mark.parametrize(
    ("num_prompt", "one_step", "two_steps"), [(3, 0, 1), (4, 1, 1), (5, 0, 0), (2, 0, 0)]
)
def test_generation_needs_a_block_at_a_border(
    num_prompt: int, one_step: int, two_steps: int
) -> None:
    # After the context `num_prompt` tokens are cached and the next step caches one more.
    manager = BlockManager(10, 4)
    request = generating(make_request(1, num_prompt, max_new=9), manager)
    assert request.num_cached_tokens == num_prompt
    assert manager.get_needed_blocks_one_step(request) == one_step
    assert manager.get_needed_blocks_one_step(request, two_step_lookahead=True) == two_steps


def test_lookahead_ends_at_the_last_token() -> None:
    manager = BlockManager(10, 4)
    request = generating(make_request(1, num_prompt=3, max_new=2), manager)
    assert manager.get_needed_blocks_one_step(request, two_step_lookahead=True) == 0


def test_cached_after_step_k_is_prompt_plus_k() -> None:
    request = make_request(1, num_prompt=5, max_new=9)
    assert request.num_cached_tokens == 0
    request.move_to_next_context_chunk()
    request.add_new_token(1)
    for k in range(4):
        assert request.num_cached_tokens == 5 + k
        request.add_new_token(1)


def test_beams_share_full_prompt_blocks_and_own_the_rest() -> None:
    manager = BlockManager(40, 4)
    request = make_request(1, num_prompt=9, max_new=4, beam_width=3)
    assert manager.get_needed_blocks_one_step(request) == 2 + 3
    # ceil(13 / 4) = 4 blocks, of which floor(9 / 4) = 2 shared and 2 for each beam
    assert manager.get_blocks_at_completion(request) == 2 + 2 * 3
    even = make_request(2, num_prompt=8, max_new=4, beam_width=3)
    assert manager.get_needed_blocks_one_step(even) == 2
    assert manager.get_needed_blocks_one_step(generating(even, manager)) == 3


def test_to_completion_subtracts_what_is_held() -> None:
    manager = BlockManager(10, 4)
    request = make_request(1, num_prompt=5, max_new=8)
    assert manager.get_remaining_blocks_to_completion(request) == 4
    manager.allocate(1, 5)
    assert manager.get_remaining_blocks_to_completion(request) == 2


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


def test_blocks_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens_per_block must be at least 1, not 0"):
        BlockManager(3, 0)
