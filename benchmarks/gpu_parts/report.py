"""What the reports of a GPU say first, and how they are written."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]


def describe(is_dry: bool, script: str) -> dict[str, Any]:
    """Machine, versions and command; asks nothing of the device itself."""
    import numpy
    import torch

    facts: dict[str, Any] = {
        "dry_run": is_dry,
        "command": " ".join(["python", f"benchmarks/{script}", *sys.argv[1:]]),
        # Changes what is compiled (`inflight_kernels.launch`).
        "early_launch": os.environ.get("INFLIGHT_EARLY_LAUNCH") == "1",
        "commit": _output("git", "-C", str(_ROOT), "describe", "--always", "--dirty"),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": import_module("triton").__version__,
        "numpy": numpy.__version__,
    }
    if not is_dry:
        query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit"
        facts["gpu"] = _output("nvidia-smi", query, "--format=csv,noheader")
    return facts


def write(report: dict[str, Any], path: Path | None) -> None:
    """As JSON; the old file stays whole until the new one is."""
    if path is not None:
        half = path.with_suffix(".part")
        half.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        half.replace(path)


def shorten(text: str, most: int) -> str:
    """``text``, without its middle where it is longer: a log begins with what went wrong first, and
    what a compiler says ends with the fault."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} [...] {text[-half:]}"


def _output(*command: str) -> str:
    """What a command prints; "unknown" where there is none or it fails."""
    if shutil.which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
