"""How long the ring is, and how much it holds, with as many requests as a server may run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from support.recorder_worlds import GUARANTEED, MAX_UTILIZATION, RecordedWorld, play, read
from support.scheduler_world import make_request

from inflight_recorder import recorder as recorder_module
from inflight_recorder.recorder import FlightRecorder, pack_iteration
from inflight_recorder.schema import (
    Arrival,
    BeamTrace,
    Chunk,
    Decision,
    Drafts,
    End,
    Growth,
    Iteration,
    PartialMatch,
    apply_changes,
    unpack_iteration,
)
from inflight_recorder.settings import Settings
from inflight_scheduler import ActiveRequests, BeamParams, BeamSearch, BlockManager, LlmRequest
from inflight_scheduler.beam_search import BeamStep

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


def ids_of(requests: Sequence[LlmRequest]) -> tuple[int, ...]:
    return tuple(request.request_id for request in requests)


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


@pytest.mark.slow
def test_only_changes_of_generating_requests_are_held() -> None:
    """All ids of thousands in each iteration were most of the ring, which held a tenth as many."""
    num_requests = 1000
    world = RecordedWorld(Settings(GUARANTEED, 2**15, 32, num_requests))
    recorder = world.recorder
    expected = []
    for number in range(400):
        while len(world.active) < num_requests:
            num_arrived = len(world.finished) + len(world.active)
            world.arrive(make_request(num_arrived, 4, 20 + num_arrived % 300))
        expected.append(ids_of(world.iterate()[1]))
        if number % 50 == 30:  # another scheduler's list, for once
            other = world.active.generation[::-1]
            recorder.decided(world.active, [], other, [])
            recorder.finish_iteration()
            expected.append(ids_of(other))
    chunks = recorder._ring
    noted = noted_generations(recorder)
    assert noted == expected
    assert len(set(noted)) > 300, "nobody came or went: the test shows nothing"
    num_bytes = sum(chunk.num_bytes for chunk in chunks)
    assert num_bytes < 8 * num_requests * len(noted) / 5


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


def test_what_is_held_as_bytes_gets_all_names_again() -> None:
    fields = (
        *(7, 1000, 20, 11),
        (*(3, 9, 4, 0, 0.5, 1, None), *(4, 2, 1, 8, 0.7, 2, 5)),
        ((3, 9, 4, 2), (0, 5), (5,)),
        (1, "end_id", 2, "cancelled"),
        (1, b"abcdefgh"),
        *((3, 2), (4, 1)),
        (1, 4, 3, 2),
        (*(4, (0, 0)), *(5, (2, 2, 2))),
        *(True, False, True, False, True),
    )
    assert unpack_iteration(pack_iteration(fields)) == Iteration(
        number=7,
        start_us=1000,
        step_us=20,
        num_free_blocks=11,
        arrivals=(Arrival(3, 9, 4), Arrival(4, 2, 1, 8, 0.7, 2, 5)),
        decision=Decision((Chunk(3, 9), Chunk(4, 2)), changes=(0, 5), paused=(5,)),
        ends=(End(1, "end_id"), End(2, "cancelled")),
        growths=(Growth(1, b"abcdefgh"),),
        partial_matches=(PartialMatch(3, 2),),
        late_matches=(PartialMatch(4, 1),),
        drafts=(Drafts(1, 4, 3, 2),),
        beams=(BeamTrace(4, (0, 0)), BeamTrace(5, (2, 2, 2))),
        has_failed=True,
        is_by_default=True,
        has_forgotten=True,
    )


def test_the_ring_is_bounded_while_many_search() -> None:
    """How their beams have gone on is told in each iteration: of 400 searches, 40 MB in 500."""
    recorder = make_recorder(Settings(GUARANTEED, 2**20, 32, 400))
    active = [
        make_request(number, 4, 9000, beam_width=4, search=BeamParams(4, 4))
        for number in range(400)
    ]
    for request in active:
        recorder.arrived(request)
    for number in range(3000):
        for request in active:
            assert isinstance(request.beams, BeamSearch)
            request.beams.step = BeamStep((0, 1, 2, number % 4), (0, 0, 0, 0))
        recorder.decided(active, [], active, [])
        recorder.finish_iteration()
    chunks = recorder._ring
    num_bytes = sum(len(packed) for chunk in chunks for packed in chunk.packed)
    assert 0.9 * 16 * 2**21 < num_bytes < 1.1 * 16 * 2**21


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
