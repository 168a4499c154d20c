"""The SVG says what the history says: every bar, every area and every tick is where it belongs."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from recorder.recorded import MAX_UTILIZATION, play, read

from inflight_recorder import svg
from inflight_recorder.exporters import describe, write_svg
from inflight_recorder.settings import Settings
from inflight_recorder.timeline import COLOURS, Activity, History, Span, build_timeline

LEFT, TOP, WIDTH = 92, 78, 1080
CHART_HEIGHT = 64
NAMESPACE = "{http://www.w3.org/2000/svg}"
NUM_BLOCKS = 12
SIZES = {"title": 17.0, "small": 11.5, "label": 12.0}


@pytest.fixture(scope="module")
def history() -> History:
    return build_timeline(
        read(play(Settings(MAX_UTILIZATION, NUM_BLOCKS, 4, 6, 40), num_requests=40, seed=9).text)
    )


def drawn(history: History) -> ElementTree.Element:
    return ElementTree.fromstring(write_svg(history))


def x_of(history: History, index: float) -> float:
    return LEFT + WIDTH * index / history.num_iterations


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


def test_every_span_is_a_bar_in_the_row_of_its_request(history: History) -> None:
    bars = [
        (dict(rect.attrib), title.text)
        for rect in drawn(history).iter(f"{NAMESPACE}rect")
        for title in rect.iter(f"{NAMESPACE}title")
    ]
    spans = [(place, row, span) for place, row in enumerate(history.rows) for span in row.spans]
    tops: dict[int, set[float]] = {}
    for (bar, text), (place, row, span) in zip(bars, spans, strict=True):
        start, end = x_of(history, span.start), x_of(history, span.end)
        assert float(bar["x"]) == pytest.approx(start, abs=0.01)
        assert float(bar["x"]) + float(bar["width"]) == pytest.approx(end, abs=0.02)
        assert bar["fill"] == COLOURS[span.activity]
        assert text == describe(history, row, span)
        tops.setdefault(place, set()).add(float(bar["y"]))
        assert float(bar["height"]) > 2
    assert all(len(ys) == 1 for ys in tops.values()), "one request, one row"
    ys = [tops[place].pop() for place in range(len(history.rows))]
    assert {round(after - before, 1) for before, after in pairwise(ys)} == {15.5}, "620 / 40"
    assert TOP <= ys[0] < TOP + 2
    labels = [
        (text.text, float(text.attrib["y"]))
        for text in drawn(history).iter(f"{NAMESPACE}text")
        if text.attrib.get("x") == str(LEFT - 10) and text.text != "iteration"
    ]
    for row, top, (label, y) in zip(history.rows, ys, labels, strict=False):
        assert label == str(row.request_id)
        assert top < y < top + 15.5


@pytest.mark.parametrize("max_columns", [600, 10])
def test_the_areas_are_the_numbers(
    history: History, monkeypatch: pytest.MonkeyPatch, max_columns: int
) -> None:
    """Of a column of several iterations the most that ran, and the fewest blocks that were free."""
    monkeypatch.setattr(svg, "MAX_COLUMNS", max_columns)
    areas = [
        (path.attrib["fill"], path.attrib["d"])
        for path in drawn(history).iter(f"{NAMESPACE}path")
        if "fill-opacity" in path.attrib
    ]
    context, generation = history.num_context, history.num_generation
    tokens, others = history.num_context_tokens, history.num_generation_tokens
    batch = [c + g for c, g in zip(context, generation, strict=True)]
    total = [t + g for t, g in zip(tokens, others, strict=True)]
    blue, green = COLOURS[Activity.CONTEXT], COLOURS[Activity.GENERATION]
    shown: list[tuple[str | None, Sequence[int], int]] = [
        (green, batch, max(batch)),
        (blue, context, max(batch)),
        (green, total, max(total)),
        (blue, tokens, max(total)),
        (None, history.num_free_blocks, NUM_BLOCKS),
    ]
    num_columns = min(max_columns, history.num_iterations)
    bounds = [k * history.num_iterations // num_columns for k in range(num_columns + 1)]
    for (fill, path), (colour, values, highest) in zip(areas, shown, strict=True):
        merge = max if colour else min
        merged = [merge(values[start:end]) for start, end in pairwise(bounds)]
        expected = [CHART_HEIGHT * value / highest for value in merged]
        assert heights(path, num_columns) == pytest.approx(expected, abs=0.11)
        assert fill == (colour or fill)
    names = [
        text.text
        for text in drawn(history).iter(f"{NAMESPACE}text")
        if text.attrib.get("class") == "label" and text.attrib["x"] == str(LEFT)
    ]
    assert names == [
        "requests in the batch",
        "tokens computed per iteration",
        f"free KV blocks, of {NUM_BLOCKS}",
    ]


def test_ticks_stand_at_their_iterations(history: History) -> None:
    ticks = {
        int((text.text or "").replace(",", "")): float(text.attrib["x"])
        for text in drawn(history).iter(f"{NAMESPACE}text")
        if text.attrib.get("text-anchor") == "middle"
    }
    assert len(ticks) > 3
    for number, x in ticks.items():
        assert x == pytest.approx(x_of(history, history.numbers.index(number)), abs=0.06)


def test_the_stack_is_how_many_did_what(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine columns, each some iterations and parts of two: means, one area on top of the other."""
    num_columns = 9
    monkeypatch.setattr(svg, "MAX_ROWS", 1)
    monkeypatch.setattr(svg, "MAX_COLUMNS", num_columns)
    assert history.num_iterations % num_columns > 0
    share = history.num_iterations / num_columns
    means = {activity: [0.0] * num_columns for activity in Activity}
    for row in history.rows:
        for span in row.spans:
            for k in range(num_columns):
                common = min(span.end, (k + 1) * share) - max(span.start, k * share)
                means[span.activity][k] += max(common, 0.0) / share
    highest = max(sum(column) for column in zip(*means.values(), strict=True))
    below = [0.0] * num_columns
    paths = [
        path.attrib
        for path in drawn(history).iter(f"{NAMESPACE}path")
        if "fill-opacity" not in path.attrib and path.attrib.get("fill", "none") != "none"
    ]
    colour_to_path = {path["fill"]: path["d"] for path in paths}
    order = [Activity.GENERATION, Activity.CONTEXT, Activity.RESUMED, Activity.IDLE]
    for activity in [*order, Activity.PAUSED, Activity.WAITING]:
        if not any(means[activity]):
            continue
        above = [low + more for low, more in zip(below, means[activity], strict=True)]
        path = colour_to_path.pop(COLOURS[activity])
        there, back = path[: path.index("V", path.rindex(f"H{LEFT + WIDTH}"))], path
        bottom = TOP + 300
        got = [(bottom - float(y)) * highest / 300 for y in re.findall(r"V([\d.]+)", there)]
        assert got == pytest.approx(above, abs=0.02 * highest)
        lower = [float(y) for y in re.findall(r"V([\d.]+)", back[len(there) :])][::-1]
        assert [(bottom - y) * highest / 300 for y in lower] == pytest.approx(
            below, abs=0.02 * highest
        )
        below = above
    assert not colour_to_path


@pytest.mark.parametrize("max_rows", [240, 1])
def test_no_text_stands_on_another_or_beyond_the_border(
    history: History, monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    """With everything in the legend that there is, and a scheduler with a long name."""
    monkeypatch.setattr(svg, "MAX_ROWS", max_rows)
    settings = replace(history.settings, scheduler_class="policies_of_ours:" + "Fair" * 20)
    full = replace(history, settings=settings, rows=[*map(copy, history.rows)])
    full.rows[0].end_reason = "cancelled"
    spans = [Span(activity, 0, 1) for activity in Activity]
    full.rows[0].spans = spans
    boxes = []
    for text in drawn(full).iter(f"{NAMESPACE}text"):
        small = re.search(r"[\d.]+", text.attrib.get("style", ""))
        size = float(small[0]) if small else SIZES[text.attrib["class"]]
        width = 0.55 * size * len((text.text or "").strip())
        shift = {"end": 1.0, "middle": 0.5}.get(text.attrib.get("text-anchor", ""), 0.0)
        left = float(text.attrib["x"]) - shift * width
        assert left >= 0.0, text.text
        assert left + width <= LEFT + WIDTH + 28, text.text
        boxes.append((left, left + width, float(text.attrib["y"]), size, text.text))
    for one, other in combinations(boxes, 2):
        is_beside = one[0] >= other[1] or other[0] >= one[1]
        assert is_beside or abs(one[2] - other[2]) > 0.8 * min(one[3], other[3]), (one, other)
    names = [text for *_, text in boxes]
    assert ("stopped, failed or expired" in names) == (max_rows > 1), "crosses stand in rows"
