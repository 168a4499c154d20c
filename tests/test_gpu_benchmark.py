"""`benchmarks/gpu.py` where there is no GPU: every part runs, and none claims a figure."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

# A minute or two of one core; a busy machine may share it among many.
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
# Of what a GPU machine has, the script may need torch, triton, numpy and safetensors.
RUN_WITHOUT = """
import runpy, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

blocked = set("typer rich tritonclient hypothesis httpx transformers pytriton grpc".split())
sys.meta_path.insert(0, Blocker())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FIGURES = ("us", "ms", "gb_per_s", "tflop_per_s", "of_floor", "of_published", "tokens_per_s")


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    """The script as a module, its parts importable."""
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield module


def test_dry_run(tmp_path: Path, gpu: ModuleType) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, "-c", RUN_WITHOUT, str(SCRIPT), "--dry-run", "--output", str(output)]
    # No PYTHONPATH, and another folder: the script finds its own packages.
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "PYTHONPATH": "",
            "OMP_NUM_THREADS": "1",
            "INFLIGHT_EARLY_LAUNCH": "1",  # nothing to the interpreter
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["dry_run"] is True
    assert report["early_launch"] is True
    assert set(report["parts"]) == set(gpu.PARTS)
    rows = [row for part in report["parts"].values() for row in part]
    assert not [row for row in rows if "error" in row and "check" not in row]
    assert all(row["ok"] for name in gpu._CHECKS for row in report["parts"][name])
    assert not [row for row in rows if any(figure in row for figure in FIGURES)]


def options(**changes: object) -> argparse.Namespace:
    """Options of a dry run."""
    values = {"dry_run": True, "quick": False, "ceilings": None, "parts": None, "share": None}
    values["seconds"] = values["rows"] = None
    return argparse.Namespace(**{**values, **changes})


def test_a_part_that_hangs_or_dies_is_a_row(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    [row] = gpu.run_isolated("ceilings", options(), seconds=0.1)
    assert row["error"].startswith("killed after")
    monkeypatch.setitem(gpu.PARTS, "broken", gpu.Part("nowhere.rows", 1, 1))
    [row] = gpu.run_part("broken", options(), seconds=1)
    assert "nowhere" in row["error"]
    # The child knows no such part and ends with a status; its stderr says why.
    [row] = gpu.run_isolated("broken", options(), seconds=240)
    assert "status 1" in row["error"]
    assert "KeyError: 'broken'" in row["stderr"]


def test_a_part_in_two_processes(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.PARTS, "compile", gpu.PARTS["compile"]._replace(num_processes=2))
    rows = list(gpu.run_isolated("compile", options(), seconds=800))
    models = [row["model"] for row in rows if "model" in row]
    assert models == ["8B", "13B fp8", "8B defaults", "8B fp8", "14B"]
    assert not [row for row in rows if "error" in row]


def test_a_part_stops_when_its_time_is_over(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_parts.common import Row, Setting

    def forever(setting: Setting) -> object:
        while True:
            yield Row(left=setting.seconds_left)

    monkeypatch.setattr("gpu_parts.ceilings.rows", forever)
    monkeypatch.setattr("torch.device", lambda name: name)
    start = time.monotonic()
    *rows, last = gpu.run_part("ceilings", options(dry_run=False), seconds=0.05)
    assert rows
    assert "stopped after" in last["error"]
    assert time.monotonic() - start < 30


def test_a_part_counts_from_before_its_imports(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it goes on until it is killed, and what it was making then is lost."""
    from gpu_parts import common

    class Slow(ModuleType):
        def __getattr__(self, name: str) -> object:
            time.sleep(0.2)
            return getattr(common, name)

    def told(setting: common.Setting) -> object:
        yield common.Row(left=setting.seconds_left)

    monkeypatch.setattr("gpu_parts.ceilings.rows", told)
    monkeypatch.setitem(sys.modules, "gpu_parts.common", Slow("gpu_parts.common"))
    [row] = gpu.run_part("ceilings", options(), seconds=10)
    assert row["left"] < 9.8


def test_times_add_up(gpu: ModuleType) -> None:
    full = options(dry_run=False)
    assert sum(gpu._seconds(name, full) for name in gpu.PARTS) <= gpu._FULL_SECONDS <= 540
    quick = options(quick=True, dry_run=False)
    assert sum(gpu._seconds(name, quick) for name in gpu.PARTS) <= 180
    alone = options(parts=["E3"], dry_run=False)
    assert gpu._seconds("E3", alone) == gpu._seconds("E4/14B", options(parts=["E4/14B"])) == 530
    assert gpu._seconds("tiles", options(dry_run=False)) == 0, "only when it is named"
    both = options(parts=["checks", "engines"], seconds=115, dry_run=False)
    assert [gpu._seconds(name, both) for name in ("checks", "engines")] == [55, 60]
    short = options(seconds=265, dry_run=False)
    assert gpu._seconds("E1/O1", short) == 20


@pytest.mark.parametrize(
    ("kernel", "engine", "status"),
    [
        ({"ok": True}, {"ok": True}, 0),
        ({"ok": True}, {"ok": False, "error": "0.3"}, 3),
        ({"ok": True}, {"error": "killed after 94 seconds"}, 3),
        ({"ok": False, "error": "0.3"}, {"ok": True}, 1),
        ({"error": "no time was left"}, {"ok": False, "error": "0.3"}, 1),
        ({"check": "sample bfloat16", "ok": False}, {"ok": True}, 1),
        ({"check": "context 32/8 bfloat16", "ok": False}, {"ok": True}, 4),
        ({"check": "invariant_linear bfloat16", "ok": False}, {"ok": False}, 4),
    ],
)
def test_the_status_says_which_checks_failed(
    gpu: ModuleType, kernel: dict[str, object], engine: dict[str, object], status: int
) -> None:
    """Where only engines fail the documented call goes on with figures."""
    good = {"ok": True, "error": "1e-4"}
    parts = {"checks": [good, kernel], "engines": [engine, good], "K1": [{"error": "a tile"}]}
    assert gpu._status(parts) == status
    assert gpu._status({"K1": [{"error": "a tile"}]}) == 0


def test_ceilings_are_the_largest_that_were_measured(gpu: ModuleType) -> None:
    rows = [
        {"what": "copy", "gb_per_s": 4300.0},
        {"what": "read (sum)", "gb_per_s": 4400.0},
        {"what": "square bf16", "tokens": 8192, "tflop_per_s": 790.0},
        {"error": "fp8 failed"},
    ]
    assert json.loads(gpu._ceilings(rows)) == {
        "is_measured": True,
        "read_bytes": 4.4e12,
        "bf16_flops": 7.9e14,
    }
    assert gpu._ceilings([{"error": "all failed"}]) == ""
