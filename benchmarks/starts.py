"""How long `inflight serve` takes until it is ready, and what of that compiling kernels takes.

    python benchmarks/starts.py --models smollm2-135m llama-1b --rounds 5

Each round starts the server of each model three times: with an empty folder for compiled kernels,
with the folder that this has filled, and with torch's operators, which are not compiled. So the
first less the last is what a first start compiles, and the second less the last what later ones
read. The files of a model lie in the machine's memory: the first start of a round has read them,
and is not timed. ``llama-1b`` has random weights in bfloat16, which are written to a temporary
folder. Processor time is that of all processes until the server is ready: on a machine that does
other work it says more than what has passed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from inflight_server.checkpoints import smollm2
from report import describe_run, write_result
from servers import start_serve

_RANDOM = "llama-1b"
_DEMO = "demo"
_SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
_SETTINGS = {"max_seq_len": 2048}
_WAYS = {
    "empty": ("empty", "compiled"),
    "later": ("empty", "compiled"),
    "torch": ("torch", "torch"),
}
"""By name: the folder of compiled kernels, and ``attention_backend``."""


def start(model: Path | None, backend: str, cache: Path) -> dict[str, Any]:
    """One start and stop: seconds until it was ready, processor seconds of each process."""
    with tempfile.TemporaryDirectory(prefix="starts-") as folder:
        began = time.perf_counter()
        server = start_serve(
            Path(folder),
            model=model,
            settings={**_SETTINGS, "attention_backend": backend},
            environment={"XDG_CACHE_HOME": str(cache)},
        )
        try:
            server.wait_until_printed("inflight is ready")
            seconds = time.perf_counter() - began
            launcher = psutil.Process(server.process.pid)
            processes = [launcher, *launcher.children(recursive=True)]
            used = [each.cpu_times() for each in processes]
        finally:
            server.stop()
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(sum(each.user + each.system for each in used), 2),
        "load_average": round(os.getloadavg()[0], 1),
    }


def measure(model: Path | None, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """All starts of a model, by way."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="starts-") as folder:
            if number == 0:
                start(model, "torch", Path(folder))
            for way, (cache, backend) in _WAYS.items():
                found[way].append(start(model, backend, Path(folder) / cache))
    return found


def summarise(starts: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of each way, and what compiling and reading take over torch's operators."""
    row: dict[str, Any] = {}
    for key in ("seconds", "cpu_seconds"):
        medians = {way: statistics.median(each[key] for each in starts[way]) for way in _WAYS}
        row[key] = {way: round(value, 2) for way, value in medians.items()}
        row[key]["compiling"] = round(medians["empty"] - medians["torch"], 2)
        row[key]["reading"] = round(medians["later"] - medians["torch"], 2)
    return row


def _find(name: str, folder: Path) -> Path | None:
    """The files of a model; random weights are written to ``folder``."""
    if name in (_DEMO, smollm2.NAME):
        return smollm2.find_smollm2() if name == smollm2.NAME else None
    if name != _RANDOM:
        return Path(name)
    import torch

    from random_llama import random_llama

    random_llama(128_256, **_SHAPE).to(torch.bfloat16).save_pretrained(folder)
    return folder


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--models",
        nargs="+",
        default=[_DEMO, smollm2.NAME, _RANDOM],
        help=f"{_DEMO}, {smollm2.NAME}, {_RANDOM}, or the folder or GGUF file of another",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--note", default="", help="put into the report: what else the machine did")
    parser.add_argument("-o", "--output", type=Path, help="default: results/starts.json")
    options = parser.parse_args()
    result = describe_run("torch", "numpy", "numba", "nvidia-pytriton")
    result |= {"note": options.note, "rounds": options.rounds, "rows": []}
    with tempfile.TemporaryDirectory(prefix="starts-model-") as folder:
        for name in options.models:
            starts = measure(_find(name, Path(folder)), options.rounds)
            row = {"model": name, **summarise(starts), "starts": starts}
            result["rows"].append(row)
            print(name, row["seconds"], "processor time:", row["cpu_seconds"], flush=True)
    print(write_result("starts", result, options.output).name)


if __name__ == "__main__":
    main()
