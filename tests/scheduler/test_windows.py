"""Groups of layers with a window: what they hold, what they give back, and what of it is found."""

from __future__ import annotations

import pytest
from support.fake_engine import sight_of, tokens_alone
from support.scheduler_world import World, make_request

from inflight_scheduler import (
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    make_scheduler,
    refusal_reason,
)
from inflight_scheduler.request import PrefixMatch

POLICIES = pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy))
GUARANTEED = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


def make_world(
    manager: BlockManager,
    policy: CapacitySchedulerPolicy = GUARANTEED,
    max_num_tokens: int = 8,
) -> World:
    """Chunks of up to ``max_num_tokens`` tokens, which the manager must know."""
    scheduler = make_scheduler(
        policy,
        manager,
        max_batch_size=4,
        max_num_tokens=max_num_tokens,
        chunking=ContextChunking(unit_size=1),
    )
    return World(scheduler, manager, 4)


@pytest.mark.fast(1)
@POLICIES
@pytest.mark.parametrize("enable_reuse", [False, True])
@pytest.mark.parametrize(
    ("windows", "num_blocks", "num_tokens"),
    [((7,), 10, 160), ((None, 7, 7), 40, 80), ((9, 3), 14, 160)],
)
def test_a_text_longer_than_the_pool(
    policy: CapacitySchedulerPolicy,
    windows: tuple[int | None, ...],
    num_blocks: int,
    num_tokens: int,
    enable_reuse: bool,
) -> None:
    """The pool holds at most half of the text in all groups, and requests take turns."""
    assert num_blocks * 4 < num_tokens * len(windows)
    manager = BlockManager(
        num_blocks, 4, windows=windows, max_chunk_tokens=8, enable_reuse=enable_reuse
    )
    world = make_world(manager, policy)
    requests = [make_request(i, num_tokens - 40, 40, family=i % 2) for i in range(4)]
    requests += [make_request(i, 6, 9) for i in range(4, 8)]
    alone = [
        tokens_alone(each.tokens, each.max_new_tokens, -1, 0, sight_of(windows))
        for each in requests
    ]
    for request in requests:
        world.arrive(request)
    world.drain()
    assert [request.tokens for request in requests] == alone


def test_what_a_group_holds() -> None:
    """A context as much as its longest chunk needs with what that sees; an answer its window."""
    manager = BlockManager(50, 4, windows=(None, 7), max_chunk_tokens=8)
    request = make_request(1, 40, 12)
    assert manager.get_needed_blocks_one_step(request) == 10 + 5
    assert manager.get_blocks_at_completion(request) == 13 + 5
    assert manager.get_remaining_blocks_to_completion(request) == 13 + 5
    world = make_world(manager)
    world.arrive(request)
    world.step()
    group = manager.window_groups[0]
    assert manager.num_used_blocks == 10 + 5
    assert group.held(1)[0] == 0
    for _ in range(4):
        world.step()
    assert request.num_cached_tokens == 40
    # Position 40 sees 34 and after: blocks 8 and 9.
    assert group.held(1)[0] == 8
    assert manager.num_used_blocks == 10 + 2
    assert manager.get_remaining_blocks_to_completion(request) == 3 + 1
    world.step()
    assert group.num_held(1) == 3
    for _ in range(4):  # at 44 a block is opened, and one is given back
        assert manager.get_needed_blocks_one_step(request) == (request.num_cached_tokens == 44)
        world.step()
    assert group.held(1)[0] == 9
    world.drain()


def test_looking_two_steps_ahead_counts_what_is_given_back_between_them() -> None:
    """A request alone in a pool that it can ever fit goes on, however many drafts it has."""
    need = make_request(1, 8, 16)
    for num_drafts in range(5):
        sizes = BlockManager(99, 2, windows=(None, 10), max_drafts=4)
        manager = BlockManager(
            sizes.get_blocks_at_completion(need), 2, windows=(None, 10), max_drafts=4
        )
        policy = CapacitySchedulerPolicy.MAX_UTILIZATION
        scheduler = make_scheduler(policy, manager, max_batch_size=2, two_step_lookahead=True)
        world = World(scheduler, manager, 2, max_drafts=4)
        world.arrive(make_request(1, 8, 16))
        while world.active:
            (request,) = world.active
            if request.is_generation_in_progress_state:
                request.set_draft_tokens([0] * num_drafts)
            world.step()
            assert world.num_running == 1, "it was paused"


def test_a_prefix_is_found_where_the_next_token_sees_it() -> None:
    manager = BlockManager(60, 4, windows=(None, 7), max_chunk_tokens=8, enable_reuse=True)
    world = make_world(manager)
    world.arrive(make_request(1, 30, 14, family=0))
    world.drain()
    full = world.finished[0].tokens

    def match_of(num_tokens: int) -> PrefixMatch:
        request = make_request(9, num_tokens)
        request.tokens[:] = (full + [0] * num_tokens)[:num_tokens]
        return manager.match_prefix(request)

    # Of the prompt all is cached, also what fell behind the window while it was computed.
    assert match_of(18).num_tokens == 16
    (source,) = match_of(18).window_sources
    assert source[:2] == (1, 2), "position 16 sees 10 and after"
    assert len(source[2]) == 2
    assert match_of(18).num_blocks == 4
    assert match_of(18).num_entries == 6
    # Of the answer what is seen at its end, and not what is seen before: 43 tokens are cached.
    assert match_of(44).num_tokens == 40
    assert match_of(37).num_tokens == 28
    # Without a block that is seen there is no prefix, however much of it the other group has.
    for _, _, block_ids in match_of(44).window_sources:
        assert manager._pool.unkeep(block_ids[0])
        assert manager._index is not None
        manager._index.forget([block_ids[0]])
    assert match_of(44).num_tokens == 28
    manager.check_integrity()


def test_nothing_is_kept_of_a_text_whose_numbers_have_failed() -> None:
    """What it has given back may be wrong, too."""
    manager = BlockManager(60, 4, windows=(None, 7), max_chunk_tokens=8, enable_reuse=True)
    world = make_world(manager)
    request = make_request(1, 30, 14)
    world.arrive(request)
    for _ in range(5):
        world.step()
    assert manager.num_idle_blocks > 0
    manager.forget(1)
    assert manager.num_idle_blocks == 0


def test_a_pause_may_need_more_than_a_prompt() -> None:
    """Then the answer is a context, of which a chunk takes more than a step."""
    manager = BlockManager(6, 4, windows=(5,), max_chunk_tokens=40)
    reason = refusal_reason(
        make_request(1, 4, 60), block_manager=manager, max_num_tokens=40, may_pause=True
    )
    assert reason is not None
    assert (
        "needs 12 KV blocks of 4 tokens, but there are 6; ask for less, lower max_num_t" in reason
    )
    assert (
        refusal_reason(
            make_request(1, 4, 60), block_manager=manager, max_num_tokens=40, may_pause=False
        )
        is None
    )
