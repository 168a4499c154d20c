"""A server of its own for `inflight demo`: started on free ports, stopped, and looked after.

It runs in its own session, so that Ctrl-C on the terminal reaches the demo alone, which then shuts
the server down in order.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from inflight_client.client import InflightClient
from inflight_client.errors import InflightError, RequestTimeout, ServerUnreachable

_HOST = "127.0.0.1"
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.1


class DemoServer:
    """``inflight serve`` in a subprocess; a ``with`` block starts it and never leaves it behind."""

    def __init__(self) -> None:
        self._http_port, self._grpc_port, self._metrics_port = _free_ports(3)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__

    @property
    def grpc_url(self) -> str:
        """Where clients find it."""
        return f"{_HOST}:{self._grpc_port}"

    def __enter__(self) -> DemoServer:
        ports = {"http": self._http_port, "grpc": self._grpc_port, "metrics": self._metrics_port}
        options = [f"--{name}-port={port}" for name, port in ports.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "inflight_client.cli", "serve", f"--host={_HOST}", *options],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()

    def wait_until_ready(self) -> None:
        """Return when the model takes requests; `InflightError` with the server's words if not."""
        assert self._process is not None, "enter the with block first"
        deadline = time.monotonic() + _START_SECONDS
        with InflightClient(self.grpc_url) as client:
            while not _is_ready(client):
                if self._process.poll() is not None:
                    raise InflightError(f"the server did not start:\n{self._output()}")
                if time.monotonic() > deadline:
                    raise InflightError(
                        f"the server was not ready after {_START_SECONDS:g} s:\n{self._output()}"
                    )
                time.sleep(_POLL_SECONDS)

    def stop(self) -> list[str]:
        """Shut the server down as Ctrl-C would; what did not go well, empty if all did."""
        process, self._process = self._process, None
        if process is None:
            return []
        family = _descendants(process.pid)
        problems = []
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            code = process.wait(_STOP_SECONDS)
            if code != 0:
                problems.append(f"the server ended with exit code {code}:\n{self._output()}")
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            problems.append(f"the server had to be killed after {_STOP_SECONDS:g} s")
        left = [pid for pid, start in family.items() if _start_time(pid) == start]
        if left:
            problems.append(f"the server left processes behind: {', '.join(map(str, left))}")
        return problems

    def _output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()


def _is_ready(client: InflightClient) -> bool:
    try:
        return client.health()
    except (ServerUnreachable, RequestTimeout):
        return False


def _free_ports(count: int) -> list[int]:
    """Ports nobody listens on now; all are held until all are found, so they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((_HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _descendants(pid: int) -> dict[int, str]:
    """Every process started by ``pid`` or by one of its children, with its start time."""
    parents = {child: _stat(child)[1] for child in _process_ids() if _stat(child)}
    found: dict[int, str] = {}
    generation = {pid}
    while generation:
        generation = {child for child, parent in parents.items() if int(parent) in generation}
        found.update({child: _start_time(child) for child in generation})
    return found


def _process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` after the name (state, parent, ...); empty if gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _start_time(pid: int) -> str:
    """When ``pid`` started, which tells it from a later process of the same number."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""
