"""The timeline as an SVG: one row per request, and what the batch looked like underneath.

Its size does not grow with the recording: above `MAX_ROWS` requests it shows how many of them do
what instead of rows, and columns are merged to at most `MAX_COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import accumulate, groupby

from inflight_recorder.history import ACTIVITY_NAMES, Activity, History, Row, Span
from inflight_recorder.palette import (
    COLOURS,
    ERROR_COLOUR,
    count,
    crosses,
    seconds,
    shown_activities,
    title,
)
from inflight_recorder.records import BAD_ENDS

MAX_ROWS = 240
MAX_COLUMNS = 600

_LEFT, _PLOT, _RIGHT = 92, 1080, 28
_TOP = 78
_CHART_HEIGHT, _CHART_GAP = 64, 34
_ROWS_HEIGHT, _STACK_HEIGHT = 620, 300
_TITLE_SIZE, _TITLE_ASPECT = 17, 0.6  # and how wide a letter is for its height
_FAINT, _GRID = "#66727f", "#e7ebf0"

_STYLE = """
text { font-family: "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1f2933; }
.title { font-size: 17px; font-weight: 600; }
.small { font-size: 11.5px; fill: #66727f; }
.label { font-size: 12px; }
rect { shape-rendering: crispEdges; }
"""


def write_svg(history: History) -> str:
    """The picture; a few hundred kilobytes for a hundred requests, at most some megabytes."""
    has_rows = len(history.rows) <= MAX_ROWS
    row_height = max(min(_ROWS_HEIGHT / len(history.rows), 17.0), 2.5)
    rows_height = row_height * len(history.rows) if has_rows else _STACK_HEIGHT
    charts_top = _TOP + rows_height + 44
    height = charts_top + 3 * (_CHART_HEIGHT + _CHART_GAP) + 18
    width = _LEFT + _PLOT + _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
        f'width="{width}" height="{height:.0f}" role="img">',
        f"<title>{escape(title(history))}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height:.0f}" fill="#ffffff"/>',
        _title(title(history)),
        *_legend(history, has_rows),
        *_grid(history, _TOP, rows_height),
        *(_rows(history, row_height) if has_rows else _stack(history, rows_height)),
        *_charts(history, charts_top),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(history: History, index: float) -> float:
    return _LEFT + _PLOT * index / history.num_iterations


def _rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        f'fill="{fill}"{more}'
    )


def _title(text: str) -> str:
    """On one line, however long the name of a user's scheduler is."""
    size = _PLOT / (_TITLE_ASPECT * len(text))
    smaller = f' style="font-size: {size:.1f}px"' if size < _TITLE_SIZE else ""
    return f'<text class="title" x="{_LEFT}" y="30"{smaller}>{escape(text)}</text>'


def _legend(history: History, has_rows: bool) -> Iterator[str]:
    x = float(_LEFT)
    for activity in shown_activities(history):
        name = ACTIVITY_NAMES[activity]
        yield _rect(x, 45, 12, 12, COLOURS[activity], ' rx="2"/>')
        yield f'<text class="label" x="{x + 18:.0f}" y="55">{name}</text>'
        x += 18 + 6.7 * len(name) + 22
    if has_rows and (name := crosses(history)):
        yield _cross(x + 5, 51, 4)
        yield f'<text class="label" x="{x + 16:.0f}" y="55">{name}</text>'


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


def _grid(history: History, top: float, height: float) -> Iterator[str]:
    """Lines of the iterations, with their numbers above the rows."""
    first = history.numbers[0]
    step = _tick_step(history.num_iterations, 12)
    for number in range(-(-first // step) * step, first + history.num_iterations, step):
        x = _x(history, number - first)
        yield (
            f'<path d="M{x:.1f} {top - 4:.1f}V{top + height + 4:.1f}" stroke="{_GRID}" '
            'stroke-width="1"/>'
        )
        yield f'<text class="small" x="{x:.1f}" y="{top - 7}" text-anchor="middle">'
        yield f"{number:,}</text>"
    yield f'<text class="small" x="{_LEFT - 10}" y="{top - 7}" text-anchor="end">iteration</text>'


def _rows(history: History, row_height: float) -> Iterator[str]:
    """One row per request; hovering tells the reason."""
    gap = min(2.0, row_height * 0.2)
    every = max(1, -(-len(history.rows) // 45)) if row_height < 11 else 1
    for number, row in enumerate(history.rows):
        y = _TOP + number * row_height
        if number % every == 0:
            yield (
                f'<text class="small" x="{_LEFT - 10}" y="{y + row_height / 2 + 4:.1f}" '
                f'text-anchor="end">{row.request_id}</text>'
            )
        for span in row.spans:
            x = _x(history, span.start)
            width = max(_x(history, span.end) - x, 0.6)
            yield _rect(x, y + gap / 2, width, row_height - gap, COLOURS[span.activity], ">")
            yield f"<title>{escape(describe(history, row, span))}</title></rect>"
        if row.end is not None and row.end_reason in BAD_ENDS:
            x = _x(history, row.end) + min(6.0, row_height * 0.45)
            yield _cross(x, y + row_height / 2, max(min(row_height * 0.25, 3.6), 1.4))


def describe(history: History, row: Row, span: Span) -> str:
    """What a span means, for people."""
    first, last = history.numbers[span.start], history.numbers[span.end - 1]
    when = f"iteration {first}" if first == last else f"iterations {first} to {last}"
    lines = [f"request {row.request_id}: {ACTIVITY_NAMES[span.activity]}, {when}"]
    if span.num_tokens:
        lines.append(count(span.num_tokens, "token"))
    lines += dict.fromkeys(reason for reason in (span.first_reason, span.last_reason) if reason)
    return "\n".join(lines)


def _stack(history: History, height: float) -> Iterator[str]:
    """How many requests did what, averaged over the iterations of each column."""
    num_columns = min(history.num_iterations, MAX_COLUMNS)
    columns = _activities_by_column(history, num_columns)
    highest = max(sum(column.values()) for column in columns)
    bottom = _TOP + height
    yield (
        f'<text class="small" x="{_LEFT}" y="{bottom + 16:.0f}">requests in flight, by what they '
        f"do (more than {MAX_ROWS}: no rows)</text>"
    )
    below = [0.0] * num_columns
    for activity in _STACK_ORDER:
        heights = [column.get(activity, 0.0) for column in columns]
        if not any(heights):
            continue
        above = [low + more for low, more in zip(below, heights, strict=True)]
        path = _band(below, above, bottom, height / highest)
        yield f'<path d="{path}" fill="{COLOURS[activity]}"/>'
        below = above
    for value, y in ((round(highest), _TOP + 13), (0, bottom + 4)):
        yield f'<text class="small" x="{_LEFT - 10}" y="{y:.0f}" text-anchor="end">{value:,}</text>'


_STACK_ORDER = (
    Activity.GENERATION,
    Activity.CONTEXT,
    Activity.RESUMED,
    Activity.IDLE,
    Activity.PAUSED,
    Activity.WAITING,
)


def _activities_by_column(history: History, num_columns: int) -> list[dict[Activity, float]]:
    """For each column the mean number of requests in each activity.

    A span adds to the two columns at its ends and, through running sums, to all between them.
    """
    scale = num_columns / history.num_iterations
    changes = {activity: [0.0] * (num_columns + 2) for activity in Activity}
    for row in history.rows:
        for span in row.spans:
            change = changes[span.activity]
            for place, sign in ((span.start * scale, 1.0), (span.end * scale, -1.0)):
                column = int(place)
                change[column] += sign * (column + 1 - place)
                change[column + 1] += sign * (place - column)
    sums = {activity: list(accumulate(change)) for activity, change in changes.items()}
    return [
        {activity: sums[activity][column] for activity in Activity} for column in range(num_columns)
    ]


def _band(below: Sequence[float], above: Sequence[float], bottom: float, scale: float) -> str:
    """The area between two lines of steps."""
    width = _PLOT / len(above)
    there = "".join(
        f"V{bottom - value * scale:.1f}H{_LEFT + width * (k + 1):.1f}"
        for k, value in enumerate(above)
    )
    back = "".join(
        f"V{bottom - below[k] * scale:.1f}H{_LEFT + width * k:.1f}"
        for k in range(len(below) - 1, -1, -1)
    )
    return f"M{_LEFT} {bottom - below[0] * scale:.1f}{there}{back}Z"


def _charts(history: History, top: float) -> Iterator[str]:
    """Batch size, tokens and free blocks per iteration."""
    step = _CHART_HEIGHT + _CHART_GAP
    blue, green = COLOURS[Activity.CONTEXT], COLOURS[Activity.GENERATION]
    context = list(history.num_context)
    batch = [c + g for c, g in zip(context, history.num_generation, strict=True)]
    yield from _chart(history, top, "requests in the batch", [(batch, green), (context, blue)])
    tokens = list(history.num_context_tokens)
    total = [t + g for t, g in zip(tokens, history.num_generation_tokens, strict=True)]
    yield from _chart(
        history, top + step, "tokens computed per iteration", [(total, green), (tokens, blue)]
    )
    yield from _chart(
        history,
        top + 2 * step,
        f"free KV blocks, of {history.settings.num_blocks:,}",
        [(list(history.num_free_blocks), "#7d8b99")],
        highest=history.settings.num_blocks,
        merge=min,
    )
    duration = seconds(history.start_us[-1] - history.start_us[0])
    yield (
        f'<text class="small" x="{_LEFT + _PLOT}" y="{top - 10:.0f}" text-anchor="end">'
        f"{duration} in all</text>"
    )


def _chart(
    history: History,
    top: float,
    name: str,
    series: Sequence[tuple[list[int], str]],
    highest: int | None = None,
    merge: Callable[[Sequence[int]], int] = max,
) -> Iterator[str]:
    """Areas, the first behind the others; columns are merged by ``merge``."""
    if highest is None:
        highest = max(series[0][0], default=0)
    highest = max(highest, 1)
    bottom = top + _CHART_HEIGHT
    yield f'<text class="label" x="{_LEFT}" y="{top - 8:.0f}">{escape(name)}</text>'
    yield f'<path d="M{_LEFT} {top:.1f}H{_LEFT + _PLOT}" stroke="{_GRID}"/>'
    for values, colour in series:
        path = _area(values, bottom, highest, merge)
        yield f'<path d="{path}" fill="{colour}" fill-opacity="0.9"/>'
    yield f'<path d="M{_LEFT} {bottom:.1f}H{_LEFT + _PLOT}" stroke="{_FAINT}" stroke-width="0.8"/>'
    for value, y in ((highest, top + 4), (0, bottom + 4)):
        yield f'<text class="small" x="{_LEFT - 10}" y="{y:.0f}" text-anchor="end">{value:,}</text>'


def _area(
    values: list[int], bottom: float, highest: int, merge: Callable[[Sequence[int]], int]
) -> str:
    """Steps, closed at the bottom; equal neighbours make one step."""
    num_columns = min(len(values), MAX_COLUMNS)
    parts = [f"M{_LEFT} {bottom:.1f}"]
    column = 0
    merged = (
        merge(values[k * len(values) // num_columns : (k + 1) * len(values) // num_columns])
        for k in range(num_columns)
    )
    for value, group in groupby(merged):
        column += len(list(group))
        y = bottom - _CHART_HEIGHT * min(value / highest, 1.0)
        parts.append(f"V{y:.1f}H{_LEFT + _PLOT * column / num_columns:.1f}")
    parts.append(f"V{bottom:.1f}Z")
    return "".join(parts)
