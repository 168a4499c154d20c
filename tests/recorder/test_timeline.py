"""Timelines say what happened to each request, and why it waited."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import pytest
from support.recorder_worlds import GUARANTEED, MAX_UTILIZATION, RecordedWorld, play, read
from support.scheduler_world import make_request

from inflight_recorder.settings import RecordingError, Settings
from inflight_recorder.timeline import Activity, Timeline, assign_tracks, build_timeline

SETTINGS = Settings(MAX_UTILIZATION, 12, 4, 6, 40)
IDLE = (Activity.WAITING, Activity.PAUSED, Activity.IDLE)


@pytest.fixture(scope="module")
def world() -> RecordedWorld:
    return play(SETTINGS, num_requests=40, seed=9)


@pytest.fixture(scope="module")
def timeline(world: RecordedWorld) -> Timeline:
    return build_timeline(read(world.text))


def test_lanes_tell_what_the_world_did(world: RecordedWorld, timeline: Timeline) -> None:
    lanes = {lane.request_id: lane for lane in timeline.lanes}
    assert len(lanes) == 40
    assert sum(lane.num_pauses for lane in timeline.lanes) == world.num_pauses > 0
    for request in world.finished:
        lane = lanes[request.request_id]
        assert lane.num_generated == request.num_generated_tokens
        assert lane.end_reason == request.finish_reason.name.lower()
        assert lane.num_pauses == request.num_pauses
    assert {lane.end_reason for lane in timeline.lanes} >= {"length", "cancelled", "end_id"}


def test_intervals_cover_each_life_without_gap_or_overlap(timeline: Timeline) -> None:
    for lane in timeline.lanes:
        assert lane.end is not None
        places = [
            lane.start,
            *(x for interval in lane.intervals for x in (interval.start, interval.end)),
            lane.end,
        ]
        assert places[::2] == places[1::2]
        assert lane.intervals[0].activity in (Activity.WAITING, Activity.CONTEXT)
        for before, after in pairwise(lane.intervals):
            if after.activity is Activity.RESUMED:
                assert before.activity is Activity.PAUSED
            if after.activity is Activity.PAUSED and before.activity is not Activity.PAUSED:
                assert re.match(r"paused as victim of request \d+", after.first_reason)
            if after.activity is Activity.CONTEXT:
                assert before.activity is Activity.WAITING
        for interval in lane.intervals:
            assert bool(interval.first_reason) == (interval.activity in IDLE)


def test_a_waiting_request_goes_on_waiting_while_another_expires() -> None:
    """An end before a decision is an iteration of its own, in which nothing is decided."""
    world = RecordedWorld(Settings(GUARANTEED, 4, 4, 6))
    requests = [make_request(number, 4, 8) for number in (1, 2, 3)]
    for request in requests:
        world.arrive(request)
    world.iterate()
    world.end(requests[2], "expired")
    while world.active:
        world.iterate()
    timeline = build_timeline(read(world.text))
    assert (timeline.num_context[1], timeline.num_generation[1]) == (0, 0)
    runs, waits, expires = timeline.lanes
    assert (
        [(interval.start, interval.end) for interval in expires.intervals]
        == [(0, expires.end)]
        == [(0, 2)]
    )
    waiting, context = waits.intervals[:2]
    assert (waiting.activity, context.activity) == (Activity.WAITING, Activity.CONTEXT)
    assert (waiting.start, waiting.end) == (0, context.start)
    assert [(each.start, each.end) for each in runs.intervals[:2]] == [(0, 1), (2, runs.end)]


def test_intervals_add_up_to_the_iterations(timeline: Timeline) -> None:
    running = Counter[tuple[Activity, int]]()
    for lane in timeline.lanes:
        for interval in lane.intervals:
            places = range(interval.start, interval.end)
            running.update((interval.activity, index) for index in places)
    for index in range(timeline.num_iterations):
        assert running[Activity.GENERATION, index] == timeline.num_generation[index]
        contexts = running[Activity.CONTEXT, index] + running[Activity.RESUMED, index]
        assert contexts == timeline.num_context[index]


def test_more_spans_than_memory_is_for_are_refused(
    world: RecordedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight_recorder.timeline.MAX_NUM_INTERVALS", 100)
    with pytest.raises(RecordingError, match="more than 100 intervals: cut the recording"):
        build_timeline(read(world.text))
    with pytest.raises(RecordingError, match="holds no request: nothing was scheduled yet"):
        build_timeline(read(RecordedWorld(SETTINGS).text))


def test_above_so_many_lanes_no_reasons_are_asked_for(world: RecordedWorld) -> None:
    lanes = build_timeline(read(world.text), max_lanes_with_reasons=20).lanes
    assert any(each.first_reason for lane in lanes[:20] for each in lane.intervals)
    reasons = [each.first_reason for lane in lanes[21:] for each in lane.intervals]
    assert not any(reason.startswith("waiting") for reason in reasons)


def test_tracks_hold_one_request_at_a_time(timeline: Timeline) -> None:
    tracks = assign_tracks(timeline.lanes)
    assert max(tracks) < 40
    for track in set(tracks):
        mine = [lane for lane, own in zip(timeline.lanes, tracks, strict=True) if own == track]
        for before, after in pairwise(mine):
            assert before.end is not None
            assert before.end <= after.start
