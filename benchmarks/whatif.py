"""How well `inflight whatif` predicts: one recording, other settings predicted and then measured.

The demo model on the CPU, open-loop Poisson arrivals. Each round records the base settings, learns
from that recording, predicts the other settings, and measures them right after; the reported error
is that of the median over the rounds.

    python benchmarks/whatif.py --rounds 3
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from recorded_run import TimedRequest, run_recorded
from report import describe_run, write_result

from inflight_scheduler import CapacitySchedulerPolicy
from inflight_scheduler.recording.cost_model import fit_cost_model
from inflight_scheduler.recording.files import open_recording
from inflight_scheduler.recording.latency import Summary
from inflight_scheduler.recording.whatif import predict
from inflight_scheduler.recording.workload import read_workload

GUARANTEED = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
BASE: dict[str, Any] = {"policy": GUARANTEED, "num_blocks": 48, "max_batch_size": 32}
OTHERS: dict[str, dict[str, Any]] = {
    "max_utilization": {"policy": MAX_UTILIZATION},
    "twice the blocks": {"num_blocks": 96},
    "batch of 4": {"max_batch_size": 4},
}
METRICS = ("tokens_per_second", "seconds", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


def make_requests(number: int, rate: float, seed: int) -> list[TimedRequest]:
    """Poisson arrivals with 10 to 120 prompt tokens and 10 to 120 new ones."""
    rng = random.Random(seed)
    seconds, requests = 0.0, []
    for _ in range(number):
        seconds += rng.expovariate(rate)
        requests.append(TimedRequest(seconds, rng.randint(10, 120), rng.randint(10, 120)))
    return requests


def measure(requests: list[TimedRequest], path: Path, changes: dict[str, Any]) -> Summary:
    """Run under some settings and read the recording."""
    run_recorded(requests, path, **{**BASE, **changes})
    with open_recording(path) as reader:
        return read_workload(reader).latencies.summary()


def one_round(
    requests: list[TimedRequest], folder: Path
) -> tuple[float, dict[str, tuple[Summary, Summary]]]:
    """Error of the fit, and (predicted, measured) by setting."""
    path = folder / "base.jsonl"
    measured = measure(requests, path, {})
    with open_recording(path) as reader:
        settings = reader.header.settings
        workload = read_workload(reader)
    cost = fit_cost_model(workload.samples)
    pairs = {"as recorded": (predict(settings, workload.jobs, cost), measured)}
    for name, changes in OTHERS.items():
        predicted = predict(replace(settings, **changes), workload.jobs, cost)
        pairs[name] = (predicted, measure(requests, folder / "other.jsonl", changes))
    return cost.relative_error, pairs


def main() -> None:
    """Run the rounds and write benchmarks/results/whatif.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rate", type=float, default=25.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    requests = make_requests(args.requests, args.rate, seed=1)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        run_recorded(requests[:10], Path(folder) / "warm.jsonl", **BASE)
        for number in range(args.rounds):
            rounds.append(one_round(requests, Path(folder)))
            print(f"round {number + 1} of {args.rounds} done", flush=True)
    settings: dict[str, Any] = {}
    for name in ("as recorded", *OTHERS):
        settings[name] = {}
        for metric in METRICS:
            predicted = statistics.median(getattr(pairs[name][0], metric) for _, pairs in rounds)
            measured = statistics.median(getattr(pairs[name][1], metric) for _, pairs in rounds)
            settings[name][metric] = {
                "predicted": round(predicted, 3),
                "measured": round(measured, 3),
                "error_percent": round(100 * (predicted / measured - 1), 1),
            }
        rates = [f"{m} {v['error_percent']:+.0f} %" for m, v in settings[name].items()]
        print(f"{name:18} {', '.join(rates)}")
    result = {
        **describe_run("torch", "inflight"),
        "workload": {"requests": args.requests, "rate": args.rate, "rounds": args.rounds},
        "base": {**BASE, "policy": BASE["policy"].name.lower()},
        "mean_error_of_an_iteration_percent": round(
            100 * statistics.median(error for error, _ in rounds), 1
        ),
        "settings": settings,
        "summaries_of_the_last_round": {
            name: {"predicted": asdict(predicted), "measured": asdict(measured)}
            for name, (predicted, measured) in rounds[-1][1].items()
        },
    }
    print(write_result("whatif", result, args.output))


if __name__ == "__main__":
    main()
