"""The table of statistics."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from inflight_client.stats_table import stats_table

STATS: dict[str, Any] = {
    "Active Request Count": 249,
    "Context Requests": 8,
    "Fraction used KV cache blocks": 0.5,
    "Free KV cache blocks": 1224,
    "Generation Requests": 231,
    "Iteration Counter": 90,
    "KV cache hit rate": 2 / 3,
    "Max KV cache blocks": 2448,
    "Max Request Count": 256,
    "Paused Requests": 3,
    "Reused KV cache blocks": 17,
    "Runtime GPU Memory Usage": 3 * 2**20,
    "Scheduled Requests": 239,
    "Timestamp": "12-13-2023 14:55:14",
    "Used KV cache blocks": 1224,
    "Waiting Requests": 7,
}


def render(stats: dict[str, Any]) -> str:
    output = StringIO()
    Console(width=80, file=output).print(stats_table(stats, "a test"))
    return output.getvalue()


def test_values_stand_beside_their_words_on_80_columns() -> None:
    """Fractions are rounded, and keys that only a newer server has are shown."""
    text = render(STATS)
    for words in (
        "249 active  256 at most  239 scheduled",
        "7 waiting  3 paused",
        "8 in context phase  231 generating",
        "1224 used  1224 free  2448 in all",
        "3.0 MiB GPU",
        "############### 50%",
        "90  12-13-2023 14:55:14",
        "KV cache hit rate",
        "0.667 ",
        "Reused KV cache blocks",
    ):
        assert words in text.replace("...............", "")
    assert {len(line) for line in text.splitlines()[1:]} == {80}


def test_before_the_first_iteration() -> None:
    assert "none so far" in render({})
