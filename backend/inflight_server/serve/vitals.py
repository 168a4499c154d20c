"""What can be seen of a running server from outside: who is dead, who does not answer."""

from __future__ import annotations

import http.client
from pathlib import Path

from inflight_backend.errors import ServerKilled, ServingError
from inflight_backend.status import ModelStatus, beat_of, read_status
from inflight_backend.triton.awake_clock import AwakeClock
from inflight_protocol import LLM_MODEL_NAME
from inflight_server.serve.log import explain, explain_abort
from inflight_server.serve.process import ServerProcess, children_of, end_of, is_running
from inflight_server.serve.repository import DEFAULT_MODELS
from inflight_server.serve.settings import ServeSettings
from inflight_server.serve.workspace import Workspace

_HEALTH_SECONDS = 2.0
_PROBE_PERIOD_SECONDS = 2.0
# What the model gets after it has said that nothing moves: its streams have ended by then, the
# server may still be writing the ends out.
_FAREWELL_SECONDS = 1.0
_SEE_LOG = "(--verbose shows its log)"


class Vitals:
    """Looks at one server and its model processes; raises `ServingError` saying what is wrong."""

    def __init__(
        self, settings: ServeSettings, workspace: Workspace, server: ServerProcess
    ) -> None:
        self._settings = settings
        self._workspace = workspace
        self._server = server
        stall_seconds = settings.llm_parameters.stall_seconds
        self._silence_seconds = stall_seconds + 2 * _PROBE_PERIOD_SECONDS
        self._clock = AwakeClock(longest_turn=self._silence_seconds / 2)
        self._answered_at = self._probed_at = self._beat_at = self._loaded_at = self._clock.now()
        self._last_beat = 0
        self._last_stage = _stage_of(None)
        self._unhealthy_since: float | None = None
        self._added: dict[str, int | None] | None = None

    def processes(self, status: ModelStatus) -> list[int]:
        """The server and what serves its models, as far as that is known."""
        added = self._added or {}
        return [self._server.pid, status.pid, *(pid for pid in added.values() if pid is not None)]

    def check_processes(self, status: ModelStatus | None, is_loading: bool = False) -> None:
        """Fail if the model could not be loaded or a process died."""
        # Before the server, which its models follow: what is wrong is the server then.
        death = "" if is_loading else self._death_of_added()
        end = self._server.exit_status()
        is_model_dead = status is not None and not is_running(status.pid)
        latest = read_status(self._workspace.status_file)  # what was written before the death
        if latest is not None and latest.phase == "failed":
            raise ServingError(latest.fields["error"])
        if end is not None:
            log_file = self._workspace.log_file
            reason = explain_abort(log_file) or (explain(log_file) if is_loading else "")
            why = f": {reason}" if reason else f" {_SEE_LOG}"
            failure = ServerKilled if self._server.was_killed else ServingError
            raise failure(f"tritonserver ended ({end}){why}")
        if is_model_dead:
            how = end_of(status.pid) if status is not None else ""
            raise ServingError(f"the model process died{how and f': {how}'} {_SEE_LOG}")
        if death:
            raise ServingError(f"{death} {_SEE_LOG}")

    def check_loading(self, status: ModelStatus | None) -> None:
        """Fail if nothing is heard of the model, or its load stands still for too long."""
        now = self._clock.now()
        stage = _stage_of(status)
        if stage != self._last_stage:
            self._last_stage, self._loaded_at = stage, now
        if now - self._loaded_at > self._settings.load_seconds:
            raise ServingError(
                f"loading has stood still for {now - self._loaded_at:.0f} s with {stage} "
                "(--load-seconds allows for more)"
            )
        self._answered_at = now  # it does not before all is loaded
        if status is None:  # the model process has not come to our code: no beat yet
            self._beat_at = now
        else:
            self._check_beat()

    def check_progress(self) -> None:
        """Fail if the model says that nothing moves, or nothing is heard of model or server."""
        self._check_health_of_model(read_status(self._workspace.status_file))
        self._check_beat()
        now = self._clock.now()
        if now - self._probed_at >= _PROBE_PERIOD_SECONDS:
            self._probed_at = now
            if self.is_answering("live"):
                self._answered_at = self._clock.now()
        silence = self._clock.now() - self._answered_at
        if silence > self._silence_seconds:
            raise ServingError(f"tritonserver has not answered for {silence:.0f} s")

    def is_answering(self, what: str = "ready") -> bool:
        """True if the server says that it is ``live`` or ``ready``."""
        connection = http.client.HTTPConnection(
            self._settings.local_address, self._settings.http_port, timeout=_HEALTH_SECONDS
        )
        try:
            connection.request("GET", f"/v2/health/{what}")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _death_of_added(self) -> str:
        """Which process of a model beside `tensorrt_llm` died, and how; "" if none did.

        They write no status: who serves such a model is looked up when all are loaded.
        """
        if self._added is None:
            self._added = self._find_added_models()
        for model, pid in self._added.items():
            if pid is None or not is_running(pid):
                how = "" if pid is None else end_of(pid)
                return f"the process of {model} died{how and f': {how}'}"
        return ""

    def _find_added_models(self) -> dict[str, int | None]:
        """Model -> its process; None if that has died already.

        Nobody is watched where even `tensorrt_llm`'s is not found: then this Triton starts them in
        another way than the ones we know.
        """
        added = [model for model in self._settings.models if model not in DEFAULT_MODELS]
        children = children_of(self._server.pid) if added else {}
        found = {
            Path(argument).parts[-3]: pid
            for pid, arguments in children.items()
            for argument in arguments
            if argument.endswith("/1/model.py")
        }
        return {model: found.get(model) for model in added} if LLM_MODEL_NAME in found else {}

    def _check_beat(self) -> None:
        now = self._clock.now()
        beat = beat_of(self._workspace.status_file)
        if beat != self._last_beat:
            self._last_beat, self._beat_at = beat, now
        if now - self._beat_at > self._silence_seconds:
            raise ServingError(f"the model process was silent for {now - self._beat_at:.0f} s")

    def _check_health_of_model(self, status: ModelStatus | None) -> None:
        if status is None or status.phase != "unhealthy":
            self._unhealthy_since = None
            return
        now = self._clock.now()
        self._unhealthy_since = self._unhealthy_since or now
        if now - self._unhealthy_since >= _FAREWELL_SECONDS:
            raise ServingError(f"the model is not healthy: {status.fields['error']}")


def _stage_of(status: ModelStatus | None) -> str:
    """How far loading is, in words."""
    if status is None:
        return "no word from the model process"
    if status.phase != "loading":  # of the model with the status file; there may be others
        return "tensorrt_llm loaded"
    return f"{status.fields['loaded_bytes']} bytes of weights loaded"
