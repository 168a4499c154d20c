"""What an iteration of the scheduler costs: decide, plan, update, in microseconds.

``incremental`` is what `GptManager` runs: `ActiveRequests`, whose cost grows with what changes.
``overlapped`` is the same in the loop for a GPU, which plans a step while the one before it runs.
``naive`` is the same decision by the rules alone, everything recomputed from every request in each
iteration, as in the published Python scheduler of TensorRT-LLM. No engine: tokens are constant.
Times are processor time of the thread. On a shared machine other work takes caches and memory away,
which can only add time: all cases are measured ``--repeats`` times in turn, and of each the repeat
with the least median counts; the medians of all are in the result, and the load average (processes
that wanted a core). The 99th percentile is that of the least each iteration took: all repeats of a
case decide the same, so what one of them took longer for was not its own. Python's collections of
garbage are not part of it.

The load is steady: ``--active`` requests in the generation phase, each with 256 new tokens, at
evenly spread ages, so one in 256 finishes in every iteration and as many arrive. Prompts have 97
to 128 tokens, so one request in 32 opens a block; the first 64 tokens are the same for all, which
block reuse finds. STATIC_BATCH admits no request while its batch runs, so there the batch shrinks.
In rows whose ``pool`` is below 1 the pool holds that share of what all requests need to completion:
under GUARANTEED_NO_EVICT the others wait, under MAX_UTILIZATION some are paused every few
iterations and come back together, which the mean and the 99th percentile show and the median hides.
"""

from __future__ import annotations

import argparse
import bisect
import gc
import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from inflight_scheduler import (
    ActiveRequests,
    BatchPlanner,
    BlockManager,
    CapacitySchedulerPolicy,
    LlmRequest,
    ScheduledBatch,
    make_scheduler,
)
from report import describe_run, write_result

TOKENS_PER_BLOCK = 32
PROMPT_LEN, SHARED_LEN, MAX_NEW = 128, 64, 256
DESIGNS = ("incremental", "overlapped", "naive")
SHORT_POOL = 0.3
TARGET_US = {1024: 1000.0, 4096: 1000.0}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    policy: CapacitySchedulerPolicy
    num_active: int
    has_reuse: bool
    design: str
    pool: float = 1.0
    """Blocks of the pool, as a share of what all requests need to completion."""


class Load:
    """A scheduler with everything around it, kept busy with ``case.num_active`` requests."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.dice = random.Random(0)
        self.shared = [self.dice.randrange(32000) for _ in range(SHARED_LEN)]
        num_wanted = case.num_active * ((PROMPT_LEN + MAX_NEW) // TOKENS_PER_BLOCK)
        num_blocks = int(num_wanted * case.pool)
        self.manager = BlockManager(num_blocks, TOKENS_PER_BLOCK, enable_reuse=case.has_reuse)
        self.tracked = None if case.design == "naive" else ActiveRequests(self.manager)
        self.plain: list[LlmRequest] = []
        self.planner = BatchPlanner(self.manager, case.num_active, self.tracked)
        self.scheduler = make_scheduler(case.policy, self.manager, max_batch_size=case.num_active)
        self.num_arrivals = self.num_paused = 0
        self.running = ScheduledBatch(0)  # overlapped: the step whose tokens come next
        for _ in range(case.num_active):
            self._arrive(1 + self.num_arrivals * MAX_NEW // case.num_active)
        self.iterate()  # all contexts at once

    def iterate(self) -> tuple[float, float, float]:
        """One iteration; seconds of decide, plan and update (releasing included).

        Overlapped, everything before the step starts counts as plan (`BatchPlanner.assume_step`).
        """
        active = self.plain if self.tracked is None else self.tracked
        start = time.thread_time()
        context, generation, paused = self.scheduler.schedule_request(active, ())
        decided = time.thread_time()
        batch = self.planner.plan(context, generation, paused)
        if self.case.design == "overlapped":
            self.planner.assume_step(batch)
            batch, self.running = self.running, batch
        planned = time.thread_time()
        is_overlapped = self.case.design == "overlapped"
        apply = self.planner.apply_tokens if is_overlapped else self.planner.update
        advanced = apply(batch, [7] * batch.num_drawn)
        if self.tracked is None:
            finished = [request for request in advanced if request.is_finished]
        else:
            finished = self.tracked.finished
        for request in finished:
            self.planner.release(request)
            if self.tracked is None:
                self.plain.remove(request)
            else:
                self.tracked.remove(request)
        end = time.thread_time()
        self.num_paused += len(paused)
        for _ in finished:
            self._arrive(MAX_NEW)
        return decided - start, planned - decided, end - planned

    def _arrive(self, max_new: int) -> None:
        num_own = PROMPT_LEN - SHARED_LEN - self.dice.randrange(TOKENS_PER_BLOCK)
        rest = [self.dice.randrange(32000) for _ in range(num_own)]
        request = LlmRequest(self.num_arrivals, self.shared + rest, max_new)
        self.num_arrivals += 1
        if self.tracked is None:
            bisect.insort(self.plain, request, key=lambda other: -other.priority)
        else:
            self.tracked.add(request)


def measure(case: Case, num_iterations: int) -> dict[str, Any]:
    """Median microseconds of the parts, median and mean of the whole, and ``totals`` of each."""
    gc.collect()
    gc.freeze()  # what other cases left behind is not looked at in the iterations of this one
    load = Load(case)
    # A whole pool is at once as it stays; a short one is when all have taken their blocks.
    for _ in range(20 if case.pool == 1.0 else MAX_NEW):
        load.iterate()
    load.num_paused = 0
    gc.disable()  # a pass of 1 to 3 ms, now and then, is of what the process holds in all
    samples = [load.iterate() for _ in range(num_iterations)]
    gc.enable()
    totals = [sum(sample) * 1e6 for sample in samples]
    parts = [statistics.median(part) * 1e6 for part in zip(*samples, strict=True)]
    return {
        "policy": case.policy.name,
        "active": case.num_active,
        "reuse": case.has_reuse,
        "pool": case.pool,
        "design": case.design,
        "iterations": num_iterations,
        "decide_us": round(parts[0], 1),
        "plan_us": round(parts[1], 1),
        "update_us": round(parts[2], 1),
        "total_us_p50": round(statistics.median(totals), 1),
        "total_us_mean": round(statistics.mean(totals), 1),
        "totals": totals,
        "pauses": load.num_paused,
        # The targets are for so many running requests: with a short pool fewer run.
        "target_us": TARGET_US.get(case.num_active) if case.pool == 1.0 else None,
    }


def best_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the least median; of all runs the medians and, by iteration, the 99th
    percentile of the least."""
    least = map(min, zip(*(run.pop("totals") for run in runs), strict=True))
    best = min(runs, key=lambda run: run["total_us_p50"])
    return best | {
        "total_us_p99": round(statistics.quantiles(least, n=100, method="inclusive")[-1], 1),
        "total_us_p50_of_repeats": [run["total_us_p50"] for run in runs],
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Microseconds per iteration")
    columns = [name for name in rows[0] if not name.endswith("_of_repeats")]
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*("" if row[name] is None else str(row[name]) for name in columns))
    return table


def main() -> None:
    """Measure all cases, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--active", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    cases = [
        Case(policy, num_active, has_reuse, design)
        for policy in CapacitySchedulerPolicy
        for num_active in args.active
        for has_reuse in (False, True)
        for design in DESIGNS
    ] + [
        Case(policy, num_active, has_reuse, design, SHORT_POOL)
        for policy in CapacitySchedulerPolicy
        if policy is not CapacitySchedulerPolicy.STATIC_BATCH
        for num_active in args.active
        for has_reuse in (False, True)
        for design in DESIGNS
    ]
    runs: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(args.repeats):
        for case in cases:
            runs[case].append(measure(case, args.iterations))
    rows = list(map(best_of, runs.values()))
    result = describe_run() | {
        "tokens_per_block": TOKENS_PER_BLOCK,
        "prompt_tokens": [PROMPT_LEN - TOKENS_PER_BLOCK + 1, PROMPT_LEN],
        "shared_prompt_tokens": SHARED_LEN,
        "new_tokens": MAX_NEW,
        "load_average": [load_before, os.getloadavg()[0]],
        "rows": rows,
    }
    Console(width=140).print(_table(rows))
    print("written to", write_result("scheduler", result, args.output).name)


if __name__ == "__main__":
    main()
