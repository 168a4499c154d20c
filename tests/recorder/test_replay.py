"""What was recorded is decided again, exactly; what differs is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from recorder.recorded import (
    GUARANTEED,
    MAX_UTILIZATION,
    RecordedWorld,
    chunkings,
    play,
    read,
    small_settings,
    tiny_ring,
)
from scheduler.world import make_request

from inflight_recorder import recorder as recorder_module
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.replay import replay
from inflight_recorder.settings import RecordingError, Settings
from inflight_recorder.simulator import Simulation
from inflight_scheduler import (
    CapacitySchedulerPolicy,
    ContextChunking,
    ContextChunkingPolicy,
    RequestScheduler,
)

SMALL = Settings(MAX_UTILIZATION, num_blocks=12, tokens_per_block=4, max_batch_size=6)


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy))
@hypothesis_settings(max_examples=80, deadline=None)
@given(
    settings=small_settings,
    reuse=st.sampled_from([(False, False), (True, False), (True, True)]),
    seed=st.integers(0, 2**16),
    is_equal=st.booleans(),
    is_overlapped=st.booleans(),
    fault_rate=st.sampled_from([0.0, 0.05]),
)
@pytest.mark.case(113)
def test_replay_of_our_own_recording_is_identical(
    policy: CapacitySchedulerPolicy,
    settings: Settings,
    reuse: tuple[bool, bool],
    seed: int,
    is_equal: bool,
    is_overlapped: bool,
    fault_rate: float,
) -> None:
    settings = replace(
        settings,
        policy=policy,
        enable_reuse=reuse[0],
        may_copy_blocks=reuse[1],
        is_overlapped=is_overlapped,
        priority_span=5,
    )
    priorities = (0.5,) if is_equal else (0.0, 0.5, 0.9)
    world = play(settings, num_requests=15, seed=seed, priorities=priorities, fault_rate=fault_rate)
    result = replay(read(world.text))
    assert result.divergence is None, str(result)
    assert result.num_requests == 15
    assert result.num_pauses == world.num_pauses


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
def test_the_ring_replays_from_its_middle(
    policy: CapacitySchedulerPolicy, is_overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest segments are gone; the state at the start of the next one stands in for them."""
    monkeypatch.setattr(recorder_module, "CHUNK_ITERATIONS", 7)
    settings = Settings(
        policy, 12, 4, 6, 40, ContextChunking(unit_size=2), is_overlapped=is_overlapped
    )
    world = play(settings, num_requests=150, seed=3)
    first = next(iter(read(world.text)))
    assert first.number > 1, "nothing was dropped: the test shows nothing"
    assert read(world.text).header.active, "nobody was active: the test shows nothing"
    assert replay(read(world.text)).divergence is None


def test_the_ring_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many iterations a segment may have."""
    monkeypatch.setattr(recorder_module, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(recorder_module, "REQUEST_BYTES", 0)
    segments = play(SMALL, num_requests=300, seed=1).recorder._ring
    assert len(segments) == recorder_module.NUM_CHUNKS
    size = sum(sys.getsizeof(packed) for segment in segments for packed in segment.packed)
    assert 0.5 * 16 * 4000 < size < 1.1 * 16 * 4000


def test_what_was_cached_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings from before that was recorded are refused, and so is half the truth."""
    monkeypatch.setattr(recorder_module, "CHUNK_ITERATIONS", 7)
    world = play(Settings(MAX_UTILIZATION, 12, 4, 6, 40, None, True), num_requests=150, seed=3)
    header, _, rest = world.text.partition("\n")
    content = json.loads(header)
    del content["cache"]
    with pytest.raises(RecordingError, match="begins in the middle and does not say what"):
        replay(read(json.dumps(content) + "\n" + rest))


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy))
@hypothesis_settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(4, 16),
    tokens_per_block=st.sampled_from([1, 2, 4]),
    max_num_tokens=st.none() | st.integers(4, 40),
    chunking=chunkings,
    may_copy=st.booleans(),
    seed=st.integers(0, 2**16),
    num_iterations=st.integers(16, 90),
    is_overlapped=st.booleans(),
)
@example(  # it begins while a step of a chunk that is not the last one runs
    num_blocks=13,
    tokens_per_block=1,
    max_num_tokens=None,
    chunking=ContextChunking(ContextChunkingPolicy.FORCE_CHUNK, 1),
    may_copy=False,
    seed=13,
    num_iterations=16,
    is_overlapped=True,
)
def test_a_ring_with_reuse_replays_from_its_middle(
    policy: CapacitySchedulerPolicy,
    num_blocks: int,
    tokens_per_block: int,
    max_num_tokens: int | None,
    chunking: ContextChunking | None,
    may_copy: bool,
    seed: int,
    num_iterations: int,
    is_overlapped: bool,
) -> None:
    """At any moment; the cache at its start comes back block by block, in the order of idleness."""
    settings = Settings(
        policy,
        num_blocks,
        tokens_per_block,
        6,
        max_num_tokens,
        chunking,
        True,
        may_copy,
        is_overlapped=is_overlapped,
        priority_span=5,
    )
    with tiny_ring():
        world = RecordedWorld(settings)
        play(
            settings,
            num_requests=60,
            seed=seed,
            world=world,
            priorities=(0.0, 0.5, 0.9),
            salts=(b"", b"", b"other"),
            max_iterations=num_iterations,
        )
    reader = read(world.text)
    result = replay(reader)
    assert result.divergence is None, str(result)
    mark = world.recorder._ring[0].cache
    if reader.header.cache is not None and mark is not None:
        header = reader.header
        manager = Simulation(header.settings, header.active, cache=header.cache).block_manager
        manager.check_integrity()
        state = manager.cache_state()
        assert state is not None
        assert state.tables == mark.state.tables
        assert list(state.kept()) == list(mark.state.kept())
        assert state.idle == mark.state.idle
        assert sorted(state.beginnings) == sorted(mark.state.beginnings)


def test_the_texts_a_ring_remembers_are_bounded() -> None:
    """Many requests with few different texts: their parts are swept, and replay still works."""
    settings = Settings(MAX_UTILIZATION, 12, 2, 6, 40, None, True, True)
    with tiny_ring():
        world = play(settings, num_requests=1200, seed=4)
    assert world.recorder._texts is not None
    assert world.recorder._texts._parts.num_parts < 300
    assert len(world.text.partition("\n")[0]) < 5000
    assert replay(read(world.text)).divergence is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cache: cache["idle"].pop(), "the idle blocks are not those"),
        (lambda cache: cache["idle"].append(cache["idle"][0]), "the idle blocks are not those"),
        (lambda cache: cache["idle"].append(12), "idle is 12: it must be between 0 and 11"),
        (lambda cache: cache["kept"].pop(), "kept must hold rows of 3"),
        (lambda cache: cache["kept"].extend(cache["kept"][:3]), "is kept twice"),
        (lambda cache: cache["tables"].pop(), "an entry for each active request"),
        (lambda cache: next(filter(None, cache["tables"])).pop(), r"holds \d+ blocks"),
        (lambda cache: cache.update(of=["x"]), "a whole number is expected"),
        (lambda cache: cache.update(texts=2**60), "texts is 1152921504606846976"),
        (lambda cache: cache["parts"].extend([0, 10**9, 4, 0]), "parts is 1000000000"),
        (lambda cache: cache["starts"].append(cache["starts"][0]), "the same beginning"),
        (lambda cache: cache.update(more=1), "the key of cache 'more' is unknown here"),
        (
            lambda cache: cache["kept"].__setitem__(2, 10**9),
            "kept is 1000000000: it must be between 0 and 12",
        ),
    ],
)
def test_a_cache_that_cannot_have_been_is_refused(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    settings = Settings(MAX_UTILIZATION, 12, 2, 6, 40, None, True, True)
    with tiny_ring():
        world = play(settings, seed=4, max_iterations=40)
    header, _, rest = world.text.partition("\n")
    content = json.loads(header)
    change(content["cache"])
    with pytest.raises(RecordingError, match=message):
        replay(read(json.dumps(content) + "\n" + rest))


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


def test_a_pause_that_is_not_told_is_found() -> None:
    lines = play(SMALL, num_requests=30, seed=5).text.splitlines(keepends=True)
    pausing = [index for index, line in enumerate(lines) if '"p":' in line]
    assert len(pausing) > 3
    for index in pausing:
        content = json.loads(lines[index])
        del content["p"]
        changed = [*lines[:index], json.dumps(content) + "\n", *lines[index + 1 :]]
        divergence = replay(read("".join(changed))).divergence
        assert divergence is not None
        assert (divergence.number, divergence.what) == (content["i"], "paused requests")


@pytest.mark.parametrize(
    ("key", "width", "what"), [("c", 2, "context requests"), ("g", 1, "generation requests")]
)
def test_another_order_of_those_who_run_is_found(key: str, width: int, what: str) -> None:
    """Nothing else differs then, neither blocks nor who is paused."""
    settings = replace(SMALL, num_blocks=60)
    lines = play(settings, num_requests=60, seed=5).text.splitlines(keepends=True)
    num_changed = 0
    for index, line in enumerate(lines[1:], start=1):
        content = json.loads(line)
        rows = content.get(key, [])
        if len(rows) < 2 * width:
            continue
        content[key] = rows[width : 2 * width] + rows[:width] + rows[2 * width :]
        changed = [*lines[:index], json.dumps(content) + "\n", *lines[index + 1 :]]
        divergence = replay(read("".join(changed))).divergence
        assert divergence is not None
        assert (divergence.number, divergence.what) == (content["i"], what)
        num_changed += 1
    assert num_changed > 3


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


def test_what_is_cached_is_remembered_however_many_short_texts_come() -> None:
    """They take no block of their own and evict nothing; then the long text is used again."""
    chunking = ContextChunking(ContextChunkingPolicy.FIRST_COME_FIRST_SERVED, 4)
    settings = Settings(MAX_UTILIZATION, 16, 4, 6, 12, chunking, enable_reuse=True)
    world = RecordedWorld(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likeness, "_MIN_TEXTS", 8)
        world.recorder = FlightRecorder(settings, cache_state=world.manager.cache_state)
        salts = [b"", *(str(number).encode() for number in range(400)), b""]
        for number, salt in enumerate(salts):
            length = 2 if salt else 20
            world.arrive(make_request(number, length, 1, family=1, cache_salt=salt))
            while world.active:
                world.iterate()
    result = replay(read(world.text))
    assert result.divergence is None, str(result)
    assert world.recorder._texts is not None
    assert len(world.recorder._texts._cached) < 20


@pytest.mark.parametrize("num_iterations", [None, 30])
def test_numbers_that_failed_of_those_who_have_left_empty_the_cache_in_a_replay_too(
    num_iterations: int | None,
) -> None:
    """Of whole recordings, and of rings that end in the middle of things."""
    num_forgotten = 0
    for seed in range(20):
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
        num_forgotten += world.text.count('"w":1')
    assert num_forgotten > 0


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_prompt_without_numbers_is_not_cached_in_a_replay_either(
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
