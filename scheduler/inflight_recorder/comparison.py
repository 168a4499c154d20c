"""The timelines of several settings on one time axis, with their table, as one web page.

It loads nothing. All histories are in it, so it is for thousands of requests, not for millions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inflight_recorder.errors import RecordingError
from inflight_recorder.history import History
from inflight_recorder.page import fill_template, history_data

MAX_ROWS = 20_000
"""Requests of all timelines together; such a page has about 10 MB."""


@dataclass(frozen=True, slots=True)
class Table:
    """Texts: a title for each column, then one row per setting, its name first, and notes."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def write_comparison(
    title: str, table: Table, histories: Sequence[tuple[str, History]]
) -> Iterator[str]:
    """The page, piece by piece; ``histories`` in the order in which they are drawn.

    Checked at once, not when the first piece is taken.

    `RecordingError` for more than `MAX_ROWS` requests in all.
    """
    num_rows = sum(len(history.rows) for _, history in histories)
    if num_rows > MAX_ROWS:
        raise RecordingError(
            f"{num_rows:,} requests in all timelines are more than {MAX_ROWS:,} for one page: "
            "compare fewer settings, or save the predictions and draw them one by one"
        )
    data = {
        "title": title,
        "titles": table.titles,
        "rows": table.rows,
        "notes": table.notes,
        "panels": [{"name": name, **history_data(history)} for name, history in histories],
    }
    return fill_template("comparison.html", data)
