"""Mixed load for as long as you like, with everything that users and machines do to a server.

Per policy: traffic of every kind (three in ten requests are cancelled; stops, resets, bad input) on
an oversubscribed KV pool; a quiet moment in which everything must be free again; then the same
traffic while processes are killed and frozen. At the end models are reloaded on a plain
tritonserver. The report says what came of every request and what was left behind.

    python benchmarks/soak.py --minutes 60

Exit code 1 if anything is not as promised; ``failures`` in the report says what.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from report import describe_run, write_result
from soak_parts.plain_triton import plain_triton
from soak_parts.server import MODEL, TRITONSERVER, Footprint, Served
from soak_parts.traffic import Tally, Traffic

POLICIES = ("guaranteed_no_evict", "max_utilization")
NUM_WORKERS = 40
# 24 of the 40 requests may be active; the pool holds a quarter of what those can need.
SETTINGS = {
    "max_batch_size": 24,
    "max_queue_size": 12,
    "max_seq_len": 2200,
    "max_tokens_in_paged_kv_cache": 24 * 2200 // 4,
    "enable_chunked_context": "true",
    "stall_seconds": 10,
}
_KILL_EVERY_SECONDS = 75.0
_IDLE_SECONDS = 30.0
_RECOVERY_SECONDS = 60.0
_MAX_SLOPE_MB_PER_HOUR = 40.0
_SLOPE_NEEDS_SECONDS = 300.0
# Where the time is too short for a slope: the ring of the recorder and the caches of torch fill.
_MAX_GROWTH_MB = 100.0

Kill = tuple[str, str, signal.Signals]
KILLS: tuple[Kill, ...] = (
    ("model process killed", MODEL, signal.SIGKILL),
    ("tritonserver killed", TRITONSERVER, signal.SIGKILL),
    ("model process frozen", MODEL, signal.SIGSTOP),
    ("tritonserver frozen", TRITONSERVER, signal.SIGSTOP),
)


@dataclass
class Findings:
    """What one policy went through."""

    samples: list[tuple[float, dict[str, Footprint]]] = field(default_factory=list)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    leaks: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def expect(self, is_true: bool, otherwise: str) -> None:
        """Note a failure unless ``is_true``."""
        if not is_true:
            self.failures.append(otherwise)


async def soak(policy: str, seconds: float, kills: Iterator[Kill], seed: int) -> dict[str, Any]:
    """One policy: warm-up, steady load, quiet, kills, quiet, stop."""
    served = Served({**SETTINGS, "batch_scheduler_policy": policy})
    findings = Findings()
    tally = Tally()
    try:
        await _load(served, tally, seconds * 0.1, seed)
        warm = await _quiet(served, findings, "after the warm-up")
        steady_began = time.monotonic()
        await _load(served, tally, seconds * 0.6, seed + 1, findings)
        steady_seconds = time.monotonic() - steady_began
        calm = await _quiet(served, findings, "after the steady load")
        _compare(warm, calm, steady_seconds, findings)
        await _kill(served, tally, seconds * 0.3, seed + 2, kills, findings)
        await _quiet(served, findings, "after the kills")
        code, stop_seconds = served.stop()
        left = served.left_behind()
    finally:
        served.stop()
    findings.expect(code == 0, f"exit code {code}: {served.log[-300:]}")
    findings.expect(not left, f"left behind: {left}")
    _judge(tally, findings)
    shutil.rmtree(served.scratch, ignore_errors=True)
    return {
        "policy": policy,
        "steady_seconds": round(steady_seconds, 1),
        "requests": sum(tally.outcomes.values()) + len(tally.wrong),
        "outcomes": dict(sorted(tally.outcomes.items())),
        "finals_per_request_read_to_its_end": {str(k): v for k, v in sorted(tally.finals.items())},
        "tokens_checked": tally.num_tokens,
        "leaks": {**findings.leaks, "left_after_stop": len(left)},
        "memory_slope_mb_per_hour": _slopes(findings.samples),
        "recoveries": findings.recoveries,
        "stop_seconds": round(stop_seconds, 2),
        "failures": findings.failures,
    }


async def _load(
    served: Served, tally: Tally, seconds: float, seed: int, findings: Findings | None = None
) -> None:
    traffic = _traffic(served, tally, seed)
    traffic.start(NUM_WORKERS)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        await asyncio.sleep(min(left, max(1.0, seconds / 300)))
        if findings is not None:
            findings.samples.append((time.monotonic(), served.footprints()))
    await traffic.stop()
    await _check_ids(traffic, findings)
    await traffic.close()


async def _kill(
    served: Served,
    tally: Tally,
    seconds: float,
    seed: int,
    kills: Iterator[Kill],
    findings: Findings,
) -> None:
    regions = len(served.shared_memory())
    traffic = _traffic(served, tally, seed)
    traffic.start(NUM_WORKERS)
    for _ in range(max(1, int(seconds / _KILL_EVERY_SECONDS))):
        next_kill = time.monotonic() + min(_KILL_EVERY_SECONDS, seconds)
        await asyncio.sleep(min(2.0, seconds / 4))
        what, program, number = next(kills)
        served.signal(program, number)
        began = time.monotonic()
        while not (is_back := await _is_served(served)):
            if time.monotonic() - began > _RECOVERY_SECONDS:
                break
            await asyncio.sleep(0.05)
        took = round(time.monotonic() - began, 2)
        findings.recoveries.append({"what": what, "seconds_until_served_again": took})
        findings.expect(is_back, f"{what}: not served again after {took} s: {served.log[-300:]}")
        await asyncio.sleep(max(next_kill - time.monotonic(), 0.0))
    await traffic.stop()
    await traffic.close()
    extra = len(served.shared_memory()) - regions
    findings.leaks["shared_memory_regions"] = extra
    findings.expect(extra == 0, f"{extra} regions of shared memory left by killed servers")


async def _is_served(served: Served) -> bool:
    traffic = _traffic(served, Tally(), 0)  # a new connection: an old one waits before it retries
    is_back = await traffic.try_once()
    await traffic.close()
    return is_back


async def _quiet(served: Served, findings: Findings, when: str) -> dict[str, Footprint]:
    """Nobody asks anything: within seconds nothing may be held any more."""
    deadline = time.monotonic() + _IDLE_SECONDS
    active = used = -1  # not known yet
    while (active or used) and time.monotonic() < deadline:
        traffic = _traffic(served, Tally(), 0)
        try:
            stats = await traffic.ask_json("", "stats", stats=True, streaming=False)
        except asyncio.TimeoutError:
            findings.failures.append(f"{when}: a question was not answered in time")
        else:
            active, used = stats["Active Request Count"], stats["Used KV cache blocks"]
        await traffic.close()
        await asyncio.sleep(0.1)
    findings.leaks[f"active_requests {when}"] = active
    findings.leaks[f"used_blocks {when}"] = used
    findings.expect(active == 0 and used == 0, f"{when}: {active} active, {used} blocks in use")
    await asyncio.sleep(1.0)
    return served.footprints()


async def _check_ids(traffic: Traffic, findings: Findings | None) -> None:
    """The ids used last must all be free once their clients have gone."""
    if findings is None:
        return
    await asyncio.sleep(1.0)
    held = 0
    for name in traffic.names[-50:]:
        answer = await traffic.ask_json(name, "why", why=True)
        held += answer["state"] != "not in flight"
    findings.leaks["ids_held"] = held
    findings.expect(held == 0, f"{held} ids are held though nothing runs")


def _traffic(served: Served, tally: Tally, seed: int) -> Traffic:
    traffic = Traffic(served.grpc_url, served.http_port, seed)
    traffic.tally = tally
    return traffic


def _compare(
    before: dict[str, Footprint], after: dict[str, Footprint], seconds: float, findings: Findings
) -> None:
    for name in before:
        threads = after[name].num_threads - before[name].num_threads
        descriptors = after[name].num_descriptors - before[name].num_descriptors
        growth = after[name].resident_mb - before[name].resident_mb
        findings.leaks[name] = {
            "threads": threads,
            "descriptors": descriptors,
            "growth_mb": round(growth, 1),
        }
        # tritonserver starts threads of its own for load and keeps them.
        allowed = 0 if name == MODEL else 8
        findings.expect(threads <= allowed, f"{name}: {threads} more threads")
        findings.expect(descriptors <= allowed, f"{name}: {descriptors} more descriptors")
        if seconds < _SLOPE_NEEDS_SECONDS:
            findings.expect(growth < _MAX_GROWTH_MB, f"{name}: grew by {growth:.0f} MB")
    if seconds >= _SLOPE_NEEDS_SECONDS:
        for name, slope in _slopes(findings.samples).items():
            is_flat = slope < _MAX_SLOPE_MB_PER_HOUR
            findings.expect(is_flat, f"{name}: memory grows by {slope:.0f} MB/h")


def _slopes(samples: Sequence[tuple[float, dict[str, Footprint]]]) -> dict[str, float]:
    """MB per hour over the second half of the steady load, by program."""
    half = samples[len(samples) // 2 :]
    slopes = {}
    for name in half[0][1] if len(half) > 2 else ():
        points = [(at, each[name].resident_mb) for at, each in half if name in each]
        fit = statistics.linear_regression([at for at, _ in points], [mb for _, mb in points])
        slopes[name] = round(fit.slope * 3600, 1)
    return slopes


def _judge(tally: Tally, findings: Findings) -> None:
    findings.failures += tally.wrong[:20]
    counts = {number for number, times in tally.finals.items() if times}
    findings.expect(counts == {1}, f"finals per request: {dict(tally.finals)}")
    num_kills = len(findings.recoveries)
    lost = tally.outcomes["transport error"]
    findings.expect(num_kills > 0 or lost == 0, f"{lost} transport errors without a kill")


def reload_models(times: int) -> dict[str, Any]:
    """Load, use and unload the model again and again on a plain tritonserver."""
    scratch = Path(tempfile.mkdtemp(prefix="soak-"))
    seconds: list[float] = []
    with plain_triton(scratch) as triton:
        body = {"text_input": "1 2 3", "max_tokens": 20, "stream": False}
        url = f"{triton.http_url}/v2/models/tensorrt_llm/generate"
        prints: list[Footprint] = []
        for _ in range(times):
            began = time.monotonic()
            triton.control("load")
            seconds.append(time.monotonic() - began)
            answer = httpx.post(url, json=body, timeout=60, trust_env=False)
            answer.raise_for_status()
            prints.append(triton.footprint())
            triton.control("unload")
            triton.wait_for("UNAVAILABLE", 60.0)
        regions = triton.num_regions()
    shutil.rmtree(scratch, ignore_errors=True)
    warm, last = prints[min(5, times - 1)], prints[-1]
    growth = last.resident_mb - warm.resident_mb
    failures = [f"{regions} regions of shared memory left"] if regions else []
    if last.num_threads > warm.num_threads + 2 or last.num_descriptors > warm.num_descriptors + 2:
        failures.append("threads or descriptors grow with reloads")
    if growth > max(20.0, 0.5 * times):
        failures.append(f"the server grew by {growth:.0f} MB in {times} reloads")
    return {
        "reloads": times,
        "load_seconds_p50": round(statistics.median(seconds), 2),
        "growth_mb_since_the_fifth": round(growth, 1),
        "threads": last.num_threads - warm.num_threads,
        "descriptors": last.num_descriptors - warm.num_descriptors,
        "regions_left": regions,
        "failures": failures,
    }


def main() -> int:
    """Run the soak and write its report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="of load, over both policies")
    parser.add_argument("--reloads", type=int, default=None, help="default: 100 from 30 minutes on")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, help="default: results/soak.json")
    options = parser.parse_args()
    reloads = options.reloads
    if reloads is None:
        reloads = 100 if options.minutes >= 30 else 0
    kills = itertools.cycle(KILLS[:2] if options.minutes < 5 else KILLS)
    seconds = options.minutes * 60 / len(options.policies)
    result = describe_run("torch", "numpy", "nvidia-pytriton", "tritonclient")
    result["minutes"] = options.minutes
    result["workers"] = NUM_WORKERS
    result["settings"] = SETTINGS
    result["policies"] = [
        asyncio.run(soak(policy, seconds, kills, options.seed)) for policy in options.policies
    ]
    if reloads:
        result["reload"] = reload_models(reloads)
    parts = [*result["policies"], *([result["reload"]] if reloads else [])]
    result["failures"] = [failure for part in parts for failure in part["failures"]]
    path = write_result("soak", result, options.output)
    print(f"{path.name}: {len(result['failures'])} failures")
    for failure in result["failures"]:
        print(f"  {failure}")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
