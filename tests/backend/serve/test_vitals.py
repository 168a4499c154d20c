"""What the launcher sees from outside: a server that stops answering, a model that goes silent."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inflight_backend.errors import ServingError
from inflight_backend.status import StatusWriter, read_status
from inflight_protocol import LLM_MODEL_NAME
from inflight_server.serve import process as vitals
from inflight_server.serve.process import ServerProcess, Vitals, children_of, is_running
from inflight_server.serve.repository import DEFAULT_MODELS
from inflight_server.serve.settings import ServeSettings
from inflight_server.serve.workspace import Workspace

pytestmark = pytest.mark.slow

# Says that it is live, as tritonserver does, until it is stopped by a signal; each argument is a
# model file, which it starts a process for and does not look at again.
SERVER = """
import http.server, subprocess, sys
SLEEP = "import time; time.sleep(600)"
models = [subprocess.Popen([sys.executable, "-c", SLEEP, file]) for file in sys.argv[1:]]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
STALL = 1.0
SILENCE = STALL + 0.2  # with the probes of `running`
LOAD = 2.0
ADDED = ("tensorrt_llm_bls", "preprocessing")


class Running:
    """A server, this process as its model, processes of added models, and the vitals of all."""

    def __init__(self, folder: Path, workspace: Workspace) -> None:
        models = (LLM_MODEL_NAME, *ADDED)
        files = [str(workspace.models / model / "1" / "model.py") for model in models]
        log = folder / "log"
        with log.open("wb") as output:
            self.server = ServerProcess([sys.executable, "-c", SERVER, *files], os.environ, output)
        deadline = time.monotonic() + 20
        while not (log.read_text().endswith("\n") and self._has_started(files)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        parameters = {"stall_seconds": str(STALL), "accumulate_tokens": "true"}  # not all of one
        settings = ServeSettings(
            http_port=int(log.read_text()),
            parameters=parameters,
            load_seconds=LOAD,
            models=(*DEFAULT_MODELS, *ADDED),
        )
        self.model = StatusWriter(workspace.status_file)
        self.model.write("ready")
        self.status_file = workspace.status_file
        self.status = read_status(workspace.status_file)
        self.vitals = Vitals(settings, workspace, self.server)

    def _has_started(self, files: list[str]) -> bool:
        """The kernel shows a command line a moment after who started the process goes on."""
        return {arguments[-1] for arguments in children_of(self.server.pid).values()} == set(files)

    def watch(self, seconds: float, has_beat: bool = True) -> None:
        """What `inflight serve` does all the time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if has_beat:
                self.model.beat()
            self.vitals.check_processes(self.status)
            self.vitals.check_progress()
            time.sleep(0.01)

    def kill_added(self, model: str) -> None:
        """Kill the process of an added model, and wait until it is dead."""
        (pid,) = (
            pid
            for pid, arguments in children_of(self.server.pid).items()
            if arguments[-1].endswith(f"/{model}/1/model.py")
        )
        os.kill(pid, signal.SIGKILL)
        while is_running(pid):
            time.sleep(0.001)

    def has_loaded_for(self, seconds: float) -> bool:
        """True when `load` has taken so long."""
        return time.monotonic() - self.began > seconds

    def load(self, is_over: Callable[[], bool]) -> None:
        """What `inflight serve` does before the server is ready; 30 s at most."""
        self.began = time.monotonic()
        deadline = self.began + 30
        while not is_over() and time.monotonic() < deadline:
            status = read_status(self.status_file)
            self.vitals.check_processes(status, is_loading=True)
            self.vitals.check_loading(status)
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


def test_a_machine_that_was_stopped_and_goes_on_has_missed_nothing(running: Running) -> None:
    """`docker pause`: server, model and launcher stand still, the clock does not."""
    running.watch(0.2)
    time.sleep(4 * SILENCE)
    running.watch(0.05, has_beat=False)
    running.watch(0.2)


def test_a_model_that_says_it_is_stuck_may_say_goodbye(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitals, "_FAREWELL_SECONDS", 1.0)  # many looks, also on a busy machine
    running.model.write("unhealthy", error="nothing moves")
    running.watch(0.05)
    with pytest.raises(ServingError, match="the model is not healthy: nothing moves"):
        running.watch(30.0)


@pytest.mark.case(119)
def test_a_server_that_died_is_found(running: Running) -> None:
    os.kill(running.server.pid, signal.SIGKILL)
    with pytest.raises(ServingError, match=r"tritonserver ended \(killed by SIGKILL\)"):
        running.watch(30.0)


@pytest.mark.case(90)
@pytest.mark.parametrize("model", ADDED)
def test_an_added_model_that_died_is_found_at_once(running: Running, model: str) -> None:
    running.watch(0.2)
    running.kill_added(model)
    with pytest.raises(ServingError, match=f"the process of {model} died: killed by SIGKILL"):
        running.vitals.check_processes(running.status)


@pytest.mark.case(90)
def test_an_added_model_that_died_before_all_were_loaded_is_found_then(running: Running) -> None:
    """Not before: the process of one whose turn has not come is not there either."""
    running.kill_added("preprocessing")
    running.load(lambda: running.has_loaded_for(0.2))
    with pytest.raises(ServingError, match=r"the process of preprocessing died \("):
        running.vitals.check_processes(running.status)


def test_nobody_is_blamed_where_triton_starts_models_in_another_way(running: Running) -> None:
    running.kill_added(LLM_MODEL_NAME)
    running.kill_added("preprocessing")
    running.watch(0.2)


def never() -> bool:
    return False


@pytest.mark.case(88)
def test_a_load_that_goes_on_may_take_long(running: Running) -> None:
    """Longer than any of the limits, and yet the server is not blamed when it serves at last."""

    def move_on() -> bool:
        seconds = time.monotonic() - running.began
        running.model.write("loading", loaded_bytes=int(10 * seconds), total_bytes=100)
        return running.has_loaded_for(1.5 * LOAD)

    running.load(move_on)
    running.watch(0.1)


@pytest.mark.case(88)
def test_a_model_process_that_is_silent_while_loading_is_found(running: Running) -> None:
    with running.model.beating(0.01):
        running.load(lambda: running.has_loaded_for(0.2))
    with pytest.raises(ServingError, match="the model process was silent for"):
        running.load(never)


@pytest.mark.case(88)
@pytest.mark.parametrize(
    ("num_bytes", "stage"),
    [(None, "no word from the model process"), (7, "7 bytes of weights loaded")],
)
def test_a_load_that_stands_still_is_found(
    running: Running, num_bytes: int | None, stage: str
) -> None:
    """A process that never comes to our code, or a device that takes no more weights: it beats."""
    if num_bytes is None:
        running.status_file.unlink()
    else:
        running.model.write("loading", loaded_bytes=num_bytes, total_bytes=10)

    def beat() -> bool:
        running.model.beat()
        return False

    with pytest.raises(ServingError, match=rf"loading has stood still for \d s with {stage}"):
        running.load(beat)
