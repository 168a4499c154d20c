"""The timeline as one web page: zoom, pan, and the reason under the pointer. It loads nothing.

All of the history is in the page (about 40 bytes a span); what is drawn is bounded by the pixels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from inflight_recorder.history import ACTIVITY_NAMES, Activity, History, assign_lanes
from inflight_recorder.palette import COLOURS, ERROR_COLOUR, crosses, shown_activities, title
from inflight_recorder.records import BAD_ENDS

MAX_ROWS = 1000
"""Above that, requests that follow one another share a line."""

_MAX_EXACT = 2**53  # what a number holds exactly in a browser


def write_page(history: History) -> Iterator[str]:
    """The page, piece by piece."""
    yield from fill_template("page.html", history_data(history))


def fill_template(name: str, data: object) -> Iterator[str]:
    """The page ``name`` of this package with the styles and functions all share, and ``data``."""
    folder = files("inflight_recorder")
    template = (folder / name).read_text(encoding="utf-8")
    for part in ("common.css", "common.js"):
        template = template.replace(f"__{part}__", (folder / part).read_text(encoding="utf-8"))
    before, after = template.split("__DATA__")
    yield before
    # In a script element only "</" and "<!--" mean anything; both need the first sign.
    yield json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    yield after


def history_data(history: History) -> dict[str, Any]:
    """A history as the scripts of the pages read it."""
    texts = _Texts()
    rows = [
        [
            row.request_id if row.request_id < _MAX_EXACT else str(row.request_id),
            row.prompt_len,
            row.max_new_tokens,
            row.num_generated,
            row.num_pauses,
            -1 if row.end is None else row.end,
            texts.index(row.end_reason),
            [
                value
                for span in row.spans
                for value in (
                    int(span.activity),
                    span.start,
                    span.end,
                    texts.index(span.first_reason),
                    texts.index(span.last_reason),
                    span.num_tokens,
                )
            ],
        ]
        for row in history.rows
    ]
    return {
        "title": title(history),
        "num_blocks": history.settings.num_blocks,
        "activities": [ACTIVITY_NAMES[activity] for activity in Activity],
        "colours": [COLOURS[activity] for activity in Activity],
        "error_colour": ERROR_COLOUR,
        "shown": [int(activity) for activity in shown_activities(history)],
        "rows": rows,
        "lanes": _lanes(history),
        "crosses": crosses(history),
        "bad": [texts.index(reason) for reason in sorted(BAD_ENDS)],
        "reasons": texts.texts,
        "iterations": history.numbers.tolist(),
        "start_us": history.start_us.tolist(),
        "step_us": history.step_us.tolist(),
        "context": history.num_context.tolist(),
        "generation": history.num_generation.tolist(),
        "tokens": history.num_context_tokens.tolist(),
        "generation_tokens": history.num_generation_tokens.tolist(),
        "free": history.num_free_blocks.tolist(),
        "pauses_after": [
            [index, history.end_us(index)]
            for index, is_last in enumerate(history.is_last_busy)
            if is_last
        ],
    }


def _lanes(history: History) -> list[list[int]]:
    """Which rows share a line of the picture: none, unless there are very many."""
    if len(history.rows) <= MAX_ROWS:
        return [[index] for index in range(len(history.rows))]
    lanes: list[list[int]] = []
    for index, lane in enumerate(assign_lanes(history.rows)):
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(index)
    return lanes


class _Texts:
    """Each text once; index 0 is none."""

    def __init__(self) -> None:
        self.texts = [""]
        self._index = {"": 0}

    def index(self, text: str) -> int:
        """The place of ``text``, which is added if it is new."""
        if text not in self._index:
            self._index[text] = len(self.texts)
            self.texts.append(text)
        return self._index[text]
