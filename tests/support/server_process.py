"""`inflight serve` as a child process, and the proof that it leaves nothing behind.

A server gets a temporary folder of its own, so that whatever it leaves there is its.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from inflight_protocol import LLM_MODEL_NAME

HOST = "127.0.0.1"
START_SECONDS = 240
STOP_SECONDS = 120
MODEL = "triton_python_backend_stub"
TRITONSERVER = "bin/tritonserver"
_SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Address:
    """Where a server listens."""

    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def http_url(self) -> str:
        """Base of the HTTP endpoints."""
        return f"http://{HOST}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """Address for gRPC clients."""
        return f"{HOST}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """The Prometheus page."""
        return f"http://{HOST}:{self.metrics_port}/metrics"


@dataclass
class ServeProcess(Address):
    """One run of ``inflight serve`` on free ports; `stop` it, then `assert_clean`."""

    scratch: Path
    process: subprocess.Popen[bytes]
    _names: set[str] = field(default_factory=set)
    _outside: set[Path] = field(default_factory=set)

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return (self.scratch / "stdout").read_text()

    @property
    def stderr(self) -> str:
        """What it has complained about so far."""
        return (self.scratch / "stderr").read_text()

    @property
    def error_lines(self) -> list[str]:
        """Its complaints without the notice that it is starting."""
        return [line for line in self.stderr.splitlines() if not line.startswith("starting")]

    def wait_until_printed(self, text: str) -> None:
        """Return when ``text`` appears on stdout or stderr; fail if the process ends before."""
        deadline = time.monotonic() + START_SECONDS
        while text not in self.stdout + self.stderr:
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline, f"no {text!r} in {START_SECONDS} s: {self.stderr}"
            time.sleep(0.02)
        self._note_workspace()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop and return its exit code."""
        self._note_workspace()
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Its exit code once it has ended by itself."""
        deadline = time.monotonic() + STOP_SECONDS
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"still running after {STOP_SECONDS} s: {self.stderr}")
            self._note_workspace()
            time.sleep(0.01)
        return self.process.returncode

    def kill_model(
        self, number: signal.Signals = signal.SIGKILL, model: str = LLM_MODEL_NAME
    ) -> None:
        """Kill the process of the Python model, or send it another signal."""
        os.kill(self.pid_of(MODEL, model), number)

    def kill_tritonserver(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the server, not the model, or send it another signal."""
        os.kill(self.pid_of(TRITONSERVER), number)

    def pid_of(self, program: str, model: str = LLM_MODEL_NAME) -> int:
        """The process that runs ``program`` for this run, and not one that only tries whether it
        starts: that one has no arguments. Each ``model`` has one of its own."""
        found = []
        for pid, line in self.processes().items():
            name, *arguments = line.rstrip("\0").split("\0")
            is_other = program == MODEL and f"/{model}/1/model.py" not in "".join(arguments)
            if name.endswith(program) and arguments and not is_other:
                found.append(pid)
        (pid,) = found
        return pid

    def processes(self) -> dict[int, str]:
        """The command lines of its processes, by pid: those that name its temporary folder."""
        found: dict[int, str] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                found[int(entry.name)] = (entry / "cmdline").read_text(errors="replace")
        return {pid: line for pid, line in found.items() if str(self.scratch / "tmp") in line}

    def wait_until_gone(self, seconds: float) -> None:
        """Return when no process of the run is left; fail if one still is after ``seconds``."""
        deadline = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.02)

    def shared_memory(self) -> set[str]:
        """Names of its regions."""
        self._note_workspace()
        regions = (each.name for each in _SHARED_MEMORY.iterdir())
        return {name for name in regions if name.startswith(tuple(self._names))}

    def assert_clean(self) -> None:
        """Fail if a process, shared memory or a temporary folder of the run is still there."""
        assert self.process.poll() is not None, "still running"
        temporary = self.scratch / "tmp"
        assert list(temporary.iterdir()) == []
        assert self.processes() == {}
        assert self.shared_memory() == set()
        assert not [path for path in self._outside if path.exists()]

    def _note_workspace(self) -> None:
        """Remember what the run owns outside of its folder, while that folder tells.

        Its shared memory starts with the name of the folder; the file ``scratch`` in it names
        the folder that the Python backend makes for itself.
        """
        for workspace in (self.scratch / "tmp").glob("inflight-serve-*"):
            self._names.add(workspace.name)
            with suppress(OSError):
                written = (workspace / "scratch").read_text()
                self._outside.update({Path(written)} if written else ())


def start_serve(
    scratch: Path,
    *,
    model: Path | None = None,
    settings: Mapping[str, object] | None = None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    output: int | None = None,
    python: str = sys.executable,
) -> ServeProcess:
    """Start ``inflight serve`` in ``scratch`` (its temporary files go there, and its output unless
    there is a descriptor ``output``), as it is installed for ``python``."""
    (scratch / "tmp").mkdir(exist_ok=True)  # by the run before
    http_port, grpc_port, metrics_port = free_ports(3)
    arguments = [
        "--openai-port=0",
        f"--http-port={http_port}",
        f"--grpc-port={grpc_port}",
        f"--metrics-port={metrics_port}",
        *([f"--model={model}"] if model else []),
        *(f"--set={key}={value}" for key, value in (settings or {}).items()),
        *options,
    ]
    base = {**os.environ, "TMPDIR": str(scratch / "tmp")}
    with (scratch / "stdout").open("wb") as stdout, (scratch / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [Path(python).parent / "inflight", "serve", *arguments],
            env={**base, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout if output is None else output,
            stderr=stderr if output is None else output,
        )
    return ServeProcess(http_port, grpc_port, metrics_port, scratch, process)


def free_ports(count: int) -> list[int]:
    """Different ports that are free now, none of those that Linux gives to a connection that goes
    out: ranks that look for their leader before it listens would take the port that it waits for.
    """
    sockets: list[socket.socket] = []
    while len(sockets) < count:
        with suppress(OSError):  # in use
            sockets.append(
                socket.create_server((HOST, random.SystemRandom().randrange(10_000, 32_768)))
            )
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def temporary_folder(name: str) -> Path:
    """A folder with a short path: the names inside get long."""
    return Path(tempfile.mkdtemp(prefix=f"e2e-{name}-"))
