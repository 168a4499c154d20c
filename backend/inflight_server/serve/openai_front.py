"""OpenAI's API beside the server: ``inflight openai`` as a process of its own, started
again when it ends or falls silent.

It outlives a server that fails, and answers 503 until there is a new one. Nothing of ours is
imported from `inflight_openai`: the two know each other by a command line.
"""

from __future__ import annotations

import http.client
import os
import re
import sys
import time

from inflight_backend.errors import ServingError
from inflight_backend.triton.watchdog import AwakeClock
from inflight_client.headers import API_KEY_VARIABLE
from inflight_server.serve.console import say
from inflight_server.serve.log_file import keep_small
from inflight_server.serve.process import ServerProcess
from inflight_server.serve.settings import ServeSettings
from inflight_server.serve.supervisor import RestartPolicy, StopSignals
from inflight_server.serve.workspace import Workspace

_START_SECONDS = 60.0
_POLL_SECONDS = 0.05
_PROBE_PERIOD_SECONDS = 2.0
_PROBE_SECONDS = 2.0
_SILENCE_SECONDS = 30.0
_LAST_SECONDS = 3.0  # to write out answers that have ended, before it is killed
_LONGEST_DELAY = 30.0
_ERROR = re.compile(r"^error: (.*)", re.MULTILINE)


class OpenAIFront:
    """The process, from the moment that a server is ready until the launcher ends."""

    def __init__(self, settings: ServeSettings, workspace: Workspace) -> None:
        self._settings = settings
        self._log_file = workspace.openai_log_file
        self._process: ServerProcess | None = None
        self._policy = RestartPolicy(max_restarts=sys.maxsize)
        self._clock = AwakeClock(longest_turn=_SILENCE_SECONDS / 2)
        self._answered_at = self._probed_at = self._start_at = 0.0
        self._ready_at: float | None = None

    @property
    def processes(self) -> list[int]:
        """Its id, while it is there."""
        return [] if self._process is None else [self._process.pid]

    def start(self, signals: StopSignals) -> None:
        """Return when it takes requests or the user wants to stop; at once if it runs already, or
        is not wanted. `ServingError` says why it could not start."""
        if self._process is not None or self._settings.why_no_openai:
            return
        self._launch()
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_answering() and not signals.is_asked():
            if (end := self._end()) or time.monotonic() > deadline:
                self.stop()
                raise ServingError(f"OpenAI's API could not start: {end or 'it does not answer'}")
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Start it again if it has ended, or has not answered for too long."""
        if self._process is None:
            if self._start_at and self._clock.now() >= self._start_at:
                self._launch()
            return
        keep_small(self._log_file)
        now = self._clock.now()
        end = self._end()
        if not end and now - self._probed_at >= _PROBE_PERIOD_SECONDS:
            self._probed_at = now
            if self._is_answering():
                self._answered_at = self._clock.now()
                self._ready_at = self._ready_at or time.monotonic()
        if not end and now - self._answered_at > _SILENCE_SECONDS:
            end = f"it has not answered for {now - self._answered_at:.0f} s"
        if end:
            self._stop_now()
            ready = None if self._ready_at is None else time.monotonic() - self._ready_at
            delay = min(self._policy.next_delay(ready) or 0.0, _LONGEST_DELAY)
            when = f"in {delay:g} s" if delay else "now"
            say(f"OpenAI's API ended: {end}; starting it again {when}", err=True)
            self._start_at = self._clock.now() + delay

    def stop(self) -> None:
        """End it, and be sure that it has gone. The server has ended by then: while that drained,
        new requests were answered with 503 here."""
        self._start_at = 0.0
        if self._process is not None:
            self._process.ask_to_end()
            deadline = time.monotonic() + _LAST_SECONDS
            while self._process.exit_status() is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        self._stop_now()

    def _stop_now(self) -> None:
        if self._process is not None:
            self._process.stop(0.0, lambda: True)
            self._process = None

    def _launch(self) -> None:
        self._ready_at = None
        self._answered_at = self._probed_at = self._clock.now()
        environment = dict(os.environ)
        if self._settings.api_key:
            environment[API_KEY_VARIABLE] = self._settings.api_key
        with self._log_file.open("ab") as log:
            output = sys.stderr if self._settings.is_verbose and sys.stderr is not None else log
            self._process = ServerProcess(self._command(), environment, output.fileno())

    def _command(self) -> list[str]:
        settings = self._settings
        host = settings.local_host
        return [
            *(sys.executable, "-m", "inflight_client.cli", "openai"),
            f"--url={host}:{settings.grpc_port}",
            f"--metrics-url=http://{host}:{settings.metrics_port}/metrics",
            f"--host={settings.host}",
            f"--port={settings.openai_port}",
            f"--drain-seconds={settings.drain_seconds}",
            *([] if (file := settings.api_key_file) is None else [f"--api-key-file={file}"]),
            *settings.front.command_line(),
        ]

    def _end(self) -> str:
        """How it ended, in words; "" while it runs."""
        status = self._process.exit_status() if self._process is not None else None
        if status is None:
            return ""
        found = _ERROR.findall(self._log_file.read_text(encoding="utf-8", errors="replace"))
        return found[-1] if found else status

    def _is_answering(self) -> bool:
        """True if it answers, though it may say that the server does not."""
        connection = http.client.HTTPConnection(
            self._settings.local_address, self._settings.openai_port, timeout=_PROBE_SECONDS
        )
        try:
            connection.request("GET", "/version")
            return connection.getresponse().status > 0
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
