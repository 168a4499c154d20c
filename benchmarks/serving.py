"""The cost of serving: a model through the real server, and the same engine without it.

For each number of streams: tokens per second, time to the first token, gaps between responses
(p50, p99), tokens per response, and the ratio to the engine alone (no Triton, the callbacks of
`GptManager` only); through Triton's HTTP, its gRPC, and OpenAI's API, with the processor time of
the front, as cores at 5,000 tokens per second. Rounds are interleaved. The client (`load.py`)
shares the cores with the server.

    python benchmarks/serving.py --streams 1 8 64 256 --tokens 256 --rounds 3
    python benchmarks/serving.py --model smollm2-135m --streams 64 256 --tokens 32 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from inflight_backend import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    NamedTensor,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from inflight_client.terminal.load import Round, Trace
from inflight_server.checkpoints import smollm2
from inflight_server.serve.settings import DEMO_MODEL
from load import run_completions, run_grpc_streams, run_streams
from report import describe_run, write_result
from servers import free_ports, start_serve

ROOT = Path(__file__).resolve().parents[1]
POOL_TOKENS = 131_072
PROMPT = "1 2 3 4"
PROMPT_IDS = (1, 2, 3, 4)
"""Of another model than that of the demo."""
MODEL_NAME = "model"
FRONT_RATE = 5000
"""Tokens per second for which the cores of the front are told."""


class EngineAlone:
    """`GptManager` with four callbacks and nothing else."""

    def __init__(self, model: Path, prompt_ids: Sequence[int], max_batch_size: int) -> None:
        self._prompt_ids = prompt_ids
        self._waiting: list[InferenceRequest] = []
        self._traces: dict[int, Trace] = {}
        self._next_id = 1
        self._started = 0.0
        self._num_running = 0
        self._manager = GptManager(
            model,
            TrtGptModelType.InflightFusedBatching,
            1,
            CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            self._get,
            self._send,
            optional_params=TrtGptModelOptionalParams(
                KvCacheConfig(max_tokens=POOL_TOKENS), max_batch_size=max_batch_size
            ),
        )

    def run(self, num_streams: int, num_tokens: int) -> Round:
        """All streams at once, to their end."""
        ids = range(self._next_id, self._next_id + num_streams)
        self._next_id += num_streams
        self._traces = {i: Trace() for i in ids}
        self._num_running = num_streams
        self._started = time.perf_counter()
        self._waiting = [
            InferenceRequest.from_tokens(i, self._prompt_ids, num_tokens, is_streaming=True)
            for i in ids
        ]
        self._manager.wake()
        while self._num_running:
            time.sleep(0.001)
        return Round(num_streams, self._last - self._started, list(self._traces.values()))

    def close(self) -> None:
        """End the worker thread."""
        self._manager.shutdown()

    def _get(self, room: int) -> list[InferenceRequest]:
        new, self._waiting = self._waiting[: max(room, 0)], self._waiting[max(room, 0) :]
        return new

    def _send(
        self, request_id: int, tensors: Sequence[NamedTensor], is_final: bool, error: str
    ) -> None:
        assert not error, error
        self._last = time.perf_counter()
        trace = self._traces[request_id]
        trace.times.append(self._last - self._started)
        trace.counts.append(tensors[0].tensor.size)
        if is_final:
            self._num_running -= 1


class Served:
    """The same through `inflight serve`."""

    def __init__(
        self, model: Path, prompt_ids: Sequence[int], max_batch_size: int, scratch: Path
    ) -> None:
        self._prompt_ids = list(prompt_ids)
        settings = {"max_batch_size": max_batch_size, "max_tokens_in_paged_kv_cache": POOL_TOKENS}
        [self._openai_port] = free_ports(1)
        options = [f"--openai-port={self._openai_port}", f"--served-model-name={MODEL_NAME}"]
        self._server = start_serve(scratch, model=model, settings=settings, options=options)
        self._server.wait_until_printed("inflight is ready")
        processes = psutil.Process(self._server.process.pid).children()
        [self._front] = [each for each in processes if "openai" in each.cmdline()]

    def run(self, num_streams: int, num_tokens: int) -> Round:
        """All streams at once, each on its own connection."""
        return asyncio.run(
            run_streams(self._server.http_port, num_streams, self._values(num_tokens))
        )

    def run_grpc(self, num_streams: int, num_tokens: int) -> Round:
        """The same over gRPC."""
        return asyncio.run(
            run_grpc_streams(self._server.grpc_port, num_streams, self._values(num_tokens))
        )

    def _values(self, num_tokens: int) -> dict[str, Any]:
        return {
            "input_ids": self._prompt_ids,
            "input_lengths": len(self._prompt_ids),
            "request_output_len": num_tokens,
            "streaming": True,
        }

    def run_openai(self, num_streams: int, num_tokens: int) -> tuple[Round, float]:
        """The same through OpenAI's API; with the seconds of processor time of the front."""
        values = {
            "model": MODEL_NAME,
            "prompt": self._prompt_ids,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,  # as the others, which name none: to draw takes the engine longer
        }
        before = self._front.cpu_times()
        done = asyncio.run(run_completions(self._openai_port, num_streams, values))
        after = self._front.cpu_times()
        return done, after.user + after.system - before.user - before.system

    def close(self) -> None:
        """Stop the server."""
        self._server.stop()


def _median(rounds: Sequence[Round]) -> dict[str, float]:
    figures = [r.figures() for r in rounds]
    return {key: statistics.median(f[key] for f in figures) for key in figures[0]}


def _table(rows: Sequence[dict[str, Any]], way: str, prefix: str, title: str) -> Table:
    """``way``: the key of its figures; its ratio has the same ``prefix``."""
    table = Table(title=title)
    columns = (
        "streams",
        "engine tok/s",
        "served tok/s",
        "served / engine",
        "first token p50 ms",
        "gap p50 ms",
        "gap p99 ms",
        "tokens / response",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        engine, served = row["engine"], row[way]
        table.add_row(
            str(row["streams"]),
            f"{engine['tokens_per_second']:,.0f}",
            f"{served['tokens_per_second']:,.0f}",
            f"{row[f'{prefix}ratio']:.2f}",
            f"{served['first_token_ms_p50']:.1f}",
            f"{served['gap_ms_p50']:.1f}",
            f"{served['gap_ms_p99']:.1f}",
            f"{served['tokens_per_response']:.1f}",
        )
    return table


def _openai_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="The same through OpenAI's API")
    columns = ("streams", "tok/s", "/ engine", "first p50 ms", "gap p50 ms", "gap p99 ms")
    for column in (*columns, f"front: cores at {FRONT_RATE:,} tok/s"):
        table.add_column(column, justify="right")
    for row in rows:
        openai = row["openai"]
        table.add_row(
            str(row["streams"]),
            f"{openai['tokens_per_second']:,.0f}",
            f"{row['openai_ratio']:.2f}",
            f"{openai['first_token_ms_p50']:.1f}",
            f"{openai['gap_ms_p50']:.1f}",
            f"{openai['gap_ms_p99']:.1f}",
            f"{row['front_cores']:.2f}",
        )
    return table


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help=f"{smollm2.NAME}, or a checkpoint; default: of the demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    model, prompt_ids = _model(args.model)
    alone = EngineAlone(model, prompt_ids, max(args.streams))
    scratch = tempfile.TemporaryDirectory(prefix="serving-")
    served = Served(model, prompt_ids, max(args.streams), Path(scratch.name))
    rows = []
    try:
        for num_streams in args.streams:
            rounds = [
                (
                    alone.run(num_streams, args.tokens),
                    served.run(num_streams, args.tokens),
                    served.run_grpc(num_streams, args.tokens),
                    served.run_openai(num_streams, args.tokens),
                )
                for _ in range(args.rounds + 1)
            ][1:]  # the first round warms up
            engine = _median([r[0] for r in rounds])
            through = _median([r[1] for r in rounds])
            over_grpc = _median([r[2] for r in rounds])
            openai = _median([r[3][0] for r in rounds])
            seconds = statistics.median(r[3][1] for r in rounds)
            speed = engine["tokens_per_second"]
            rows.append(
                {
                    "streams": num_streams,
                    "engine": engine,
                    "served": through,
                    "ratio": through["tokens_per_second"] / speed,
                    "grpc": over_grpc,
                    "grpc_ratio": over_grpc["tokens_per_second"] / speed,
                    "openai": openai,
                    "openai_ratio": openai["tokens_per_second"] / speed,
                    "front_cores": FRONT_RATE * seconds / (num_streams * args.tokens),
                }
            )
    finally:
        served.close()
        scratch.cleanup()
        alone.close()
    result = describe_run("torch", "numpy", "nvidia-pytriton", "tritonclient")
    result |= {"tokens_per_stream": args.tokens, "rounds": args.rounds, "rows": rows}
    start = f"{args.model or 'Demo model'}: engine alone, and served by Triton over"
    Console().print(
        _table(rows, "served", "", f"{start} HTTP"),
        _table(rows, "grpc", "grpc_", f"{start} gRPC"),
        _openai_table(rows),
    )
    name = "serving" if args.model is None else f"serving_{args.model.partition('-')[0]}"
    print("written to", write_result(name, result, args.output).name)


def _model(name: str | None) -> tuple[Path, Sequence[int]]:
    """Its checkpoint, and a prompt of four numbers."""
    if name is None:
        tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
        return DEMO_MODEL, tokenizer.encode(PROMPT).ids
    return smollm2.find_smollm2() if name == smollm2.NAME else Path(name), PROMPT_IDS


if __name__ == "__main__":
    main()
