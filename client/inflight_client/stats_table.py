"""The statistics of one iteration as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

_BAR_WIDTH = 30
_VALUES_WIDTH = 51  # with the longest heading and the frame, 80 columns; steady when followed

# Heading -> (key of the statistics, its place among words). Keys: TensorRT-LLM's batch manager.
_GROUPS: dict[str, tuple[tuple[str, str], ...]] = {
    "iteration": (("Iteration Counter", "{}"), ("Timestamp", "{}"), ("MicroBatch ID", "batch {}")),
    "requests": (
        ("Active Request Count", "{} active"),
        ("Max Request Count", "{} at most"),
        ("Scheduled Requests", "{} scheduled"),
    ),
    "held up": (
        ("Waiting Requests", "{} waiting"),
        ("Paused Requests", "{} paused"),
    ),
    "in this step": (
        ("Context Requests", "{} in context phase"),
        ("Generation Requests", "{} generating"),
        ("Total Context Tokens", "{} context tokens"),
    ),
    "KV cache blocks": (
        ("Used KV cache blocks", "{} used"),
        ("Free KV cache blocks", "{} free"),
        ("Max KV cache blocks", "{} in all"),
        ("Tokens per KV cache block", "{} tokens each"),
    ),
    "memory": (
        ("Runtime CPU Memory Usage", "{} CPU"),
        ("Runtime GPU Memory Usage", "{} GPU"),
        ("Runtime Pinned Memory Usage", "{} pinned"),
    ),
}
_FRACTION = "Fraction used KV cache blocks"
_KNOWN = {key for group in _GROUPS.values() for key, _ in group} | {_FRACTION}


def stats_table(stats: Mapping[str, Any], source: str) -> Table:
    """One row per subject; keys this client does not know come last, so nothing is hidden."""
    table = Table(title=f"statistics of {source}", box=box.ROUNDED, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(min_width=_VALUES_WIDTH)
    if not stats:
        table.add_row("iteration", "none so far")
    for heading, group in _GROUPS.items():
        words = [form.format(_format(key, stats[key])) for key, form in group if key in stats]
        if words:
            table.add_row(heading, "  ".join(words))
    fraction = stats.get(_FRACTION)
    if isinstance(fraction, float):
        table.add_row("KV cache in use", _bar(fraction))
    for key in sorted(stats.keys() - _KNOWN):
        table.add_row(key, _format(key, stats[key]))
    return table


def _bar(fraction: float) -> str:
    filled = round(min(max(fraction, 0.0), 1.0) * _BAR_WIDTH)
    return f"{'#' * filled}{'.' * (_BAR_WIDTH - filled)} {fraction:.0%}"


def _format(key: str, value: Any) -> str:
    if key.endswith("Memory Usage") and isinstance(value, int):
        return f"{value / 2**20:.1f} MiB"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)
