"""Recordings are decided again, exactly; whatever differs is found."""

from __future__ import annotations

import json
import marshal
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.recorder_worlds import (
    GUARANTEED,
    MAX_UTILIZATION,
    DraftingWorld,
    RecordedWorld,
    SearchingWorld,
    chunkings,
    play,
    read,
    tiny_ring,
)
from support.scheduler_world import make_request

from inflight_recorder import recorder as recorder_module
from inflight_recorder.replay import replay
from inflight_recorder.settings import Settings
from inflight_recorder.simulator import Simulation
from inflight_recorder.timeline import build_timeline
from inflight_recorder.workload import read_workload
from inflight_scheduler import (
    CapacitySchedulerPolicy,
    ContextChunking,
    FinishReason,
)

SMALL = Settings(MAX_UTILIZATION, num_blocks=12, tokens_per_block=4, max_batch_size=6)
REUSE = Settings(MAX_UTILIZATION, 40, 2, 5, enable_reuse=True, is_overlapped=True)


def check_replay(text: str) -> None:
    """All that follow a recording come to its end, and nothing differs."""
    result = replay(read(text))
    assert result.divergence is None, str(result)
    assert build_timeline(read(text)).num_iterations == result.num_iterations
    read_workload(read(text))


@pytest.mark.fast(1)
@pytest.mark.parametrize("kind", ["plain", "beams", "drafts"])
@hypothesis_settings(max_examples=120, deadline=None)
@given(
    settings=st.builds(
        Settings,
        policy=st.sampled_from(CapacitySchedulerPolicy),
        num_blocks=st.integers(3, 16),
        tokens_per_block=st.sampled_from([1, 2, 4]),
        max_batch_size=st.integers(1, 8),
        max_num_tokens=st.none() | st.integers(4, 40),
        chunking=chunkings,
        enable_reuse=st.booleans(),
        may_copy_blocks=st.booleans(),
        is_overlapped=st.booleans(),
        priority_span=st.just(5),
        windows=st.sampled_from([(None,), (None,), (None, 5), (3,), (None, 2, 6, 6)]),
        max_drafts=st.just(4),
        num_snapshots=st.sampled_from([None, None, 1, 4]),
    ),
    seed=st.integers(0, 2**16),
    priorities=st.sampled_from([(0.5,), (0.0, 0.5, 0.9)]),
    salts=st.sampled_from([(b"",), (b"", b"", b"other")]),
    fault_rate=st.sampled_from([0.0, 0.05]),
    is_ring=st.booleans(),
)
@example(  # the ring begins while a step runs of a chunk that is not the last one
    settings=Settings(
        MAX_UTILIZATION,
        13,
        1,
        6,
        chunking=ContextChunking(unit_size=1, max_context_length=1),
        enable_reuse=True,
        is_overlapped=True,
        priority_span=5,
    ),
    seed=13,
    priorities=(0.0, 0.5, 0.9),
    salts=(b"", b"", b"other"),
    fault_rate=0.0,
    is_ring=True,
)
@example(  # a partial match where the replay remembers that there was none
    settings=Settings(
        CapacitySchedulerPolicy.STATIC_BATCH,
        16,
        4,
        1,
        chunking=ContextChunking(unit_size=1, max_context_length=1),
        enable_reuse=True,
        may_copy_blocks=True,
        priority_span=5,
    ),
    seed=1,
    priorities=(0.5,),
    salts=(b"",),
    fault_rate=0.05,
    is_ring=False,
)
@pytest.mark.case(113)
def test_replay_of_our_own_recording_is_identical(
    kind: str,
    settings: Settings,
    seed: int,
    priorities: tuple[float, ...],
    salts: tuple[bytes, ...],
    fault_rate: float,
    is_ring: bool,
) -> None:
    """From the start, or from the middle of a ring; with pauses, stops, faults, shared blocks."""
    if kind == "beams":  # one that holds rows cannot be at the start of a ring
        settings = replace(settings, max_num_tokens=None, chunking=None, windows=(None,))
        is_ring = False
    if kind == "drafts":
        settings = replace(settings, num_snapshots=None)
    if settings.num_snapshots is not None:
        settings = replace(settings, windows=(None,))
    settings = replace(settings, num_blocks=settings.num_blocks * len(settings.windows))
    with tiny_ring() if is_ring else nullcontext():
        world = RecordedWorld(settings)
        if kind == "beams":
            world = SearchingWorld(settings)
        elif kind == "drafts":
            world = DraftingWorld(settings, seed)
        play(
            settings,
            num_requests=40 if is_ring else 15,
            seed=seed,
            world=world,
            priorities=priorities,
            salts=salts,
            fault_rate=fault_rate,
            max_iterations=16 + seed % 75 if is_ring else None,
        )
    check_replay(world.text)
    if not is_ring:
        result = replay(read(world.text))
        assert (result.num_requests, result.num_pauses) == (15, world.num_pauses)
    elif settings.enable_reuse and kind == "plain":
        check_cache_at_start(world)


def check_cache_at_start(world: RecordedWorld) -> None:
    """It comes back block by block, in the order of idleness."""
    reader, state = read(world.text), world.recorder._ring[0].start.cache
    if reader.header.cache is None or state is None:
        return
    manager = Simulation(reader.settings, start=reader.header).block_manager
    manager.check_integrity()
    again = manager.cache_state()
    assert again is not None
    assert (again.tables, again.kept, again.idle) == (state.tables, state.kept, state.idle)
    assert sorted(again.groups) == sorted(state.groups)
    tables = marshal.loads(world.recorder._ring[0].start.windows)
    assert dict(manager.window_tables()) == {request_id: held for request_id, held in tables}
    assert [again.hashes[k] for k in again.kept] == [state.hashes[k] for k in state.kept]


def test_the_memory_for_texts_is_that_of_active_requests() -> None:
    settings = Settings(MAX_UTILIZATION, 12, 2, 6, 40, None, True, True)
    with tiny_ring():
        world = play(settings, num_requests=1200, seed=4)
    recorder = world.recorder
    assert not any((recorder._hashes, recorder._told_matches))
    assert len(world.text.partition("\n")[0]) < 5000
    assert replay(read(world.text)).divergence is None


def change(content: dict[str, Any], key: str) -> bool:
    """Another number of free blocks, a pause that is lost, or another order; False: not here."""
    if key == "f":
        content["f"] += 1
        return "s" in content
    rows = content.get("s", {}).get(key, [])
    if key == "p" and rows:
        del content["s"]["p"]
        return True
    rows[:2] = rows[1::-1]
    return len(rows) >= 2


@pytest.mark.parametrize(
    ("key", "num_blocks", "what"),
    [
        ("f", 12, "free blocks"),
        ("p", 12, "paused requests"),
        ("c", 60, "context requests"),
        ("g", 60, "generation requests"),
    ],
)
@pytest.mark.case(113)
def test_one_changed_fact_is_found(key: str, num_blocks: int, what: str) -> None:
    """Nothing else differs where the order does, neither blocks nor who is paused."""
    world = play(replace(SMALL, num_blocks=num_blocks), num_requests=60, seed=5)
    lines = world.text.splitlines(keepends=True)
    num_changed = 0
    for index in range(1, len(lines), 5 if key == "f" else 1):
        content = json.loads(lines[index])
        if change(content, key):
            changed = [*lines[:index], json.dumps(content) + "\n", *lines[index + 1 :]]
            divergence = replay(read("".join(changed))).divergence
            assert divergence is not None
            assert (divergence.number, divergence.what) == (content["i"], what)
            if key == "f":
                assert str(content["f"] - 1) == divergence.replayed
            num_changed += 1
    assert num_changed > 3


@pytest.mark.parametrize("num_iterations", [None, 30])
def test_failed_logits_of_a_request_that_left_empty_the_cache_in_a_replay_too(
    num_iterations: int | None,
) -> None:
    """Of whole recordings, and of rings that end in the middle of things."""
    num_forgotten = 0
    for seed in range(10):
        settings = Settings(MAX_UTILIZATION, 16, 2, 6, 40, None, True, is_overlapped=True)
        with tiny_ring() if num_iterations else nullcontext():
            world = RecordedWorld(settings)
            play(
                settings,
                num_requests=80,
                seed=seed,
                world=world,
                fault_rate=0.5,
                max_iterations=num_iterations,
            )
        result = replay(read(world.text))
        assert result.divergence is None, (seed, str(result))
        num_forgotten += world.text.count('"w":true')
    assert num_forgotten > 0


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_prompt_with_failed_logits_is_not_cached_in_a_replay_either(
    is_overlapped: bool, num_drafts: int
) -> None:
    """So of two that begin like it one waits for the other, as it did."""
    settings = Settings(MAX_UTILIZATION, 40, 2, 5, None, None, True)
    world = RecordedWorld(replace(settings, is_overlapped=is_overlapped and not num_drafts))
    world.arrive(make_request(1, 8, 9, family=1, num_drafts=num_drafts))
    world.iterate(fault="broken")
    while world.active:
        world.iterate(fault="broken")
    for number in (2, 3):
        world.arrive(make_request(number, 8, 2, family=1))
    while world.active:
        world.iterate()
    assert [len(batch.context_chunks) for batch in world.batches if batch.context_chunks] == [1] * 3
    result = replay(read(world.text))
    assert result.divergence is None, str(result)
    assert world.text.count('"not_finite"') == 1


def test_a_ring_knows_the_blocks_of_drafts_that_never_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk takes room for them, and the last one leaves them none."""
    monkeypatch.setattr(recorder_module, "CHUNK_ITERATIONS", 1)
    monkeypatch.setattr(recorder_module, "NUM_CHUNKS", 1)
    chunking = ContextChunking(unit_size=3, max_context_length=3)
    world = RecordedWorld(Settings(GUARANTEED, 20, 1, 2, chunking=chunking))
    request = make_request(1, 6, 8)
    request.set_draft_tokens((1, 2))
    world.arrive(request)
    for _ in range(3):
        world.iterate()
    assert (request.num_verified_drafts, request.num_tokens) == (0, 8)
    assert world.manager.num_blocks_of(1) == 8, "nothing is left over: the test shows nothing"
    assert str(replay(read(world.text))) == "identical, 1 iteration (1 request, 0 pauses)"


def end(world: RecordedWorld, request_id: int) -> None:
    """Its client has stopped it between two turns."""
    request = world.active.get(request_id)
    assert request is not None
    request.finish(FinishReason.CANCELLED)
    world.end(request)


def test_a_search_is_lost_in_the_turn_in_which_another_request_has_left() -> None:
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
def test_nothing_of_a_search_with_failed_logits_is_kept_in_a_replay_either(
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
def test_a_search_that_had_answers_ends_well_with_failed_logits(is_overlapped: bool) -> None:
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
    assert len(state.kept) == 4, "of the first prompt alone"
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
    assert world.is_running
    end(world, 1)
    world.iterate()
    assert [iteration.number for iteration in read(world.text)] == [3]
    header = read(world.text).header
    assert not header.is_running
    assert [state.pending_place for state in header.active] == [0]
