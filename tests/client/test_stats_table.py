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
    "Max KV cache blocks": 2448,
    "Max Request Count": 256,
    "Runtime GPU Memory Usage": 3 * 2**20,
    "Timestamp": "12-13-2023 14:55:14",
    "Used KV cache blocks": 1224,
}


def render(stats: dict[str, Any], width: int = 120) -> str:
    output = StringIO()
    Console(width=width, file=output).print(stats_table(stats, "a test"))
    return output.getvalue()


def test_values_stand_beside_their_words() -> None:
    text = render(STATS)

    assert "249 active  256 at most" in text
    assert "8 in context phase  231 generating" in text
    assert "1224 used  1224 free  2448 in all" in text
    assert "3.0 MiB GPU" in text
    assert "############### 50%" in text.replace(".", "")
    assert "90  12-13-2023 14:55:14" in text


def test_keys_of_a_newer_server_are_shown() -> None:
    assert "Reused KV cache blocks" in render({**STATS, "Reused KV cache blocks": 17})


def test_fractions_are_rounded() -> None:
    text = render({**STATS, "KV cache hit rate": 2 / 3, "Acceptance Length": 7 / 3})
    assert "0.667 " in text
    assert "2.33 " in text


def test_nothing_is_cut_off_on_80_columns() -> None:
    stats = {**STATS, "Scheduled Requests": 239, "Waiting Requests": 7, "Paused Requests": 3}
    text = render({**stats, "KV cache transfer time": 0}, width=80)
    assert "256 at most  239 scheduled" in text
    assert "7 waiting  3 paused" in text
    assert {len(line) for line in text.splitlines()[1:]} == {80}


def test_before_the_first_iteration() -> None:
    assert "none so far" in render({})
