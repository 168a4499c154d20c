"""What was recorded is decided again, exactly; what differs is shown."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scheduler.recording.recorded import GUARANTEED, MAX_UTILIZATION, RecordedWorld, play, read
from scheduler.world import make_request

from inflight_scheduler import (
    CapacitySchedulerPolicy,
    ContextChunking,
    ContextChunkingPolicy,
    RequestScheduler,
)
from inflight_scheduler.recording import recorder as recorder_module
from inflight_scheduler.recording.errors import RecordingError
from inflight_scheduler.recording.records import Settings
from inflight_scheduler.recording.replay import replay

SMALL = Settings(MAX_UTILIZATION, num_blocks=12, tokens_per_block=4, max_batch_size=6)


chunkings = st.none() | st.builds(
    ContextChunking, st.sampled_from(ContextChunkingPolicy), st.integers(1, 4)
)


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy))
@hypothesis_settings(max_examples=80, deadline=None)
@given(
    num_blocks=st.integers(2, 16),
    tokens_per_block=st.sampled_from([1, 2, 4]),
    max_batch_size=st.integers(1, 8),
    max_num_tokens=st.none() | st.integers(4, 40),
    chunking=chunkings,
    reuse=st.sampled_from([(False, False), (True, False), (True, True)]),
    seed=st.integers(0, 2**16),
    is_equal=st.booleans(),
)
@pytest.mark.case(113)
def test_replay_of_our_own_recording_is_identical(
    policy: CapacitySchedulerPolicy,
    num_blocks: int,
    tokens_per_block: int,
    max_batch_size: int,
    max_num_tokens: int | None,
    chunking: ContextChunking | None,
    reuse: tuple[bool, bool],
    seed: int,
    is_equal: bool,
) -> None:
    settings = Settings(
        policy, num_blocks, tokens_per_block, max_batch_size, max_num_tokens, chunking, *reuse
    )
    priorities = (0.5,) if is_equal else (0.0, 0.5, 0.9)
    world = play(settings, num_requests=15, seed=seed, priorities=priorities)
    result = replay(read(world.text))
    assert result.divergence is None, str(result)
    assert result.num_requests == 15
    assert result.num_pauses == world.num_pauses


@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
def test_the_ring_replays_from_its_middle(
    policy: CapacitySchedulerPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest segments are gone; the state at the start of the next one stands in for them."""
    monkeypatch.setattr(recorder_module, "SEGMENT_ITERATIONS", 7)
    settings = Settings(policy, 12, 4, 6, 40, ContextChunking(unit_size=2))
    world = play(settings, num_requests=150, seed=3)
    first = next(iter(read(world.text)))
    assert first.number > 1, "nothing was dropped: the test shows nothing"
    assert read(world.text).header.active, "nobody was active: the test shows nothing"
    assert replay(read(world.text)).divergence is None


def test_the_ring_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "SEGMENT_NUMBERS", 100)
    world = play(SMALL, num_requests=300, seed=1)
    longest = 2 * recorder_module.NUM_SEGMENTS * 100
    numbers = [json.loads(line) for line in world.text.splitlines()[1:]]
    assert len(numbers) * 8 <= longest


def test_with_reuse_the_middle_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cached at the start of the ring is not in it; a file from the start is exact."""
    monkeypatch.setattr(recorder_module, "SEGMENT_ITERATIONS", 7)
    world = play(Settings(MAX_UTILIZATION, 12, 4, 6, 40, None, True), num_requests=150, seed=3)
    with pytest.raises(RecordingError, match="begins in the middle: with block reuse"):
        replay(read(world.text))


@pytest.mark.case(113)
def test_one_changed_number_is_found() -> None:
    world = play(SMALL, num_requests=30, seed=5)
    lines = world.text.splitlines(keepends=True)
    for index in range(5, len(lines), 9):
        content = json.loads(lines[index])
        content["f"] += 1
        changed = [*lines[:index], json.dumps(content) + "\n", *lines[index + 1 :]]
        result = replay(read("".join(changed)))
        assert result.divergence is not None
        assert result.divergence.number == content["i"]
        assert result.divergence.what == "free blocks"
        assert str(content["f"] - 1) in str(result)


def test_another_policy_is_a_divergence_with_both_sides() -> None:
    world = play(SMALL, num_requests=30, seed=5)
    text = world.text.replace('"max_utilization"', '"guaranteed_no_evict"')
    divergence = replay(read(text)).divergence
    assert divergence is not None
    assert divergence.recorded != divergence.replayed
    assert f"iteration {divergence.number} differs in" in str(divergence)


def test_a_scheduler_of_the_user_is_needed_again() -> None:
    class LastFirst(RequestScheduler):
        """Runs the newest request only."""

        def schedule_request(self, active_requests, inflight_request_ids):  # type: ignore[no-untyped-def]
            newest = [active_requests[-1]]
            is_context = newest[0].is_context_init_state
            return (newest, [], []) if is_context else ([], newest, [])

    settings = Settings(GUARANTEED, 12, 4, 6, scheduler_class="somewhere:LastFirst")
    world = RecordedWorld(settings, LastFirst())
    world.arrive(make_request(1, 3, 4))
    world.arrive(make_request(2, 3, 4))
    while world.active:
        world.iterate()
    with pytest.raises(RecordingError, match=r"somewhere:LastFirst.*--scheduler-class"):
        replay(read(world.text))
    result = replay(read(world.text), lambda settings, planner: LastFirst())
    assert str(result) == "identical, 8 iterations (2 requests, 0 pauses)"
