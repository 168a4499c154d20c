"""`inflight top`: the numbers of now, and a row for each request, in a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

WINDOW_SECONDS = 10.0
_BAR = 24
_STYLES = {
    "encoder": "magenta",
    "context": "blue",
    "generation": "green",
    "paused": "yellow",
    "waiting": "dim",
}


class Board:
    """What live answers have told lately."""

    def __init__(self) -> None:
        self._answer: Mapping[str, Any] = {}
        self._settings: Mapping[str, Any] = {}
        self._about: dict[int, Mapping[str, Any]] = {}
        self._tokens: deque[tuple[float, int]] = deque()
        self._firsts: deque[tuple[float, float]] = deque()
        self._gaps: deque[tuple[float, float, int]] = deque()

    def take(self, answer: Mapping[str, Any]) -> None:
        """The next answer to the question ``live``."""
        now = time.monotonic()
        if answer["is_new"]:
            self._settings = answer["settings"]
            self._about.clear()
        else:  # what came before anybody looked has no time
            self._tokens.append((now, len(answer["first"]) + sum(n for _, n in answer["gaps"])))
            self._firsts.extend((now, value) for value in answer["first"])
            self._gaps.extend((now, value, number) for value, number in answer["gaps"])
        self._about |= {int(number): about for number, about in answer["about"].items()}
        there = {row[0] for row in answer["requests"]}
        self._about = {number: about for number, about in self._about.items() if number in there}
        for known in (self._tokens, self._firsts, self._gaps):
            while known and known[0][0] < now - WINDOW_SECONDS:
                known.popleft()
        self._answer = answer

    def render(self, height: int) -> Group:
        """Numbers above, then as many requests as ``height`` lines have room for."""
        if not self._answer:
            return Group(Text("waiting for the server"))
        rows = self._answer["requests"]
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
        for name in ("id", "state", "prompt", "tokens", "blocks", "progress", "why"):
            is_number = name in ("prompt", "tokens", "blocks")
            table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
        shown = max(height - 9, 1)
        for number, state, generated, computed, blocks, _, _, reason in rows[:shown]:
            about = self._about.get(number, {})
            prompt, most = about.get("prompt_tokens", 0), about.get("max_new_tokens", 0)
            done, whole = (computed, prompt) if state == "context" else (generated, most)
            table.add_row(
                _plain(about.get("name") or str(number)),
                Text(state, style=_STYLES.get(state, "")),
                str(prompt),
                f"{generated}/{most}",
                str(blocks),
                Text("█" * round(_BAR * min(done / (whole or 1), 1)), style=_STYLES.get(state, "")),
                _plain(reason),
            )
        parts: list[Any] = [self._numbers(), table]
        if len(rows) > shown:
            parts.append(Text(f"and {len(rows) - shown} more", style="dim"))
        if self._answer["num_queued"]:
            reason = self._answer["queued"][0][5] if self._answer["queued"] else ""
            parts.append(_plain(f"{self._answer['num_queued']} in the queue: {reason}"))
        return Group(*parts)

    def _numbers(self) -> Table:
        stats = self._answer["stats"]
        states = [row[1] for row in self._answer["requests"]]
        waiting = states.count("waiting") + self._answer["num_queued"]
        running = len(states) - states.count("waiting") - states.count("paused")
        seconds = max(time.monotonic() - self._tokens[0][0], 1.0) if self._tokens else 1.0
        rate = sum(number for _, number in list(self._tokens)[1:]) / seconds
        grid = Table(box=box.ROUNDED, show_header=False, expand=True)
        firsts = [(value, 1) for _, value in self._firsts]
        gaps = [(value, number) for _, value, number in self._gaps]
        cells = (
            f"tokens/s  {rate:,.0f}",
            f"TTFT  {_pair(firsts)}",
            f"gap  {_pair(gaps)}",
            f"running {running}  waiting {waiting}  paused {states.count('paused')}",
            f"KV cache  {stats['Fraction used KV cache blocks']:.0%} of "
            f"{stats['Max KV cache blocks']} blocks",
            f"cache hits  {stats['KV cache hit rate']:.0%}",
        )
        grid.add_row(*cells[:3])
        grid.add_row(*cells[3:])
        return grid


def _plain(text: str) -> Text:
    """Text of others, such as the ids that clients choose: no markup, and nothing that a terminal
    would obey."""
    return Text(
        "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
    )


def _pair(values: list[tuple[float, int]]) -> str:
    """Median and 99th percentile of values with weights."""
    if not values:
        return "-"
    ordered, total = sorted(values), sum(number for _, number in values)
    found = []
    for share in (0.5, 0.99):
        counted = 0
        for value, number in ordered:
            counted += number
            if counted >= share * total:
                found.append(f"{value * 1e3:,.1f}")
                break
    return f"{found[0]} ms, 99 % {found[-1]} ms"
