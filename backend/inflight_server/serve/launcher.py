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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from inflight_backend.manager.parameters import PRIVATE_BY_MODEL, PRIVATE_VARIABLE
from inflight_backend.status import ModelStatus, read_status
from inflight_protocol import DRAFT_MODEL_NAME
from inflight_server.serve.console import (
    LoadingDisplay,
    occupy_standard_descriptors,
    ready_block,
    say,
    shown,
)
from inflight_server.serve.log_file import keep_small
from inflight_server.serve.openai_front import OpenAIFront
from inflight_server.serve.preflight import check_install, check_settings
from inflight_server.serve.process import ServerHealth, ServerProcess
from inflight_server.serve.repository import assemble
from inflight_server.serve.settings import PRIVATE_KEYS, ServeSettings
from inflight_server.serve.supervisor import Attempt, RestartPolicy, StopSignals, Supervisor
from inflight_server.serve.tritonserver import TritonInstall, environment, locate, prepare_backends
from inflight_server.serve.workspace import BackendTmp, Workspace

_POLL_SECONDS = 0.05  # while it starts and stops
_WATCH_SECONDS = 0.2  # while it serves; a process that ends and a signal are noticed at once
# A server without requests ends 2 to 3 s after SIGINT; its own limit only matters when our
# drain gave up, and must end before we kill.
_EXIT_TIMEOUT_SECONDS = 3
_GRACE_SECONDS = 5.0
_STOP_ALL_SECONDS = 3.0
# A client that has vanished without closing its connection is noticed after their sum.
_KEEPALIVE_MS = 5_000
_KEEPALIVE_TIMEOUT_MS = 5_000
# Of Triton, for what each model process sends and asks: one for each of its threads that may do so
# at once. Triton's 32 take turns, each with cold caches, and its time for a token grows by half.
_POOL_THREADS = 4


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

            front = OpenAIFront(settings, workspace)

            def serve(attempt: Attempt) -> None:
                log = shown() if settings.is_verbose else _log_in(workspace.log_file)
                with log as output, BackendTmp(workspace.scratch_note) as scratch:
                    server = ServerProcess(command, env, output)
                    Run(settings, workspace, scratch, server, front, signals, attempt).run()

            policy = RestartPolicy(settings.max_restarts)
            try:
                Supervisor(workspace, signals, policy).run(serve)
            finally:
                front.stop()


@contextmanager
def _log_in(log_file: Path) -> Iterator[int]:
    """A descriptor for the output of the server."""
    with log_file.open("ab") as output:  # for `keep_small`
        yield output.fileno()


def _prepare(settings: ServeSettings, install: TritonInstall, workspace: Workspace) -> list[str]:
    """Fill the workspace and return the command line of the server."""
    values, draft_values = (
        _public(each) for each in (settings.parameters, settings.draft_parameters)
    )
    for each in (values, draft_values):
        each["decoupled_mode"] = str(settings.is_decoupled).lower()
    ages: list[str] = []
    if seconds := settings.max_connection_seconds:
        # What ends a gRPC stream whose client never reads: nothing else in Triton notices. HTTP
        # connections have no age; their requests may last as long as a gRPC stream may at most.
        names = ("--grpc-max-connection-age", "--grpc-max-connection-age-grace")
        ages = [f"{name}={round(1000 * seconds)}" for name in names]
        values.setdefault("max_run_seconds", str(2 * seconds))
    assemble(workspace.models, values, settings.models, draft_values)
    backends = prepare_backends(install, workspace.backends)
    return [
        str(install.binary),
        f"--model-repository={workspace.models}",
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-region-prefix-name={workspace.shm_prefix}",
        f"--backend-config=python,thread-pool-size={_POOL_THREADS}",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={_EXIT_TIMEOUT_SECONDS}",
        f"--grpc-keepalive-time={_KEEPALIVE_MS}",
        f"--grpc-keepalive-timeout={_KEEPALIVE_TIMEOUT_MS}",
        *ages,
        *_closed_interfaces(),
        *(f"{option}={address}" for option, address in settings.addresses.items()),
        *(f"{option}={port}" for option, port in settings.ports.items()),
    ]


def _private_parameters(settings: ServeSettings, workspace: Workspace) -> dict[str, str]:
    """Environment of the models with the parameters that are paths: clients must not see them."""
    paths: dict[str, object] = dict(_private(settings.parameters))
    paths |= {
        "gpt_model_path": str(settings.model),
        "status_file": str(workspace.status_file),
        "drain_file": str(workspace.drain_file),
    }
    if settings.draft_model is not None:
        own = {**_private(settings.draft_parameters), "gpt_model_path": str(settings.draft_model)}
        paths[PRIVATE_BY_MODEL] = {DRAFT_MODEL_NAME: own}
    return {PRIVATE_VARIABLE: json.dumps(paths)}


def _public(parameters: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in parameters.items() if key not in PRIVATE_KEYS}


def _private(parameters: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in parameters.items() if key in PRIVATE_KEYS}


def _closed_interfaces() -> tuple[str, ...]:
    """They require a random password in a header. Triton's refusal contains only the header's name,
    so the name gives the reason. Verbose logging, which any client may turn on else, is 100 KB for
    a stream of 60 tokens. A client that may register shared memory can write to that of server and
    model, once it knows its name: since it has our prefix, no Triton refuses that by itself.
    """
    rules = [f"{name}:{reason}={secrets.token_hex(16)}" for name, reason in _CLOSED.items()]
    options = ("--http-restricted-api", "--grpc-restricted-protocol")
    return tuple(f"{option}={rule}" for option in options for rule in rules)


@dataclass
class Run:
    """A started server: wait until it is ready, watch it, drain and stop it."""

    settings: ServeSettings
    workspace: Workspace
    scratch: BackendTmp
    server: ServerProcess
    front: OpenAIFront
    signals: StopSignals
    attempt: Attempt

    def __post_init__(self) -> None:
        self.health = ServerHealth(self.settings, self.workspace, self.server)

    def run(self) -> None:
        """Everything from loading to the end; the server is gone when this returns or raises."""
        grace_seconds = 0.0  # while loading there is nothing to finish
        try:
            status = self._wait_until_ready()
            if status is not None:
                self.front.start(self.signals)
                self._announce(status)
                self._watch()
            elif not self._may_have_clients():
                return
            self._drain()
            grace_seconds = _GRACE_SECONDS
        finally:
            self.server.stop(grace_seconds, lambda: self.signals.is_asked(times=3))

    def _announce(self, status: ModelStatus) -> None:
        self.attempt.mark_ready()
        if self.attempt.failed_at is None:
            say(ready_block(self.settings, status))
        else:
            seconds = time.monotonic() - self.attempt.failed_at
            say(f"ready again {seconds:.1f} s after the failure", err=True)

    def _wait_until_ready(self) -> ModelStatus | None:
        """The status of the ready model; None if asked to stop before."""
        with LoadingDisplay(self.settings) as display:
            while not self.signals.is_asked():
                self.scratch.look()
                status = self.health.check_loading()
                if status is not None:
                    self.scratch.release()  # the backend had made it before it ran the model
                    display.update(status)
                    if status.phase == "ready" and self.health.is_answering():
                        return status
                time.sleep(_POLL_SECONDS)
        return None

    def _may_have_clients(self) -> bool:
        """True for a server that may have told them that it is ready before we have seen that.

        Triton listens when all its models are loaded.
        """
        status = read_status(self.workspace.status_file)
        is_loaded = status is not None and status.phase == "ready"
        return is_loaded and self.health.is_answering("live")

    def _watch(self) -> None:
        while not self.signals.is_asked():
            self.health.check_progress()
            self.front.check()
            keep_small(self.workspace.log_file)
            processes = [*self.health.processes(), *self.front.processes]
            self.signals.wait(_WATCH_SECONDS, processes)

    def _drain(self) -> None:
        """Let running requests finish within the drain time, then end them with an error."""
        seconds = self.settings.drain_seconds
        say(
            f"stopping: running requests may finish within {seconds:g} s (Ctrl-C: stop them now)",
            err=True,
        )
        if not self._is_drained(seconds, num_signals=2):
            self._is_drained(_STOP_ALL_SECONDS, num_signals=3, stop_all=True)

    def _is_drained(self, seconds: float, num_signals: int, stop_all: bool = False) -> bool:
        """Ask the model to drain; False if it has not after ``seconds`` or ``num_signals``."""
        try:
            self.workspace.ask_to_drain(stop_all)
        except OSError as error:  # no room for one more name: the steps behind this one remain
            say(f"the model cannot be told: {error.strerror}", err=True)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.signals.is_asked(num_signals):
            status = self.health.check_processes()
            if status is not None and status.phase == "drained":
                return True
            time.sleep(_POLL_SECONDS)
        return False
