"""Every script of benchmarks/ and tools/ starts; those for a GPU run dry on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
    path.relative_to(ROOT).as_posix()
    for folder in ("benchmarks", "tools")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]
FIGURES = ("us", "ms", "gb_per_s", "tflop_per_s", "of_floor", "of_published", "tokens_per_s")
# Of what a GPU machine has, gpu.py may need torch, triton, numpy, tokenizers and safetensors.
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


def run(folder: Path, *arguments: str | Path, may_fail: bool = False, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, int(may_fail)), done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_starts(script: str, tmp_path: Path) -> None:
    run(tmp_path, ROOT / script, "--help")


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("idle", "--seconds 0.5 --rounds 1"),
        ("live_page", "--streams 2 --tokens 8 --viewers 1 --rounds 1"),
        ("memory", "--model tiny --schemes awq"),
        ("pictures", "--requests 50"),
        ("quantized", "--model random --requests 1 2 --prompt 8 --tokens 4 --rounds 1"),
        ("ranks", "--small --rounds 1 --steps 2 --prompt 160 --settings one pp2"),
        ("recorder", "--requests 2 --prompts 8 --tokens 9 --thousands 8 --iterations 20"),
        ("reload", "--times 2"),
        ("responses", "--tokens 8 --rounds 1"),
        ("scheduler", "--active 8 --repeats 1 --iterations 3"),
        ("serving", "--streams 2 --tokens 8 --rounds 1"),
        ("starts", "--models demo --rounds 1"),
        ("tiny_requests", "--requests 1000 --warm-up 50"),
        ("whatif", "--rounds 1 --requests 10"),
    ],
)
def test_a_script_measures(script: str, options: str, tmp_path: Path) -> None:
    """Some work in small; those that judge their figures may end with 1."""
    output = tmp_path / "report.json"
    run(
        tmp_path,
        ROOT / f"benchmarks/{script}.py",
        *options.split(),
        "--output",
        output,
        may_fail=True,
    )
    report = json.loads(output.read_text(encoding="utf-8"))
    assert {"date", "commit", "command", "processor", "versions"} <= report.keys()


def test_every_committed_report_has_its_script() -> None:
    for report in (ROOT / "benchmarks/results").glob("*.json"):
        command = json.loads(report.read_text(encoding="utf-8"))["command"]
        assert re.findall(r"benchmarks/\w+\.py", command)[0] in SCRIPTS, report.name


def test_gpu(tmp_path: Path) -> None:
    """Also without PYTHONPATH: it finds its own packages."""
    output = tmp_path / "gpu.json"
    command = ("-c", RUN_WITHOUT, ROOT / "benchmarks/gpu.py", "--dry-run", "--output", output)
    run(tmp_path, *command, PYTHONPATH="")
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["dry_run"] is True
    assert len(report["parts"]) > 10
    rows = [row for part in report["parts"].values() for row in part]
    assert not [row for row in rows if "error" in row and "check" not in row]
    assert all(row["ok"] for name in ("checks", "engines") for row in report["parts"][name])
    assert not [row for row in rows if any(figure in row for figure in FIGURES)]
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8").replace("\\\n", "")
    for parts in re.findall(r"python3 benchmarks/gpu\.py --parts ([^-]*) --", page):
        assert set(parts.split()) <= set(report["parts"])


def test_peers(tmp_path: Path) -> None:
    """The engines that are installed answer as long as asked; others have a row that says why."""
    output = tmp_path / "peers.json"
    peers = ("--peers", "attention", "vllm", "transformers")
    run(
        tmp_path,
        ROOT / "benchmarks/peers.py",
        "--dry-run",
        "--output",
        output,
        *peers,
        PYTHONPATH="",
    )
    rows: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))["rows"]
    by_peer: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_peer.setdefault(row["peer"], []).append(row)
    kernels = [row for row in by_peer["attention"] if "kind" in row]
    assert [row["kind"] for row in kernels] == 2 * ["generation", "context"]
    assert "No module named 'flashinfer'" in kernels[2]["flashinfer"]
    assert by_peer["inflight"][0]["kv_tokens"] == 512
    [missing] = by_peer["vllm"]
    assert missing["error"] == "ModuleNotFoundError: No module named 'vllm'"
    assert by_peer["transformers"][1:] == [
        {"peer": "transformers", "what": "3 x 3-9/2-5", "rounds": 1}
    ]
    assert not [row for row in rows if any("tokens_per_s" in key or "_us" in key for key in row)]
