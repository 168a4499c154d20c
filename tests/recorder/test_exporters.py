"""The SVG, the page and the trace say what the timeline says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest
from support.recorder_worlds import (
    GUARANTEED,
    MAX_UTILIZATION,
    DraftingWorld,
    RecordedWorld,
    SearchingWorld,
    play,
    read,
)
from support.scheduler_world import make_request

from inflight_recorder import exporters
from inflight_recorder.exporters import describe, write_page, write_svg, write_trace
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.schema import Header, SettingsRecord
from inflight_recorder.settings import Settings
from inflight_recorder.timeline import (
    COLOURS,
    ERROR_COLOUR,
    Activity,
    Timeline,
    build_timeline,
    title,
)
from inflight_recorder.whatif import Clock

SETTINGS = Settings(MAX_UTILIZATION, 12, 4, 6, 40)
NUM_BLOCKS = 12
LEFT, TOP, WIDTH = 92, 78, 1080
CHART_HEIGHT = 64
NAMESPACE = "{http://www.w3.org/2000/svg}"
SIZES = {"title": 17.0, "small": 11.5, "label": 12.0}
NUM_REQUESTS, AT_ONCE = 100_000, 200
MANY = Settings(MAX_UTILIZATION, 4000, 16, 400, 4096)
MAX_MEMORY = 400 * 2**20  # address space, of which 140 MB are used
MAX_CPU_SECONDS = 60  # 8 are needed


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return build_timeline(read(play(SETTINGS, num_requests=40, seed=9).text))


def drawn(timeline: Timeline) -> ElementTree.Element:
    return ElementTree.fromstring("".join(write_svg(timeline)))


def x_of(timeline: Timeline, index: float) -> float:
    return LEFT + WIDTH * index / timeline.num_iterations


def heights(path: str, num_columns: int) -> list[float]:
    """How far above its bottom the upper edge of an area is, in each column."""
    edge = path[: path.rindex("V")]
    start = re.match(r"M\d+ ([\d.]+)", edge)
    assert start is not None
    found: list[float] = []
    for y, x in re.findall(r"V([\d.]+)H([\d.]+)", edge):
        num_covered = round((float(x) - LEFT) / WIDTH * num_columns)
        found += [float(start[1]) - float(y)] * (num_covered - len(found))
    assert len(found) == num_columns
    return found


def test_every_span_is_a_bar_in_the_row_of_its_request(timeline: Timeline) -> None:
    bars = [
        (dict(rect.attrib), title.text)
        for rect in drawn(timeline).iter(f"{NAMESPACE}rect")
        for title in rect.iter(f"{NAMESPACE}title")
    ]
    intervals = [
        (place, lane, interval)
        for place, lane in enumerate(timeline.lanes)
        for interval in lane.intervals
    ]
    tops: dict[int, set[float]] = {}
    for (bar, text), (place, lane, interval) in zip(bars, intervals, strict=True):
        start, end = x_of(timeline, interval.start), x_of(timeline, interval.end)
        assert float(bar["x"]) == pytest.approx(start, abs=0.01)
        assert float(bar["x"]) + float(bar["width"]) == pytest.approx(end, abs=0.02)
        assert bar["fill"] == COLOURS[interval.activity]
        assert text == describe(timeline, lane, interval)
        tops.setdefault(place, set()).add(float(bar["y"]))
        assert float(bar["height"]) > 2
    assert any("paused as victim of request" in (text or "") for _, text in bars)
    assert any("waiting for KV blocks: needs" in (text or "") for _, text in bars)
    assert all(len(ys) == 1 for ys in tops.values()), "one request, one lane"
    ys = [tops[place].pop() for place in range(len(timeline.lanes))]
    assert {round(after - before, 1) for before, after in pairwise(ys)} == {15.5}, "620 / 40"
    assert TOP <= ys[0] < TOP + 2
    labels = [
        (text.text, float(text.attrib["y"]))
        for text in drawn(timeline).iter(f"{NAMESPACE}text")
        if text.attrib.get("x") == str(LEFT - 10) and text.text != "iteration"
    ]
    for lane, top, (label, y) in zip(timeline.lanes, ys, labels, strict=False):
        assert label == str(lane.request_id)
        assert top < y < top + 15.5


@pytest.mark.parametrize("max_columns", [600, 10])
def test_the_areas_are_the_numbers(
    timeline: Timeline, monkeypatch: pytest.MonkeyPatch, max_columns: int
) -> None:
    """Of a column of several iterations the most that ran, and the fewest blocks that were free."""
    monkeypatch.setattr(exporters, "MAX_COLUMNS", max_columns)
    areas = [
        (path.attrib["fill"], path.attrib["d"])
        for path in drawn(timeline).iter(f"{NAMESPACE}path")
        if "fill-opacity" in path.attrib
    ]
    context, generation = timeline.num_context, timeline.num_generation
    tokens, others = timeline.num_context_tokens, timeline.num_generation_tokens
    batch = [c + g for c, g in zip(context, generation, strict=True)]
    total = [t + g for t, g in zip(tokens, others, strict=True)]
    blue, green = COLOURS[Activity.CONTEXT], COLOURS[Activity.GENERATION]
    shown: list[tuple[str | None, Sequence[int], int]] = [
        (green, batch, max(batch)),
        (blue, context, max(batch)),
        (green, total, max(total)),
        (blue, tokens, max(total)),
        (None, timeline.num_free_blocks, NUM_BLOCKS),
    ]
    num_columns = min(max_columns, timeline.num_iterations)
    bounds = [k * timeline.num_iterations // num_columns for k in range(num_columns + 1)]
    for (fill, path), (colour, values, highest) in zip(areas, shown, strict=True):
        merge = max if colour else min
        merged = [merge(values[start:end]) for start, end in pairwise(bounds)]
        expected = [CHART_HEIGHT * value / highest for value in merged]
        assert heights(path, num_columns) == pytest.approx(expected, abs=0.11)
        assert fill == (colour or fill)


@pytest.mark.parametrize("max_columns", [600, 10])
def test_above_so_many_requests_they_are_counted(
    timeline: Timeline, monkeypatch: pytest.MonkeyPatch, max_columns: int
) -> None:
    """Areas above one another, the largest drawn first: all that were in flight."""
    monkeypatch.setattr(exporters, "MAX_ROWS", 39)
    monkeypatch.setattr(exporters, "MAX_COLUMNS", max_columns)
    areas = [
        path.attrib["d"]
        for path in drawn(timeline).iter(f"{NAMESPACE}path")
        if path.attrib.get("fill") in COLOURS.values() and "fill-opacity" not in path.attrib
    ]
    doing: list[list[Activity]] = [[] for _ in range(timeline.num_iterations)]
    for interval in (interval for lane in timeline.lanes for interval in lane.intervals):
        for index in range(interval.start, interval.end):
            doing[index].append(interval.activity)
    num_columns = min(max_columns, timeline.num_iterations)
    bounds = [k * timeline.num_iterations // num_columns for k in range(num_columns + 1)]
    in_flight = [fmean(map(len, doing[start:end])) for start, end in pairwise(bounds)]
    for path, numbers in (
        (areas[0], in_flight),
        (
            areas[-1],
            [fmean(d.count(Activity.GENERATION) for d in doing[a:b]) for a, b in pairwise(bounds)],
        ),
    ):
        expected = [300 * number / max(in_flight) for number in numbers]
        assert heights(path, num_columns) == pytest.approx(expected, abs=0.11)


@pytest.mark.parametrize("max_rows", [1000, 39])
def test_the_page_holds_the_timeline_and_loads_nothing(
    timeline: Timeline, monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    """Above so many requests it has as many lines as were in flight at once."""
    monkeypatch.setattr(exporters, "MAX_PAGE_ROWS", max_rows)
    text = "".join(write_page(timeline))
    assert "http://" not in text
    assert "https://" not in text
    data = data_of(timeline)
    assert any("waiting for KV blocks" in text for text in data["reasons"])
    check_rows(data, timeline)
    shown = {
        "iterations": timeline.numbers,
        "start_us": timeline.start_us,
        "step_us": timeline.step_us,
        "context": timeline.num_context,
        "generation": timeline.num_generation,
        "tokens": timeline.num_context_tokens,
        "generation_tokens": timeline.num_generation_tokens,
        "free": timeline.num_free_blocks,
    }
    assert {name: data[name] for name in shown} == {k: list(v) for k, v in shown.items()}
    assert data["colours"] == [COLOURS[activity] for activity in Activity]
    assert (data["title"], data["num_blocks"]) == (title(timeline), 12)
    alive = [
        sum(lane.start <= index < (lane.end or index + 1) for lane in timeline.lanes)
        for index in range(timeline.num_iterations)
    ]
    assert len(data["lanes"]) == (40 if max_rows == 1000 else max(alive))
    assert sorted(index for lane in data["lanes"] for index in lane) == list(range(40))


def data_of(timeline: Timeline) -> dict[str, Any]:
    """What the script of the page reads."""
    text = "".join(write_page(timeline))
    content = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    assert content is not None
    found: dict[str, Any] = json.loads(content[1])
    return found


def check_rows(data: dict[str, Any], timeline: Timeline) -> None:
    """Rows and intervals in the order in which `common.js` reads them."""
    texts = data["reasons"]
    for shown, lane in zip(data["rows"], timeline.lanes, strict=True):
        *facts, why, intervals = shown
        end = -1 if lane.end is None else lane.end
        lengths = [lane.prompt_len, lane.max_new_tokens, lane.num_generated]
        assert facts == [lane.request_id, *lengths, lane.num_pauses, end]
        assert texts[why] == lane.end_reason
        for start, interval in zip(range(0, len(intervals), 6), lane.intervals, strict=True):
            activity, *bounds, first, last, num_tokens = intervals[start : start + 6]
            assert (activity, bounds) == (interval.activity, [interval.start, interval.end])
            assert (texts[first], texts[last]) == (interval.first_reason, interval.last_reason)
            assert num_tokens == interval.num_tokens


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
def test_request_that_did_not_end_well_is_crossed_out(reason: str, is_bad: bool) -> None:
    world = RecordedWorld(SETTINGS)
    request = make_request(1, 3, 9)
    world.arrive(request)
    world.iterate()
    world.iterate([request])
    timeline = build_timeline(read(world.text.replace('"cancelled"', f'"{reason}"')))
    assert timeline.lanes[0].end_reason == reason
    assert (ERROR_COLOUR in "".join(write_svg(timeline))) == is_bad
    data = data_of(timeline)
    assert (data["rows"][0][6] in data["bad"]) == is_bad
    assert data["crosses"] == ("stopped, failed or expired" if is_bad else "")


@pytest.mark.parametrize("write", [write_page, write_svg])
def test_a_hostile_name_is_only_text(write) -> None:  # type: ignore[no-untyped-def]
    """The one text of a recording that comes from outside; here it closes every element."""
    name = "</script><script>alert(1)</script>"
    world = RecordedWorld(Settings(GUARANTEED, 12, 4, 6))
    world.arrive(make_request(2**63, 3, 4))
    while world.active:
        world.iterate()
    text = world.text.replace('"settings":{', f'"settings":{{"scheduler_class":{json.dumps(name)},')
    picture = "".join(write(build_timeline(read(text))))
    assert "<script>alert" not in picture
    assert str(2**63) in picture


@pytest.mark.parametrize("kind", ["plain", "beams", "drafts"])
def test_all_tokens_of_an_iteration_are_shown(kind: str) -> None:
    """Of each beam one, drafts, and the last tokens of prompts that drafts run behind."""
    settings = Settings(MAX_UTILIZATION, 30, 4, 6, 60)
    world = RecordedWorld(settings)
    if kind == "beams":
        world = SearchingWorld(settings)
    elif kind == "drafts":
        world = DraftingWorld(settings, 3)
    play(settings, num_requests=20, seed=3, world=world)
    timeline = build_timeline(read(world.text))
    is_decided = [iteration.decision is not None for iteration in read(world.text)]
    tokens = zip(timeline.num_context_tokens, timeline.num_generation_tokens, strict=True)
    shown = [sum(pair) for pair, is_it in zip(tokens, is_decided, strict=True) if is_it]
    assert shown == [batch.num_tokens for batch in world.batches]
    intervals = [interval for lane in timeline.lanes for interval in lane.intervals]
    assert sum(interval.num_tokens for interval in intervals) == sum(shown)
    num_steps = sum(timeline.num_generation)
    assert (sum(timeline.num_generation_tokens) > num_steps) == (kind != "plain")
    assert max(map(int, re.findall(r">(\d+)</text>", "".join(write_svg(timeline))))) >= max(shown)


def events_of(timeline: Timeline) -> list[dict[str, Any]]:
    """The trace; it keeps the rules of the Trace Event Format, for the three phases that are used.

    docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: every event has ph, pid
    and name; times are microseconds; a complete event (X) has a duration and a thread, and those of
    one thread nest; a counter (C) has numbers only; metadata (M) names a process.
    """
    events: list[dict[str, Any]] = json.loads("".join(write_trace(timeline)))["traceEvents"]
    ends: dict[tuple[int, int], int] = {}
    counters: dict[str, int] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
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
                track = event["pid"], event["tid"]
                assert event["ts"] >= ends.get(track, 0) - 1, "slices of one track overlap"
                ends[track] = event["ts"] + event["dur"]
            case other:
                raise AssertionError(f"phase {other} is not used")
    return events


def test_nothing_is_drawn_while_no_request_is_in_flight() -> None:
    """A minute passes between two requests: neither of them lasts a minute."""
    clock = Clock()
    settings = Settings(GUARANTEED, 12, 4, 6)
    world = RecordedWorld(settings)
    world.recorder = FlightRecorder(settings, world.manager, clock=clock)
    for number in (1, 2):
        world.arrive(make_request(number, 3, 4))
        while world.active:
            clock.time_us += 1000
            world.iterate()
        clock.time_us += 60_000_000
    timeline = build_timeline(read(world.text))
    assert timeline.start_us[-1] > 60_000_000
    assert list(timeline.is_last_busy) == [0, 0, 0, 1] * 2
    events = events_of(timeline)
    assert sum(event["dur"] for event in events if event["ph"] == "X") < 20_000
    idle = [event for event in events if event["name"] == "batch"][4]
    assert idle["args"] == {"context": 0, "generation": 0}
    free = [event["args"]["free"] for event in events if event["name"] == "free blocks"]
    assert free == [11, 11, 10, 10, 12] * 2
    text = "".join(write_page(timeline))
    assert '"pauses_after":[[3,' in text


def test_the_trace_tells_what_the_timeline_does(timeline: Timeline) -> None:
    """A slice per interval, and three counters per iteration."""
    events = events_of(timeline)
    kinds = Counter(event["ph"] for event in events)
    assert kinds["C"] == 3 * (timeline.num_iterations + sum(timeline.is_last_busy))
    intervals = [interval for lane in timeline.lanes for interval in lane.intervals]
    assert any(interval.first_reason != interval.last_reason for interval in intervals)
    slices = [event for event in events if event["ph"] == "X"]
    for event, interval in zip(slices, intervals, strict=True):
        assert event["ts"] == timeline.start_us[interval.start]
        assert event["ts"] + event["dur"] == timeline.end_us(interval.end - 1)
        first = event["args"].get("reason", "")
        assert [first, event["args"].get("reason at the end", first)] == [
            interval.first_reason,
            interval.last_reason,
        ]
    counted = {(e["name"], e["ts"]): list(e["args"].values()) for e in events if e["ph"] == "C"}
    for index, time_us in enumerate(timeline.start_us[: timeline.num_iterations]):
        assert counted["free blocks", time_us] == [timeline.num_free_blocks[index]]
        batch = [timeline.num_context[index], timeline.num_generation[index]]
        assert counted["batch", time_us] == batch
        tokens = [timeline.num_context_tokens[index], timeline.num_generation_tokens[index]]
        assert counted["tokens", time_us] == tokens


DRAW = """
import resource, sys
from pathlib import Path
from inflight_recorder.storage import open_recording
from inflight_recorder.timeline import build_timeline
from inflight_recorder.exporters import write_page, write_svg

resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[3]), int(sys.argv[3])))
folder = Path(sys.argv[1])
with open_recording(folder / "recording.jsonl") as reader:
    timeline = build_timeline(reader)
print(len(timeline.lanes), sum(lane.num_generated for lane in timeline.lanes))
(folder / "svg").write_text("".join(write_svg(timeline)))
with (folder / "page").open("w") as file:
    file.writelines(write_page(timeline))
"""


def write_recording(file: Path) -> None:
    """In every iteration 200 requests arrive and compute their prompts, and those of the one
    before draw their second and last token."""
    with file.open("w") as lines:
        lines.write(msgspec.json.encode(Header(2, SettingsRecord.of(MANY))).decode() + "\n")
        before: list[int] = []
        for index in range(NUM_REQUESTS // AT_ONCE + 1):
            first = index * AT_ONCE
            new = list(range(first, min(first + AT_ONCE, NUM_REQUESTS)))
            content = {
                "i": index + 1,
                "t": 1000 * index,
                "d": 900,
                "a": [
                    {"request_id": number, "prompt_len": 4, "max_new_tokens": 2} for number in new
                ],
                "s": {"c": [(number, 4) for number in new], "g": before},
                "f": MANY.num_blocks - len(new) - len(before),
            }
            lines.write(json.dumps(content) + "\n")
            before = new


@pytest.mark.slow
@pytest.mark.case(116)
def test_pictures_of_very_many_requests_are_bounded(tmp_path: Path) -> None:
    write_recording(tmp_path / "recording.jsonl")
    command = [sys.executable, "-c", DRAW, str(tmp_path), str(MAX_MEMORY), str(MAX_CPU_SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(NUM_REQUESTS), str(2 * NUM_REQUESTS)]
    ElementTree.parse(tmp_path / "svg")
    assert (tmp_path / "svg").stat().st_size < 100_000  # of any number of requests
    assert (tmp_path / "page").stat().st_size < 100 * NUM_REQUESTS
