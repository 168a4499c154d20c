"""One run over a server that only says that it is ready, with this process as model: what goes
wrong beside it takes no step of the way down away."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from support.server_logs import without_grpc
from support.triton_harness import wait_until

from inflight_backend.errors import ServingError
from inflight_backend.status import StatusWriter, stop_file_of
from inflight_server.serve import launcher
from inflight_server.serve import log_file as log
from inflight_server.serve.launcher import Run
from inflight_server.serve.openai_front import OpenAIFront
from inflight_server.serve.process import ServerHealth, ServerProcess
from inflight_server.serve.settings import ServeSettings
from inflight_server.serve.supervisor import Attempt, StopSignals
from inflight_server.serve.tritonserver import TritonInstall
from inflight_server.serve.workspace import BackendTmp, Workspace

# Says that it is ready, and how it was ended.
SERVER = """
import http.server, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
def leave(*_):
    print("asked to end", flush=True)
    sys.exit()
signal.signal(signal.SIGINT, leave)
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
WRITES_MUCH = """
import os, time
print("x" * 100_000, flush=True)
while os.fstat(1).st_size:
    time.sleep(0.01)
print("after", flush=True)
"""
DRAIN = 0.4
NAMES = ("model", "device", "dtype", "policy")
SIZES = ("num_blocks", "tokens_per_block", "max_batch_size", "max_seq_len", "max_num_tokens")
READY = {**dict.fromkeys(NAMES, "m"), **dict.fromkeys(SIZES, 1)}


class Started:
    """One `Run`, and what its server has printed."""

    def __init__(
        self, folder: Path, workspace: Workspace, scratch: BackendTmp, drain_seconds: float
    ) -> None:
        self._log = folder / "log"
        with self._log.open("wb") as output:
            server = ServerProcess([sys.executable, "-c", SERVER], os.environ, output)
        wait_until(lambda: self.output.endswith("\n"))
        port = int(self.output)
        settings = ServeSettings(http_port=port, openai_port=0, drain_seconds=drain_seconds)
        self.workspace = workspace
        self.model = StatusWriter(workspace.status_file)
        self.model.write("ready", **READY)
        self.signals = StopSignals()
        front, attempt = OpenAIFront(settings, workspace), Attempt(1)
        self.run_of_it = Run(settings, workspace, scratch, server, front, self.signals, attempt)

    @property
    def output(self) -> str:
        return without_grpc(self._log.read_text())

    def run(self, interfere: Callable[[], None] | None = None) -> float:
        """Run until it ends; when it is ready, ``interfere`` on another thread. The seconds from
        then on."""
        began = time.monotonic()

        def wait() -> None:
            nonlocal began
            if interfere is not None:
                wait_until(lambda: self.run_of_it.attempt.ready_at is not None)
                began = time.monotonic()
                interfere()

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            with self.signals:
                self.run_of_it.run()
        finally:
            thread.join()
        return time.monotonic() - began

    def stop(self) -> None:
        self.signals.count = 1


@pytest.fixture
def drain_seconds() -> float:
    """For the streams of the server."""
    return DRAIN


@pytest.fixture
def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drain_seconds: float
) -> Iterator[Started]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(launcher, "_STOP_ALL_SECONDS", 0.2)
    with Workspace() as workspace, BackendTmp(workspace.scratch_note) as scratch:
        scratch.release()  # this server makes none, and others want to start
        yield Started(tmp_path, workspace, scratch, drain_seconds)


@pytest.mark.parametrize(
    ("seconds", "parameters", "limit", "age"),
    [
        (60.0, {}, "120.0", ["60000", "60000"]),
        (60.0, {"max_run_seconds": "5"}, "5", ["60000", "60000"]),
        (60.0, {"max_run_seconds": ""}, "", ["60000", "60000"]),  # no limit
        (0.0, {}, "${max_run_seconds}", []),
    ],
)
def test_the_limit_of_requests_follows_the_age_of_connections_unless_it_is_set(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    parameters: dict[str, str],
    limit: str,
    age: list[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    settings = ServeSettings(max_connection_seconds=seconds, parameters=parameters)
    install = TritonInstall(tmp_path, tmp_path, tmp_path, (), is_embedded=False)
    with Workspace() as workspace:
        command = launcher._prepare(settings, install, workspace)
        config = (workspace.models / "tensorrt_llm" / "config.pbtxt").read_text()
    _, _, entry = config.partition('key: "max_run_seconds"')
    assert entry.split('"')[1] == limit
    told = [each.partition("=")[2] for each in command if each.startswith("--grpc-max-connection")]
    assert told == age


@pytest.mark.slow
@pytest.mark.case(100)
@pytest.mark.parametrize("drain_seconds", [60.0])  # it is over when the model says so
def test_a_stop_that_nobody_hears_of_is_a_drain(
    started: Started, nobody_hears: AbstractContextManager[None]
) -> None:
    def drain() -> None:
        started.stop()
        wait_until(started.workspace.drain_file.exists)
        started.model.write("drained")

    with nobody_hears:
        started.run(drain)
    assert not stop_file_of(started.workspace.drain_file).exists()
    assert started.output.endswith("asked to end\n")


@pytest.mark.case(100)
@pytest.mark.parametrize(
    ("is_loaded", "is_listening"), [(True, True), (True, False), (False, True)]
)
def test_a_stop_before_we_have_seen_that_it_is_ready_is_a_drain_where_clients_may_have(
    started: Started, monkeypatch: pytest.MonkeyPatch, is_loaded: bool, is_listening: bool
) -> None:
    """Its streams were cut: a client that asks Triton itself may be served before we have asked."""
    if not is_loaded:
        StatusWriter(started.workspace.status_file).write("loading")
    if not is_listening:
        monkeypatch.setattr(ServerHealth, "is_answering", lambda *_: False)
    started.stop()
    seconds = started.run()
    is_drain = is_loaded and is_listening
    assert started.workspace.drain_file.exists() == is_drain
    assert not is_drain or seconds > DRAIN
    assert started.output.endswith("asked to end\n") == is_drain


@pytest.mark.slow
def test_a_log_that_grows_without_end_is_cut_while_the_server_writes_to_it(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "MAX_BYTES", 100_000)
    log_file = started.workspace.log_file
    with launcher._log_in(log_file) as output:
        writer = ServerProcess([sys.executable, "-c", WRITES_MUCH], os.environ, output)

    def stop() -> None:
        wait_until(lambda: writer.exit_status() is not None)
        started.stop()

    started.run(stop)
    writer.stop(0, lambda: False)
    assert without_grpc(log_file.read_text()) == "after\n", "and no hole before it"
    assert log.before(log_file).read_text().endswith("x" * 100_000 + "\n")


@pytest.mark.slow
@pytest.mark.case(126)
def test_a_model_that_cannot_be_told_gets_its_time_and_its_server_is_asked_to_end(
    started: Started, capfd: pytest.CaptureFixture[str]
) -> None:
    def stop() -> None:
        shutil.rmtree(started.workspace.path)
        started.stop()

    assert started.run(stop) > DRAIN
    assert started.output.endswith("asked to end\n")
    assert "the model cannot be told" in capfd.readouterr().err


@pytest.mark.parametrize("act", ["kill", "signal"])
def test_the_launcher_sleeps_until_a_process_ends_or_a_signal_comes(
    started: Started, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    monkeypatch.setattr(launcher, "_WATCH_SECONDS", 3600.0)
    monkeypatch.setattr(ServerHealth, "_check_beat", lambda health: None)  # we do not beat
    if act == "kill":
        with pytest.raises(ServingError, match=r"tritonserver ended \(killed by SIGKILL\)"):
            started.run(lambda: os.kill(started.run_of_it.server.pid, signal.SIGKILL))
    else:
        started.run(lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert started.output.endswith("asked to end\n")
