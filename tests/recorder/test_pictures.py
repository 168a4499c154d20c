"""Histories and the three forms in which they are drawn."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from recorder.recorded import (
    GUARANTEED,
    MAX_UTILIZATION,
    RecordedWorld,
    SearchingWorld,
    play,
    read,
    searching,
)
from recorder.test_recorded_drafts import DraftingWorld
from scheduler.world import make_request

from inflight_recorder import page, svg
from inflight_recorder.exporters import write_page, write_svg, write_trace
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.settings import RecordingError, Settings
from inflight_recorder.timeline import (
    COLOURS,
    ERROR_COLOUR,
    Activity,
    History,
    assign_lanes,
    build_timeline,
    title,
)
from inflight_recorder.whatif import Clock
from inflight_scheduler import FinishReason

SETTINGS = Settings(MAX_UTILIZATION, 12, 4, 6, 40)


@pytest.fixture(scope="module")
def world() -> RecordedWorld:
    return play(SETTINGS, num_requests=40, seed=9)


@pytest.fixture(scope="module")
def history(world: RecordedWorld) -> History:
    return build_timeline(read(world.text))


def test_rows_tell_what_the_world_did(world: RecordedWorld, history: History) -> None:
    rows = {row.request_id: row for row in history.rows}
    assert len(rows) == 40
    assert sum(row.num_pauses for row in history.rows) == world.num_pauses > 0
    for request in world.finished:
        row = rows[request.request_id]
        assert row.num_generated == request.num_generated_tokens
        assert row.end_reason == request.finish_reason.name.lower()
        assert row.num_pauses == request.num_pauses
    assert {row.end_reason for row in history.rows} >= {"length", "cancelled", "end_id"}
    assert FinishReason.LENGTH.name.lower() == "length"


def test_spans_cover_each_life_without_gap_or_overlap(history: History) -> None:
    for row in history.rows:
        assert row.end is not None
        places = [row.start, *(x for span in row.spans for x in (span.start, span.end)), row.end]
        assert places[::2] == places[1::2]
        assert row.spans[0].activity in (Activity.WAITING, Activity.CONTEXT)
        for before, after in pairwise(row.spans):
            if after.activity is Activity.RESUMED:
                assert before.activity is Activity.PAUSED
            if after.activity is Activity.PAUSED and before.activity is not Activity.PAUSED:
                assert re.match(r"paused as victim of request \d+", after.first_reason)
            if after.activity is Activity.CONTEXT:
                assert before.activity is Activity.WAITING


def test_who_waits_goes_on_waiting_while_another_expires() -> None:
    """An end before a decision is an iteration of its own, in which nothing is decided."""
    world = RecordedWorld(Settings(GUARANTEED, 4, 4, 6))
    requests = [make_request(number, 4, 8) for number in (1, 2, 3)]
    for request in requests:
        world.arrive(request)
    world.iterate()
    world.end(requests[2], "expired")
    while world.active:
        world.iterate()
    history = build_timeline(read(world.text))
    assert (history.num_context[1], history.num_generation[1]) == (0, 0)
    runs, waits, expires = history.rows
    assert [(span.start, span.end) for span in expires.spans] == [(0, expires.end)] == [(0, 2)]
    waiting, context = waits.spans[:2]
    assert (waiting.activity, context.activity) == (Activity.WAITING, Activity.CONTEXT)
    assert (waiting.start, waiting.end) == (0, context.start)
    assert [(span.start, span.end) for span in runs.spans[:2]] == [(0, 1), (2, runs.end)]


def test_spans_add_up_to_the_iterations(history: History) -> None:
    running = Counter[tuple[Activity, int]]()
    for row in history.rows:
        for span in row.spans:
            running.update((span.activity, index) for index in range(span.start, span.end))
    for index in range(history.num_iterations):
        assert running[Activity.GENERATION, index] == history.num_generation[index]
        contexts = running[Activity.CONTEXT, index] + running[Activity.RESUMED, index]
        assert contexts == history.num_context[index]


def test_whoever_waits_has_a_reason_in_the_picture(history: History) -> None:
    idle = (Activity.WAITING, Activity.PAUSED, Activity.IDLE)
    for row in history.rows:
        for span in row.spans:
            assert bool(span.first_reason) == (span.activity in idle)


def test_svg_is_sound_and_says_the_reasons(history: History) -> None:
    picture = write_svg(history)
    root = ElementTree.fromstring(picture)
    titles = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 1 + sum(len(row.spans) for row in history.rows)
    assert any("paused as victim of request" in title for title in titles)
    assert any("waiting for KV blocks: needs" in title for title in titles)


def test_many_requests_make_a_picture_of_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svg, "MAX_ROWS", 30)
    sizes = []
    for number in (500, 1500):
        world = RecordedWorld(SETTINGS)
        monkeypatch.setattr("inflight_recorder.recorder.NUM_CHUNKS", 1000)
        play(SETTINGS, num_requests=number, seed=1, world=world)
        history = build_timeline(read(world.text), with_reasons=False)
        picture = write_svg(history)
        ElementTree.fromstring(picture)
        sizes.append(len(picture))
    assert sizes[1] < 1.3 * sizes[0]


def test_more_spans_than_memory_is_for_are_refused(
    world: RecordedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight_recorder.timeline.MAX_NUM_SPANS", 100)
    with pytest.raises(RecordingError, match="more than 100 spans: cut the recording"):
        build_timeline(read(world.text))


def test_a_page_of_many_requests_has_as_many_lines_as_were_in_flight(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "MAX_ROWS", 39)
    lanes = page.history_data(history)["lanes"]
    alive = [
        sum(row.start <= index < (row.end or index + 1) for row in history.rows)
        for index in range(history.num_iterations)
    ]
    assert len(lanes) == max(alive) < 39
    assert sorted(index for lane in lanes for index in lane) == list(range(40))


def test_the_stack_holds_every_request_in_every_iteration(history: History) -> None:
    """As many columns as iterations: the means are the numbers themselves."""
    columns = svg._activities_by_column(history, history.num_iterations)
    for index, column in enumerate(columns):
        assert column[Activity.GENERATION] == pytest.approx(history.num_generation[index])
        alive = sum(
            row.start <= index < (history.num_iterations if row.end is None else row.end)
            for row in history.rows
        )
        assert sum(column.values()) == pytest.approx(alive)


def test_lanes_hold_one_request_at_a_time(history: History) -> None:
    lanes = assign_lanes(history.rows)
    assert max(lanes) < 40
    for lane in set(lanes):
        mine = [row for row, own in zip(history.rows, lanes, strict=True) if own == lane]
        for before, after in pairwise(mine):
            assert before.end is not None
            assert before.end <= after.start


def test_the_page_holds_the_history_and_loads_nothing(history: History) -> None:
    text = "".join(write_page(history))
    assert "http://" not in text
    assert "https://" not in text
    content = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    assert content is not None
    data = json.loads(content[1])
    assert any("waiting for KV blocks" in text for text in data["reasons"])
    check_rows(data, history)
    shown = {
        "iterations": history.numbers,
        "start_us": history.start_us,
        "step_us": history.step_us,
        "context": history.num_context,
        "generation": history.num_generation,
        "tokens": history.num_context_tokens,
        "generation_tokens": history.num_generation_tokens,
        "free": history.num_free_blocks,
    }
    assert {name: data[name] for name in shown} == {k: list(v) for k, v in shown.items()}
    assert data["colours"] == [COLOURS[activity] for activity in Activity]
    assert (data["title"], data["num_blocks"]) == (title(history), 12)


def check_rows(data: dict[str, Any], history: History) -> None:
    """Rows and spans in the order in which `common.js` reads them."""
    texts = data["reasons"]
    for shown, row in zip(data["rows"], history.rows, strict=True):
        *facts, why, spans = shown
        end = -1 if row.end is None else row.end
        lengths = [row.prompt_len, row.max_new_tokens, row.num_generated]
        assert facts == [row.request_id, *lengths, row.num_pauses, end]
        assert texts[why] == row.end_reason
        for start, span in zip(range(0, len(spans), 6), row.spans, strict=True):
            activity, *bounds, first, last, num_tokens = spans[start : start + 6]
            assert (activity, bounds) == (span.activity, [span.start, span.end])
            assert (texts[first], texts[last]) == (span.first_reason, span.last_reason)
            assert num_tokens == span.num_tokens


def test_who_is_in_flight_at_the_end_has_no_end_in_the_page() -> None:
    world = RecordedWorld(SETTINGS)
    world.arrive(make_request(1, 3, 9))
    world.iterate()
    history = build_timeline(read(world.text))
    data = page.history_data(history)
    assert data["rows"][0][5] == -1
    check_rows(data, history)


@pytest.mark.parametrize(
    ("reason", "is_bad"),
    [
        ("end_id", False),
        ("stop_words", False),
        ("cancelled", True),
        ("timed_out", True),
        ("error", True),
        ("not_finite", True),
    ],
)
def test_who_did_not_end_well_is_crossed_out(reason: str, is_bad: bool) -> None:
    world = RecordedWorld(SETTINGS)
    request = make_request(1, 3, 9)
    world.arrive(request)
    world.iterate()
    world.iterate([request])
    history = build_timeline(read(world.text.replace('"cancelled"', f'"{reason}"')))
    assert history.rows[0].end_reason == reason
    assert (ERROR_COLOUR in write_svg(history)) == is_bad
    data = page.history_data(history)
    assert (data["rows"][0][6] in data["bad"]) == is_bad
    assert data["crosses"] == ("stopped, failed or expired" if is_bad else "")


@pytest.mark.parametrize("write", [write_page, lambda history: [write_svg(history)]])
def test_a_hostile_name_is_only_text(write) -> None:  # type: ignore[no-untyped-def]
    """The one text of a recording that comes from outside; here it closes every element."""
    name = "</script><script>alert(1)</script>"
    world = RecordedWorld(Settings(GUARANTEED, 12, 4, 6))
    world.arrive(make_request(2**63, 3, 4))
    while world.active:
        world.iterate()
    text = world.text.replace('"scheduler_class":null', f'"scheduler_class":{json.dumps(name)}')
    picture = "".join(write(build_timeline(read(text))))
    assert "<script>alert" not in picture
    assert str(2**63) in picture


@pytest.mark.parametrize("kind", ["plain", "beams", "drafts"])
def test_all_tokens_of_an_iteration_are_shown(kind: str) -> None:
    """Of each beam one, drafts, and the last tokens of prompts that drafts run behind."""
    settings = Settings(MAX_UTILIZATION, 30, 4, 6, 60)
    if kind == "beams":
        world: RecordedWorld = SearchingWorld(settings)
        for number in range(1, 9):
            world.arrive(searching(number))
        while world.active:
            world.iterate()
    else:
        world = RecordedWorld(settings) if kind == "plain" else DraftingWorld(settings, 3)
        play(settings, num_requests=20, seed=3, world=world)
    history = build_timeline(read(world.text))
    is_decided = [iteration.decision is not None for iteration in read(world.text)]
    tokens = zip(history.num_context_tokens, history.num_generation_tokens, strict=True)
    shown = [sum(pair) for pair, is_it in zip(tokens, is_decided, strict=True) if is_it]
    assert shown == [batch.num_tokens for batch in world.batches]
    spans = [span for row in history.rows for span in row.spans]
    assert sum(span.num_tokens for span in spans) == sum(shown)
    data = page.history_data(history)
    assert sum(data["tokens"]) + sum(data["generation_tokens"]) == sum(shown)
    counts = [
        event["args"]
        for event in json.loads("".join(write_trace(history)))["traceEvents"]
        if event["ph"] == "C" and event["name"] == "tokens"
    ]
    assert sum(count["context"] + count["generation"] for count in counts) == sum(shown)
    num_steps = sum(history.num_generation)
    assert (sum(history.num_generation_tokens) > num_steps) == (kind != "plain")
    assert max(map(int, re.findall(r">(\d+)</text>", write_svg(history)))) >= max(shown)


def check_trace_events(events: list[dict[str, Any]]) -> None:
    """The rules of the Trace Event Format, for the three phases that are used.

    docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: every event has ph, pid
    and name; times are microseconds; a complete event (X) has a duration and a thread, and those of
    one thread nest; a counter (C) has numbers only; metadata (M) names a process.
    """
    ends: dict[tuple[int, int], int] = {}
    counters: dict[str, int] = {}
    for event in events:
        assert event["name"]
        assert type(event["pid"]) is type(event["tid"]) is type(event["ts"]) is int
        match event["ph"]:
            case "M":
                assert event["name"] == "process_name"
                assert isinstance(event["args"]["name"], str)
            case "C":
                assert all(type(value) is int for value in event["args"].values())
                assert event["ts"] >= counters.get(event["name"], 0)
                counters[event["name"]] = event["ts"]
            case "X":
                assert event["dur"] > 0
            case other:
                raise AssertionError(f"phase {other} is not used")
    slices = [event for event in events if event["ph"] == "X"]
    for event in sorted(slices, key=lambda event: event["ts"]):
        lane = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(lane, 0) - 1, "slices of one lane overlap"
        ends[lane] = event["ts"] + event["dur"]


def test_nothing_is_drawn_while_nobody_is_in_flight() -> None:
    """A minute passes between two requests: neither of them lasts a minute."""
    clock = Clock()
    settings = Settings(GUARANTEED, 12, 4, 6)
    world = RecordedWorld(settings)
    world.recorder = FlightRecorder(settings, clock=clock)
    for number in (1, 2):
        world.arrive(make_request(number, 3, 4))
        while world.active:
            clock.time_us += 1000
            world.iterate()
        clock.time_us += 60_000_000
    history = build_timeline(read(world.text))
    assert history.start_us[-1] > 60_000_000
    assert list(history.is_last_busy) == [0, 0, 0, 1] * 2
    events = json.loads("".join(write_trace(history)))["traceEvents"]
    assert sum(event["dur"] for event in events if event["ph"] == "X") < 20_000
    idle = [event for event in events if event["name"] == "batch"][4]
    assert idle["args"] == {"context": 0, "generation": 0}
    free = [event["args"]["free"] for event in events if event["name"] == "free blocks"]
    assert free == [11, 11, 10, 10, 12] * 2
    text = "".join(write_page(history))
    assert '"pauses_after":[[3,' in text


def test_the_trace_has_one_slice_per_span_and_three_counters(history: History) -> None:
    trace = json.loads("".join(write_trace(history)))
    events = trace["traceEvents"]
    kinds = Counter(event["ph"] for event in events)
    assert kinds["X"] == sum(len(row.spans) for row in history.rows)
    assert kinds["C"] == 3 * (history.num_iterations + sum(history.is_last_busy))
    check_trace_events(events)
    lanes: dict[int, int] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        assert event["ts"] >= lanes.get(event["tid"], 0) - 1
        lanes[event["tid"]] = event["ts"] + event["dur"]
    assert any("paused as victim" in event["args"].get("reason", "") for event in events)


def test_the_trace_tells_what_the_history_does(history: History) -> None:
    events = json.loads("".join(write_trace(history)))["traceEvents"]
    spans = [span for row in history.rows for span in row.spans]
    assert any(span.first_reason != span.last_reason for span in spans)
    slices = [event for event in events if event["ph"] == "X"]
    for event, span in zip(slices, spans, strict=True):
        assert event["ts"] == history.start_us[span.start]
        assert event["ts"] + event["dur"] == history.end_us(span.end - 1)
        first = event["args"].get("reason", "")
        assert [first, event["args"].get("reason at the end", first)] == [
            span.first_reason,
            span.last_reason,
        ]
    counted = {(e["name"], e["ts"]): list(e["args"].values()) for e in events if e["ph"] == "C"}
    for index, time_us in enumerate(history.start_us[: history.num_iterations]):
        assert counted["free blocks", time_us] == [history.num_free_blocks[index]]
        batch = [history.num_context[index], history.num_generation[index]]
        assert counted["batch", time_us] == batch
        tokens = [history.num_context_tokens[index], history.num_generation_tokens[index]]
        assert counted["tokens", time_us] == tokens


def test_an_empty_recording_is_no_picture() -> None:
    text = RecordedWorld(SETTINGS).text
    with pytest.raises(RecordingError, match="holds no request"):
        build_timeline(read(text))
