"""The cost of serving: a model through the real server, and the same engine without it.

For each number of streams: tokens per second, time to the first token, gaps between responses
(p50, p99), tokens per response, and the ratio to the engine alone (no Triton, the callbacks of
`GptManager` only); through Triton's HTTP, its gRPC, and OpenAI's API, with the processor time of
the front, as cores at 5,000 tokens per second. Rounds are interleaved. The client (`load.py`)
shares the cores with the server.

Beside that the processor time per token of every process: on a machine that does other things, too,
that of tritonserver, front and client tells what serving costs, and the speeds tell little. With
``OMP_WAIT_POLICY=passive`` threads of the engine alone sleep while they wait, as they do on a
server.

    OMP_WAIT_POLICY=passive python benchmarks/serving.py --streams 1 8 64 256 --rounds 3
    OMP_WAIT_POLICY=passive python benchmarks/serving.py --model smollm2-135m --streams 64 256 \
        --tokens 64 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Coroutine, Sequence
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
from servers import MODEL, TRITONSERVER, free_ports, start_serve

ROOT = Path(__file__).resolve().parents[1]
POOL_TOKENS = 131_072
PROMPT = "1 2 3 4"
PROMPT_IDS = (1, 2, 3, 4)
"""Of another model than that of the demo."""
MODEL_NAME = "model"
FRONT_RATE = 5000
"""Tokens per second for which the cores of the front are told."""

Measured = tuple[Round, dict[str, float]]
"""A round, and the seconds of processor time of each process that had to do with it."""


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
            poll_when_idle=lambda: False,  # it takes nothing from a server that is measured
        )

    def run(self, num_streams: int, num_tokens: int) -> Measured:
        """All streams at once, to their end."""
        before = time.process_time()
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
        done = Round(num_streams, self._last - self._started, list(self._traces.values()))
        return done, {"engine": time.process_time() - before}

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
        children = psutil.Process(self._server.process.pid).children()
        [front] = [each for each in children if "openai" in each.cmdline()]
        self._processes = {
            "model": psutil.Process(self._server.pid_of(MODEL)),
            "tritonserver": psutil.Process(self._server.pid_of(TRITONSERVER)),
            "front": front,
            "client": psutil.Process(),
        }

    def run(self, num_streams: int, num_tokens: int) -> Measured:
        """All streams at once, each on its own connection."""
        values = self._values(num_tokens)
        return self._measure(run_streams(self._server.http_port, num_streams, values))

    def run_grpc(self, num_streams: int, num_tokens: int) -> Measured:
        """The same over gRPC."""
        values = self._values(num_tokens)
        return self._measure(run_grpc_streams(self._server.grpc_port, num_streams, values))

    def _measure(self, clients: Coroutine[Any, Any, Round]) -> Measured:
        before = {name: _seconds(each) for name, each in self._processes.items()}
        done = asyncio.run(clients)
        return done, {name: _seconds(self._processes[name]) - before[name] for name in before}

    def _values(self, num_tokens: int) -> dict[str, Any]:
        return {
            "input_ids": self._prompt_ids,
            "input_lengths": len(self._prompt_ids),
            "request_output_len": num_tokens,
            "streaming": True,
        }

    def run_openai(self, num_streams: int, num_tokens: int) -> Measured:
        """The same through OpenAI's API."""
        values = {
            "model": MODEL_NAME,
            "prompt": self._prompt_ids,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,  # as the others, which name none: to draw takes the engine longer
        }
        return self._measure(run_completions(self._openai_port, num_streams, values))

    def close(self) -> None:
        """Stop the server."""
        self._server.stop()


def _seconds(process: psutil.Process) -> float:
    """Of processor time, to the nanosecond: psutil's ticks of 10 ms are 5 us for each token of a
    round. This is what ``clock_getcpuclockid`` makes of a pid."""
    return time.clock_gettime((~process.pid << 3) | 2)


def _median(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in figures) for key in figures[0]}


def _row(
    num_streams: int, num_tokens: int, rounds: Sequence[dict[str, Measured]]
) -> dict[str, Any]:
    """Of ``rounds``, of each way; processor time in microseconds per token."""
    row: dict[str, Any] = {"streams": num_streams, "processor_us": {}}
    scale = 1e6 / (num_streams * num_tokens)
    for way in rounds[0]:
        row[way] = _median([each[way][0].figures() for each in rounds])
        seconds = _median([each[way][1] for each in rounds])
        row["processor_us"][way] = {name: scale * each for name, each in seconds.items()}
    speed = row["engine"]["tokens_per_second"]
    for way, prefix in (("served", ""), ("grpc", "grpc_"), ("openai", "openai_")):
        row[f"{prefix}ratio"] = row[way]["tokens_per_second"] / speed
    row["front_cores"] = FRONT_RATE * row["processor_us"]["openai"]["front"] / 1e6
    return row


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


def _processor_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Processor time, microseconds per token")
    names = ("engine", "model", "tritonserver", "front", "client")
    for column in ("streams", "way", *names, "all"):
        table.add_column(column, justify="right")
    for row in rows:
        for way, spent in row["processor_us"].items():
            shown = [f"{spent[name]:.1f}" if name in spent else "" for name in names]
            table.add_row(str(row["streams"]), way, *shown, f"{sum(spent.values()):.1f}")
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
                {
                    "engine": alone.run(num_streams, args.tokens),
                    "served": served.run(num_streams, args.tokens),
                    "grpc": served.run_grpc(num_streams, args.tokens),
                    "openai": served.run_openai(num_streams, args.tokens),
                }
                for _ in range(args.rounds + 1)
            ]
            rows.append(_row(num_streams, args.tokens, rounds[1:]))  # the first one warms up
    finally:
        served.close()
        scratch.cleanup()
        alone.close()
    result = describe_run("torch", "numpy", "nvidia-pytriton", "tritonclient")
    result |= {
        "tokens_per_stream": args.tokens,
        "rounds": args.rounds,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "load_average": os.getloadavg()[0],
        "rows": rows,
    }
    start = f"{args.model or 'Demo model'}: engine alone, and served by Triton over"
    Console().print(
        _table(rows, "served", "", f"{start} HTTP"),
        _table(rows, "grpc", "grpc_", f"{start} gRPC"),
        _openai_table(rows),
        _processor_table(rows),
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
