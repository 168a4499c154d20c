"""A model process dies with its launcher, whatever it is doing. Real processes and signals."""

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


# In C code that holds Python's lock, as Triton may: no thread of Python can run.
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


def run_model(code: str, **environment: str) -> tuple[int, str]:
    """Run a model process to its end; its exit status and output."""
    done = subprocess.run(
        [sys.executable, "-c", code, "llm"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    return done.returncode, done.stdout


@pytest.mark.case(124)
@pytest.mark.parametrize("doing", [STUCK_IN_NATIVE_CODE, IDLE], ids=["stuck", "idle"])
def test_model_dies_with_its_killed_launcher(doing: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "lifeline")
    with start(LAUNCHER, folder, *MODELS) as launcher:
        models = [start(MODEL + doing, name, INFLIGHT_LIFELINE=folder) for name in MODELS]
        with models[0], models[1]:
            assert [model.poll() for model in models] == [None, None]
            launcher.kill()
            assert [model.wait(WAIT) for model in models] == [-signal.SIGKILL] * 2


@pytest.mark.case(124)
@pytest.mark.parametrize("is_swept", [False, True])
def test_model_that_starts_after_the_launchers_death_exits(is_swept: bool, tmp_path: Path) -> None:
    lifeline = DeathPipe(tmp_path / "lifeline", MODELS)
    lifeline.close()
    if is_swept:
        shutil.rmtree(tmp_path / "lifeline")
    assert run_model(MODEL, **lifeline.environment) == (1, "")


@pytest.mark.case(109)
def test_event_on_one_pipe_kills_no_other_model(tmp_path: Path) -> None:
    """Opening and closing a FIFO beside the launcher kills no model. An event on one FIFO (kernels
    differ in what a reader is told of another one's end) reaches no other model."""
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
    assert run_model(MODEL) == (0, "up\n")


def test_kernel_without_the_feature_stops_no_model(tmp_path: Path) -> None:
    """The model loads; it still checks for its parent."""
    no_descriptor = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
    code = MODEL.replace("die_with_launcher(sys", no_descriptor + "die_with_launcher(sys")
    lifeline = DeathPipe(tmp_path / "lifeline", MODELS)
    assert run_model(code, **lifeline.environment) == (0, "up\n")
    lifeline.close()


def test_failed_construction_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        DeathPipe(tmp_path / "lifeline", ("llm", "no/such"))
    assert os.listdir("/proc/self/fd") == before
