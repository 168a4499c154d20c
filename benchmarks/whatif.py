"""How well `inflight whatif` predicts: one recording, other settings predicted and then measured.

The demo model on the CPU, open-loop Poisson arrivals. Each round records the base settings, learns
from that recording, predicts the other settings, and measures them right after, twice: how far two
runs of the same settings lie apart is what no prediction can beat. All that once without block
reuse and once with it, the server's default. Errors are taken within a round; reported are the
median, the least and the largest over the rounds.

    python benchmarks/whatif.py --rounds 5
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from inflight_recorder.cost_model import fit_cost_model
from inflight_recorder.storage import open_recording
from inflight_recorder.whatif import predict
from inflight_recorder.workload import Summary, read_workload
from inflight_scheduler import CapacitySchedulerPolicy
from recorded_run import TimedRequest, run_recorded
from report import describe_run, write_result

GUARANTEED = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
BASE: dict[str, Any] = {"policy": GUARANTEED, "num_blocks": 48, "max_batch_size": 32}
OTHERS: dict[str, dict[str, Any]] = {
    "max_utilization": {"policy": MAX_UTILIZATION},
    "twice the blocks": {"num_blocks": 96},
    "batch of 4": {"max_batch_size": 4},
}
CASES: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "without block reuse": ({"enable_block_reuse": False}, tuple(OTHERS)),
    "with block reuse": ({"enable_block_reuse": True}, ("max_utilization", "twice the blocks")),
}
"""Changes of the base, and which others are predicted from it: a round takes three minutes."""

METRICS = ("tokens_per_second", "seconds", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


def make_requests(number: int, rate: float, seed: int) -> list[TimedRequest]:
    """Poisson arrivals with 10 to 120 prompt tokens, which begin in nine ways, and 10 to 120 new
    ones."""
    rng = random.Random(seed)
    seconds, requests = 0.0, []
    for _ in range(number):
        seconds += rng.expovariate(rate)
        lengths = rng.randint(10, 120), rng.randint(10, 120)
        requests.append(TimedRequest(seconds, *lengths, family=rng.randrange(9)))
    return requests


def measure(requests: list[TimedRequest], path: Path, changes: dict[str, Any]) -> Summary:
    """Run under some settings and read the recording."""
    run_recorded(requests, path, **{**BASE, **changes})
    with open_recording(path) as reader:
        return read_workload(reader).latencies.summary()


class Trial(NamedTuple):
    """One setting in one round; ``fast`` and ``slow``: iterations 10 % shorter and longer."""

    predicted: Summary
    fast: Summary
    slow: Summary
    measured: Summary
    again: Summary


def one_round(
    requests: list[TimedRequest], folder: Path, case: dict[str, Any], names: Sequence[str]
) -> tuple[float, dict[str, Trial]]:
    """Error of the fit, and what came out by setting."""
    path = folder / "base.jsonl"
    measured = measure(requests, path, case)
    with open_recording(path) as reader:
        settings = reader.settings
        workload = read_workload(reader)
    cost = fit_cost_model(workload.samples)
    trials = {}
    for name in ("as recorded", *names):
        changes = OTHERS.get(name, {})
        changed = replace(settings, **changes)
        predicted, fast, slow = (
            predict(
                changed,
                workload.jobs,
                cost.scaled(factor),
            )
            for factor in (1.0, 0.9, 1.1)
        )
        run = partial(measure, requests, folder / "other.jsonl", {**case, **changes})
        first = measured if not changes else run()
        again = run()
        trials[name] = Trial(predicted, fast, slow, first, again)
    return cost.relative_error, trials


def compare(trials: list[Trial], metric: str) -> dict[str, Any]:
    """Medians over the rounds, and errors within each."""

    def values(which: str) -> list[float]:
        return [getattr(getattr(trial, which), metric) for trial in trials]

    def errors(one: str, other: str) -> dict[str, float]:
        percent = [100 * (x / y - 1) for x, y in zip(values(one), values(other), strict=True)]
        return {
            "median": round(statistics.median(percent), 1),
            "least": round(min(percent), 1),
            "largest": round(max(percent), 1),
        }

    return {
        **{which: round(statistics.median(values(which)), 3) for which in Trial._fields},
        "error_percent": errors("predicted", "measured"),
        "error_percent_of_measuring_again": errors("again", "measured"),
    }


def summarize(case: str, rounds: list[tuple[float, dict[str, Trial]]]) -> dict[str, Any]:
    """All rounds of one case, by setting and metric; the errors are printed as well."""
    settings: dict[str, Any] = {}
    for name in rounds[0][1]:
        trials = [trials[name] for _, trials in rounds]
        found = {metric: compare(trials, metric) for metric in METRICS}
        for metric, values in found.items():
            error, noise = values["error_percent"], values["error_percent_of_measuring_again"]
            print(
                f"{case:19} {name:16} {metric:17} {error['median']:+6.1f} %  "
                f"again {noise['median']:+.1f} %"
            )
        largest = [trial.predicted.max_batch for trial in trials]
        settings[name] = {**found, "max_memory_batch": round(statistics.median(largest))}
    error = statistics.median(error for error, _ in rounds)
    return {"mean_error_of_an_iteration_percent": round(100 * error, 1), "settings": settings}


def main() -> None:
    """Run the rounds and write benchmarks/results/whatif.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rate", type=float, default=25.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    requests = make_requests(args.requests, args.rate, seed=1)
    rounds: dict[str, list[tuple[float, dict[str, Trial]]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        run_recorded(requests[:10], Path(folder) / "warm.jsonl", **BASE)
        for number in range(args.rounds):
            for name, (case, names) in CASES.items():
                rounds[name].append(one_round(requests, Path(folder), case, names))
            print(f"round {number + 1} of {args.rounds} done", flush=True)
    result = {
        **describe_run("torch", "inflight"),
        "workload": {"requests": args.requests, "rate": args.rate, "rounds": args.rounds},
        "base": {**BASE, "policy": BASE["policy"].name.lower()},
        "cases": {name: summarize(name, rounds[name]) for name in CASES},
    }
    print(write_result("whatif", result, args.output))


if __name__ == "__main__":
    main()
