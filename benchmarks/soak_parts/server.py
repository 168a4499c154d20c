"""One `inflight serve` with what it holds of the machine, and ways to hurt it."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from inflight_protocol import LLM_MODEL_NAME
from servers import ServeProcess, free_ports, start_serve
from soak_parts.checkpoints import Kind, write_checkpoint

LAUNCHER = "inflight serve"
MODEL = "triton_python_backend_stub"
RELAY = "tensorrt_llm_bls"
"""The model that puts its requests to the other, and the program of its process."""

TRITONSERVER = "tritonserver"
OPENAI = "inflight openai"
OPENAI_MODEL = "soaked"
"""Its name in OpenAI's API."""

DRAIN_SECONDS = 60
"""What a stop waits for requests that run; far more than a stop without any takes."""

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
    """``inflight serve`` with a model of a kind, in a temporary folder of its own."""

    def __init__(self, settings: Mapping[str, object], kind: Kind) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="soak-"))
        model = write_checkpoint(self.scratch / "model", kind)
        [self.openai_port] = free_ports(1)
        paths = [os.environ.get("PYTHONPATH", ""), str(_INSIDE)]
        # --verbose: what the servers say, also those that died, is kept in one place.
        self._running = start_serve(
            self.scratch,
            model=model,
            settings={**settings, **kind.settings},
            options=[
                f"--drain-seconds={DRAIN_SECONDS}",
                f"--add={RELAY}",
                f"--openai-port={self.openai_port}",
                f"--served-model-name={OPENAI_MODEL}",
                "--verbose",
            ],
            environment={
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            },
        )
        self._running.wait_until_printed("inflight is ready")
        self.http_port, self.grpc_url = self._running.http_port, self._running.grpc_url

    @property
    def log(self) -> str:
        """What the launcher, its servers and their models have said."""
        return self._running.stderr

    def signal(self, program: str, number: signal.Signals) -> None:
        """Send a signal to the model process or to tritonserver."""
        os.kill(pids_of(self._running)[program], number)

    def footprints(self) -> dict[str, Footprint]:
        """By program, of the processes that run now; one that has ended meanwhile is not there."""
        found = {}
        for name, pid in pids_of(self._running).items():
            with suppress(psutil.NoSuchProcess):
                found[name] = footprint(pid)
        return found

    def shared_memory(self) -> set[str]:
        """The regions of this run."""
        return self._running.shared_memory()

    def stop(self) -> tuple[int, float]:
        """Exit code and seconds of a stop by SIGTERM."""
        began = time.monotonic()
        return self._running.stop(), time.monotonic() - began

    def left_behind(self) -> list[str]:
        """Once stopped: what is still there of processes, shared memory and folders."""
        deadline = time.monotonic() + _EXIT_SECONDS
        while (processes := self._running.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        folders = [path.name for path in (self.scratch / "tmp").iterdir()]
        return [*processes.values(), *self.shared_memory(), *folders]


def pids_of(running: ServeProcess) -> dict[str, int]:
    """By program, of the processes that run now; of a model other than the LLM by its name."""
    pids = {LAUNCHER: running.process.pid}
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(running.process.pid).children():
            if "openai" in child.cmdline():
                pids[OPENAI] = child.pid
    for pid, line in running.processes().items():
        program, *arguments = line.split("\0")
        models = [Path(each).parts[-3] for each in arguments if each.endswith("/model.py")]
        name = Path(program).name
        pids[name if models in ([], [LLM_MODEL_NAME]) else models[0]] = pid
    return pids


def judge_stop(code: int, seconds: float, left: list[str]) -> list[str]:
    """What is wrong with a stop while nothing was asked. The drain waits for each request that
    the model process has accepted and not ended, so that one it has forgotten about takes it all.
    """
    failures = []
    if code:
        failures.append(f"exit code {code}")
    if seconds >= DRAIN_SECONDS:
        failures.append(f"the stop took {seconds:.0f} s: it waited for unknown requests")
    if left:
        failures.append(f"left behind: {left}")
    return failures


def repairs(log: str) -> list[str]:
    """The lines of the servers' log that tell of one, which nothing else may show."""
    return [line for line in log.splitlines() if any(text in line for text in _REPAIRS)]


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
    use, those of processes that `inflight serve` opens anew for each of its waits, and connections
    to us: our end of one may stay until the next garbage collection.
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
            if not kind.startswith("/proc/") and inode != "pidfd]":
                kinds[kind if inode else "file"] += 1
    return kinds


def _ports(connection: Any) -> tuple[int, int]:
    """Here and there; ports alone, because gRPC's addresses are IPv4 within IPv6."""
    there = connection.raddr.port if connection.raddr else 0
    return connection.laddr.port, there
