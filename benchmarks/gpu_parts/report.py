"""What the reports of a GPU say first, and how they are written."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from report import describe_run


def describe(is_dry: bool) -> dict[str, Any]:
    """Machine, versions and command; asks nothing of the device itself."""
    facts = {"dry_run": is_dry, **describe_run("torch", "triton", "numpy")}
    if not is_dry and shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit"
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        facts["gpu"] = told.stdout.strip() or "unknown"
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
