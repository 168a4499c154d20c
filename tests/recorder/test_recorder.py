"""How long the ring is, and how much it holds, with as many requests as a server may run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.recorder_worlds import GUARANTEED, MAX_UTILIZATION, RecordedWorld, play, read
from support.scheduler_world import make_request

from inflight_recorder import recorder as recorder_module
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.schema import (
    Arrival,
    apply_changes,
    standing_requests,
    summarise,
    unpack_iteration,
)
from inflight_recorder.settings import Settings
from inflight_scheduler import ActiveRequests, BlockManager

NUM_REQUESTS = 5000


def make_recorder(settings: Settings) -> FlightRecorder:
    return FlightRecorder(settings, BlockManager(settings.num_blocks, settings.tokens_per_block))


def noted_generations(recorder: FlightRecorder) -> list[tuple[int, ...]]:
    """The requests that generate, in each decision of the ring."""
    noted: list[tuple[int, ...]] = []
    generation: tuple[int, ...] = ()
    for chunk in recorder._ring:
        for decision in (unpack_iteration(packed).decision for packed in chunk.packed):
            if decision is not None:
                changes = decision.changes
                is_whole = changes is None
                generation = (
                    decision.generation if is_whole else apply_changes(generation, changes or ())
                )
                noted.append(generation)
    return noted


def generate(num_iterations: int, *, is_steady: bool) -> FlightRecorder:
    """All arrive at once and then generate: all of them, or one less in every other iteration."""
    recorder = make_recorder(Settings(GUARANTEED, 2**20, 32, NUM_REQUESTS))
    active = [make_request(number, 4, 300) for number in range(NUM_REQUESTS)]
    for request in active:
        recorder.arrived(request)
    recorder.decided(active, active, [], [])
    recorder.finish_iteration()
    for number in range(1, num_iterations):
        generation = active if is_steady or number % 2 else active[:-1]
        recorder.decided(active, [], generation, [])
        recorder.finish_iteration()
    return recorder


def test_the_ring_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many iterations a chunk may have."""
    monkeypatch.setattr(recorder_module, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(recorder_module, "REQUEST_BYTES", 0)
    chunks = play(Settings(MAX_UTILIZATION, 12, 4, 6), num_requests=300, seed=1).recorder._ring
    assert len(chunks) == recorder_module.NUM_CHUNKS
    size = sum(sys.getsizeof(packed) for chunk in chunks for packed in chunk.packed)
    assert 0.5 * 16 * 4000 < size < 1.1 * 16 * 4000


@pytest.mark.parametrize("is_steady", [False, True])
def test_with_many_requests_the_chunks_are_fewer_and_longer(is_steady: bool) -> None:
    """To note where all of them stand is done four times in a full ring, which holds no more.

    A list of thousands for each of 8,192 iterations would be hundreds of megabytes. All is held as
    bytes: garbage collections take the longer the more objects they have to look into.
    """
    chunks = generate(2000, is_steady=is_steady)._ring
    num_iterations = sum(len(chunk.packed) for chunk in chunks)
    assert len(chunks) == (2 if is_steady else 4)
    assert num_iterations == 2000 if is_steady else num_iterations > 3 * 16 / 4 * 70
    assert sum(chunk.num_bytes for chunk in chunks) < 1.01 * 16 * 576 * NUM_REQUESTS
    assert len(chunks[-1].start.hashes) == NUM_REQUESTS
    assert {type(chunk.start.requests) for chunk in chunks} == {bytes}
    assert {type(packed) for chunk in chunks for packed in chunk.packed} == {bytes}


def test_who_looks_on_gets_each_iteration_once() -> None:
    """Two requests: one decision that changes something, steady steps in one row, an end."""
    recorder = make_recorder(Settings(GUARANTEED, 64, 32, 8))
    active = [make_request(number, 4, 300) for number in (1, 2)]
    for request in active:
        recorder.arrived(request)
    recorder.decided(active, active, [], [])
    recorder.finish_iteration()
    for _ in range(4):
        recorder.decided(active, [], active, [])
        recorder.finish_iteration()
    start, packed = recorder.recent(None, 2048)
    assert start is not None
    assert standing_requests(start) == []
    came, began, steady = summarise(packed)
    assert [row[:3] for row in came["a"]] == [[1, 4, 300], [2, 4, 300]]
    assert came["c"] == [[1, 4], [2, 4]]
    assert began["g"] == [1, 2]
    assert (steady["i"], steady["n"]) == (5, 3)
    assert steady.keys() == {"i", "t", "d", "f", "n"}

    assert recorder.recent(5, 2048) == (None, [])
    recorder.ended(active[1], "failed")
    recorder.decided(active[:1], [], active[:1], [])
    recorder.finish_iteration()
    start, packed = recorder.recent(5, 2048)
    assert start is None
    assert [row.get("e") for row in summarise(packed)] == [[[2, "error"]], None]
    assert recorder.recent(99, 2048)[0] is not None  # of another server: everything again


def test_a_chunk_tells_who_was_in_flight_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "CHUNK_ITERATIONS", 4)
    recorder = make_recorder(Settings(GUARANTEED, 64, 32, 8))
    active = [make_request(7, 4, 300)]
    recorder.arrived(active[0])
    for number in range(10):
        recorder.decided(active, active if number == 0 else [], active if number else [], [])
        recorder.finish_iteration()
    start, packed = recorder.recent(1, 3)
    assert start is not None
    assert standing_requests(start) == [[7, 4, 4, 304]]
    assert len(packed) == 2


def test_a_decision_that_was_never_carried_out_does_not_hide_a_change() -> None:
    """The changes that were told with it are in no iteration."""
    recorder = make_recorder(Settings(GUARANTEED, 2**15, 32, 4))
    active = ActiveRequests(BlockManager(2**15, 32))
    for number, is_carried_out in enumerate([True, True, False, True]):
        request = make_request(number, 4, 20)
        active.add(request)
        request.move_to_next_context_chunk()
        recorder.arrived(request)
        recorder.decided(active, [], active.generation, [])
        if is_carried_out:
            recorder.finish_iteration()
    assert noted_generations(recorder) == [(0,), (0, 1), (0, 1, 2, 3)]


def test_a_request_that_ends_before_a_decision_leaves_nothing_behind() -> None:
    """It came and went, so nothing of its text is told."""
    settings = Settings(MAX_UTILIZATION, 12, 4, 6, enable_reuse=True)
    world = RecordedWorld(settings)
    world.arrive(request := make_request(1, 9, 4))
    world.end(request, "stopped")
    world.recorder.finish_iteration()
    [iteration] = read(world.text)
    assert iteration.arrivals == (Arrival(1, 9, 4),)
    assert world.recorder._hashes == {}


def test_recording_into_memory_needs_the_standard_library_only() -> None:
    """What the batch manager imports of this package and uses until a recording is asked for."""
    code = """
import sys
sys.modules.update(dict.fromkeys(("msgspec", "torch", "numpy")))
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.settings import Settings, check_possible, fallback_scheduler, scheduler_of
from inflight_recorder.storage import RecordingFile, rotate
from inflight_scheduler import BlockManager, CapacitySchedulerPolicy
settings = Settings(CapacitySchedulerPolicy.MAX_UTILIZATION, 12, 4, 6)
recorder = FlightRecorder(settings, BlockManager(12, 4))
recorder.decided([], [], [], [])
recorder.finish_iteration()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
