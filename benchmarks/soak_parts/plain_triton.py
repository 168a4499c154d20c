"""tritonserver without `inflight serve` around it, as an operator's own set-up starts it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from inflight_server.serve.process import ServerProcess
from inflight_server.serve.repository import DEFAULT_MODELS, assemble
from inflight_server.serve.settings import DEMO_MODEL
from inflight_server.serve.tritonserver import environment, locate, prepare_backends
from load import HOST
from soak_parts.server import SHARED_MEMORY, START_SECONDS, Footprint, footprint, free_ports


@dataclass
class PlainTriton:
    """A server in explicit model control, its models not loaded yet."""

    process: ServerProcess
    http_port: int
    grpc_port: int
    shm_prefix: str
    scratch: Path

    @property
    def http_url(self) -> str:
        """Base of the HTTP endpoints."""
        return f"http://{HOST}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """Address for gRPC clients."""
        return f"{HOST}:{self.grpc_port}"

    def control(self, action: str, model: str = "tensorrt_llm") -> None:
        """``load`` or ``unload`` a model."""
        url = f"{self.http_url}/v2/repository/models/{model}/{action}"
        answer = httpx.post(url, json={}, timeout=START_SECONDS, trust_env=False)
        assert answer.status_code == 200, answer.text

    def state(self, model: str = "tensorrt_llm") -> str:
        """What the server says about a model: READY, UNLOADING, UNAVAILABLE or nothing."""
        url = f"{self.http_url}/v2/repository/index"
        index = httpx.post(url, json={}, timeout=10, trust_env=False).json()
        (state,) = (each.get("state", "") for each in index if each["name"] == model)
        return str(state)

    def wait_for(self, state: str, model: str = "tensorrt_llm", seconds: float = 60.0) -> None:
        """Return once the model is in ``state``."""
        deadline = time.monotonic() + seconds
        while (now := self.state(model)) != state:
            assert time.monotonic() < deadline, f"{now}, not {state}, after {seconds} s"
            time.sleep(0.02)

    def footprint(self) -> Footprint:
        """Of the server alone: the model process is a new one after each load."""
        return footprint(self.process.pid)

    def num_regions(self) -> int:
        """Its regions of shared memory."""
        return len(list(SHARED_MEMORY.glob(f"{self.shm_prefix}*")))


@contextmanager
def plain_triton(
    scratch: Path, parameters: Mapping[str, str] | None = None, added: Sequence[str] = ()
) -> Iterator[PlainTriton]:
    """Start a server in ``scratch``; end it and remove its shared memory afterwards.

    ``added``: models that may be loaded beside the usual ones.
    """
    install = locate()
    values = {"gpt_model_path": str(DEMO_MODEL), **(parameters or {})}
    assemble(scratch / "models", values, [*DEFAULT_MODELS, *added])
    backends = prepare_backends(install, scratch / "backends")
    http_port, grpc_port = free_ports(2)
    prefix = f"plain-{scratch.name}"
    command = [
        str(install.binary),
        f"--model-repository={scratch / 'models'}",
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        "--model-control-mode=explicit",
        "--disable-auto-complete-config",
        "--exit-timeout-secs=5",
        "--allow-metrics=false",
        *(f"--{name}-address={HOST}" for name in ("http", "grpc")),
        f"--http-port={http_port}",
        f"--grpc-port={grpc_port}",
    ]
    with (scratch / "log").open("wb") as log:
        process = ServerProcess(command, environment(install), log)
    try:
        yield _wait_until_live(PlainTriton(process, http_port, grpc_port, prefix, scratch))
    finally:
        process.stop(0.0, lambda: True)
        for region in SHARED_MEMORY.glob(f"{prefix}*"):
            region.unlink(missing_ok=True)


def _wait_until_live(running: PlainTriton) -> PlainTriton:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert running.process.exit_status() is None
        assert time.monotonic() < deadline
        try:
            httpx.get(f"{running.http_url}/v2/health/live", trust_env=False).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.05)
        else:
            return running
