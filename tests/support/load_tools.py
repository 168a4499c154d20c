"""Tools of others as `make test-all` installs them (load-tools.txt): perf_analyzer, genai-perf."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight_server.serve.tritonserver import locate

ROOT = Path(sys.prefix) / "load-tools"
PERF_ANALYZER = ROOT / "bin" / "perf_analyzer"

# For outputs that a response does not have, perf_analyzer exports four bytes of memory it has just
# been given. If they are no number, it writes an empty file, or the beginning of one, and exits
# with 0: nothing of ours.
_ATTEMPTS = 4

# Its binary asks for these; the tritonserver of the wheel brings them, under names of its own.
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


def tool_environment(scratch: Path) -> dict[str, str]:
    """For processes of both tools; ``scratch`` gets links to libraries. Nothing is fetched."""
    assert PERF_ANALYZER.is_file(), f"{ROOT} is missing: `make test-all` installs it"
    bundled = locate().binary.parents[3] / "nvidia_pytriton.libs"
    folder = scratch / "libraries"
    folder.mkdir(exist_ok=True)
    for name, pattern in _LIBRARIES.items():
        (source,) = bundled.glob(pattern)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(source)
    return {
        **os.environ,
        "PATH": f"{ROOT / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "LD_LIBRARY_PATH": str(folder),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def run_genai_perf(scratch: Path, arguments: Sequence[str], seconds: float) -> dict[str, Any]:
    """The metrics that ``genai-perf profile`` wrote. Its requests are named 0, 1, 2, ..., so a
    second one beside it would ask for ids that are still in use."""
    for attempt in range(_ATTEMPTS):
        folder = scratch / str(attempt)
        folder.mkdir(parents=True)
        run = subprocess.Popen(
            [sys.executable, "-m", "genai_perf.main", "profile", *arguments],
            cwd=folder,
            env=tool_environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # it has a perf_analyzer of its own
        )
        try:
            printed = run.communicate(timeout=seconds)[0]
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        if not any(map(_is_cut_off, folder.glob("artifacts/*/profile_export.json"))):
            break
    assert run.returncode == 0, printed
    (path,) = folder.glob("artifacts/*/profile_export_genai_perf.json")
    metrics: dict[str, Any] = json.loads(path.read_text())
    return metrics


def run_perf_analyzer(scratch: Path, arguments: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """What it printed, and the requests of its export: time stamps of each and of its responses."""
    for _ in range(_ATTEMPTS):
        export = scratch / f"profile-{len(list(scratch.iterdir()))}.json"  # it writes over no file
        done = subprocess.run(
            [PERF_ANALYZER, *arguments, f"--profile-export-file={export}"],
            env=tool_environment(scratch),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if not _is_cut_off(export):
            break
    (experiment,) = json.loads(export.read_text())["experiments"]
    return done.stdout, experiment["requests"]


def _is_cut_off(export: Path) -> bool:
    try:
        json.loads(export.read_text())
    except json.JSONDecodeError:
        return True
    return False
