"""What the launcher sees from outside: a server that stops answering, a model that goes silent."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight_backend.errors import ServingError
from inflight_backend.serve import vitals
from inflight_backend.serve.process import ServerProcess
from inflight_backend.serve.settings import ServeSettings
from inflight_backend.serve.vitals import Vitals
from inflight_backend.serve.workspace import Workspace
from inflight_backend.status import StatusWriter, read_status

# Says that it is live, as tritonserver does, until it is stopped by a signal.
SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
STALL = 1.0


class Running:
    """A server, this process as its model, and the vitals of both."""

    def __init__(self, folder: Path, workspace: Workspace) -> None:
        log = folder / "log"
        with log.open("wb") as output:
            self.server = ServerProcess([sys.executable, "-c", SERVER], os.environ, output)
        deadline = time.monotonic() + 20
        while not log.read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        parameters = {"stall_seconds": str(STALL), "accumulate_tokens": "true"}  # not all of one
        settings = ServeSettings(http_port=int(log.read_text()), parameters=parameters)
        self.model = StatusWriter(workspace.status_file)
        self.model.write("ready")
        self.status = read_status(workspace.status_file)
        self.vitals = Vitals(settings, workspace, self.server)

    def watch(self, seconds: float, has_beat: bool = True) -> None:
        """What `inflight serve` does all the time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if has_beat:
                self.model.beat()
            self.vitals.check_processes(self.status)
            self.vitals.check_progress()
            time.sleep(0.01)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(vitals, "_PROBE_PERIOD_SECONDS", 0.1)
    monkeypatch.setattr(vitals, "_HEALTH_SECONDS", 0.2)
    monkeypatch.setattr(vitals, "_FAREWELL_SECONDS", 0.1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Workspace() as workspace:
        made = Running(tmp_path, workspace)
        yield made
        made.server.stop(0.0, lambda: True)


@pytest.mark.case(119)
def test_a_server_that_hangs_is_found_though_its_model_beats(running: Running) -> None:
    running.watch(0.2)
    os.kill(running.server.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(ServingError, match="tritonserver has not answered for"):
        running.watch(30.0)
    assert time.monotonic() - began >= STALL


@pytest.mark.case(88)
def test_a_model_process_that_is_silent_is_found(running: Running) -> None:
    running.watch(0.2)
    with pytest.raises(ServingError, match="the model process was silent for"):
        running.watch(30.0, has_beat=False)


def test_a_model_that_says_it_is_stuck_may_say_goodbye(running: Running) -> None:
    running.model.write("unhealthy", error="nothing moves")
    running.watch(0.05)
    with pytest.raises(ServingError, match="the model is not healthy: nothing moves"):
        running.watch(30.0)


@pytest.mark.case(119)
def test_a_server_that_died_is_found(running: Running) -> None:
    os.kill(running.server.pid, signal.SIGKILL)
    with pytest.raises(ServingError, match=r"tritonserver ended \(killed by SIGKILL\)"):
        running.watch(30.0)
