"""What ranks cost and bring: plans sent, steps on 2 ranks beside steps on one, stages that overlap.

Steps are those of a random Llama (about 100 M parameters, float32, seeded) or of ``--model``: a
prompt, and 1 or 64 requests that generate. Each setting has a process of its own, and they take
turns; figures are medians over the rounds, ratios medians of the ratios of a round. On a CPU each
rank has one thread, so one rank with one thread says what a second rank brings, one with two
whether ranks or threads use two cores better.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --device cuda --model FOLDER --settings one tp2 pp2    # two GPUs
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine_steps import run_steps
from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.ranks.leader import LeadingEngine
from inflight_backend.ranks.messages import Step, ToRank, pack
from inflight_scheduler import ContextChunk, LlmRequest, ScheduledBatch
from random_llama import num_parameters, random_llama
from report import describe_run, write_result

_SETTINGS = {
    "one": (1, 1, 1),
    "one, 2 threads": (1, 1, 2),
    "tp2": (2, 1, 1),
    "pp2": (1, 2, 1),
}
"""Tensor and pipeline parallel size, and threads of a rank on a CPU."""
_SMALL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
_LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
          "num_attention_heads": 12, "num_key_value_heads": 4}  # fmt: skip
_MANY = 64
_PLANS = 2_000


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--settings", nargs="+", choices=[*_SETTINGS], default=[*_SETTINGS])
    parser.add_argument("--model", type=Path, help="a checkpoint; default: a random one")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8, help="generations of a round")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--output", type=Path, help="JSON file; default: the committed result")
    parser.add_argument("--serve", choices=[*_SETTINGS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        _serve(options)
        return
    result = {**describe_run("inflight", "torch"), "load_average_at_start": os.getloadavg()[0]}
    result["plans"] = {name: _measure_plan(batch) for name, batch in _plans().items()}
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            model = random_llama(
                1000 if options.small else 32_000, **_SMALL if options.small else _LARGE
            )
            model.save_pretrained(folder)
            options.model = Path(folder)
            result["parameters"] = num_parameters(model)
            del model
        result |= _measure(options)
    result["load_average_at_end"] = os.getloadavg()[0]
    result["computed_for_two_h100"] = _compute()
    print(json.dumps(result, indent=1))
    print(f"written: {write_result('ranks', result, options.output)}")


def _compute() -> dict[str, Any]:
    """What two H100 would need, or bring, for the aims of 1.7 times the generations and 0.85 of
    twice the prompts; nothing here is measured. A layer has two sums, and the embedding one."""
    bandwidth, link, flops = 3.35e12, 450e9, 400e12  # nominal bytes/s; an estimate of FLOP/s
    models = {  # bytes of weights and layers
        "Llama-3.1-8B bf16": (16.1e9, 32),
        "Llama-3.1-70B fp8": (70.6e9, 80),
    }
    longest_sum = {
        name: round(1e6 * (num_bytes / bandwidth) * (1 / 1.7 - 1 / 2) / (2 * layers + 1), 1)
        for name, (num_bytes, layers) in models.items()
    }
    tokens, hidden_size, layers = 8192, 4096, 32
    alone = tokens * 16.1e9 / flops
    sums = (2 * layers + 1) * tokens * hidden_size * 2 / link
    return {
        "inputs": {"bandwidth": bandwidth, "link": link, "flops": flops},
        "longest_sum_us_for_1.7_at_tp2": longest_sum,
        "prefill_efficiency_of_8192_tokens_at_tp2": round(alone / (2 * (alone / 2 + sums)), 3),
        "prompt_in_4_parts_over_whole_at_pp2": round(5 / 8, 3),
    }


def _plans() -> dict[str, ScheduledBatch]:
    prompt = tuple(range(1024))
    return {
        "256 generations": ScheduledBatch(1, generation_slots=tuple(range(256))),
        "8 prompts of 1,024, 248 generations": ScheduledBatch(
            1,
            context_chunks=tuple(ContextChunk(slot, 0, prompt, True) for slot in range(248, 256)),
            generation_slots=tuple(range(248)),
        ),
    }


def _measure_plan(batch: ScheduledBatch) -> dict[str, float]:
    """Microseconds of the host to pack a plan, to send it to one rank, and to read it there."""
    own, other = socket.socketpair()
    decoder = msgspec.msgpack.Decoder(ToRank)
    with own, other:
        reader = subprocess.Popen(["cat"], stdin=other.fileno(), stdout=subprocess.DEVNULL)
        times: dict[str, list[float]] = {"pack_us": [], "send_us": [], "read_us": []}
        for _ in range(_PLANS):
            started = time.perf_counter()
            message = pack(Step(batch))
            packed = time.perf_counter()
            own.sendall(message)
            sent = time.perf_counter()
            decoder.decode(message[8:])
            read = time.perf_counter()
            for name, seconds in zip(
                times, (packed - started, sent - packed, read - sent), strict=True
            ):
                times[name].append(1e6 * seconds)
        own.shutdown(socket.SHUT_RDWR)
        reader.wait()
    medians = {name: round(statistics.median(each), 1) for name, each in times.items()}
    return {"bytes": len(message), **medians}


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", str(options.model), "--device", options.device,
               "--steps", str(options.steps), "--prompt", str(options.prompt)]  # fmt: skip
    processes: dict[str, subprocess.Popen[str]] = {}
    for name in options.settings:
        threads = str(_SETTINGS[name][2])
        processes[name] = subprocess.Popen(
            [*command, "--serve", name],
            env={**os.environ, "OMP_NUM_THREADS": threads},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        _ask(processes[name])  # a round that compiles
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(options.rounds):
        rounds.append({name: _ask(process) for name, process in processes.items()})
    for process in processes.values():
        process.communicate()
    kinds = list(rounds[0][options.settings[0]])
    milliseconds = {
        name: {
            kind: round(statistics.median(1e3 * each[name][kind] for each in rounds), 3)
            for kind in kinds
        }
        for name in options.settings
    }
    first = options.settings[0]
    over_first = {
        name: {
            kind: round(
                statistics.median(each[name][kind] / each[first][kind] for each in rounds), 3
            )
            for kind in kinds
        }
        for name in options.settings
    }
    return {"median_ms": milliseconds, f"over_{first}": over_first}


def _ask(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    while True:
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a setting has ended; its error is above")
        if line.startswith("{"):
            found: dict[str, float] = json.loads(line)
            return found


def _serve(options: argparse.Namespace) -> None:
    """Run a round for each line of stdin: median seconds of steps, by their kind."""
    tensor, pipeline, _ = _SETTINGS[options.serve]
    tokens = options.prompt + 32 + (_MANY * (64 + options.steps))
    config = EngineConfig(
        device=options.device,
        max_batch_size=_MANY,
        max_num_tokens=max(options.prompt, 8 * _MANY),
        max_tokens_in_paged_kv_cache=32 * -(-tokens // 32),
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
    )
    if tensor * pipeline > 1:
        engine: Engine = LeadingEngine.start(options.model, config, silence_seconds=120.0)
    else:
        engine = Engine.load(options.model, config)
    engine.prepare_thread()
    for _ in sys.stdin:
        (prompt,) = list(run_steps(engine, _requests(1, options.prompt, 1)))
        found = {f"prompt of {options.prompt}": prompt}
        for count in (1, _MANY):
            seconds = list(run_steps(engine, _requests(count, 8, options.steps + 1)))
            found[f"{count} generating"] = statistics.median(seconds[-options.steps :])
        print(json.dumps(found), flush=True)
    if isinstance(engine, LeadingEngine):
        engine.close()


def _requests(count: int, num_tokens: int, num_new: int) -> list[LlmRequest]:
    return [
        LlmRequest(
            number, [(7 * number + 3 * place) % 1000 for place in range(num_tokens)], num_new
        )
        for number in range(1, count + 1)
    ]


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
