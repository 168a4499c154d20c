"""The story of one run: check, assemble, start, wait, watch, drain, stop.

Order of side effects: signals are counted, the workspace is made, the server starts. The
way back, on every path, is the reverse: the server and all it started are gone before the
workspace and its shared memory are removed, and that before signals act as usual again.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from pathlib import Path

import typer

from inflight_backend.errors import ServingError
from inflight_backend.serve.checks import check_install, check_settings
from inflight_backend.serve.display import LoadingDisplay, ready_block
from inflight_backend.serve.install import TritonInstall, environment, locate, prepare_backends
from inflight_backend.serve.log import explain
from inflight_backend.serve.process import ServerProcess, is_running
from inflight_backend.serve.repository import assemble
from inflight_backend.serve.scratch import BackendScratch
from inflight_backend.serve.settings import ServeSettings
from inflight_backend.serve.signals import StopSignals
from inflight_backend.serve.workspace import Workspace
from inflight_backend.status import ModelStatus, read_status

_POLL_SECONDS = 0.05
_HEALTH_SECONDS = 2.0
# A server without requests ends 2 to 3 s after SIGTERM; its own limit only matters when our
# drain gave up, and must end before we kill.
_EXIT_TIMEOUT_SECONDS = 3
_GRACE_SECONDS = 5.0
_STOP_ALL_SECONDS = 3.0
_STDERR = 2
_SEE_LOG = "run it with --verbose to see its log"


def run(settings: ServeSettings) -> None:
    """Serve until asked to stop; `ServingError` if starting fails or the server dies."""
    with StopSignals() as signals:
        check_settings(settings)
        install = locate()
        env = environment(install)
        check_install(install, env)
        with Workspace() as workspace:
            command = _prepare(settings, install, workspace)
            with BackendScratch(workspace.scratch_note) as scratch:
                server = _start(command, env, None if settings.is_verbose else workspace.log_file)
                Run(settings, workspace, scratch, server, signals).run()


def _start(command: list[str], env: dict[str, str], log_file: Path | None) -> ServerProcess:
    """Start the server with its output in ``log_file``, or on our stderr."""
    if log_file is None:
        return ServerProcess(command, env, _STDERR)
    with log_file.open("wb") as output:
        return ServerProcess(command, env, output)


def _prepare(settings: ServeSettings, install: TritonInstall, workspace: Workspace) -> list[str]:
    """Fill the workspace and return the command line of the server."""
    values = {
        **settings.parameters,
        "gpt_model_path": str(settings.model),
        "status_file": str(workspace.status_file),
        "drain_file": str(workspace.drain_file),
        "decoupled_mode": str(settings.is_decoupled).lower(),
    }
    assemble(workspace.models, values, settings.models)
    backends = prepare_backends(install, workspace.backends)
    return [
        str(install.binary),
        f"--model-repository={workspace.models}",
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-region-prefix-name={workspace.shm_prefix}",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={_EXIT_TIMEOUT_SECONDS}",
        *(f"--{name}-address={settings.host}" for name in ("http", "grpc", "metrics")),
        *(f"{option}={port}" for option, port in settings.ports.items()),
    ]


class Run:
    """A started server: wait until it is ready, watch it, drain and stop it."""

    def __init__(
        self,
        settings: ServeSettings,
        workspace: Workspace,
        scratch: BackendScratch,
        server: ServerProcess,
        signals: StopSignals,
    ) -> None:
        self._settings = settings
        self._workspace = workspace
        self._scratch = scratch
        self._server = server
        self._signals = signals

    def run(self) -> None:
        """Everything from loading to the end; the server is gone when this returns or raises."""
        grace_seconds = 0.0  # while loading there is nothing to finish
        try:
            status = self._wait_until_ready()
            if status is None:
                return
            typer.echo(ready_block(self._settings, status))
            self._watch(status)
            self._drain()
            grace_seconds = _GRACE_SECONDS
        finally:
            self._server.stop(grace_seconds, lambda: self._signals.is_asked(times=3))

    def _wait_until_ready(self) -> ModelStatus | None:
        """The status of the ready model; None if asked to stop before."""
        with LoadingDisplay(self._settings) as display:
            while not self._signals.is_asked():
                self._scratch.look()
                status = read_status(self._workspace.status_file)
                if status is not None:
                    self._scratch.release()  # the backend had made it before it ran the model
                display.update(status)
                self._check_alive(status, is_loading=True)
                if status is not None and status.phase == "ready" and self._is_healthy():
                    return status
                time.sleep(_POLL_SECONDS)
        return None

    def _watch(self, status: ModelStatus) -> None:
        while not self._signals.is_asked():
            self._check_alive(status)
            time.sleep(_POLL_SECONDS)

    def _check_alive(self, status: ModelStatus | None, is_loading: bool = False) -> None:
        """`ServingError` saying why, if the model failed to load or a process died."""
        end = self._server.exit_status()
        is_model_dead = status is not None and not is_running(status.pid)
        latest = read_status(self._workspace.status_file)  # what was written before the death
        if latest is not None and latest.phase == "failed":
            raise ServingError(latest.fields["error"])
        if end is not None:
            reason = explain(self._workspace.log_file) if is_loading else ""
            raise ServingError(f"tritonserver ended ({end}): {reason or _SEE_LOG}")
        if is_model_dead:
            raise ServingError(f"the model process died: {_SEE_LOG}")

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(
            self._settings.local_host, self._settings.http_port, timeout=_HEALTH_SECONDS
        )
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _drain(self) -> None:
        """Let running requests finish within the drain time, then end them with what they have."""
        seconds = self._settings.drain_seconds
        typer.echo(
            f"stopping: running requests may finish within {seconds:g} s (Ctrl-C: stop them now)",
            err=True,
        )
        self._workspace.ask_to_drain()
        if self._wait_until_drained(seconds, lambda: self._signals.is_asked(times=2)):
            return
        self._workspace.ask_to_drain(stop_all=True)
        self._wait_until_drained(_STOP_ALL_SECONDS, lambda: self._signals.is_asked(times=3))

    def _wait_until_drained(self, seconds: float, is_hurried: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not is_hurried():
            status = read_status(self._workspace.status_file)
            self._check_alive(status)
            if status is not None and status.phase == "drained":
                return True
            time.sleep(_POLL_SECONDS)
        return False
