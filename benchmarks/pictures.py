"""What it takes to replay and draw a recording of very many requests: seconds and memory.

The recording is a prediction (the real scheduler, a made-up clock) of random requests that arrive
faster than they are served. Each command runs in a process of its own; its seconds are those of
the processor, so that a busy machine does not count.

    python benchmarks/pictures.py --requests 100000
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from inflight_recorder.cost_model import CostModel
from inflight_recorder.settings import Settings
from inflight_recorder.storage import RecordingFile, open_recording
from inflight_recorder.whatif import predict
from inflight_recorder.workload import make_workload
from inflight_scheduler import CapacitySchedulerPolicy
from report import describe_run, write_result

SETTINGS = Settings(CapacitySchedulerPolicy.MAX_UTILIZATION, 4000, 16, 256, 4096)
COST = CostModel(3000.0, 30.0, 2000.0, 200.0, 0.5)
RATE = 400.0
COMMANDS = {"replay": "", "svg": "out.svg", "page": "out.html", "trace": "out.json"}


def make_recording(num_requests: int, path: Path) -> None:
    """So many requests of 20 to 200 prompt tokens and 5 to 60 new ones."""
    jobs = make_workload(RATE, (20, 200), (5, 60), num_requests, seed=1)
    with closing(RecordingFile(path)) as sink:
        predict(SETTINGS, jobs, COST, sink=sink)


def measure(name: str, recording: Path, folder: Path) -> dict[str, Any]:
    """One command; it must succeed."""
    output = COMMANDS[name]
    command = "timeline" if output else "replay"
    options = ["-o", str(folder / output)] if output else []
    inflight = [sys.executable, "-m", "inflight_client.cli"]
    process = subprocess.Popen([*inflight, command, str(recording), *options])
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{command} failed"
    return {
        "form": name,
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_memory_mb": round(usage.ru_maxrss / 1024),
        "output_mb": round((folder / output).stat().st_size / 1e6, 2) if output else 0.0,
    }


def main() -> None:
    """Measure and write benchmarks/results/pictures.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        recording = Path(scratch) / "recording.jsonl"
        # In a process of its own: the peak memory of this one would count for those it starts.
        maker = get_context("spawn").Process(target=make_recording, args=(args.requests, recording))
        maker.start()
        maker.join()
        with open_recording(recording) as reader:
            num_iterations = sum(1 for _ in reader)
        rows = []
        for name in COMMANDS:
            rows.append(measure(name, recording, Path(scratch)))
            print(rows[-1], flush=True)
        result = {
            **describe_run("inflight"),
            "requests": args.requests,
            "iterations": num_iterations,
            "recording_mb": round(recording.stat().st_size / 1e6, 2),
            "rows": rows,
        }
    print(write_result("pictures", result, args.output))


if __name__ == "__main__":
    main()
