"""A part of a benchmark in processes of its own: what it breaks or hangs on costs itself only.

They append their rows to one file, a line each, the moment a row is made: whatever is killed, the
processes or the script that started them, the file has what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_parts.report import shorten

GRACE = 5  # seconds a part gets to end by itself
_MOST = 8000  # characters of its stderr: a recording that fails takes some 4,000 to say where

Row = dict[str, Any]


def parse(parser: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """The options of a script whose parts run so, besides those that ``parser`` has: how much to
    run, where to write (in ``$OUT`` if that is set), and what `run_isolated` gives to a part.

    An error where there is no GPU, unless the run is dry.
    """
    parser.add_argument("--quick", action="store_true", help="three minutes instead of nine")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU, no figures")
    parser.add_argument("--seconds", type=float, help="of the whole run, imports included")
    out = Path(os.environ["OUT"]) / f"{name}.json" if os.environ.get("OUT") else None
    parser.add_argument("--output", type=Path, default=out, help="write JSON here")
    for option, kind in (("part", str), ("rows", Path), ("until", float), ("share", str)):
        parser.add_argument(f"--{option}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: it decides then
        return options
    import torch

    if not torch.cuda.is_available():
        parser.error("no CUDA device here; --dry-run shows that the script works")
    return options


def keep_row(file: Path, part: str, process: int, row: Row) -> None:
    """Append a row to a file that other processes append to as well, in one write."""
    line = json.dumps({"part": part, "process": process, **row}) + "\n"
    with file.open("ab", buffering=0) as stream:
        stream.write(line.encode())


def run_isolated(
    script: Path,
    part: str,
    arguments: Sequence[str],
    seconds: float,
    rows: Path | None = None,
    env: Mapping[str, str] | None = None,
    num_processes: int = 1,
) -> Iterator[Row]:
    """The rows that ``script`` writes with these arguments; it is ended when its time is over.

    It gets ``--part``, ``--rows FILE`` for `keep_row`, and ``--until TIME``, when it should stop;
    of several processes each gets ``--share NUMBER/COUNT`` of the work. A last row of each has its
    stderr, if it wrote there, and says what went wrong, if anything did. ``rows`` is kept, and may
    hold those of earlier parts; without it the file goes when the part has ended.
    """
    end = time.monotonic() + seconds
    env = dict(os.environ if env is None else env)
    if num_processes > 1:  # beside one another, each has its part of the cores
        num_threads = len(os.sched_getaffinity(0)) // num_processes
        env.setdefault("OMP_NUM_THREADS", str(max(1, num_threads)))
    processes: list[_Process] = []
    with tempfile.TemporaryDirectory() as folder:
        rows = rows or Path(folder) / "rows.jsonl"
        rows.touch()
        start = rows.stat().st_size
        command = [sys.executable, str(script), "--part", part, *arguments]
        command += ["--until", str(time.time() + seconds - GRACE), "--rows", str(rows)]
        try:
            for number in range(num_processes):
                share = ["--share", f"{number}/{num_processes}"] if num_processes > 1 else []
                log = Path(folder) / f"{number}.log"
                processes.append(_Process([*command, *share], log, env))
            for number, process in enumerate(processes):
                label = f"process {number} of {num_processes} " if num_processes > 1 else ""
                last = process.last_row(end, seconds, label)
                yield from _kept(rows, start, number)
                if last:
                    yield last
        finally:
            for process in processes:
                process.stop()


def _kept(file: Path, start: int, process: int) -> Iterator[Row]:
    """The rows of a process behind the first ``start`` bytes."""
    for line in file.read_bytes()[start:].splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # not whole: the disk is full, and the process says so
            continue
        del row["part"]
        if row.pop("process") == process:
            yield row


class _Process:
    """One run of the script, with its stderr in a file."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self._log = log
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=stream, env=dict(env)
            )

    def last_row(self, end: float, seconds: float, label: str) -> Row:
        """What went wrong and what it said, once it has ended; at ``end`` it is killed."""
        problem = ""
        try:
            status = self._process.wait(max(0.0, end - time.monotonic()))
            problem = f"{label}ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            self.stop()
            problem = f"{label}killed after {seconds:.0f} seconds"
        last: Row = {"error": problem} if problem else {}
        said = self._log.read_text(encoding="utf-8", errors="replace").strip()
        return {**last, "stderr": shorten(said, _MOST)} if said else last

    def stop(self) -> None:
        """End it if it runs."""
        self._process.kill()
        self._process.wait()
