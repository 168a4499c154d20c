"""What a call of the GPU benchmark leaves when it is killed, and what the documented calls take."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
# The benchmark as on a machine with a GPU, with one part of two rows, which then hangs.
SCRIPT = """
import sys, time, types
from pathlib import Path

torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_available=lambda: True)
sys.path.insert(0, {benchmarks!r})
import gpu
import gpu_parts.report

def hang(name, options, seconds):
    yield {{"row": 1, "tokens_per_s": 12000.0}}
    yield {{"row": 2, "tokens_per_s": 12500.0}}
    Path(__file__).with_name("hangs").touch()
    time.sleep(600)

gpu.__file__ = __file__  # what the process of a part is started with
gpu.PARTS.clear()
gpu.PARTS["slow"] = gpu.Part("slow.rows", 500, 500)
gpu.run_part = hang
gpu_parts.report.describe = lambda is_dry, script: {{"gpu": "fast"}}
gpu.main()
"""


# Compiles what some rows launch, on a GPU that is not here, and asks what is left to compile.
COMPILE = """
import json
import torch
from gpu_parts import compiling
from gpu_parts.common import Setting
from support.compile_recorder import record_keys

setting = Setting(torch.device("meta"), is_dry=False, is_quick=False, stop_at=float("inf"))
with record_keys(90):
    calls = compiling.kernel_calls(setting, ["quantize_fp8"])
    rows = [compiling.compile_kernel(setting, *call) for call in calls]
    left = compiling.kernel_calls(setting, ["quantize_fp8"])
print(json.dumps([len(calls), rows, len(left)]))
"""


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Path]:
    """The output of a run that was killed while its part hung."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(benchmarks=str(BENCHMARKS)), encoding="utf-8")
    output = tmp_path / "out" / "gpu.json"
    output.parent.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(script), "--output", str(output)],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    try:
        while not (tmp_path / "hangs").exists():
            assert process.poll() is None, "it ended before its part hung"
            time.sleep(0.05)
        process.kill()
        process.wait()
        yield output
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the process of the part lives on


def test_a_killed_call_leaves_the_rows_of_the_part_that_ran(killed: Path) -> None:
    assert lines_of(killed.with_suffix(".rows.jsonl")) == [
        {"part": "run", "gpu": "fast"},
        {"part": "slow", "process": 0, "row": 1, "tokens_per_s": 12000.0},
        {"part": "slow", "process": 0, "row": 2, "tokens_per_s": 12500.0},
    ]
    assert json.loads(killed.read_text(encoding="utf-8")) == {"gpu": "fast", "parts": {}}


def test_kernels_are_compiled_without_being_run(tmp_path: Path) -> None:
    """One row of each kernel is enough, and no tensor has memory."""
    folders = ("backend", "scheduler", "kernels", "client", "benchmarks", "tests")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in folders),
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_calls, rows, num_left = json.loads(done.stdout)
    assert 1 <= num_calls == len(rows) < 6, "there are more rows"
    assert all(set(row) == {"op", "seconds"} for row in rows)
    assert num_left == 0
    assert list((tmp_path / "cache").rglob("*.cubin"))


@pytest.fixture
def gpu() -> Iterator[Any]:
    """The script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield import_module("gpu")


def test_the_documented_calls_fit_half_an_hour(gpu: Any) -> None:
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").replace("\\\n", "")
    calls = text.partition("## The first calls, in order")[2].partition("**Memory errors")[0]
    seconds = []
    for line in re.findall(r"python3 (benchmarks/(?:gpu|peers)\.py --.*)", calls):
        assert "--output $OUT/" in line
        parts = re.search(r"--parts ([^-]*) --", line)
        assert parts is None or set(parts[1].split()) <= set(gpu.PARTS)
        limit = re.search(r"--seconds (?:\$\(\()?(\d+)( - SECONDS)?", line)
        assert limit, f"{line} takes as long as it likes"
        seconds.append(int(limit[1]))
    # Checks are within the first call's seconds; ``again`` runs where they failed, in its place.
    checks, first, again, second, *others = seconds
    assert checks + again < first
    starts = 3 * 120
    assert checks < first <= 540
    assert starts + first + second + max(others) + 60 <= 30 * 60


def test_no_part_goes_on_beyond_the_time_of_all(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports took 40 seconds, and the part before took more than its own."""
    given: list[float] = []

    def run(name: str, options: argparse.Namespace, seconds: float) -> Iterator[dict[str, Any]]:
        given.append(seconds)
        yield {}

    monkeypatch.setattr(gpu, "run_isolated", run)
    parts = ["ceilings", "compile"]  # 30 and 40 of 70
    options = argparse.Namespace(parts=parts, seconds=140, dry_run=False, quick=False)
    for took, name, later in ((40, "ceilings", parts[1:]), (110, "compile", [])):
        monkeypatch.setattr(gpu, "_BEGAN", time.monotonic() - took)
        assert list(gpu._rows(name, later, options)) == [{}]
    assert given[0] == 60, "its own, since the one behind it needs the rest"
    assert given[1] == pytest.approx(30, abs=5)
    monkeypatch.setattr(gpu, "_BEGAN", time.monotonic() - 135)
    assert list(gpu._rows("compile", [], options)) == [{"error": "no time was left"}]
