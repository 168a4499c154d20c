"""The table of statistics."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from inflight_client.stats_table import stats_table
from inflight_client.terminal.top import Board

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


def test_a_board_shows_ids_and_reasons_as_text() -> None:
    """A client chooses the id of its request: neither markup nor what a terminal obeys."""
    board, output = Board(), StringIO()
    name = "[/x][red]\x1b[2J\x9b1m"
    board.take(
        {
            "is_new": True,
            "settings": {},
            "first": [],
            "gaps": [],
            "about": {"7": {"name": name, "prompt_tokens": 1, "max_new_tokens": 2}},
            "requests": [[7, "waiting", 0, 0, 0, 0, 1, f"behind {name}"]],
            "queued": [[8, name, 1, 2, 0, f"[/y] {name}"]],
            "num_queued": 1,
            "stats": STATS,
        }
    )
    Console(width=160, file=output).print(board.render(40))
    shown = "[/x][red]\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}1m"
    assert output.getvalue().count(shown) == 3
