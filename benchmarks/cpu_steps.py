"""Milliseconds of a prefill and of a decode step on a CPU: this checkout beside another one.

    python benchmarks/cpu_steps.py --before FOLDER

``FOLDER`` is a checkout of the commit to compare with. Models with random weights (the same for
both, of the shapes of real small ones) get 1, 8 and 32 prompts of 128 tokens in one step and then
decode greedily, each in a thread and an environment like that of its own `inflight serve`, where
OpenMP threads sleep at once. This checkout runs once more with ``GOMP_SPINCOUNT=5000``. Each of the
three has a process of its own for each model and dtype; they take turns, one round each, and every
figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("backend", "scheduler", "kernels", "client", "benchmarks")

# Keys of config.json, of a Llama unless it says otherwise.
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "SmolLM2-360M": {
        "vocab_size": 49_152, "hidden_size": 960, "intermediate_size": 2560,
        "num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5,
        "tie_word_embeddings": True,
    },
    "TinyLlama-1.1B": {
        "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
    },
    "Gemma-3-270M": {
        "model_type": "gemma3_text", "vocab_size": 262_144, "hidden_size": 640,
        "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "tie_word_embeddings": True,
    },
    "Pythia-160M": {
        "model_type": "gpt_neox", "vocab_size": 50_304, "hidden_size": 768,
        "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    },
    "Granite-3.1-1B-A400M": {
        "model_type": "granitemoe", "vocab_size": 49_152, "hidden_size": 1024,
        "intermediate_size": 512, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 8,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
# Engine of a row: whether it is this checkout, and the settings of its process.
_BEFORE = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
    "MALLOC_ARENA_MAX": "4",
}
_SERVED = {
    **_BEFORE,
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
}
ENGINES = {
    "before": (False, _BEFORE),
    "served": (True, _SERVED),
    "spinning": (True, {**_SERVED, "GOMP_SPINCOUNT": "5000"}),
}
_Row = dict[str, Any]


def main() -> None:
    """Measure, print each round, write the JSON."""
    options = _parse()
    if options.worker:
        _work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        rounds = list(_measure(options, Path(folder)))
    medians = list(_medians(rounds))
    for row in medians:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    sys.path[:0] = [str(ROOT / package) for package in _PACKAGES]
    from report import commit_of, describe_run, write_result

    result = {
        **describe_run("torch", "numpy"),
        "before": commit_of(options.before),
        "load_average": os.getloadavg(),
        "engines": {name: environment for name, (_, environment) in ENGINES.items()},
        "prompt_tokens": options.input,
        "decode_steps": options.output,
        "medians": medians,
        "rounds": rounds,
    }
    print(f"written: {write_result('cpu_steps', result, options.write_to)}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--before", type=Path, default=ROOT, help="checkout to compare with")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=16, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write-to", type=Path, help="JSON file; default: the committed result")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)  # checkpoint folder, dtype
    return parser.parse_args()


def _measure(options: argparse.Namespace, folder: Path) -> Iterator[_Row]:
    for model in options.models:
        checkpoint = folder / model
        _write_checkpoint(model, checkpoint)
        for dtype in options.dtypes:
            workers = {name: _start(name, checkpoint, dtype, options) for name in ENGINES}
            for number in range(-1, options.rounds):  # the first one warms up
                for count in options.requests:
                    for name in workers:
                        row = {
                            "model": model, "dtype": dtype, "requests": count, "round": number,
                            "engine": name, **_ask(workers[name], count),
                        }  # fmt: skip
                        if number >= 0:
                            print("  ".join(f"{key}={row[key]}" for key in row), flush=True)
                            yield row
            for worker in workers.values():
                worker.communicate(timeout=60)


def _write_checkpoint(model: str, folder: Path) -> None:
    sys.path[:0] = [str(ROOT / "benchmarks")]
    from random_llama import random_model

    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    random_model(**{"model_type": "llama", **MODELS[model]}).save_pretrained(folder)


def _start(
    name: str, checkpoint: Path, dtype: str, options: argparse.Namespace
) -> subprocess.Popen[str]:
    is_ours, environment = ENGINES[name]
    checkout = ROOT if is_ours else options.before
    paths = os.pathsep.join(str(checkout.resolve() / package) for package in _PACKAGES)
    command = [
        sys.executable, str(Path(__file__).resolve()), "--worker", str(checkpoint), dtype,
        "--input", str(options.input), "--output", str(options.output),
        "--requests", *map(str, options.requests),
    ]  # fmt: skip
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment, "PYTHONPATH": paths},
    )


def _ask(worker: subprocess.Popen[str], count: int) -> _Row:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{count}\n")
    worker.stdin.flush()
    row: _Row = json.loads(worker.stdout.readline())
    return row


def _work(options: argparse.Namespace) -> None:
    """A worker: for each count that it reads, one round of that many requests, as a JSON line."""
    from engine_steps import load_engine

    checkpoint, dtype = options.worker
    num_tokens = options.input + options.output + 1

    def run() -> None:
        engine = load_engine(Path(checkpoint), max(options.requests), num_tokens, dtype)
        for line in sys.stdin:
            print(json.dumps(_round(engine, int(line), options)), flush=True)

    thread = threading.Thread(target=run)  # malloc gives each its own arena
    thread.start()
    thread.join()


def _round(engine: Any, count: int, options: argparse.Namespace) -> _Row:
    import torch

    from engine_steps import run_steps
    from inflight_scheduler import LlmRequest

    generator = torch.Generator().manual_seed(count)
    shape = (count, options.input)
    prompts = torch.randint(engine.vocab_size, shape, generator=generator).tolist()
    requests = [LlmRequest(i, prompt, options.output + 1) for i, prompt in enumerate(prompts, 1)]
    milliseconds = [1e3 * seconds for seconds in run_steps(engine, requests)]
    assert len(milliseconds) == options.output + 1, "all prompts fit one step"
    prefill, *decode = milliseconds
    return {
        "prefill_ms": round(prefill, 2),
        "decode_ms": round(statistics.median(decode), 2),
    }


def _medians(rounds: list[_Row]) -> Iterator[_Row]:
    keys = list(dict.fromkeys((row["model"], row["dtype"], row["requests"]) for row in rounds))
    for key in keys:
        same = [row for row in rounds if (row["model"], row["dtype"], row["requests"]) == key]
        row: _Row = dict(zip(("model", "dtype", "requests"), key, strict=True))
        for phase in ("prefill_ms", "decode_ms"):
            row[phase] = {
                engine: round(
                    statistics.median(each[phase] for each in same if each["engine"] == engine), 2
                )
                for engine in ENGINES
            }
        yield row


if __name__ == "__main__":
    main()
