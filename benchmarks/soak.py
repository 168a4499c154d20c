"""Mixed load for as long as you like, with everything that users and machines do to a server.

Per policy: a warm-up until what fills up is full; the same traffic for a steady time (of every
kind: three in ten requests are cancelled; stops, resets, bad input) on an oversubscribed KV pool; a
quiet moment in which everything must be free again; then that traffic while processes are killed
and frozen. The report says what came of every request and what was left behind. From an hour on,
what memory does must have been judged as well.

    python benchmarks/soak.py --minutes 60

Exit code 1 if anything is not as promised; ``failures`` in the report says what. Times allow for a
machine that does other work; counts are exact.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from report import describe_run, write_result
from soak_parts import judge, quiet
from soak_parts.checkpoints import KINDS
from soak_parts.judge import Samples
from soak_parts.quiet import Asker
from soak_parts.server import (
    LAUNCHER,
    MODEL,
    OPENAI_MODEL,
    TRITONSERVER,
    Footprint,
    Served,
    judge_stop,
    repairs,
)
from soak_parts.traffic import NotAnswered, OpenAIAddress, Tally, Traffic

POLICIES = {"guaranteed_no_evict": "experts", "max_utilization": "windows"}
"""And the kind of model that is served with each."""
NUM_WORKERS = 40
# 24 of the 40 requests may be active; the pool holds a quarter of what those can need.
SETTINGS: dict[str, Any] = {
    "max_batch_size": 24,
    "max_beam_width": 2,
    "max_queue_size": 12,
    "max_seq_len": 2200,
    "max_tokens_in_paged_kv_cache": 24 * 2200 // 4,
    "enable_chunked_context": "true",
    "stall_seconds": 30,
    "logits_processors": quiet.PROCESSOR,
    "lora_cache_host_memory_bytes": 1_000_000,
}
# The recorder keeps 8,192 iterations; when it has filled that four times, malloc has found the
# places for it, too.
_WARM_ITERATIONS = 4 * 8192
_SETTLED_SECONDS = 600.0
_MIN_WARM_UP, _LOAD = 0.1, 0.88  # shares of the time of a policy
_MIN_KILL_SECONDS = 18.0
_SERVE_SECONDS = 75.0  # after a recovery: a server that fails within 60 s has failed in a row
_IDLE_SECONDS = 120.0
_QUEUE_SECONDS = 20.0
_KEPT_SECONDS = 20.0
_CHECK_SECONDS = 1.5  # of the steady time, for the two looks at the queue after it
_RECOVERY_SECONDS = 180.0
# A stream that was open when a process was killed or frozen ends within 2 s, or 6 s after the
# stall; what other work on the machine may add comes on top.
_NOTICE_SECONDS = {signal.SIGKILL: 2.0, signal.SIGSTOP: 6.0 + SETTINGS["stall_seconds"]}
_BUSY_SECONDS = 6.0

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

    recoveries: list[dict[str, Any]] = field(default_factory=list)
    leaks: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    load_averages: list[float] = field(default_factory=list)
    iterations_until_free: dict[str, int] = field(default_factory=dict)

    def expect(self, is_true: bool, otherwise: str) -> None:
        """Note a failure unless ``is_true``."""
        if not is_true:
            self.failures.append(otherwise)


class PolicySoak:
    """One policy: warm-up, steady load, quiet, kills, quiet, stop."""

    def __init__(
        self, policy: str, model: str, seconds: float, kills: Iterator[Kill], seed: int
    ) -> None:
        self._policy, self._model = policy, model
        self._seconds = seconds
        self._kills = kills
        self._seeds = itertools.count(1000 * seed)
        self._kind = KINDS[model]
        self._served = Served({**SETTINGS, "batch_scheduler_policy": policy}, self._kind)
        self._findings = Findings()
        self._kill_seconds = max((1 - _LOAD) * seconds, _MIN_KILL_SECONDS)
        self._questions = Tally()  # and whatever else is asked beside the traffic

    async def run(self) -> dict[str, Any]:
        """Its part of the report."""
        try:
            return await self._run()
        except BaseException:
            print(self._served.log, file=sys.stderr)
            raise

    @property
    def failures(self) -> list[str]:
        """What is wrong so far."""
        return self._findings.failures

    async def _run(self) -> dict[str, Any]:
        served, findings = self._served, self._findings
        calm, disturbed = Tally(), Tally()
        warm_up, steady = Samples(), Samples()
        asker = Asker(self._traffic(self._questions))
        asker.start()
        try:
            began = time.monotonic()
            names = await self._load(calm, warm_up, lambda: self._is_warm_up_over(began, asker))
            is_warm = _is_warm(began, asker)
            before = await self._quiet("after the warm-up", names)
            num_before, cancelled_before = calm.num_requests, calm.num_cancelled
            end = began + self._seconds - self._kill_seconds - _CHECK_SECONDS
            names = await self._load(calm, steady, lambda: time.monotonic() > end)
            after = await self._quiet("after the steady load", names)
            await asker.stop()
            findings.leaks.update(self._noted(judge.compare(before, after)))
            judged = judge.judge_memory(
                warm_up,
                steady,
                is_warm,
                calm.num_requests - num_before,
                calm.num_cancelled - cancelled_before,
                self._seconds,
            )
            names = await self._kill(disturbed, self._kill_seconds)
            last = await self._quiet("after the kills", names)
            killed = judge.compare({LAUNCHER: after[LAUNCHER]}, last)
            findings.leaks["launcher after the kills"] = self._noted(killed)[LAUNCHER]
            code, stop_seconds = served.stop()
            left = served.left_behind()
        finally:
            served.stop()
        findings.failures += judge_stop(code, stop_seconds, left)
        findings.leaks["left_after_stop"] = len(left)
        repaired = repairs(served.log)
        findings.leaks["repairs"] = len(repaired)
        findings.expect(not repaired, f"{len(repaired)} repairs: {repaired[:3]}")
        findings.failures += judge.judge_answers(calm, disturbed, self._questions, asker.wrong)
        if findings.failures:
            print(served.log, file=sys.stderr)
        shutil.rmtree(served.scratch, ignore_errors=True)
        finals = self._questions.to_json()["finals_per_request_read_to_its_end"]
        return {
            "policy": self._policy,
            "model": self._model,
            "load_average": judge.loads(findings.load_averages),
            "load": {"seconds": round(warm_up.seconds + steady.seconds), **calm.to_json()},
            "kills": disturbed.to_json(),
            "questions": asker.to_json() | {"finals_per_request_read_to_its_end": finals},
            "leaks": findings.leaks,
            "iterations_until_free": findings.iterations_until_free,
            "memory": self._noted(judged),
            "recoveries": findings.recoveries,
            "stop_seconds": round(stop_seconds, 2),
            "failures": findings.failures,
        }

    def _is_warm_up_over(self, began: float, asker: Asker) -> bool:
        passed = time.monotonic() - began
        longest = judge.longest_warm_up(self._seconds - self._kill_seconds)
        return passed > _MIN_WARM_UP * self._seconds and (
            _is_warm(began, asker) or passed > longest
        )

    def _noted(self, result: tuple[dict[str, Any], list[str]]) -> dict[str, Any]:
        report, failures = result
        self._findings.failures += failures
        return report

    def _traffic(self, tally: Tally) -> Traffic:
        served = self._served
        traffic = Traffic(
            served.grpc_url,
            served.http_port,
            OpenAIAddress(served.openai_port, OPENAI_MODEL),
            next(self._seeds),
            has_beams=self._kind.has_beams,
        )
        traffic.tally = tally
        return traffic

    async def _load(
        self, tally: Tally, samples: Samples, is_over: Callable[[], bool]
    ) -> Sequence[str]:
        """The ids that were used last."""
        traffic = self._traffic(tally)
        traffic.start(NUM_WORKERS)
        period = min(5.0, max(0.5, self._seconds / 200))
        while not is_over():
            await asyncio.sleep(period)
            samples.add(time.monotonic(), self._served.footprints())
            self._findings.load_averages.append(os.getloadavg()[0])
        await traffic.stop()
        await traffic.close()
        return traffic.names

    async def _kill(self, tally: Tally, seconds: float) -> Sequence[str]:
        """The ids that were used last."""
        served, findings = self._served, self._findings
        regions = len(served.shared_memory())
        findings.expect(regions > 0, "of a server that runs no shared memory was seen")
        traffic = self._traffic(tally)
        traffic.start(NUM_WORKERS)
        outages: list[tuple[float, float]] = []
        end = time.monotonic() + seconds
        while not findings.recoveries or time.monotonic() < end:
            await asyncio.sleep(min(2.0, seconds / 4))
            what, program, number = next(self._kills)
            served.signal(program, number)
            began = time.monotonic()
            while not (is_back := await self._is_served()):
                if time.monotonic() - began > _RECOVERY_SECONDS:
                    break
                await asyncio.sleep(0.05)
            back = time.monotonic()
            outages.append((began, back))
            took = round(back - began, 2)
            findings.expect(
                is_back, f"{what}: not served again after {took} s: {served.log[-300:]}"
            )
            await asyncio.sleep(min(_SERVE_SECONDS, seconds / 3))
            limit = _NOTICE_SECONDS[number] + _BUSY_SECONDS
            open_since = traffic.open_since.values()
            report, failures = judge.judge_ends(traffic.spans, open_since, began, back, limit)
            findings.failures += [f"{what}: {failure}" for failure in failures]
            findings.recoveries.append({"what": what, "seconds_until_served_again": took, **report})
        await traffic.stop()
        await traffic.close()
        findings.failures += judge.judge_harm(traffic.harmed_at, outages)
        extra = len(served.shared_memory()) - regions
        findings.leaks["shared_memory_regions"] = extra
        findings.expect(extra == 0, f"{extra} regions of shared memory left by killed servers")
        return traffic.names

    async def _is_served(self) -> bool:
        traffic = self._traffic(
            self._questions
        )  # a new connection: an old one waits before it retries
        is_back = await traffic.try_once()
        await traffic.close()
        return is_back

    async def _quiet(self, when: str, names: Sequence[str]) -> dict[str, Footprint]:
        """No request is sent: within seconds nothing may be held any more, nor the last ids, nor
        a place in the queue."""
        await self._wait_until_free(when)
        await self._check_ids(when, names[-20:])
        await self._check_queue(when)
        await self._wait_until_free(f"{when}, once full again")
        await self._check_kept(when)
        await asyncio.sleep(1.0)
        return self._served.footprints()

    async def _wait_until_free(self, when: str) -> None:
        findings = self._findings
        rest = await quiet.wait_until_free(lambda: self._traffic(self._questions), _IDLE_SECONDS)
        findings.leaks[f"active_requests {when}"] = rest.active
        findings.leaks[f"used_blocks {when}"] = rest.used_blocks
        findings.iterations_until_free[when] = rest.iterations
        findings.failures += [f"{when}: {failure}" for failure in rest.failures]

    async def _check_ids(self, when: str, names: Sequence[str]) -> None:
        """Each of the ids used last must be free for a new request."""
        traffic = self._traffic(self._questions)
        held = [why for name in names if (why := await traffic.why_held(name))]
        await traffic.close()
        self._findings.leaks[f"ids_held {when}"] = len(held)
        self._findings.expect(not held, f"{when}: {len(held)} ids are held: {held[:3]}")

    async def _check_kept(self, when: str) -> None:
        """Nothing in the model process remembers a request that has ended."""
        kept = quiet.count_kept(lambda: self._traffic(self._questions), _KEPT_SECONDS)
        self._findings.leaks[f"kept_objects {when}"], failures = await kept
        self._findings.failures += [f"{when}: {failure}" for failure in failures]

    async def _check_queue(self, when: str) -> None:
        """It must be empty; what a client has left behind may take a moment to be gone."""
        findings = self._findings
        deadline = time.monotonic() + _QUEUE_SECONDS
        forgotten, errors = -1, list[str]()
        while forgotten and time.monotonic() < deadline:
            traffic = self._traffic(self._questions)
            try:
                asked = quiet.count_forgotten(traffic, SETTINGS["max_batch_size"])
                forgotten, errors = await asked
            except (asyncio.TimeoutError, grpc.RpcError, NotAnswered) as error:
                errors = [f"not answered: {error!r:.200}"]
            await traffic.close()
            await asyncio.sleep(0.1)
        findings.leaks[f"forgotten_in_the_queue {when}"] = forgotten
        findings.expect(forgotten == 0, f"{when}: {forgotten} requests forgotten in the queue")
        findings.failures += [f"{when}: all places taken: {each}" for each in errors[:3]]


def main() -> int:
    """Run the soak and write its report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="of load, over both policies")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--model", choices=KINDS, help="default: another one for each policy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--note", default="", help="put into the report: what else the machine did")
    parser.add_argument("-o", "--output", type=Path, help="default: results/soak.json")
    options = parser.parse_args()
    kills = itertools.cycle(KILLS[:2] if options.minutes < 5 else KILLS)
    seconds = options.minutes * 60 / len(options.policies)
    result = describe_run("torch", "numpy", "nvidia-pytriton", "tritonclient")
    result["minutes"] = options.minutes
    result["note"] = options.note
    result["workers"] = NUM_WORKERS
    result["settings"] = SETTINGS
    result["warm_up_seconds"] = _SETTLED_SECONDS
    result["max_slope_mb_per_hour"] = judge.MAX_MB_PER_HOUR
    result["max_bytes_per_cancelled_call"] = judge.MAX_BYTES_PER_CANCELLED_CALL
    result["policies"] = [
        asyncio.run(_soak(policy, options.model or POLICIES[policy], seconds, kills, options.seed))
        for policy in options.policies
    ]
    result["failures"] = [failure for part in result["policies"] for failure in part["failures"]]
    path = write_result("soak", result, options.output)
    print(f"{path.name}: {len(result['failures'])} failures")
    for failure in result["failures"]:
        print(f"  {failure}")
    return 1 if result["failures"] else 0


def _is_warm(began: float, asker: Asker) -> bool:
    is_full = asker.num_iterations >= _WARM_ITERATIONS
    return is_full and time.monotonic() - began > _SETTLED_SECONDS


async def _soak(
    policy: str, model: str, seconds: float, kills: Iterator[Kill], seed: int
) -> dict[str, Any]:
    soak = None
    try:
        soak = PolicySoak(policy, model, seconds, kills, seed)
        part = await soak.run()
    except Exception as error:  # what the other policy shows must not be lost
        traceback.print_exc()
        found = soak.failures if soak is not None else []
        part = {"policy": policy, "failures": [*found, f"the soak itself failed: {error!r:.300}"]}
    print(policy, part["failures"], part.get("memory"), flush=True)
    return part


if __name__ == "__main__":
    sys.exit(main())
