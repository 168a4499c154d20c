"""What is refused on arrival: exactly what could never finish."""

from __future__ import annotations

import pytest
from support.scheduler_world import World, make_request

from inflight_scheduler import (
    BlockManager,
    CapacitySchedulerPolicy,
    LlmRequest,
    make_scheduler,
    refusal_reason,
)


def reason(request: LlmRequest, may_pause: bool, max_num_tokens: int | None = 12) -> str | None:
    manager = BlockManager(num_blocks=4, tokens_per_block=4)
    return refusal_reason(
        request, block_manager=manager, max_num_tokens=max_num_tokens, may_pause=may_pause
    )


def test_larger_than_the_pool() -> None:
    text = reason(make_request(1, num_prompt=8, max_new=9), may_pause=False)
    assert text is not None
    assert "prompt of 8 plus 9 output tokens needs 5 KV blocks of 4 tokens" in text
    assert "there are 4" in text
    assert reason(make_request(1, num_prompt=8, max_new=8), may_pause=False) is None


def test_prompt_longer_than_an_iteration() -> None:
    text = reason(make_request(1, num_prompt=13, max_new=1), may_pause=False)
    assert text is not None
    assert "prompt of 13 tokens exceeds max_num_tokens=12" in text
    assert reason(make_request(1, 13, 1), may_pause=False, max_num_tokens=None) is None


def test_all_beams_with_their_drafts_are_one_step() -> None:
    text = reason(make_request(1, 2, 2, beam_width=4), may_pause=False, max_num_tokens=3)
    assert text is not None
    assert "a generation step of 4 beams and 0 draft tokens exceeds max_num_tokens=3" in text
    assert reason(make_request(1, 2, 2, beam_width=3), False, max_num_tokens=3) is None
    drafting = make_request(1, 1, 4, num_drafts=3)
    assert "of 1 beams and 3 draft tokens" in (reason(drafting, False, max_num_tokens=3) or "")


def test_a_pause_must_be_recomputable() -> None:
    request = make_request(1, num_prompt=8, max_new=6)
    text = reason(request, may_pause=True)
    assert text is not None
    assert "computed again from 13 tokens" in text
    assert reason(request, may_pause=False) is None
    assert reason(make_request(1, num_prompt=8, max_new=5), may_pause=True) is None


def test_without_kv_cache_only_the_iteration_limits() -> None:
    request = make_request(1, num_prompt=13)
    text = refusal_reason(request, block_manager=None, max_num_tokens=12, may_pause=False)
    assert text is not None
    assert "max_num_tokens" in text


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy), ids=lambda policy: policy.name)
@pytest.mark.parametrize("max_new", [5, 8])
def test_the_largest_admitted_request_runs(policy: CapacitySchedulerPolicy, max_new: int) -> None:
    request = make_request(1, num_prompt=8, max_new=max_new)
    may_pause = policy == CapacitySchedulerPolicy.MAX_UTILIZATION
    manager = BlockManager(num_blocks=4, tokens_per_block=4)
    budget = 8 + max_new - 1
    assert (
        refusal_reason(request, block_manager=manager, max_num_tokens=budget, may_pause=may_pause)
        is None
    )
    scheduler = make_scheduler(policy, manager, max_batch_size=2, max_num_tokens=budget)
    world = World(scheduler, manager, num_slots=2)
    world.arrive(request)
    world.drain()
    assert request.num_generated_tokens == max_new
