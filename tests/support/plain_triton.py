"""tritonserver as operators start it, on a model repository somewhere: no `inflight serve`."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc as grpcclient
from support.server_process import HOST, START_SECONDS, STOP_SECONDS, free_ports, temporary_folder

from inflight_server.serve.tritonserver import environment, locate, prepare_backends

_ANSWER_SECONDS = 60.0
_ABORT = "boost::interprocess::lock_exception"
_KINDS = {
    "int32": "INT32",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "float32": "FP32",
    "bool": "BOOL",
    "object": "BYTES",
}
_TYPES = {"i": np.int32, "u": np.uint64, "f": np.float32, "b": np.bool_}


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
def repository_server(*options: str, server_options: Sequence[str] = ()) -> Iterator[PlainServer]:
    """`plain_server` on what ``inflight model-repository`` writes with ``options``."""
    scratch = temporary_folder("plain")
    inflight = str(Path(sys.executable).parent / "inflight")
    command = [inflight, "model-repository", str(scratch / "models"), *options]
    subprocess.run(command, check=True, capture_output=True)
    with plain_server(scratch, scratch / "models", server_options) as running:
        yield running
    shutil.rmtree(scratch)


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
        "--exit-timeout-secs=20",
        *(f"--{name}-address={HOST}" for name in ("http", "grpc", "metrics")),
        f"--http-port={http_port}",
        f"--grpc-port={grpc_port}",
        f"--metrics-port={metrics_port}",
        *options,
    ]
    log = scratch / "server.log"

    def start() -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                env={"OMP_NUM_THREADS": "1", **environment(install)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    process = start()
    try:
        if _has_aborted(process, http_port, log):
            _sweep_up(process, scratch)
            process = start()
        assert not _has_aborted(process, http_port, log), log.read_text()
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
            _sweep_up(process, scratch)
    assert process.returncode == 0, log.read_text()


def generate(server: PlainServer, model: str, **body: Any) -> dict[str, Any]:
    """The whole answer over HTTP; an error is in ``error``."""
    url = f"{server.http_url}/v2/models/{model}/generate"
    answer = httpx.post(url, json=body, timeout=_ANSWER_SECONDS, trust_env=False)
    content: dict[str, Any] = answer.json()
    return content


def generate_stream(server: PlainServer, model: str, **body: Any) -> list[dict[str, Any]]:
    """Every event of the stream over HTTP."""
    url = f"{server.http_url}/v2/models/{model}/generate_stream"
    answer = httpx.post(url, json=body, timeout=_ANSWER_SECONDS, trust_env=False)
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]


def _make_inputs(**tensors: Any) -> list[grpcclient.InferInput]:
    inputs = []
    for name, value in tensors.items():
        array = np.asarray(value)
        if array.dtype.name not in _KINDS:
            array = array.astype(_TYPES.get(array.dtype.kind, np.object_))
        inputs.append(grpcclient.InferInput(name, list(array.shape), _KINDS[array.dtype.name]))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def infer(server: PlainServer, model: str, **tensors: Any) -> dict[str, Any]:
    """One unary gRPC call; the response's tensors."""
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(model, _make_inputs(**tensors), client_timeout=_ANSWER_SECONDS)
        return {out.name: result.as_numpy(out.name) for out in result.get_response().outputs}


def stream_infer(
    server: PlainServer,
    model: str,
    tensors: Mapping[str, Any],
    outputs: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    request_id: str = "",
) -> list[dict[str, Any]]:
    """The tensors of every response of a gRPC stream; an error ends them as ``{"error": text}``."""
    responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
    wanted = [grpcclient.InferRequestedOutput(name) for name in outputs] or None
    found: list[dict[str, Any]] = []
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: responses.put((result, error)))
        client.async_stream_infer(
            model,
            _make_inputs(**tensors),
            outputs=wanted,
            parameters=parameters,
            request_id=request_id,
            enable_empty_final_response=True,
        )
        while True:
            result, error = responses.get(timeout=_ANSWER_SECONDS)
            if error is not None:
                return [*found, {"error": error.message()}]
            response = result.get_response()
            if response.outputs:
                found.append({out.name: result.as_numpy(out.name) for out in response.outputs})
            if response.parameters["triton_final_response"].bool_param:
                return found


def _sweep_up(process: subprocess.Popen[bytes], scratch: Path) -> None:
    """After its end: a model process that has not begun to load may wait for ever for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for region in Path("/dev/shm").glob(f"{scratch.name}*"):
        os.unlink(region)


def _has_aborted(process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    """Wait until the server is ready; true if Triton 24.10 has ended itself while it loads, which
    it does now and then on a busy machine. `inflight serve` starts it once more as well."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        code = process.poll()
        if code == -signal.SIGABRT and _ABORT in log.read_text():
            return True
        assert code is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            answer = httpx.get(f"http://{HOST}:{port}/v2/health/ready", trust_env=False)
        except httpx.HTTPError:
            time.sleep(0.05)
            continue
        if answer.status_code == httpx.codes.OK:
            return False
        time.sleep(0.05)
