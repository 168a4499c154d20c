"""How well `inflight whatif --replicas` predicts: three servers behind SGLang's router, measured.

The same requests go through the router twice, once in turn and once by what is cached; every server
records. From the recording of one server of the first run, and the requests as a trace, both runs
are predicted, so the second one is predicted before it is made. Prompts begin with one of a few
texts. What the servers measured is compared, and what clients saw is beside it: that has the
router, two HTTP hops and the client's own work in it, on the same cores. Throughput is what they
saw, since each server's recording has a clock of its own.

    python benchmarks/fleet.py --requests 240 --rate 8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import openai

from inflight_recorder.cost_model import fit_cost_model
from inflight_recorder.fleet.prediction import predict_fleet
from inflight_recorder.fleet.routers import ROUTERS
from inflight_recorder.storage import open_recording
from inflight_recorder.workload import Job, Latencies, random_arrivals, read_workload
from inflight_scheduler.kv.block_manager import ReuseStats
from report import describe_run, write_result
from servers import HOST, RouterProcess, free_ports, start_serve

BLOCK = 16
MEASURED = ("round_robin", "cache_aware")
FIELDS = ("tokens_per_second", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "hit_rate")


def make_requests(args: argparse.Namespace) -> list[dict[str, Any]]:
    """When each comes, its prompt, and how many tokens it generates.

    A character is a token, behind one that begins the text.
    """
    rng = random.Random(args.seed)
    texts = [
        "".join(rng.choice("0123456789") for _ in range(args.shared * BLOCK - 1))
        for _ in range(args.texts)
    ]
    seconds, requests = 0.0, []
    for _ in range(args.requests):
        seconds += rng.expovariate(args.rate)
        text = rng.randrange(args.texts)
        own = "".join(rng.choice("0123456789") for _ in range(rng.randint(8, 80)))
        requests.append(
            {
                "seconds": seconds,
                "text": text,
                "prompt": texts[text] + own,
                "num_tokens": rng.randint(20, 120),
            }
        )
    return requests


def write_trace(requests: list[dict[str, Any]], shared: int, path: Path) -> None:
    """In Mooncake's format."""
    lines = []
    for number, request in enumerate(requests):
        length = len(request["prompt"]) + 1
        num_blocks = -(-length // BLOCK)
        hashes = [1000 * request["text"] + k for k in range(shared)]
        hashes += [10**6 + 100 * number + k for k in range(num_blocks - shared)]
        line = {
            "timestamp": 1000 * request["seconds"],
            "input_length": length,
            "output_length": request["num_tokens"],
            "hash_ids": hashes,
        }
        lines.append(json.dumps(line) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


async def send_all(url: str, requests: list[dict[str, Any]]) -> dict[str, float]:
    """Send each when its time has come; what the clients saw, in milliseconds."""
    firsts: list[float] = []
    gaps: list[float] = []
    start = time.monotonic()

    async def send(client: openai.AsyncOpenAI, request: dict[str, Any]) -> None:
        await asyncio.sleep(start + request["seconds"] - time.monotonic())
        begun = last = time.monotonic()
        stream = await client.completions.create(
            model="demo_model",
            prompt=request["prompt"],
            max_tokens=request["num_tokens"],
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        has_token = False
        async for _ in stream:
            now = time.monotonic()
            (gaps if has_token else firsts).append(1000 * (now - (last if has_token else begun)))
            has_token, last = True, now

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600) as client:
        await asyncio.gather(*(send(client, request) for request in requests))
    num_tokens = sum(request["num_tokens"] for request in requests)
    return {
        "tokens_per_second": num_tokens / (time.monotonic() - start),
        "ttft_p50": percentile(firsts, 50),
        "ttft_p99": percentile(firsts, 99),
        "itl_p50": percentile(gaps, 50),
        "itl_p99": percentile(gaps, 99),
    }


def percentile(values: list[float], percent: int) -> float:
    """By nearest rank."""
    ordered = sorted(values)
    return ordered[max(-(-len(ordered) * percent // 100), 1) - 1]


def measure(
    router: str, requests: list[dict[str, Any]], recordings: list[Path]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Three servers with a router: what they measured together, and what clients saw."""
    with ExitStack() as stack:
        servers, urls = [], []
        for recording in recordings:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-")))
            [port] = free_ports(1)
            settings = {
                "record_file": recording,
                "max_batch_size": 16,
                "tokens_per_block": BLOCK,
                "max_tokens_in_paged_kv_cache": 400 * BLOCK,
                "max_seq_len": 1024,
            }
            one_core = {"OMP_NUM_THREADS": "1"}
            options = [f"--openai-port={port}"]
            servers.append(
                start_serve(scratch, settings=settings, options=options, environment=one_core)
            )
            urls.append(f"http://{HOST}:{port}")
        try:
            for server in servers:
                server.wait_until_printed("is ready")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            process = RouterProcess(folder, urls, policy=router).wait_until_ready()
            try:
                seen = asyncio.run(send_all(process.url, requests))
            finally:
                process.kill()
        finally:
            for server in servers:
                server.stop()
    return recorded(recordings), seen


def recorded(recordings: list[Path]) -> dict[str, Any]:
    """The numbers of several servers together, but for throughput: each has a clock of its own."""
    latencies, num_reused, num_missed, num_requests = Latencies(), 0, 0, []
    for recording in recordings:
        with open_recording(recording) as reader:
            workload = read_workload(reader)
        latencies.add(workload.latencies)
        num_reused += workload.reuse.num_reused_blocks
        num_missed += workload.reuse.num_missed_blocks
        num_requests.append(len(workload.jobs))
    summary = asdict(latencies.summary(reuse=ReuseStats(num_reused, num_missed)))
    numbers = {field: summary[field] for field in FIELDS[1:]}
    return numbers | {"requests_by_server": num_requests}


def predict(recording: Path, trace: Path) -> dict[str, dict[str, Any]]:
    """What the command says of each router."""
    command = [str(Path(sys.executable).parent / "inflight"), "whatif", str(recording), "--json"]
    command += ["--trace", str(trace), "--trace-block", str(BLOCK), "--replicas", "3"]
    for router in ROUTERS:
        command += ["--router", router]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = {row["router"]: row for row in json.loads(done.stdout)["rows"]}
    del rows[None]  # one server
    return {router: {field: row[field] for field in FIELDS} for router, row in rows.items()}


def time_predictions(recording: Path) -> dict[str, float]:
    """Processor seconds for each million of generated tokens, by servers and router.

    1,250 requests (a quarter of a million tokens) in 1.6 s: most servers of 1,000 have one.
    """
    with open_recording(recording) as reader:
        settings = replace(reader.settings, num_blocks=1200, max_batch_size=64)
        cost = fit_cost_model(read_workload(reader).samples)
    rng, jobs = random.Random(3), []
    for number, time_us in enumerate(random_arrivals(rng, 800, 1250)):
        text, num_shared, num_own = rng.randrange(100), rng.randint(8, 20), rng.randint(1, 10)
        blocks = [1000 * text + k + 1 for k in range(num_shared)]
        blocks += [10**9 + 100 * number + k for k in range(num_own)]
        num_tokens = rng.randint(100, 300)
        hashes = b"".join(block.to_bytes(8, "big") for block in blocks)
        jobs.append(Job(time_us, len(blocks) * BLOCK + 5, num_tokens, num_tokens, hashes=hashes))
    num_tokens = sum(job.num_new_tokens for job in jobs)
    seconds = {}
    for num_replicas, (name, make_router) in product((10, 100, 1000), ROUTERS.items()):
        start = time.process_time()
        predict_fleet(settings, jobs, cost, num_replicas, make_router(BLOCK))
        spent = time.process_time() - start
        seconds[f"{num_replicas} {name}"] = round(1e6 * spent / num_tokens, 1)
    return seconds


def main() -> None:
    """Run both and write benchmarks/results/fleet.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--rate", type=float, default=8.0, help="a second")
    parser.add_argument("--texts", type=int, default=12, help="with which prompts begin")
    parser.add_argument("--shared", type=int, default=12, help="blocks of each of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    requests = make_requests(args)
    result = describe_run("inflight", "torch")
    result["load_average_at_start"] = os.getloadavg()[0]
    result["workload"] = {k: v for k, v in vars(args).items() if k != "output"}
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fleet-") as name:
        trace = Path(name) / "trace.jsonl"
        write_trace(requests, args.shared, trace)
        for router in MEASURED:
            recordings = [Path(name) / f"{router}-{number}.jsonl" for number in range(3)]
            measured[router], seen = measure(router, requests, recordings)
            measured[router]["tokens_per_second"] = seen.pop("tokens_per_second")
            measured[router]["clients"] = seen
            if router == MEASURED[0]:
                speed = time_predictions(recordings[0])
                predicted = predict(recordings[0], trace)
    result["processor_seconds_per_million_tokens"] = speed
    result["load_average_at_end"] = os.getloadavg()[0]
    result["routers"] = {
        router: {"predicted": predicted[router], "measured": measured.get(router)}
        for router in predicted
    }
    print(write_result("fleet", result, args.output))


if __name__ == "__main__":
    main()
