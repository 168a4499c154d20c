"""One run of `inflight serve`: check, assemble, start, wait, watch, drain, stop.

A server that fails after it was ready is started again (see `supervisor`).

Order of side effects: signals are counted, the workspace is made, the server starts. The way back,
on every path, is the reverse: the server and all it started are gone before the workspace and its
shared memory are removed, and that before signals act as usual again.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from inflight_backend.manager.parameters import PRIVATE_VARIABLE
from inflight_backend.status import ModelStatus, read_status
from inflight_server.serve.console import (
    LoadingDisplay,
    occupy_standard_descriptors,
    ready_block,
    say,
    shown,
)
from inflight_server.serve.log_file import keep_small
from inflight_server.serve.preflight import check_install, check_settings
from inflight_server.serve.process import ServerProcess, Vitals
from inflight_server.serve.repository import assemble
from inflight_server.serve.settings import PATH_KEYS, ServeSettings
from inflight_server.serve.supervisor import Attempt, RestartPolicy, StopSignals, Supervisor
from inflight_server.serve.tritonserver import TritonInstall, environment, locate, prepare_backends
from inflight_server.serve.workspace import BackendTmp, Workspace

_POLL_SECONDS = 0.05  # while it starts and stops
_WATCH_SECONDS = 1.0  # while it serves; a process that ends and a signal are noticed at once
# A server without requests ends 2 to 3 s after SIGINT; its own limit only matters when our
# drain gave up, and must end before we kill.
_EXIT_TIMEOUT_SECONDS = 3
_GRACE_SECONDS = 5.0
_STOP_ALL_SECONDS = 3.0
# A client that has vanished without closing its connection is noticed after their sum.
_KEEPALIVE_MS = 5_000
_KEEPALIVE_TIMEOUT_MS = 5_000


_CLOSED = {
    "logging": "the-log-is-set-where-inflight-serve-is-started",
    "shared-memory": "inflight-serve-has-no-shared-memory-for-clients.send-tensors-in-requests",
}
"""Closed interface of Triton -> reason. Triton requires a secret header of this name, and names it
when it refuses a request: the only text that it sends to the client."""


def run(settings: ServeSettings) -> None:
    """Serve until asked to stop; `ServingError` if starting fails or the server keeps failing."""
    occupy_standard_descriptors()
    with StopSignals() as signals:
        check_settings(settings)
        install = locate()
        env = environment(install)
        check_install(install, env)
        with Workspace() as workspace:
            command = _prepare(settings, install, workspace)
            env |= workspace.environment | _private_parameters(settings, workspace)

            def serve(attempt: Attempt) -> None:
                log = shown() if settings.is_verbose else _log_in(workspace.log_file)
                with log as output, BackendTmp(workspace.scratch_note) as scratch:
                    server = ServerProcess(command, env, output)
                    Run(settings, workspace, scratch, server, signals, attempt).run()

            policy = RestartPolicy(settings.max_restarts)
            Supervisor(workspace, signals, policy).run(serve)


@contextmanager
def _log_in(log_file: Path) -> Iterator[int]:
    """A descriptor for what the server says."""
    with log_file.open("ab") as output:  # for `keep_small`
        yield output.fileno()


def _prepare(settings: ServeSettings, install: TritonInstall, workspace: Workspace) -> list[str]:
    """Fill the workspace and return the command line of the server."""
    values = {
        **_run_limit(settings.max_connection_seconds),
        **{key: value for key, value in settings.parameters.items() if key not in PATH_KEYS},
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
        f"--grpc-keepalive-time={_KEEPALIVE_MS}",
        f"--grpc-keepalive-timeout={_KEEPALIVE_TIMEOUT_MS}",
        *_connection_age(settings.max_connection_seconds),
        *_closed_interfaces(),
        *(f"{option}={address}" for option, address in settings.addresses.items()),
        *(f"{option}={port}" for option, port in settings.ports.items()),
    ]


def _private_parameters(settings: ServeSettings, workspace: Workspace) -> dict[str, str]:
    """Environment of the models with the parameters that are paths: clients must not see them."""
    paths = {key: value for key, value in settings.parameters.items() if key in PATH_KEYS}
    paths |= {
        "gpt_model_path": str(settings.model),
        "status_file": str(workspace.status_file),
        "drain_file": str(workspace.drain_file),
    }
    return {PRIVATE_VARIABLE: json.dumps(paths)}


def _connection_age(seconds: float) -> tuple[str, ...]:
    """What ends a gRPC stream whose client never reads: nothing else in Triton notices."""
    milliseconds = round(1000 * seconds)
    names = ("--grpc-max-connection-age", "--grpc-max-connection-age-grace")
    return tuple(f"{name}={milliseconds}" for name in names if milliseconds)


def _run_limit(connection_seconds: float) -> dict[str, str]:
    """The same for HTTP, whose connections have no age: what a gRPC stream may last at most."""
    return {"max_run_seconds": str(2 * connection_seconds)} if connection_seconds else {}


def _closed_interfaces() -> tuple[str, ...]:
    """They require a random password in a header. Triton's refusal contains only the header's name,
    so the name gives the reason. Verbose logging, which any client may turn on else,
    is 100 KB for a stream of 60 tokens. Who may register shared memory can write in what server and
    model share, once its name is known: since it has our prefix, no Triton refuses that by itself.
    """
    rules = [f"{name}:{reason}={secrets.token_hex(16)}" for name, reason in _CLOSED.items()]
    options = ("--http-restricted-api", "--grpc-restricted-protocol")
    return tuple(f"{option}={rule}" for option in options for rule in rules)


class Run:
    """A started server: wait until it is ready, watch it, drain and stop it."""

    def __init__(
        self,
        settings: ServeSettings,
        workspace: Workspace,
        scratch: BackendTmp,
        server: ServerProcess,
        signals: StopSignals,
        attempt: Attempt,
    ) -> None:
        self._settings = settings
        self._workspace = workspace
        self._scratch = scratch
        self._server = server
        self._signals = signals
        self._attempt = attempt
        self._vitals = Vitals(settings, workspace, server)

    def run(self) -> None:
        """Everything from loading to the end; the server is gone when this returns or raises."""
        grace_seconds = 0.0  # while loading there is nothing to finish
        try:
            status = self._wait_until_ready()
            if status is not None:
                self._announce(status)
                self._watch(status)
            elif not self._may_have_clients():
                return
            self._drain()
            grace_seconds = _GRACE_SECONDS
        finally:
            self._server.stop(grace_seconds, lambda: self._signals.is_asked(times=3))

    def _announce(self, status: ModelStatus) -> None:
        self._attempt.mark_ready()
        if self._attempt.failed_at is None:
            say(ready_block(self._settings, status))
        else:
            seconds = time.monotonic() - self._attempt.failed_at
            say(f"ready again {seconds:.1f} s after the failure", err=True)

    def _wait_until_ready(self) -> ModelStatus | None:
        """The status of the ready model; None if asked to stop before."""
        with LoadingDisplay(self._settings) as display:
            while not self._signals.is_asked():
                self._scratch.look()
                status = read_status(self._workspace.status_file)
                if status is not None:
                    self._scratch.release()  # the backend had made it before it ran the model
                display.update(status)
                self._vitals.check_processes(status, is_loading=True)
                self._vitals.check_loading(status)
                if status is not None and status.phase == "ready" and self._vitals.is_answering():
                    return status
                time.sleep(_POLL_SECONDS)
        return None

    def _may_have_clients(self) -> bool:
        """True for a server that may have told them that it is ready before we have seen that.

        Triton listens when all its models are loaded.
        """
        status = read_status(self._workspace.status_file)
        is_loaded = status is not None and status.phase == "ready"
        return is_loaded and self._vitals.is_answering("live")

    def _watch(self, status: ModelStatus) -> None:
        while not self._signals.is_asked():
            self._vitals.check_processes(status)
            self._vitals.check_progress()
            keep_small(self._workspace.log_file)
            self._signals.wait(_WATCH_SECONDS, self._vitals.processes(status))

    def _drain(self) -> None:
        """Let running requests finish within the drain time, then end them with an error."""
        seconds = self._settings.drain_seconds
        say(
            f"stopping: running requests may finish within {seconds:g} s (Ctrl-C: stop them now)",
            err=True,
        )
        self._ask_to_drain()
        if self._wait_until_drained(seconds, lambda: self._signals.is_asked(times=2)):
            return
        self._ask_to_drain(stop_all=True)
        self._wait_until_drained(_STOP_ALL_SECONDS, lambda: self._signals.is_asked(times=3))

    def _ask_to_drain(self, stop_all: bool = False) -> None:
        """A disk without room for one more name takes away this step, not those after it."""
        try:
            self._workspace.ask_to_drain(stop_all)
        except OSError as error:
            say(f"the model cannot be told: {error.strerror}", err=True)

    def _wait_until_drained(self, seconds: float, is_hurried: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not is_hurried():
            status = read_status(self._workspace.status_file)
            self._vitals.check_processes(status)
            if status is not None and status.phase == "drained":
                return True
            time.sleep(_POLL_SECONDS)
        return False
