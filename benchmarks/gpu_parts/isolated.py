"""A part of a benchmark in processes of its own: what it breaks or hangs on costs itself only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_GRACE = 5  # seconds a part gets to end by itself
_TAIL = 800  # characters of what it wrote to stderr

Row = dict[str, Any]


def run_isolated(
    script: Path,
    arguments: Sequence[str],
    seconds: float,
    env: Mapping[str, str] | None = None,
    num_processes: int = 1,
) -> Iterator[Row]:
    """The rows that ``script`` writes with these arguments; it is ended when its time is over.

    It gets ``--rows FILE``, to which it appends JSON lines, and ``--until TIME``, when it should
    stop; of several processes each gets ``--share NUMBER/COUNT`` of the work. A last row of each
    has the end of its stderr, if it wrote there, and says what went wrong, if anything did: the
    rows made before are kept.
    """
    end = time.monotonic() + seconds
    command = [sys.executable, str(script), *arguments]
    command += ["--until", str(time.time() + seconds - _GRACE)]
    env = dict(os.environ if env is None else env)
    if num_processes > 1:  # beside one another, each has its part of the cores
        num_threads = len(os.sched_getaffinity(0)) // num_processes
        env.setdefault("OMP_NUM_THREADS", str(max(1, num_threads)))
    processes: list[_Process] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number in range(num_processes):
                share = ["--share", f"{number}/{num_processes}"] if num_processes > 1 else []
                processes.append(_Process([*command, *share], Path(folder) / str(number), env))
            for number, process in enumerate(processes):
                label = f"process {number} of {num_processes} " if num_processes > 1 else ""
                yield from process.rows(end, seconds, label)
        finally:
            for process in processes:
                process.stop()


class _Process:
    """One run of the script, its rows and its stderr in files."""

    def __init__(self, command: Sequence[str], path: Path, env: Mapping[str, str]) -> None:
        self._rows, self._log = path.with_suffix(".jsonl"), path.with_suffix(".log")
        self._rows.touch()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--rows", str(self._rows)],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=dict(env),
            )

    def rows(self, end: float, seconds: float, label: str) -> Iterator[Row]:
        """What it wrote until it ended, or until ``end``, when it is killed."""
        problem = ""
        try:
            status = self._process.wait(max(0.0, end - time.monotonic()))
            problem = f"{label}ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            self.stop()
            problem = f"{label}killed after {seconds:.0f} seconds"
        for line in self._rows.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # cut off when its process was ended
                problem = problem or f"{label}wrote a last row that is not whole"
        last: Row = {"error": problem} if problem else {}
        said = self._log.read_text(encoding="utf-8", errors="replace").strip()[-_TAIL:]
        if said:
            last["stderr"] = said
        if last:
            yield last

    def stop(self) -> None:
        """End it if it runs."""
        self._process.kill()
        self._process.wait()
