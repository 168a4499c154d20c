"""What every benchmark says about itself: machine, versions, command; and where it is written."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def describe_run(*packages: str) -> dict[str, Any]:
    """Date, commit, command, processor and the versions of ``packages``."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit_of(),
        "command": "python " + shlex.join(_relative(arg) for arg in sys.argv),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def write_result(name: str, result: dict[str, Any], output: Path | None = None) -> Path:
    """Write ``result`` as JSON, by default among the committed results; returns the path."""
    path = output or RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def commit_of(checkout: Path = RESULTS) -> str:
    """The commit of a checkout, marked where it has changes; "unknown" without git."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # a GPU machine may lack git
        return "unknown"
    return result.stdout.strip() or "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _relative(arg: str) -> str:
    path = Path(arg)
    root = RESULTS.parents[1]
    return str(path.relative_to(root)) if path.is_absolute() and root in path.parents else arg


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
