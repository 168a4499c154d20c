"""A timeline as a file: SVG, an interactive web page, or a trace for Perfetto.

The size of the SVG does not grow with the recording: above `MAX_ROWS` requests it shows how many of
them do what instead of rows, and columns are merged to at most `MAX_COLUMNS`. The page loads
nothing; all of the timeline is in it (about 40 bytes an interval), and what is drawn is bounded by
the pixels.

The trace (ui.perfetto.dev, chrome://tracing) has one slice per interval on the track of its
request, and counters. A track is used again once its request has ended, so there are as many as
requests were in flight at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import accumulate, chain, groupby, islice, pairwise
from operator import add
from statistics import fmean
from typing import Any

from inflight_recorder.schema import BAD_ENDS
from inflight_recorder.timeline import (
    ACTIVITY_NAMES,
    COLOURS,
    ERROR_COLOUR,
    Activity,
    Interval,
    Lane,
    Timeline,
    assign_tracks,
    count,
    crosses,
    seconds,
    shown_activities,
    title,
)

MAX_ROWS = 240
MAX_COLUMNS = 600

_LEFT, _PLOT, _RIGHT = 92, 1080, 28
_TOP = 78
_CHART_HEIGHT, _CHART_GAP = 64, 34
_ROWS_HEIGHT, _STACK_HEIGHT = 620, 300
_TITLE_SIZE, _TITLE_ASPECT = 17, 0.6  # and how wide a letter is for its height
_FAINT, _GRID = "#66727f", "#e7ebf0"
_AT_END = ' text-anchor="end"'

_Merge = Callable[[Sequence[int]], float]

_STYLE = """
text { font-family: "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1f2933; }
.title { font-size: 17px; font-weight: 600; }
.small { font-size: 11.5px; fill: #66727f; }
.label { font-size: 12px; }
rect { shape-rendering: crispEdges; }
"""


def write_svg(timeline: Timeline) -> Iterator[str]:
    """The picture; a few hundred kilobytes for a hundred requests, at most some megabytes."""
    has_rows = len(timeline.lanes) <= MAX_ROWS
    row_height = max(min(_ROWS_HEIGHT / len(timeline.lanes), 17.0), 2.5)
    rows_height = row_height * len(timeline.lanes) if has_rows else _STACK_HEIGHT
    charts_top = _TOP + rows_height + 44
    height = charts_top + 3 * (_CHART_HEIGHT + _CHART_GAP) + 18
    width = _LEFT + _PLOT + _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
        f'width="{width}" height="{height:.0f}" role="img">',
        f"<title>{escape(title(timeline))}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height:.0f}" fill="#ffffff"/>',
        _title(title(timeline)),
        *_legend(timeline, has_rows),
        *_grid(timeline, _TOP, rows_height),
        *(_rows(timeline, row_height) if has_rows else _stack(timeline, rows_height)),
        *_charts(timeline, charts_top),
        "</svg>",
    ]
    yield "\n".join(parts) + "\n"


def _x(timeline: Timeline, index: float) -> float:
    return _LEFT + _PLOT * index / timeline.num_iterations


def _rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        f'fill="{fill}"{more}'
    )


def _text(x: float, y: float, text: str, kind: str = "small", more: str = "") -> str:
    place = f'x="{round(x, 1):g}" y="{round(y, 1):g}"'
    return f'<text class="{kind}" {place}{more}>{escape(text)}</text>'


def _beside(y: float, text: str) -> str:
    """In the margin on the left."""
    return _text(_LEFT - 10, y, text, more=_AT_END)


def _title(text: str) -> str:
    """On one line, however long the name of a user's scheduler is."""
    size = _PLOT / (_TITLE_ASPECT * len(text))
    smaller = f' style="font-size: {size:.1f}px"' if size < _TITLE_SIZE else ""
    return _text(_LEFT, 30, text, "title", smaller)


def _legend(timeline: Timeline, has_rows: bool) -> Iterator[str]:
    x = float(_LEFT)
    for activity in shown_activities(timeline):
        name = ACTIVITY_NAMES[activity]
        yield _rect(x, 45, 12, 12, COLOURS[activity], ' rx="2"/>')
        yield _text(x + 18, 55, name, "label")
        x += 18 + 6.7 * len(name) + 22
    if has_rows and (name := crosses(timeline)):
        yield _cross(x + 5, 51, 4)
        yield _text(x + 16, 55, name, "label")


def _cross(x: float, y: float, size: float) -> str:
    return (
        f'<path d="M{x - size:.1f} {y - size:.1f}L{x + size:.1f} {y + size:.1f}'
        f'M{x + size:.1f} {y - size:.1f}L{x - size:.1f} {y + size:.1f}" '
        f'stroke="{ERROR_COLOUR}" stroke-width="1.8" stroke-linecap="round"/>'
    )


def _tick_step(largest: int, most: int) -> int:
    """A round distance (1, 2, 5, 10 ...) that makes at most about ``most`` ticks."""
    step = 1
    while largest / step > most:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return step


def _grid(timeline: Timeline, top: float, height: float) -> Iterator[str]:
    """Lines of the iterations, with their numbers above the rows."""
    first = timeline.numbers[0]
    step = _tick_step(timeline.num_iterations, 12)
    for number in range(-(-first // step) * step, first + timeline.num_iterations, step):
        x = _x(timeline, number - first)
        yield (
            f'<path d="M{x:.1f} {top - 4:.1f}V{top + height + 4:.1f}" stroke="{_GRID}" '
            'stroke-width="1"/>'
        )
        yield _text(x, top - 7, f"{number:,}", more=' text-anchor="middle"')
    yield _beside(top - 7, "iteration")


def _rows(timeline: Timeline, row_height: float) -> Iterator[str]:
    """One row per request; hovering tells the reason."""
    gap = min(2.0, row_height * 0.2)
    every = max(1, -(-len(timeline.lanes) // 45)) if row_height < 11 else 1
    for number, lane in enumerate(timeline.lanes):
        y = _TOP + number * row_height
        if number % every == 0:
            yield _beside(y + row_height / 2 + 4, str(lane.request_id))
        for interval in lane.intervals:
            x = _x(timeline, interval.start)
            width = max(_x(timeline, interval.end) - x, 0.6)
            yield _rect(x, y + gap / 2, width, row_height - gap, COLOURS[interval.activity], ">")
            yield f"<title>{escape(describe(timeline, lane, interval))}</title></rect>"
        if lane.end is not None and lane.end_reason in BAD_ENDS:
            x = _x(timeline, lane.end) + min(6.0, row_height * 0.45)
            yield _cross(x, y + row_height / 2, max(min(row_height * 0.25, 3.6), 1.4))


def describe(timeline: Timeline, lane: Lane, interval: Interval) -> str:
    """What a interval means, for people."""
    first, last = timeline.numbers[interval.start], timeline.numbers[interval.end - 1]
    when = f"iteration {first}" if first == last else f"iterations {first} to {last}"
    lines = [f"request {lane.request_id}: {ACTIVITY_NAMES[interval.activity]}, {when}"]
    if interval.num_tokens:
        lines.append(count(interval.num_tokens, "token"))
    lines += dict.fromkeys(
        reason for reason in (interval.first_reason, interval.last_reason) if reason
    )
    return "\n".join(lines)


_STACK_ORDER = (
    Activity.GENERATION,
    Activity.CONTEXT,
    Activity.RESUMED,
    Activity.IDLE,
    Activity.PAUSED,
    Activity.WAITING,
)
"""From the bottom up."""


def _stack(timeline: Timeline, height: float) -> Iterator[str]:
    """How many requests did what, averaged over the iterations of each column."""
    bottom = _TOP + height
    note = f"requests in flight, by what they do (more than {MAX_ROWS}: no rows)"
    yield _text(_LEFT, bottom + 16, note)
    changes = {activity: [0] * (timeline.num_iterations + 1) for activity in Activity}
    for lane in timeline.lanes:
        for interval in lane.intervals:
            changes[interval.activity][interval.start] += 1
            changes[interval.activity][interval.end] -= 1
    tops: list[tuple[Activity, list[float]]] = []
    below = [0] * timeline.num_iterations
    for activity in _STACK_ORDER:
        if any(changes[activity]):
            counts = islice(accumulate(changes[activity]), timeline.num_iterations)
            below = list(map(add, below, counts))
            tops.append((activity, _columns(below, fmean)))
    highest = max(tops[-1][1])
    for activity, top in reversed(tops):  # each covers a part of those before it
        path = _area(top, bottom, height / highest)
        yield f'<path d="{path}" fill="{COLOURS[activity]}"/>'
    yield _beside(_TOP + 13, f"{round(highest):,}")
    yield _beside(bottom + 4, "0")


def _charts(timeline: Timeline, top: float) -> Iterator[str]:
    """Batch size, tokens and free blocks per iteration."""
    blue, green = COLOURS[Activity.CONTEXT], COLOURS[Activity.GENERATION]
    context, tokens = timeline.num_context, timeline.num_context_tokens
    batch = list(map(add, context, timeline.num_generation))
    total = list(map(add, tokens, timeline.num_generation_tokens))
    free, num_blocks = timeline.num_free_blocks, timeline.settings.num_blocks
    charts: tuple[tuple[str, list[tuple[Sequence[int], str]], int, _Merge], ...] = (
        ("requests in the batch", [(batch, green), (context, blue)], max(batch), max),
        ("tokens computed per iteration", [(total, green), (tokens, blue)], max(total), max),
        (f"free KV blocks, of {num_blocks:,}", [(free, "#7d8b99")], num_blocks, min),
    )
    for place, (name, series, highest, merge) in enumerate(charts):
        chart_top = top + place * (_CHART_HEIGHT + _CHART_GAP)
        yield from _chart(chart_top, name, series, max(highest, 1), merge)
    duration = seconds(timeline.start_us[-1] - timeline.start_us[0])
    yield _text(_LEFT + _PLOT, top - 10, f"{duration} in all", more=_AT_END)


def _chart(
    top: float, name: str, series: list[tuple[Sequence[int], str]], highest: int, merge: _Merge
) -> Iterator[str]:
    """Areas, the first behind the others; iterations of a column are merged by ``merge``."""
    bottom = top + _CHART_HEIGHT
    yield _text(_LEFT, top - 8, name, "label")
    yield f'<path d="M{_LEFT} {top:.1f}H{_LEFT + _PLOT}" stroke="{_GRID}"/>'
    for values, colour in series:
        columns = [min(value, highest) for value in _columns(values, merge)]
        path = _area(columns, bottom, _CHART_HEIGHT / highest)
        yield f'<path d="{path}" fill="{colour}" fill-opacity="0.9"/>'
    yield f'<path d="M{_LEFT} {bottom:.1f}H{_LEFT + _PLOT}" stroke="{_FAINT}" stroke-width="0.8"/>'
    yield _beside(top + 4, f"{highest:,}")
    yield _beside(bottom + 4, "0")


def _columns(values: Sequence[int], merge: _Merge) -> list[float]:
    """The values of at most `MAX_COLUMNS` columns, each merged from neighbouring iterations."""
    num_columns = min(len(values), MAX_COLUMNS)
    bounds = [k * len(values) // num_columns for k in range(num_columns + 1)]
    return [merge(values[start:end]) for start, end in pairwise(bounds)]


def _area(columns: Sequence[float], bottom: float, scale: float) -> str:
    """Steps, closed at the bottom; equal neighbours make one step."""
    parts = [f"M{_LEFT} {bottom:.1f}"]
    column = 0
    for value, group in groupby(columns):
        column += len(list(group))
        parts.append(f"V{bottom - value * scale:.1f}H{_LEFT + _PLOT * column / len(columns):.1f}")
    parts.append(f"V{bottom:.1f}Z")
    return "".join(parts)


MAX_PAGE_ROWS = 1000
"""Above that, requests that follow one another share a line."""

_MAX_EXACT = 2**53  # what a number holds exactly in a browser


def write_page(timeline: Timeline) -> Iterator[str]:
    """The page, piece by piece."""
    template = (files("inflight_recorder") / "page.html").read_text(encoding="utf-8")
    before, after = template.split("__DATA__")
    yield before
    # In a script element only "</" and "<!--" mean anything; both need the first sign.
    yield json.dumps(_page_data(timeline), separators=(",", ":")).replace("<", "\\u003c")
    yield after


def _page_data(timeline: Timeline) -> dict[str, Any]:
    """A timeline as the script of the page reads it."""
    reasons: dict[str, int] = {"": 0}

    def index(reason: str) -> int:
        return reasons.setdefault(reason, len(reasons))

    rows = [
        [
            lane.request_id if lane.request_id < _MAX_EXACT else str(lane.request_id),
            lane.prompt_len,
            lane.max_new_tokens,
            lane.num_generated,
            lane.num_pauses,
            -1 if lane.end is None else lane.end,
            index(lane.end_reason),
            [
                value
                for interval in lane.intervals
                for value in (
                    int(interval.activity),
                    interval.start,
                    interval.end,
                    index(interval.first_reason),
                    index(interval.last_reason),
                    interval.num_tokens,
                )
            ],
        ]
        for lane in timeline.lanes
    ]
    return {
        "title": title(timeline),
        "num_blocks": timeline.settings.num_blocks,
        "activities": [ACTIVITY_NAMES[activity] for activity in Activity],
        "colours": [COLOURS[activity] for activity in Activity],
        "error_colour": ERROR_COLOUR,
        "shown": [int(activity) for activity in shown_activities(timeline)],
        "rows": rows,
        "lanes": _shared_lines(timeline),
        "crosses": crosses(timeline),
        "bad": [index(reason) for reason in sorted(BAD_ENDS)],
        "reasons": list(reasons),
        "iterations": timeline.numbers.tolist(),
        "start_us": timeline.start_us.tolist(),
        "step_us": timeline.step_us.tolist(),
        "context": timeline.num_context.tolist(),
        "generation": timeline.num_generation.tolist(),
        "tokens": timeline.num_context_tokens.tolist(),
        "generation_tokens": timeline.num_generation_tokens.tolist(),
        "free": timeline.num_free_blocks.tolist(),
        "pauses_after": [
            [index, timeline.end_us(index)]
            for index, is_last in enumerate(timeline.is_last_busy)
            if is_last
        ],
    }


def _shared_lines(timeline: Timeline) -> list[list[int]]:
    """Which requests share a line of the picture: none, unless there are very many."""
    if len(timeline.lanes) <= MAX_PAGE_ROWS:
        return [[index] for index in range(len(timeline.lanes))]
    lines: list[list[int]] = []
    for index, track in enumerate(assign_tracks(timeline.lanes)):
        if track == len(lines):
            lines.append([])
        lines[track].append(index)
    return lines


_REQUESTS, _COUNTERS = 1, 2  # processes of the trace


def write_trace(timeline: Timeline) -> Iterator[str]:
    """The JSON, piece by piece."""
    before = '{"displayTimeUnit":"ms","traceEvents":['
    for event in chain(_processes(timeline), _slices(timeline), _counters(timeline)):
        yield before + json.dumps(event, separators=(",", ":"))
        before = ",\n"
    yield "]}\n"


def _processes(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for process, name in ((_REQUESTS, title(timeline)), (_COUNTERS, "batch and blocks")):
        facts = {"ph": "M", "pid": process, "tid": 0, "ts": 0, "name": "process_name"}
        yield {**facts, "args": {"name": name}}


def _slices(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for lane, track in zip(timeline.lanes, assign_tracks(timeline.lanes), strict=True):
        for interval in lane.intervals:
            start = timeline.start_us[interval.start]
            yield {
                "ph": "X",
                "pid": _REQUESTS,
                "tid": track + 1,
                "ts": start,
                "dur": max(timeline.end_us(interval.end - 1) - start, 1),
                "name": ACTIVITY_NAMES[interval.activity],
                "cat": "scheduler",
                "args": _args(timeline, lane, interval),
            }


def _args(timeline: Timeline, lane: Lane, interval: Interval) -> dict[str, Any]:
    args: dict[str, Any] = {
        "request": lane.request_id,
        "prompt tokens": lane.prompt_len,
        "iterations": f"{timeline.numbers[interval.start]} to {timeline.numbers[interval.end - 1]}",
    }
    if interval.num_tokens:
        args["tokens"] = interval.num_tokens
    if interval.first_reason:
        args["reason"] = interval.first_reason
    if interval.last_reason != interval.first_reason:
        args["reason at the end"] = interval.last_reason
    return args


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    columns = (
        timeline.num_context,
        timeline.num_generation,
        timeline.num_context_tokens,
        timeline.num_generation_tokens,
        timeline.num_free_blocks,
    )
    for index, numbers in enumerate(zip(*columns, strict=True)):
        yield from _counts(timeline.start_us[index], *numbers)
        if timeline.is_last_busy[index]:  # else the last values would stand while nothing happens
            yield from _counts(timeline.end_us(index), 0, 0, 0, 0, timeline.settings.num_blocks)


def _counts(
    time_us: int, context: int, generation: int, tokens: int, others: int, num_free: int
) -> Iterator[dict[str, Any]]:
    for name, args in (
        ("batch", {"context": context, "generation": generation}),
        ("tokens", {"context": tokens, "generation": others}),
        ("free blocks", {"free": num_free}),
    ):
        yield {"ph": "C", "pid": _COUNTERS, "tid": 0, "ts": time_us, "name": name, "args": args}
