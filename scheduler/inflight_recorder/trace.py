"""The timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

The JSON trace event format: one slice per span on the lane of its request, and counters. A lane is
used again once its request has ended, so there are as many as requests were in flight at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from inflight_recorder.history import ACTIVITY_NAMES, History, Row, Span, assign_lanes
from inflight_recorder.palette import title

_REQUESTS, _COUNTERS = 1, 2


def write_trace(history: History) -> Iterator[str]:
    """The JSON, piece by piece."""
    yield '{"displayTimeUnit":"ms","traceEvents":['
    yield _event(_process_name(_REQUESTS, title(history)))
    yield ",\n" + _event(_process_name(_COUNTERS, "batch and blocks"))
    for event in _slices(history):
        yield ",\n" + _event(event)
    for event in _counters(history):
        yield ",\n" + _event(event)
    yield "]}\n"


def _process_name(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": 0, "ts": 0, "name": "process_name",
            "args": {"name": name}}  # fmt: skip


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
                "dur": max(history.end_us(span.end - 1) - start, 1),
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


def _counters(history: History) -> Iterator[dict[str, Any]]:
    for index in range(history.num_iterations):
        context, generation = history.num_context[index], history.num_generation[index]
        tokens = history.num_context_tokens[index], history.num_generation_tokens[index]
        free = history.num_free_blocks[index]
        yield from _count(history.start_us[index], context, generation, tokens, free)
        if history.is_last_busy[index]:  # else the last values would stand while nothing happens
            yield from _count(history.end_us(index), 0, 0, (0, 0), history.settings.num_blocks)


def _count(
    time_us: int, context: int, generation: int, num_tokens: tuple[int, int], num_free: int
) -> Iterator[dict[str, Any]]:
    values = {
        "batch": {"context": context, "generation": generation},
        "tokens": {"context": num_tokens[0], "generation": num_tokens[1]},
        "free blocks": {"free": num_free},
    }
    for name, args in values.items():
        yield {"ph": "C", "pid": _COUNTERS, "tid": 0, "ts": time_us, "name": name, "args": args}
