"""The timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

The JSON trace event format: one slice per span on the lane of its request, and counters. A lane is
used again once its request has ended, so there are as many as requests were in flight at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from inflight_scheduler.recording.history import (
    ACTIVITY_NAMES,
    History,
    Row,
    Span,
    assign_lanes,
)
from inflight_scheduler.recording.palette import title

_REQUESTS, _COUNTERS = 1, 2


def write_trace(history: History) -> Iterator[str]:
    """The JSON, piece by piece."""
    yield '{"displayTimeUnit":"ms","traceEvents":['
    yield _event({"ph": "M", "pid": _REQUESTS, "name": "process_name",
                  "args": {"name": title(history)}})  # fmt: skip
    for event in _slices(history):
        yield ",\n" + _event(event)
    for event in _counters(history):
        yield ",\n" + _event(event)
    yield "]}\n"


def _event(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))


def _slices(history: History) -> Iterator[dict[str, Any]]:
    for row, lane in zip(history.rows, assign_lanes(history.rows), strict=True):
        for span in row.spans:
            start = history.start_us[span.start]
            yield {
                "ph": "X",
                "pid": _REQUESTS,
                "tid": lane + 1,
                "ts": start,
                "dur": max(_end_us(history, span) - start, 1),
                "name": ACTIVITY_NAMES[span.activity],
                "cat": "scheduler",
                "args": _args(history, row, span),
            }


def _args(history: History, row: Row, span: Span) -> dict[str, Any]:
    args: dict[str, Any] = {
        "request": row.request_id,
        "prompt tokens": row.prompt_len,
        "iterations": f"{history.numbers[span.start]} to {history.numbers[span.end - 1]}",
    }
    if span.num_tokens:
        args["tokens"] = span.num_tokens
    if span.first_reason:
        args["reason"] = span.first_reason
    if span.last_reason != span.first_reason:
        args["reason at the end"] = span.last_reason
    return args


def _end_us(history: History, span: Span) -> int:
    """Until the next iteration begins, or the last step has ended."""
    if span.end < history.num_iterations:
        return history.start_us[span.end]
    return history.start_us[span.end - 1] + history.step_us[span.end - 1]


def _counters(history: History) -> Iterator[dict[str, Any]]:
    for index in range(history.num_iterations):
        context, generation = history.num_context[index], history.num_generation[index]
        values = {
            "batch": {"context": context, "generation": generation},
            "tokens": {"context": history.num_context_tokens[index], "generation": generation},
            "free blocks": {"free": history.num_free_blocks[index]},
        }
        for name, args in values.items():
            yield {
                "ph": "C",
                "pid": _COUNTERS,
                "ts": history.start_us[index],
                "name": name,
                "args": args,
            }
