"""tritonserver as operators start it, on a model repository somewhere: no `inflight serve`."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from e2e.harness import HOST, START_SECONDS, STOP_SECONDS, free_ports

from inflight_backend.serve.install import environment, locate, prepare_backends


@dataclass(frozen=True)
class PlainServer:
    """A running server."""

    http_port: int
    grpc_port: int

    @property
    def http_url(self) -> str:
        """Base of the HTTP endpoints."""
        return f"http://{HOST}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """Address for gRPC clients."""
        return f"{HOST}:{self.grpc_port}"


@contextmanager
def plain_server(
    scratch: Path, repository: Path, options: Sequence[str] = ()
) -> Iterator[PlainServer]:
    """Run tritonserver on ``repository`` until the block ends; it must load and stop well."""
    install = locate()
    http_port, grpc_port, metrics_port = free_ports(3)
    command = [
        str(install.binary),
        f"--model-repository={repository}",
        f"--backend-directory={prepare_backends(install, scratch / 'backends')}",
        f"--backend-config=python,shm-region-prefix-name={scratch.name}",
        "--disable-auto-complete-config",
        "--exit-timeout-secs=5",
        *(f"--{name}-address={HOST}" for name in ("http", "grpc", "metrics")),
        f"--http-port={http_port}",
        f"--grpc-port={grpc_port}",
        f"--metrics-port={metrics_port}",
        *options,
    ]
    log = scratch / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={"OMP_NUM_THREADS": "1", **environment(install)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_ready(process, http_port, log)
        yield PlainServer(http_port, grpc_port)
    finally:
        process.terminate()
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            for region in Path("/dev/shm").glob(f"{scratch.name}*"):
                os.unlink(region)
    assert process.returncode == 0, log.read_text()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            answer = httpx.get(f"http://{HOST}:{port}/v2/health/ready", trust_env=False)
        except httpx.HTTPError:
            time.sleep(0.05)
            continue
        if answer.status_code == httpx.codes.OK:
            return
        time.sleep(0.05)
