"""The benchmark of the scheduler runs; its figures are another matter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_case_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "scheduler.json"
    command = [sys.executable, "benchmarks/scheduler.py", "--active", "4", "9"]
    command += ["--iterations", "5", "--repeats", "1", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    names = ("policy", "active", "reuse", "design", "pool")
    cases = {tuple(row[name] for name in names) for row in rows}
    assert len(rows) == len(cases) == (3 + 2) * 2 * 2 * 3
    assert all(row["total_us_p50"] > 0 for row in rows)
