"""What the live page costs: tokens per second of many streams while pages look on, and while none
does.

    python benchmarks/live_page.py [--streams 256] [--viewers 1 4]

The demo model behind `inflight serve` with its front; each viewer reads the page's stream of
events, as a browser does, and draws nothing. Rounds without and with viewers are interleaved, and
all share one machine, so the viewers' own work counts too.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from load import run_streams
from report import describe_run, write_result
from servers import HOST, free_ports, start_serve

PROMPT_IDS = list(range(3, 67))


async def view(url: str, sizes: list[int]) -> None:
    """Read events until cancelled; the size of each."""
    async with (
        httpx.AsyncClient(timeout=None, trust_env=False) as client,
        client.stream("GET", f"{url}/page/events") as answer,
    ):
        async for line in answer.aiter_lines():
            if line:
                sizes.append(len(line))


async def one_round(
    http_port: int, url: str, num_viewers: int, num_streams: int, num_tokens: int, sizes: list[int]
) -> float:
    """Tokens per second."""
    viewers = [asyncio.create_task(view(url, sizes)) for _ in range(num_viewers)]
    await asyncio.sleep(0.5)  # the first answer tells the whole history
    values = {
        "input_ids": PROMPT_IDS,
        "input_lengths": len(PROMPT_IDS),
        "request_output_len": num_tokens,
        "streaming": True,
    }
    try:
        found = await run_streams(http_port, num_streams, values)
    finally:
        for viewer in viewers:
            viewer.cancel()
            with suppress(asyncio.CancelledError):
                await viewer
    return found.figures()["tokens_per_second"]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of viewers."""
    [port] = free_ports(1)
    rates: dict[int, list[float]] = {number: [] for number in (0, *args.viewers)}
    sizes: list[int] = []
    settings = {"max_batch_size": args.streams, "max_tokens_in_paged_kv_cache": 131_072}
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        server = start_serve(Path(folder), settings=settings, options=(f"--openai-port={port}",))
        try:
            server.wait_until_printed("inflight is ready")
            for number in range(args.rounds + 1):
                for viewers, found in rates.items():
                    rate = asyncio.run(
                        one_round(
                            server.http_port,
                            f"http://{HOST}:{port}",
                            viewers,
                            args.streams,
                            args.tokens,
                            sizes,
                        )
                    )
                    if number:  # the first round warms up
                        found.append(rate)
        finally:
            server.stop()
    alone = statistics.median(rates[0])
    return [
        {
            "viewers": viewers,
            "tokens_per_second": statistics.median(found),
            "share": statistics.median(found) / alone,
            "rounds": found,
            "bytes_per_event": statistics.median(sizes) if viewers else 0,
        }
        for viewers, found in rates.items()
    ]


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Demo model: tokens per second while pages look on")
    for column in ("viewers", "tok/s", "of none", "bytes / event"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["viewers"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['share']:.3f}",
            f"{row['bytes_per_event']:,.0f}",
        )
    return table


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of each stream")
    parser.add_argument("--viewers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = measure(args)
    result = describe_run("torch", "numpy", "nvidia-pytriton", "starlette", "uvicorn")
    result |= {"streams": args.streams, "tokens_per_stream": args.tokens, "rows": rows}
    Console().print(_table(rows))
    print("written to", write_result("live_page", result, args.output).name)


if __name__ == "__main__":
    main()
