"""The statistics of one iteration as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.progress_bar import ProgressBar
from rich.table import Table

_BAR_WIDTH = 24

# Heading -> (key of the statistics, words after its value). Keys: TensorRT-LLM's batch manager.
_GROUPS: dict[str, tuple[tuple[str, str], ...]] = {
    "iteration": (("Iteration Counter", ""), ("Timestamp", "")),
    "requests": (
        ("Active Request Count", "active"),
        ("Max Request Count", "at most"),
        ("Scheduled Requests", "scheduled"),
        ("Waiting Requests", "waiting"),
        ("Paused Requests", "paused"),
    ),
    "in this step": (
        ("Context Requests", "in context phase"),
        ("Generation Requests", "generating"),
        ("Total Context Tokens", "context tokens"),
        ("MicroBatch ID", "= micro-batch"),
    ),
    "KV cache blocks": (
        ("Used KV cache blocks", "used"),
        ("Free KV cache blocks", "free"),
        ("Max KV cache blocks", "in all"),
        ("Tokens per KV cache block", "tokens each"),
    ),
    "memory": (
        ("Runtime CPU Memory Usage", "CPU"),
        ("Runtime GPU Memory Usage", "GPU"),
        ("Runtime Pinned Memory Usage", "pinned"),
    ),
}
_FRACTION = "Fraction used KV cache blocks"
_KNOWN = {key for group in _GROUPS.values() for key, _ in group} | {_FRACTION}


def stats_table(stats: Mapping[str, Any], source: str) -> Table:
    """One row per subject; keys this client does not know come last, so nothing is hidden."""
    table = Table(title=f"statistics of {source}", box=box.ROUNDED, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(min_width=56)
    if not stats:
        table.add_row("iteration", "none so far")
    for heading, group in _GROUPS.items():
        words = [
            f"{_format(key, stats[key])} {word}".rstrip() for key, word in group if key in stats
        ]
        if words:
            table.add_row(heading, "  ".join(words))
    used, limit = stats.get("Used KV cache blocks"), stats.get("Max KV cache blocks")
    if isinstance(used, int) and isinstance(limit, int) and limit > 0:
        table.add_row("KV cache in use", ProgressBar(limit, used, width=_BAR_WIDTH))
    for key in sorted(stats.keys() - _KNOWN):
        table.add_row(key, str(stats[key]))
    return table


def _format(key: str, value: Any) -> str:
    if key.endswith("Memory Usage") and isinstance(value, int):
        return f"{value / 2**20:.1f} MiB"
    return str(value)
