"""Fill the tables of docs/performance.md from benchmarks/results/*.json.

Above each table a comment of the page says which report it shows and how: the name of the report,
the titles of the columns, and the row as a template of `str.format`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from page import ROOT, table, write

Result = dict[str, Any]

_TABLE = re.compile(
    r"(<!-- (\w+)( \w+)?\n\| (.*) \|\n\| (.*) \|\n-->\n\n)(?:\|.*\n)*(?:\n`python.*\n)?\n*"
)


def render(old: str) -> str:
    """The page with all tables filled from the reports."""
    return _TABLE.sub(_filled, old).rstrip("\n") + "\n"


def _filled(found: re.Match[str]) -> str:
    comment, name, part, head, row = found.groups()
    report = ROOT / "benchmarks" / "results" / f"{name}.json"
    result = json.loads(report.read_text(encoding="utf-8"))
    rows = list(ROWS[name](result) if name in ROWS else result["rows"])
    if part:
        rows = [row for row in rows if row["part"] == part.strip()]
    cells = [row.format_map(values).split(" | ") for values in rows]
    filled = table(head.split(" | "), cells, is_numeric=True)
    return f"{comment}{filled}\n{_origin(name, result)}\n"


def _origin(name: str, result: Result) -> str:
    versions = "".join(f", {package} {version}" for package, version in result["versions"].items())
    return (
        f"`{result['command']}`, {result['date']}, commit {result['commit']}, "
        f"{result['processor']}, {result['cores']} cores{versions}. "
        f"Raw: [{name}.json](../benchmarks/results/{name}.json).\n"
    )


def _cpu_engine(result: Result) -> Iterator[Result]:
    names = dict.fromkeys(name for row in result["rows"] for name in row["tokens_per_second"])
    for row in result["rows"]:
        speeds = row["tokens_per_second"]
        ours, cells = speeds["inflight"], dict.fromkeys(map(_field, names), "")
        for name, speed in speeds.items():
            over = "" if name == "inflight" else f" ({ours / speed:.2f}x)"
            cells[_field(name)] = f"{speed:.0f}{over}"
        yield {**row, **cells, "part": "speeds"}
    for row in result.get("floors", ()):
        yield {**row, "weight_mb": row["weight_bytes"] / 1e6, "part": "floors"}


def _quantized(result: Result) -> Iterator[Result]:
    for row in result["rows"]:
        num_bytes = row["weight_bytes"]
        speeds = {f"tokens_{count}": speed for count, speed in row["tokens_per_second"].items()}
        yield {**row, **speeds, "megabytes": f"{num_bytes / 1e6:.0f}" if num_bytes else ""}


def _memory(result: Result) -> Iterator[Result]:
    for row in result["rows"]:
        ratios = row["of_bfloat16"]
        yield {
            **row,
            "parameters": row["weight_bytes"] / 2**20,
            "process": row["process_bytes"] / 2**20,
            "of_parameters": ratios["weight_bytes"],
            "of_process": ratios["process_bytes"],
        }


def _field(name: str) -> str:
    return name.replace(" ", "_").replace(".", "_")


def _scheduler(result: Result) -> Iterator[Result]:
    cases: dict[tuple[Any, ...], Result] = {}
    for row in result["rows"]:
        part = "whole" if row["pool"] == 1.0 else "short"
        found = cases.setdefault((part, row["policy"], row["active"]), {**row, "part": part})
        found["goal"] = f"{row['target_us'] / 1000:.1f}" if row["target_us"] else ""
        share = "total_us_p50" if part == "whole" else "total_us_p99"
        found[row["design"] + "_reuse" * row["reuse"]] = row[share] / 1000
    yield from cases.values()


def _idle(result: Result) -> Iterator[Result]:
    for name, server in zip(
        ("inflight", "the version before"), result["servers"].values(), strict=False
    ):
        parts = server["processes"]
        yield {
            **server,
            "server": name,
            "shares": ", ".join(f"{each} {parts[each]['cpu_percent']:.2f} %" for each in parts),
            "wakeups": ", ".join(f"{part['wakeups_per_second']:.0f}" for part in parts.values()),
        }


ROWS: dict[str, Callable[[Result], Iterable[Result]]] = {
    "cpu_engine_experts": _cpu_engine,
    "cpu_engine_peers": _cpu_engine,
    "cpu_engine_peers_long": _cpu_engine,
    "quantized": _quantized,
    "memory": _memory,
    "scheduler": _scheduler,
    "idle": _idle,
}
"""Report -> the rows of its tables, where those are not the list ``rows`` of the report."""


if __name__ == "__main__":
    write(__doc__, "performance.md", render)
