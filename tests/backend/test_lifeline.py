"""A model process dies with the launcher, whatever it is doing. Real processes and signals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inflight_backend.process_guard import DeathPipe

WAIT = 30.0
MODELS = ("llm", "added")
# As in Triton's code, which may wait with Python's lock: none of Python's threads can do anything.
STUCK_IN_NATIVE_CODE = "import ctypes; ctypes.PyDLL(None).sleep(60)"
IDLE = "import time; time.sleep(60)"
MODEL = """
import sys
from inflight_backend.process_guard import die_with_launcher
die_with_launcher(sys.argv[1])
print("up", flush=True)
"""
LAUNCHER = """
import sys
from pathlib import Path
from inflight_backend.process_guard import DeathPipe
lifeline = DeathPipe(Path(sys.argv[1]), sys.argv[2:])
print(lifeline.environment, flush=True)
sys.stdin.read()
"""


def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Run ``code``; it has printed a line when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


@pytest.mark.case(124)
@pytest.mark.parametrize("doing", [STUCK_IN_NATIVE_CODE, IDLE], ids=["stuck", "idle"])
def test_a_model_dies_with_a_launcher_that_is_killed(doing: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "lifeline")
    with start(LAUNCHER, folder, *MODELS) as launcher:
        models = [start(MODEL + doing, name, INFLIGHT_LIFELINE=folder) for name in MODELS]
        with models[0], models[1]:
            assert [model.poll() for model in models] == [None, None]
            launcher.kill()
            assert [model.wait(WAIT) for model in models] == [-signal.SIGKILL] * 2


@pytest.mark.case(124)
@pytest.mark.parametrize("is_swept", [False, True])
def test_a_model_that_comes_too_late_ends_by_itself(is_swept: bool, tmp_path: Path) -> None:
    lifeline = DeathPipe(tmp_path / "lifeline", MODELS)
    lifeline.close()
    if is_swept:
        shutil.rmtree(tmp_path / "lifeline")
    late = subprocess.run(
        [sys.executable, "-c", MODEL, "llm"],
        env={**os.environ, **lifeline.environment},
        capture_output=True,
        timeout=WAIT,
    )
    assert (late.returncode, late.stdout) == (1, b"")


@pytest.mark.case(109)
def test_nobody_dies_of_a_neighbour(tmp_path: Path) -> None:
    """Opening and closing a FIFO beside the launcher kills none; whatever happens to one (what
    kernels tell a reader of another one's end differs), other models hear nothing of it."""
    lifeline = DeathPipe(tmp_path / "lifeline", MODELS)
    with (
        start(MODEL + IDLE, "llm", **lifeline.environment) as model,
        start(MODEL + IDLE, "added", **lifeline.environment) as other,
    ):
        for access in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            os.close(os.open(tmp_path / "lifeline" / "llm", access | os.O_NONBLOCK))
        (tmp_path / "lifeline" / "added").write_bytes(b"something happens")
        assert other.wait(WAIT) == -signal.SIGKILL
        with pytest.raises(subprocess.TimeoutExpired):
            model.wait(0.5)
        lifeline.close()
        assert model.wait(WAIT) == -signal.SIGKILL


def test_without_a_launcher_nothing_happens() -> None:
    """As in a plain Triton."""
    alone = subprocess.run([sys.executable, "-c", MODEL, "llm"], capture_output=True, timeout=WAIT)
    assert (alone.returncode, alone.stdout) == (0, b"up\n")


def test_a_kernel_that_does_not_take_part_stops_no_model(tmp_path: Path) -> None:
    """The model loads; it looks for its parent as ever."""
    no_descriptor = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
"""
    imported = "from inflight_backend.process_guard import die_with_launcher"
    code = MODEL.replace(imported, imported + no_descriptor)
    lifeline = DeathPipe(tmp_path / "lifeline", MODELS)
    alone = subprocess.run(
        [sys.executable, "-c", code, "llm"],
        env={**os.environ, **lifeline.environment},
        capture_output=True,
        timeout=WAIT,
    )
    lifeline.close()
    assert (alone.returncode, alone.stdout) == (0, b"up\n")


def test_where_one_cannot_be_made_none_is_held(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        DeathPipe(tmp_path / "lifeline", ("llm", "no/such"))
    assert os.listdir("/proc/self/fd") == before
