"""Recordings of searches with beams are decided again, exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scheduler.recording.recorded import GUARANTEED, MAX_UTILIZATION, play, read
from scheduler.recording.searching import SearchingWorld

from inflight_scheduler import CapacitySchedulerPolicy
from inflight_scheduler.recording.history import build_history
from inflight_scheduler.recording.records import Settings
from inflight_scheduler.recording.replay import replay


@pytest.mark.parametrize("is_overlapped", [False, True])
@hypothesis_settings(max_examples=30, deadline=None)
@given(
    policy=st.sampled_from([GUARANTEED, MAX_UTILIZATION]),
    num_blocks=st.integers(6, 30),
    tokens_per_block=st.sampled_from([2, 4]),
    reuse=st.booleans(),
    seed=st.integers(0, 2**16),
    fault_rate=st.sampled_from([0.0, 0.05]),
    is_equal=st.booleans(),
)
def test_replay_is_identical(
    is_overlapped: bool,
    policy: CapacitySchedulerPolicy,
    num_blocks: int,
    tokens_per_block: int,
    reuse: bool,
    seed: int,
    fault_rate: float,
    is_equal: bool,
) -> None:
    """Also where somebody urgent comes in a turn in which only the tokens of a search do."""
    settings = Settings(
        policy,
        num_blocks,
        tokens_per_block,
        5,
        enable_reuse=reuse,
        may_copy_blocks=reuse,
        is_overlapped=is_overlapped,
        priority_span=5,
    )
    world = SearchingWorld(settings)
    priorities = (0.5,) if is_equal else (0.0, 0.5, 0.9)
    play(
        settings,
        num_requests=15,
        seed=seed,
        world=world,
        priorities=priorities,
        fault_rate=fault_rate,
    )
    result = replay(read(world.text))
    assert result.divergence is None, str(result)
    assert result.num_requests == 15
    assert build_history(read(world.text)).num_iterations == result.num_iterations
