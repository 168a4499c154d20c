"""`inflight demo`: a server, four counts side by side, one of them stopped, statistics, good-bye.

The demo model continues a count, so the demo can check what it shows: a number missing, doubled or
out of order in any stream is a bug, and the exit code says so.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import psutil
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from inflight_client.aio import AsyncInflightClient
from inflight_client.client import InflightClient
from inflight_client.errors import InflightError, RequestTimeout, ServerUnreachable
from inflight_client.stats_table import stats_table

_PROMPTS = ("1 2 3", "10 11 12", "42 43 44", "100 101 102")
_STOPPED = 1
_STOP_AFTER_NUMBERS = 25
_MAX_TOKENS = 400
_PANEL_LINES = 12
_REFRESH_PER_SECOND = 12

_HOST = "127.0.0.1"
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.1

_NEXT = """\
What to type next:
  inflight serve                                  keep a server running (the demo model)
  inflight serve --model smollm2-135m             serve a small one that speaks English
  inflight serve --model FOLDER                   serve a checkpoint, or ORG/NAME on the Hub
  inflight generate "1 2 3" --max-tokens 40       talk to it from another terminal
  inflight stats --follow                         watch it work"""


@dataclass(slots=True)
class Count:
    """One stream of the demo: what it was asked and what it has said so far."""

    prompt: str
    request_id: str
    text: str = ""
    is_ended: bool = False
    is_stopped: bool = False

    @property
    def num_numbers(self) -> int:
        """Numbers received, the last one perhaps unfinished."""
        return len(self.text.split())

    def gap(self) -> str:
        """Where the count goes wrong, in words; empty if nowhere.

        The answer may be cut anywhere, so the last number need only begin right.
        """
        words = (self.prompt + self.text).split()
        start = int(words[0])
        for index, word in enumerate(words):
            expected = str(start + index)
            is_last = index == len(words) - 1
            if word != expected and not (is_last and expected.startswith(word)):
                return f'the count "{self.prompt}" says {word} where {expected} comes next'
        return ""


@dataclass(slots=True)
class Demo:
    """The streams of the demo and the last statistics seen while they ran."""

    counts: list[Count]
    busiest: dict[str, Any] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """What did not go as it must; empty if all did."""
        found = [gap for count in self.counts if (gap := count.gap())]
        if not self.busiest:
            found.append("no statistics arrived")
        stopped = self.counts[_STOPPED]
        others = [count for count in self.counts if count is not stopped]
        found += [f'the count "{count.prompt}" is empty' for count in others if not count.text]
        if stopped.num_numbers >= min(count.num_numbers for count in others):
            found.append(f'the count "{stopped.prompt}" was stopped but did not end early')
        return found


def run_demo() -> int:
    """Run the demo on the terminal; 0 if all went well, else 1."""
    console = Console()
    demo = Demo([Count(prompt, f"demo-{index}") for index, prompt in enumerate(_PROMPTS)])
    console.print("Starting tritonserver with the demo model ...")
    with _server() as url:
        console.print(f"Ready: gRPC at {url}. Four prompts at once:\n", highlight=False)
        started = time.monotonic()
        asyncio.run(_stream_all(demo, url, console))
        _report(demo, time.monotonic() - started, console)
        console.print("\nShutting the server down ...")
    if problems := demo.problems():
        for problem in problems:
            console.print(f"PROBLEM: {problem}", style="red", markup=False, highlight=False)
        return 1
    console.print("No gap in any count; the server left nothing behind.\n")
    console.print(_NEXT, markup=False, highlight=False, soft_wrap=True)
    return 0


async def _stream_all(demo: Demo, url: str, console: Console) -> None:
    """Run every stream and the stop; returns when all streams have ended."""
    async with AsyncInflightClient(url) as client:
        watcher = asyncio.create_task(_watch_stats(client, demo))
        try:
            # On a terminal the columns grow; otherwise one line per stream says how it ended.
            if console.is_terminal:
                with Live(
                    get_renderable=lambda: _columns(demo, console),
                    console=console,
                    refresh_per_second=_REFRESH_PER_SECOND,
                ):
                    await _count_all(client, demo, _ignore)
            else:
                await _count_all(client, demo, lambda count: _print_line(count, console))
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)


async def _count_all(
    client: AsyncInflightClient, demo: Demo, on_end: Callable[[Count], None]
) -> None:
    async def follow(count: Count, stop_after: int | None) -> None:
        stream = client.stream(count.prompt, _MAX_TOKENS, request_id=count.request_id)
        async for chunk in stream:
            count.text += chunk.text
            if stop_after is not None and count.num_numbers >= stop_after and not count.is_stopped:
                count.is_stopped = True
                await client.stop(count.request_id)
        count.is_ended = True
        on_end(count)

    await asyncio.gather(
        *(
            follow(count, _STOP_AFTER_NUMBERS if index == _STOPPED else None)
            for index, count in enumerate(demo.counts)
        )
    )


async def _watch_stats(client: AsyncInflightClient, demo: Demo) -> None:
    """Keep the statistics of the busiest iteration, the latest of equals."""
    async for stats in client.stats():
        if stats.get("Active Request Count", 0) >= demo.busiest.get("Active Request Count", 0):
            demo.busiest = stats


def _ignore(count: Count) -> None:
    """On a terminal the columns show the end themselves."""


def _columns(demo: Demo, console: Console) -> RenderableType:
    grid = Table.grid(expand=True)
    width = console.width // len(demo.counts) - 4
    for _ in demo.counts:
        grid.add_column(ratio=1)
    grid.add_row(*(_panel(count, width) for count in demo.counts))
    return grid


def _panel(count: Count, width: int) -> Panel:
    lines: list[str] = [""]
    for word in (count.prompt + count.text).split():
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append("")
        lines[-1] += f"{word} "
    state = "stopped" if count.is_stopped else "done" if count.is_ended else "counting"
    style = {"stopped": "yellow", "done": "green", "counting": "cyan"}[state]
    body = Text("\n".join(lines[-_PANEL_LINES:]))
    return Panel(
        body, title=count.prompt, subtitle=state, border_style=style, height=_PANEL_LINES + 2
    )


def _print_line(count: Count, console: Console) -> None:
    words = count.text.split()
    end = f"... {' '.join(words[-3:])}"
    state = "stopped by a stop signal" if count.is_stopped else "done"
    console.print(
        f"  {count.prompt:>12} -> {' '.join(words[:6])} {end}  ({len(words)} numbers, {state})",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _report(demo: Demo, seconds: float, console: Console) -> None:
    total = sum(count.num_numbers for count in demo.counts)
    stopped = demo.counts[_STOPPED]
    console.print(
        f"\n{total} numbers in {seconds:.1f} s. "
        f'The count "{stopped.prompt}" was ended by a stop signal after {stopped.num_numbers}.\n',
        highlight=False,
    )
    console.print(stats_table(demo.busiest, "the busiest iteration"))


@contextmanager
def _server() -> Iterator[str]:
    """The gRPC address of ``inflight serve`` in a subprocess on free ports; `InflightError` unless
    it starts, ends well and leaves no process behind.

    It runs in its own session, so that Ctrl-C on the terminal reaches the demo alone, which then
    shuts the server down in order.
    """
    ports = dict(zip(("http", "grpc", "metrics"), _free_ports(3), strict=True))
    options = [f"--{name}-port={port}" for name, port in {**ports, "openai": 0}.items()]
    command = [sys.executable, "-m", "inflight_client.cli", "serve", f"--host={_HOST}", *options]
    with tempfile.TemporaryFile() as log:
        process = psutil.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        url = f"{_HOST}:{ports['grpc']}"
        try:
            _wait_until_ready(process, url, log)
            yield url
        finally:
            code, left = _stop(process)
        if code != 0:
            raise InflightError(f"the server ended with exit code {code}:\n{_text_of(log)}")
        if left:
            raise InflightError(f"the server left processes behind: {', '.join(map(str, left))}")


def _wait_until_ready(process: psutil.Popen, url: str, log: IO[bytes]) -> None:
    """Return when the model takes requests; `InflightError` with the server's words if not."""
    deadline = time.monotonic() + _START_SECONDS
    with InflightClient(url) as client:
        while not _is_ready(client):
            if process.poll() is not None:
                raise InflightError(f"the server did not start:\n{_text_of(log)}")
            if time.monotonic() > deadline:
                raise InflightError(
                    f"the server was not ready after {_START_SECONDS:g} s:\n{_text_of(log)}"
                )
            time.sleep(_POLL_SECONDS)


def _is_ready(client: InflightClient) -> bool:
    try:
        return client.health()
    except (ServerUnreachable, RequestTimeout):
        return False


def _stop(process: psutil.Popen) -> tuple[int, list[int]]:
    """Shut the server down as Ctrl-C would; its exit code, and processes that it left behind."""
    family: list[psutil.Process] = []
    if process.poll() is None:
        family = process.children(recursive=True)
        process.send_signal(signal.SIGINT)
    try:
        code = process.wait(_STOP_SECONDS)
    except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
        process.kill()
        code = process.wait()
    _, left = psutil.wait_procs(family, timeout=_POLL_SECONDS)
    return code, [each.pid for each in left]


def _text_of(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace").strip()


def _free_ports(count: int) -> list[int]:
    """Free ports; all are held until all are found, so they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_HOST, 0))
        return [each.getsockname()[1] for each in sockets]
