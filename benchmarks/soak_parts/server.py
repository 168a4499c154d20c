"""One `inflight serve` with what it holds of the machine, and ways to hurt it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from load import HOST

LAUNCHER = "inflight serve"
MODEL = "triton_python_backend_stub"
RELAY = "tensorrt_llm_bls"
"""The model that puts its requests to the other, and the program of its process."""

TRITONSERVER = "tritonserver"
SHARED_MEMORY = Path("/dev/shm")
START_SECONDS = 240.0
DRAIN_SECONDS = 60
"""What a stop waits for requests that run; far more than a stop without any takes."""

_STOP_SECONDS = 120.0
_EXIT_SECONDS = 2.0  # for the last of its processes to be gone from /proc
_INSIDE = Path(__file__).parent / "inside"  # what the model process may import
# What was lost and mended again, and what only our own bugs can cause.
_REPAIRS = ("they are rebuilt", "the batch manager failed", "could not be read")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process holds."""

    resident_mb: float
    num_threads: int
    descriptors: Counter[str] = field(default_factory=Counter)
    """How many by kind, without connections to the process that counts."""

    @property
    def num_descriptors(self) -> int:
        """Of all kinds."""
        return self.descriptors.total()


class Served:
    """``inflight serve`` with the demo model in a temporary folder of its own."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="soak-"))
        self.http_port, self.grpc_port, metrics_port = free_ports(3)
        command = [
            str(Path(sys.executable).parent / "inflight"),
            "serve",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={metrics_port}",
            f"--drain-seconds={DRAIN_SECONDS}",
            f"--add={RELAY}",
            "--verbose",  # what the servers say, also those that died, is kept in one place
            *(f"--set={key}={value}" for key, value in settings.items()),
        ]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "TMPDIR": str(self.scratch)}
        paths = [environment.get("PYTHONPATH", ""), str(_INSIDE)]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._stderr = self.scratch / "stderr"
        with self._stderr.open("wb") as stderr, (self.scratch / "stdout").open("wb") as stdout:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )
        self._names: set[str] = set()
        self._wait_for(self.scratch / "stdout", "inflight is ready")

    @property
    def grpc_url(self) -> str:
        """Address for gRPC clients."""
        return f"{HOST}:{self.grpc_port}"

    @property
    def log(self) -> str:
        """What the launcher, its servers and their models have said."""
        return self._stderr.read_text(encoding="utf-8", errors="replace")

    def signal(self, program: str, number: signal.Signals) -> None:
        """Send a signal to the model process or to tritonserver."""
        os.kill(self._pids()[program], number)

    def footprints(self) -> dict[str, Footprint]:
        """By program, of the processes that run now."""
        return {name: footprint(pid) for name, pid in self._pids().items()}

    def shared_memory(self) -> list[str]:
        """The regions of this run."""
        self._names.update(path.name for path in self.scratch.glob("inflight-serve-*"))
        prefixes = tuple(self._names)
        return [each.name for each in SHARED_MEMORY.iterdir() if each.name.startswith(prefixes)]

    def stop(self) -> tuple[int, float]:
        """Exit code and seconds of a stop by SIGTERM."""
        self.shared_memory()
        began = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return code, time.monotonic() - began

    def left_behind(self) -> list[str]:
        """Once stopped: what is still there of processes, shared memory and folders."""
        folders = [path.name for path in self.scratch.glob("inflight-serve-*")]
        deadline = time.monotonic() + _EXIT_SECONDS
        while (processes := processes_of(self.scratch)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [*processes.values(), *self.shared_memory(), *folders]

    def _pids(self) -> dict[str, int]:
        pids = {LAUNCHER: self._process.pid}
        for pid, line in processes_of(self.scratch).items():
            program = Path(line.split("\0")[0]).name
            if program in (MODEL, TRITONSERVER):
                pids[RELAY if program == MODEL and f"/{RELAY}/" in line else program] = pid
        return pids

    def _wait_for(self, file: Path, text: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while text not in file.read_text(encoding="utf-8"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {self.log}")
            time.sleep(0.05)
        self.shared_memory()


def judge_stop(code: int, seconds: float, left: list[str]) -> list[str]:
    """What is wrong with a stop while nothing was asked. The drain waits for each request that
    the model process has accepted and not ended, so that one it has forgotten about takes it all.
    """
    failures = []
    if code:
        failures.append(f"exit code {code}")
    if seconds >= DRAIN_SECONDS:
        failures.append(f"the stop took {seconds:.0f} s: it waited for requests that nobody sent")
    if left:
        failures.append(f"left behind: {left}")
    return failures


def repairs(log: str) -> list[str]:
    """The lines of the servers' log that tell of one, which nothing else may show."""
    return [line for line in log.splitlines() if any(text in line for text in _REPAIRS)]


def processes_of(scratch: Path) -> dict[int, str]:
    """Command lines by pid of all processes that were started with ``scratch`` as TMPDIR."""
    found: dict[int, str] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(scratch):
                found[process.pid] = "\0".join(process.cmdline())
    return found


def footprint(pid: int) -> Footprint:
    """What a process holds now."""
    process = psutil.Process(pid)
    return Footprint(
        resident_mb=process.memory_info().rss / 2**20,
        num_threads=process.num_threads(),
        descriptors=_descriptors(process),
    )


def _descriptors(process: psutil.Process) -> Counter[str]:
    """By kind, without files of /proc that a process opens for an instant to read its own memory
    use, and without connections to us: our end of one may stay until the next garbage collection.
    """
    ours = {_ports(each) for each in psutil.Process().net_connections("tcp")}
    sockets = {each.fd: each for each in process.net_connections("tcp")}
    kinds: Counter[str] = Counter()
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            kind, _, inode = os.readlink(entry).partition(":[")
            if found := sockets.get(int(entry.name)):
                kind = f"socket, {found.status}"
                if _ports(found)[::-1] in ours:
                    continue
            if not kind.startswith("/proc/"):
                kinds[kind if inode else "file"] += 1
    return kinds


def _ports(connection: Any) -> tuple[int, int]:
    """Here and there; ports alone, because gRPC's addresses are IPv4 within IPv6."""
    there = connection.raddr.port if connection.raddr else 0
    return connection.laddr.port, there


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        with closing(each):
            pass
    return ports
