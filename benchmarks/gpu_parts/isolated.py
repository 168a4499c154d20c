"""A part of a benchmark in a process of its own: what it breaks or hangs on costs itself only."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_GRACE = 5  # seconds a part gets to end by itself


def run_isolated(
    script: Path, arguments: Sequence[str], seconds: float, env: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """The rows that ``script`` writes with these arguments; it is ended when its time is over.

    It gets ``--rows FILE``, to which it appends JSON lines, and ``--until TIME``, when it should
    stop. A last row says what went wrong; the rows made before are kept.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.touch()
        command = [sys.executable, str(script), *arguments, "--rows", str(path)]
        command += ["--until", str(time.time() + seconds - _GRACE)]
        problem = ""
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds,
                env=None if env is None else dict(env),
            )
            if done.returncode:
                problem = f"ended with status {done.returncode}: {done.stderr.strip()[-500:]}"
        except subprocess.TimeoutExpired:
            problem = f"killed after {seconds:.0f} seconds"
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # cut off when its process was ended
                problem = problem or "its last row is not whole"
        if problem:
            yield {"error": problem}
