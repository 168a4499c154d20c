"""The wheel and the sdist: built, installed into an empty environment, and served from there."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_built_from_the_sdist_serves_in_an_empty_environment(tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-d", tmp_path)
    [sdist], [wheel] = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "-qq")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path / "built", sdist)
    [built] = (tmp_path / "built").glob("*.whl")
    assert zipfile.ZipFile(built).namelist() == zipfile.ZipFile(wheel).namelist()

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    scripts = tmp_path / "venv/bin"
    constraints = ("-c", ROOT / "constraints.txt")
    run(scripts / "pip", "-qq", "install", *constraints, f"{built}[server,embedded]")
    assert "No gap in any count" in run(scripts / "inflight", "demo", cwd=tmp_path)
