"""tritonserver as operators start it, on a model repository somewhere: no `inflight serve`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from support.server_process import (
    HOST,
    START_SECONDS,
    STOP_SECONDS,
    Address,
    free_ports,
    temporary_folder,
)

from inflight_server.serve.tritonserver import environment, locate, prepare_backends

_SHARED_MEMORY = Path("/dev/shm")
_ABORT = "boost::interprocess::lock_exception"


@dataclass
class PlainServer(Address):
    """A running server on the model repository ``scratch / "models"``."""

    scratch: Path
    process: subprocess.Popen[bytes]

    def control(self, action: str, model: str = "tensorrt_llm") -> None:
        """``load`` or ``unload`` a model, where ``--model-control-mode=explicit``."""
        url = f"{self.http_url}/v2/repository/models/{model}/{action}"
        answer = httpx.post(url, json={}, timeout=START_SECONDS, trust_env=False)
        assert answer.status_code == 200, answer.text

    def wait_for(self, state: str, model: str = "tensorrt_llm", seconds: float = 60.0) -> None:
        """Return once the model is READY, UNLOADING, UNAVAILABLE or in no state."""
        deadline = time.monotonic() + seconds
        while (now := self._state(model)) != state:
            assert time.monotonic() < deadline, f"{now}, not {state}, after {seconds} s"
            time.sleep(0.02)

    def shared_memory(self) -> list[Path]:
        """Its regions."""
        return list(_SHARED_MEMORY.glob(f"{self.scratch.name}*"))

    def _state(self, model: str) -> str:
        url = f"{self.http_url}/v2/repository/index"
        index = httpx.post(url, json={}, timeout=10, trust_env=False).json()
        (state,) = (each.get("state", "") for each in index if each["name"] == model)
        return str(state)


@contextmanager
def repository_server(*options: str, server_options: Sequence[str] = ()) -> Iterator[PlainServer]:
    """A server on what ``inflight model-repository`` writes with ``options``, until the block ends;
    it must load and, unless it was killed, stop well."""
    scratch = temporary_folder("plain")
    inflight = str(Path(sys.executable).parent / "inflight")
    command = [inflight, "model-repository", str(scratch / "models"), *options]
    subprocess.run(command, check=True, capture_output=True)
    running = _start(scratch, server_options)
    if _has_aborted(running):
        _sweep_up(running)
        running = _start(scratch, server_options)
    try:
        assert not _has_aborted(running), _log(scratch)
        yield running
    finally:
        running.process.terminate()
        try:
            running.process.wait(timeout=STOP_SECONDS)
        finally:
            _sweep_up(running)
    assert running.process.returncode in (0, -signal.SIGKILL), _log(scratch)
    shutil.rmtree(scratch)


def _start(scratch: Path, options: Sequence[str]) -> PlainServer:
    install = locate()
    http_port, grpc_port, metrics_port = ports = free_ports(3)
    command = [
        str(install.binary),
        f"--model-repository={scratch / 'models'}",
        f"--backend-directory={prepare_backends(install, scratch / 'backends')}",
        f"--backend-config=python,shm-region-prefix-name={scratch.name}",
        "--disable-auto-complete-config",
        "--exit-timeout-secs=20",
    ]
    for name, port in zip(("http", "grpc", "metrics"), ports, strict=True):
        command += [f"--{name}-address={HOST}", f"--{name}-port={port}"]
    with (scratch / "server.log").open("wb") as output:
        process = subprocess.Popen(
            [*command, *options],
            env={"OMP_NUM_THREADS": "1", **environment(install)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return PlainServer(http_port, grpc_port, metrics_port, scratch, process)


def _log(scratch: Path) -> str:
    return (scratch / "server.log").read_text()


def _sweep_up(running: PlainServer) -> None:
    """After its end: a model process that has not begun to load may wait for ever for it."""
    with suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait()
    for region in running.shared_memory():
        region.unlink(missing_ok=True)


def _has_aborted(running: PlainServer) -> bool:
    """Wait until the server is ready; true if Triton 24.10 has ended itself while it loads, which
    it does now and then on a busy machine. `inflight serve` starts it once more as well."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        code = running.process.poll()
        if code == -signal.SIGABRT and _ABORT in _log(running.scratch):
            return True
        assert code is None, _log(running.scratch)
        assert time.monotonic() < deadline, _log(running.scratch)
        with suppress(httpx.HTTPError):
            ready = httpx.get(f"{running.http_url}/v2/health/ready", trust_env=False)
            if ready.status_code == httpx.codes.OK:
                return False
        time.sleep(0.05)
