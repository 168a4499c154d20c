"""Recordings of searches with beams are decided again, exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from recorder.recorded import (
    GUARANTEED,
    MAX_UTILIZATION,
    RecordedWorld,
    play,
    read,
    tiny_ring,
)
from recorder.searching import SearchingWorld
from scheduler.world import make_request

from inflight_recorder import recorder as recorder_module
from inflight_recorder.replay import replay
from inflight_recorder.settings import Settings
from inflight_recorder.timeline import build_timeline
from inflight_scheduler import CapacitySchedulerPolicy, FinishReason

REUSE = Settings(MAX_UTILIZATION, 40, 2, 5, enable_reuse=True, is_overlapped=True)


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
    assert build_timeline(read(world.text)).num_iterations == result.num_iterations


def end(world: RecordedWorld, request_id: int) -> None:
    """Its client has stopped it between two turns."""
    request = world.active.get(request_id)
    assert request is not None
    request.finish(FinishReason.CANCELLED)
    world.end(request)


def test_a_search_is_lost_in_the_turn_in_which_somebody_has_left_before() -> None:
    """Who left has nothing to do with it: all that was cached is lost behind that."""
    world = SearchingWorld(REUSE)
    world.arrive(make_request(1, 8, 9))
    for _ in range(3):
        world.iterate()
    world.arrive(make_request(3, 8, 9))
    end(world, 3)
    world.iterate(fault="lost")
    assert not world.active
    assert compute_again(world) == [1, 1]


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_nothing_of_a_search_without_numbers_is_kept_in_a_replay_either(
    is_overlapped: bool,
) -> None:
    world = SearchingWorld(replace(REUSE, is_overlapped=is_overlapped))
    world.arrive(make_request(1, 8, 9))
    world.iterate(fault="" if is_overlapped else "broken")
    if is_overlapped:
        world.iterate(fault="broken")
    assert not world.active
    assert compute_again(world) == [1, 1]
    assert '"not_finite"' in world.text


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_search_that_had_answers_ends_well_without_numbers(is_overlapped: bool) -> None:
    """What was computed before is kept as it was, whichever loop it is."""
    world = SearchingWorld(replace(REUSE, is_overlapped=is_overlapped))
    world.arrive(make_request(10, 8, 1))
    while world.active:
        world.iterate()
    world.arrive(make_request(1, 8, 9, end_id=0))
    for _ in range(1 + is_overlapped):
        world.iterate()
    world.iterate(fault="broken")
    assert not world.active
    assert '"end_id"' in world.text
    state = world.manager.cache_state()
    assert state is not None
    assert [text for _, text, _ in state.kept()] == [0] * 4
    assert compute_again(world) == [2]


def compute_again(world: RecordedWorld) -> list[int]:
    """How many contexts run at once where two come that begin like request 1: one waits for the
    other, unless their beginning is cached. A replay says the same."""
    num_before = len(world.batches)
    for number in (4, 7):
        world.arrive(make_request(number, 8, 2))
    while world.active:
        world.iterate()
    result = replay(read(world.text))
    assert result.divergence is None, str(result)
    numbers = [len(batch.context_chunks) for batch in world.batches[num_before:]]
    return [number for number in numbers if number > 0]


def test_no_step_runs_where_a_search_was_settled_before_the_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay of a ring that begins there would pause nobody."""
    monkeypatch.setattr(recorder_module, "CHUNK_ITERATIONS", 1)
    monkeypatch.setattr(recorder_module, "NUM_CHUNKS", 1)
    world = SearchingWorld(Settings(MAX_UTILIZATION, 40, 2, 5, is_overlapped=True))
    world.arrive(make_request(1, 8, 9))
    world.arrive(make_request(3, 8, 9))
    world.iterate()
    assert world.running is not None
    end(world, 1)
    world.iterate()
    assert [iteration.number for iteration in read(world.text)] == [3]
    header = read(world.text).header
    assert not header.is_running
    assert [state.pending_place for state in header.active] == [0]


def test_what_a_search_has_generated_is_no_text_that_others_are_like() -> None:
    """It is not kept, and behind a pause the search may go on in another way."""
    with tiny_ring():
        world = SearchingWorld(replace(REUSE, num_blocks=12))
    search = make_request(1, 8, 7)
    world.arrive(search)
    [searching] = world.active
    while world.active:
        world.iterate()
    assert searching.beam_width == 2
    for number in range(2, 80):  # the index forgets, and enters again what is cached
        world.arrive(make_request(3 * number, 1, 1, cache_salt=b"%d" % number))
        while world.active:
            world.iterate()
    world.arrive(other := make_request(300, 15, 1))
    other.tokens[:] = searching.tokens
    world.iterate()
    arrival = list(read(world.text))[-1].arrivals[0]
    assert (arrival.request_id, *arrival.likeness) == (300, 0, 8)
