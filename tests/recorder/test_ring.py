"""How long the ring is, and how much it holds, with as many requests as a server may run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from inflight_recorder.beams import Moves
from inflight_recorder.likeness import Likeness
from inflight_recorder.segment import Unpacker, pack_ids, pack_iteration
from recorder.recorded import GUARANTEED, RecordedWorld
from scheduler.world import make_request

from inflight_recorder import recorder as recorder_module
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.schema import (
    Arrival,
    Chunk,
    Decision,
    Drafts,
    End,
    Growth,
    Iteration,
    Settings,
)
from inflight_scheduler import ActiveRequests, BeamParams, BeamSearch, BlockManager, LlmRequest
from inflight_scheduler.beam_search import BeamStep

NUM_REQUESTS = 5000


def ids_of(requests: Sequence[LlmRequest]) -> tuple[int, ...]:
    return tuple(request.request_id for request in requests)


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
    segments = generate(100, is_steady=True)._ring
    assert sum(len(segment.iterations) for segment in segments) == 100
    assert len(segments) <= 2


def test_the_ring_is_bounded_though_who_generates_always_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list of thousands for each of 8,192 iterations would be hundreds of megabytes."""
    monkeypatch.setattr(recorder_module, "NUM_CHUNKS", 3)
    segments = generate(300, is_steady=False)._ring
    num_iterations = sum(len(segment.iterations) for segment in segments)
    assert 3 * 50 < num_iterations < 3 * 100


def test_with_many_requests_the_segments_are_fewer_and_longer() -> None:
    """To note where all of them stand is done four times in a full ring, which holds no more."""
    num_iterations = 2000
    segments = generate(num_iterations, is_steady=False)._ring
    assert len(segments) == 4
    assert sum(len(segment.iterations) for segment in segments) > 3 * 16 / 4 * 70
    assert sum(segment.num_bytes for segment in segments) < 1.01 * 16 * 576 * NUM_REQUESTS


def test_of_many_requests_the_ring_holds_what_garbage_collections_pass_over() -> None:
    """They stop everybody, and take the longer the more objects they have to look into."""
    recorder = generate(600, is_steady=False)
    segments = recorder._ring
    assert {len(segment.active) for segment in segments} == {0, NUM_REQUESTS}
    assert {type(segment.states) for segment in segments} == {bytes}
    assert {type(packed) for segment in segments for packed in segment.packed} == {bytes}


def test_of_who_generates_only_the_changes_are_held() -> None:
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
    segments = recorder._ring
    noted = [
        i.decision.generation for s in segments for i in s.iterations if i.decision is not None
    ]
    assert noted == expected
    assert len(set(noted)) > 300, "nobody came or went: the test shows nothing"
    num_bytes = sum(segment.num_bytes for segment in segments)
    assert num_bytes < 8 * num_requests * len(noted) / 5


def test_a_decision_that_was_never_carried_out_does_not_hide_a_change() -> None:
    """The changes that were told with it are in no iteration."""
    recorder = FlightRecorder(Settings(GUARANTEED, 2**15, 32, 4))
    active = ActiveRequests(BlockManager(2**15, 32))
    for number, is_carried_out in enumerate([True, True, False, True]):
        request = make_request(number, 4, 20)
        active.add(request)
        request.move_to_next_context_chunk()
        recorder.arrived(request)
        recorder.decided(active, [], active.generation, [])
        if is_carried_out:
            recorder.finish_iteration()
    decisions = [iteration.decision for iteration in recorder._ring[0].iterations]
    assert [each and each.generation for each in decisions] == [(0,), (0, 1), (0, 1, 2, 3)]


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
        moves=(Moves(4, (0, 0)), Moves(5, (2, 2, 2))),
        has_forgotten=True,
    )
    fields = (
        *(7, 1000, 20),
        (*(3, 9, 4, 0, 0.5, 1, None, 0, 0), *(4, 2, 1, 8, 0.7, 2, 5, 6, 1)),
        *(((3, 9, 4, 2), pack_ids((1, 2)), (5,)) if has_decision else (None, None, ())),
        11,
        (1, "end_id", 2, "cancelled"),
        True,
        (1, 0, 12, 2, 9, 3),
        *(True, True),
        (1, 4, 3, 2),
        True,
        (*(4, (0, 0)), *(5, (2, 2, 2))),
        True,
    )
    unpacked = Unpacker().iteration(pack_iteration(fields))
    assert unpacked == iteration
    assert repr(unpacked) == repr(iteration)  # the names as well


def test_the_ring_is_bounded_while_many_search() -> None:
    """How their beams have gone on is told in each iteration: of 400 searches, 40 MB in 500."""
    recorder = FlightRecorder(Settings(GUARANTEED, 2**20, 32, 400))
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
    segments = recorder._ring
    num_bytes = sum(len(packed) for segment in segments for packed in segment.packed)
    assert 0.9 * 16 * 2**21 < num_bytes < 1.1 * 16 * 2**21
