"""The kernel benchmarks run where there is no GPU, on tiny shapes, and claim no figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OPS = {path.stem for path in (ROOT / "kernels" / "inflight_kernels" / "ops").rglob("[a-z]*.py")}


def test_dry_run(tmp_path: Path) -> None:
    """All benchmarks: rows for every op, and nothing in them that was not measured."""
    output = tmp_path / "kernels.json"
    search = [str(ROOT / "kernels"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "kernel_ops.run_all", "--dry-run", "--output", str(output)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["dry_run"] is True
    assert set(report["ops"]) == OPS
    for rows in report["ops"].values():
        assert rows
        assert not any("us" in row or "gb_per_s" in row for row in rows)
