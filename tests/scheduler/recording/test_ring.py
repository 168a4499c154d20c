"""How long the ring is, and how much it holds, with as many requests as a server may run."""

from __future__ import annotations

import pytest
from scheduler.recording.recorded import GUARANTEED
from scheduler.world import make_request

from inflight_scheduler.recording import recorder as recorder_module
from inflight_scheduler.recording.recorder import FlightRecorder
from inflight_scheduler.recording.records import Settings

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
