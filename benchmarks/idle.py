"""What an idle server costs, and how soon it answers the next request.

    python benchmarks/idle.py --seconds 60 --rounds 5 --compare OTHER/.venv/bin/python

Processor time and wake-ups of every process of `inflight serve` with the demo model, while no
request is there; after each such time one request, and when its first token came. ``--compare``
measures another checkout as well, which is installed for that interpreter.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import describe_run, write_result
from servers import HOST, ServeProcess, start_serve
from soak_parts.server import pids_of

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_SETTLE_SECONDS = 3.0  # after a request: the last numbers are still being published
_USER, _SYSTEM = 11, 12  # of the fields of /proc/PID/stat behind the name
_NUM_WARM = 3
_BODY = json.dumps({"text_input": "1 2 3 4", "max_tokens": 2, "stream": True})


@dataclass(frozen=True, slots=True)
class Use:
    """What one process has used since it began."""

    seconds: float
    num_wakeups: int

    def __sub__(self, other: Use) -> Use:
        return Use(self.seconds - other.seconds, self.num_wakeups - other.num_wakeups)

    def __add__(self, other: Use) -> Use:
        return Use(self.seconds + other.seconds, self.num_wakeups + other.num_wakeups)


def first_token_ms(server: ServeProcess) -> float:
    """Ask for two tokens; milliseconds until the first was here."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection(HOST, server.http_port, timeout=60)
    try:
        connection.request("POST", "/v2/models/ensemble/generate_stream", _BODY)
        answer = connection.getresponse()
        line = answer.readline()
        seconds = time.perf_counter() - began
        answer.read()
    finally:
        connection.close()
    if b'"text_output"' not in line:
        raise ValueError(f"no token: {line!r}")
    return 1000 * seconds


def uses(server: ServeProcess) -> dict[str, Use]:
    """By name, of the processes that run now."""
    return {name: _use_of(pid) for name, pid in pids_of(server).items()}


@contextmanager
def serving(python: Path, models: Sequence[str]) -> Iterator[ServeProcess]:
    """A server that was warmed up."""
    with tempfile.TemporaryDirectory(prefix="idle-") as folder:
        options = [f"--add={model}" for model in models]
        server = start_serve(Path(folder), options=options, python=str(python))
        try:
            server.wait_until_printed("inflight is ready")
            for _ in range(_NUM_WARM):
                first_token_ms(server)
            yield server
        finally:
            server.stop()


def measure(python: Path, models: Sequence[str], seconds: float, rounds: int) -> dict[str, Any]:
    """Idle for ``seconds``, then a request, so many times."""
    first_tokens: list[float] = []
    used: dict[str, Use] = {}
    idle_seconds = 0.0
    with serving(python, models) as server:
        for _ in range(rounds):
            time.sleep(_SETTLE_SECONDS)
            before, began = uses(server), time.monotonic()
            time.sleep(seconds)
            after = uses(server)
            idle_seconds += time.monotonic() - began
            for name in before:
                used[name] = used.get(name, Use(0.0, 0)) + (after[name] - before[name])
            first_tokens.append(first_token_ms(server))
    processes = {
        name: {
            "cpu_percent": round(100 * use.seconds / idle_seconds, 3),
            "wakeups_per_second": round(use.num_wakeups / idle_seconds, 1),
        }
        for name, use in sorted(used.items())
    }
    total = 100 * sum(use.seconds for use in used.values()) / idle_seconds
    return {
        "cpu_percent": round(total, 3),
        "processes": processes,
        "first_token_ms": [round(each, 2) for each in first_tokens],
        "first_token_ms_p50": round(statistics.median(first_tokens), 2),
    }


def _use_of(pid: int) -> Use:
    """Of all its threads; a voluntary switch is the end of a time without work."""
    process = Path(f"/proc/{pid}")
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[_USER]) + int(fields[_SYSTEM])
    num_wakeups = 0
    for thread in (process / "task").iterdir():
        with suppress(FileNotFoundError):  # it has just ended
            text = (thread / "status").read_text()
            num_wakeups += int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return Use(ticks / _TICKS_PER_SECOND, num_wakeups)


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each idle time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--add", action="append", default=[], help="another model, as for serve")
    parser.add_argument("--compare", type=Path, help="python of another checkout")
    parser.add_argument("--note", default="", help="put into the report: what else the machine did")
    parser.add_argument("-o", "--output", type=Path, help="default: results/idle.json")
    options = parser.parse_args()
    pythons = {"this": Path(sys.executable)}
    if options.compare:
        pythons["compared"] = options.compare.absolute()
    result = describe_run("torch", "numpy", "nvidia-pytriton")
    result |= {"note": options.note, "seconds": options.seconds, "rounds": options.rounds}
    result["servers"] = {}
    for name, python in pythons.items():
        found = measure(python, options.add, options.seconds, options.rounds)
        result["servers"][name] = found
        print(f"{name}: {found['cpu_percent']} %, {found['first_token_ms_p50']} ms")
    print(write_result("idle", result, options.output).name)


if __name__ == "__main__":
    main()
