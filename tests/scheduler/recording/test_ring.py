"""How long the ring is, and how much it holds, with as many requests as a server may run."""

from __future__ import annotations

import pytest
from scheduler.recording.recorded import GUARANTEED
from scheduler.world import make_request

from inflight_scheduler.recording import recorder as recorder_module
from inflight_scheduler.recording.beams import Moves
from inflight_scheduler.recording.likeness import Likeness
from inflight_scheduler.recording.recorder import FlightRecorder
from inflight_scheduler.recording.records import (
    Arrival,
    Chunk,
    Decision,
    Drafts,
    End,
    Growth,
    Iteration,
    Settings,
)
from inflight_scheduler.recording.segment import Unpacker, pack_ids, pack_iteration

NUM_REQUESTS = 5000


def generate(num_iterations: int, *, is_steady: bool) -> FlightRecorder:
    """All arrive at once and then generate: all of them, or one less in every other iteration."""
    recorder = FlightRecorder(Settings(GUARANTEED, 2**20, 32, NUM_REQUESTS))
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


def test_the_ring_is_no_shorter_with_thousands_of_requests() -> None:
    """To note where all of them stand takes milliseconds: not in every iteration."""
    segments = generate(100, is_steady=True)._segments
    assert sum(len(segment.iterations) for segment in segments) == 100
    assert len(segments) <= 2


def test_the_ring_is_bounded_though_who_generates_always_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list of thousands for each of 8,192 iterations would be hundreds of megabytes."""
    monkeypatch.setattr(recorder_module, "NUM_SEGMENTS", 3)
    segments = generate(300, is_steady=False)._segments
    num_iterations = sum(len(segment.iterations) for segment in segments)
    assert 3 * 50 < num_iterations < 3 * 100


def test_with_many_requests_the_segments_are_fewer_and_longer() -> None:
    """To note where all of them stand is done four times in a full ring, which holds no more."""
    num_iterations = 2000
    segments = generate(num_iterations, is_steady=False)._segments
    assert len(segments) == 4
    assert sum(len(segment.iterations) for segment in segments) > 3 * 16 / 4 * 70
    assert sum(segment.num_bytes for segment in segments) < 1.01 * 16 * 576 * NUM_REQUESTS


def test_of_many_requests_the_ring_holds_what_garbage_collections_pass_over() -> None:
    """They stop everybody, and take the longer the more objects they have to look into."""
    recorder = generate(600, is_steady=False)
    segments = recorder._segments
    assert {len(segment.active) for segment in segments} == {0, NUM_REQUESTS}
    assert {type(segment.states) for segment in segments} == {bytes}
    assert {type(part) for s in segments for packed in s.packed for part in packed} == {bytes}


@pytest.mark.parametrize("has_decision", [True, False])
def test_what_is_held_as_bytes_gets_all_names_again(has_decision: bool) -> None:
    decision = Decision((Chunk(3, 9), Chunk(4, 2)), (1, 2), (5,)) if has_decision else None
    iteration = Iteration(
        number=7,
        start_us=1000,
        step_us=20,
        arrivals=(Arrival(3, 9, 4), Arrival(4, 2, 1, 8, 0.7, 2, 5, Likeness(6, 1))),
        decision=decision,
        num_free_blocks=11,
        ends=(End(1, "end_id"), End(2, "cancelled")),
        has_failed=True,
        growths=(Growth(1, Likeness(0, 12)), Growth(2, Likeness(9, 3))),
        is_by_default=True,
        has_lost=True,
        drafts=(Drafts(1, 4, 3, 2),),
        is_settled=True,
        moves=(Moves(4, (0, 0)),),
        has_forgotten=True,
    )
    fields = (
        *(7, 1000, 20),
        (*(3, 9, 4, 0, 0.5, 1, None, 0, 0), *(4, 2, 1, 8, 0.7, 2, 5, 6, 1)),
        *(((3, 9, 4, 2), (5,)) if has_decision else (None, ())),
        11,
        (1, "end_id", 2, "cancelled"),
        True,
        (1, 0, 12, 2, 9, 3),
        *(True, True),
        (1, 4, 3, 2),
        True,
        (4, (0, 0)),
        True,
    )
    unpacked = Unpacker().iteration(pack_iteration(fields, pack_ids((1, 2))))
    assert unpacked == iteration
    assert repr(unpacked) == repr(iteration)  # the names as well
