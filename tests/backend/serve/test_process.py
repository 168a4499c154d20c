"""Stopping a process group, whatever its members do, and seeing what is wrong with a server and its
models from outside. Real processes, no tritonserver."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.server_logs import without_grpc
from support.triton_harness import wait_until

from inflight_backend.errors import ServingError
from inflight_backend.status import StatusWriter
from inflight_protocol import LLM_MODEL_NAME
from inflight_server.serve import process as process_module
from inflight_server.serve.process import (
    ServerHealth,
    ServerProcess,
    children_of,
    end_of,
    is_running,
)
from inflight_server.serve.repository import DEFAULT_MODELS
from inflight_server.serve.settings import ServeSettings
from inflight_server.serve.workspace import Workspace

POLITE = "import time; print('up', flush=True); time.sleep(60)"
# The kernel keeps 15 bytes of a name: the first half of a character at the end.
CUT_NAME = "import ctypes; ctypes.CDLL(None).prctl(15, 'abcdefghijklmn\u00fc'.encode()); " + POLITE
LIMIT = "import resource; print(resource.getrlimit(resource.%s)[0], flush=True)"
# As tritonserver, which has a handler of its own: Python's only raises.
DEFAULT = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); " + POLITE
STUBBORN = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + POLITE
# A "server" with a "model process" that ignores SIGINT; it says the pid of the latter.
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
# May be traced by a process that is no ancestor; who traces keeps it from being reaped when killed,
# as far as others can see it does not end.
TRACEABLE = "import ctypes; ctypes.CDLL(None).prctl(0x59616D61, -1); " + POLITE
TRACER = """
import ctypes, sys
assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0
print("traced", flush=True)
sys.stdin.read()
"""
LAUNCHER = f"""
import os, subprocess, sys, time
from inflight_server.serve.process import ServerProcess
server = ServerProcess([sys.executable, "-c", {STUBBORN!r}], os.environ, subprocess.DEVNULL)
print(server.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., tuple[ServerProcess, str]]:
    """Starts Python code, with arguments, and waits for the first line it prints."""
    log = tmp_path / "log"

    def start(code: str, *arguments: str) -> tuple[ServerProcess, str]:
        with log.open("wb") as output:
            command = [sys.executable, "-c", code, *arguments]
            process = ServerProcess(command, os.environ, output)
        wait_until(lambda: without_grpc(log.read_text()).endswith("\n"))
        return process, without_grpc(log.read_text()).strip()

    return start


Start = Callable[..., tuple[ServerProcess, str]]


def not_hurried() -> bool:
    return False


@pytest.mark.parametrize(
    ("code", "grace_seconds", "is_hurried", "end"),
    [
        (DEFAULT, 60, False, "SIGINT"),
        (STUBBORN, 0.2, False, "SIGKILL"),
        (STUBBORN, 60, True, "SIGKILL"),
    ],
)
def test_a_server_is_asked_to_end_and_killed_after_the_grace_time(
    start: Start, code: str, grace_seconds: float, is_hurried: bool, end: str
) -> None:
    process, _ = start(code)
    assert process.exit_status() is None
    assert not process.was_killed
    began = time.monotonic()
    process.stop(grace_seconds, lambda: is_hurried)
    assert time.monotonic() - began < 30
    assert process.exit_status() == f"killed by {end}"
    assert process.was_killed


@pytest.mark.case(100)
def test_a_service_manager_that_asks_everybody_to_end_reaches_the_launcher_only(
    start: Start,
) -> None:
    process, _ = start(DEFAULT)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.3)
    assert process.exit_status() is None
    process.stop(30, not_hurried)
    assert process.exit_status() == "killed by SIGINT"


@pytest.fixture
def limit_of_server(start: Start) -> Iterator[Callable[[str, int], int]]:
    """The soft limit of a server whose launcher has another one."""
    names = ("RLIMIT_NOFILE", "RLIMIT_STACK")
    before = {name: resource.getrlimit(getattr(resource, name)) for name in names}

    def limit(name: str, own: int) -> int:
        number, limits = getattr(resource, name), (own, before[name][1])
        resource.setrlimit(number, limits)
        process, told = start(LIMIT % name)
        process.stop(0, not_hurried)
        assert resource.getrlimit(number) == limits
        return int(told)

    yield limit
    for name, limits in before.items():
        resource.setrlimit(getattr(resource, name), limits)


@pytest.mark.case(72)
def test_a_server_may_have_more_connections_than_a_shell_gives_descriptors(
    limit_of_server: Callable[[str, int], int],
) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert hard > 1024
    assert limit_of_server("RLIMIT_NOFILE", 1024) == min(hard, 2**16)


@pytest.mark.case(40)
@pytest.mark.parametrize(
    ("own", "overcommit", "limit"),
    [
        (2**23, None, 2**30),
        (resource.RLIM_INFINITY, None, 2**30),  # a thread would have the 2 MB of the C library
        (2**23, "2\n", 2**23),  # threads could not be started where reserved memory counts
        (2**23, "", 2**30),  # no such system
    ],
)
def test_the_threads_of_a_server_have_room_for_deep_json(
    limit_of_server: Callable[[str, int], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: int,
    overcommit: str | None,
    limit: int,
) -> None:
    if overcommit is not None:
        file = tmp_path / "overcommit"
        if overcommit:
            file.write_text(overcommit)
        monkeypatch.setattr(process_module, "_OVERCOMMIT", file)
    assert limit_of_server("RLIMIT_STACK", own) == limit


@pytest.mark.parametrize("is_server_dead", [False, True])
def test_model_process_goes_with_its_server_and_is_reaped(
    start: Start, is_server_dead: bool
) -> None:
    process, model = start(PARENT)
    if is_server_dead:
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: process.exit_status() is not None)
    assert is_running(int(model))
    process.stop(0 if is_server_dead else 30, not_hurried)
    assert not Path(f"/proc/{model}").exists()


def test_a_process_that_does_not_end_when_killed_is_left_behind_with_a_line(
    start: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one that waits for a device in the kernel."""
    monkeypatch.setattr(process_module, "_KILLED_SECONDS", 0.3)
    process, _ = start(TRACEABLE)
    command = [sys.executable, "-c", TRACER, str(process.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == b"traced\n"
        began = time.monotonic()
        process.stop(0, not_hurried)
        assert time.monotonic() - began < 20
        assert f"a process ({process.pid}) was killed and does not end" in capfd.readouterr().err
        tracer.kill()
    process.stop(0, not_hurried)
    assert process.exit_status() == "killed by SIGKILL"
    assert capfd.readouterr().err == ""


def test_missing_binary_is_one_clear_error() -> None:
    with pytest.raises(ServingError, match="cannot start /nonexistent: No such file"):
        ServerProcess(["/nonexistent"], os.environ, subprocess.DEVNULL)


@pytest.mark.case(124)
def test_server_dies_with_its_launcher() -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        server = int(launcher.stdout.readline())
        launcher.kill()
    wait_until(lambda: not is_running(server))


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("import os; os.abort()", "killed by SIGABRT"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 1)", "killed by signal 35"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_how_a_process_ended_that_another_one_has_to_reap(code: str, end: str) -> None:
    """As that of the model, which tritonserver starts and does not reap: it does not run."""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_until(lambda: not is_running(process.pid))
        assert end_of(process.pid) == end
    assert end_of(process.pid) == ""
    assert not is_running(process.pid)
    assert end_of(os.getpid()) == ""


def test_a_name_that_is_no_text_hides_no_process(start: Start) -> None:
    """To find the processes of added models, all that run on the machine are read."""
    process, _ = start(CUT_NAME)
    name = Path(f"/proc/{process.pid}/comm").read_bytes()
    assert process.pid in children_of(os.getpid())
    assert is_running(process.pid)
    process.stop(0, not_hurried)
    assert name == b"abcdefghijklmn\xc3\n"


# Says that it is live and answers streams, as tritonserver does, until it is stopped by a signal;
# streams no more after SIGUSR1. Each argument is a model file, which it starts a process for and
# does not look at again.
SERVER = """
import concurrent.futures, grpc, http.server, signal, subprocess, sys, time
SLEEP = "import time; time.sleep(600)"
models = [subprocess.Popen([sys.executable, "-c", SLEEP, file]) for file in sys.argv[1:]]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
is_mute = []
signal.signal(signal.SIGUSR1, lambda *_: is_mute.append(True))
def answer(request, context):
    while is_mute and context.is_active():
        time.sleep(0.05)
    yield b""
streams = grpc.method_handlers_generic_handler(
    "inference.GRPCInferenceService",
    {"ModelStreamInfer": grpc.unary_stream_rpc_method_handler(answer)},
)
grpc_server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
grpc_server.add_generic_rpc_handlers((streams,))
grpc_port = grpc_server.add_insecure_port("127.0.0.1:0")
grpc_server.start()
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, grpc_port, flush=True)
server.serve_forever()
"""
STALL = 1.0
SILENCE = STALL + 0.2  # with the probes of `running`
LOAD = 2.0
ADDED = ("tensorrt_llm_bls", "preprocessing")


class Running:
    """A server, this process as its model, processes of added models, and the health of all."""

    def __init__(self, start: Start, workspace: Workspace) -> None:
        models = (LLM_MODEL_NAME, *ADDED)
        files = [str(workspace.models / model / "1" / "model.py") for model in models]
        self.server, ports = start(SERVER, *files)
        http_port, grpc_port = map(int, ports.split())
        # The kernel shows a command line a moment after the start of its process.
        wait_until(lambda: set(self._model_files()) == set(files))
        settings = ServeSettings(
            http_port=http_port,
            grpc_port=grpc_port,
            parameters={"stall_seconds": str(STALL), "accumulate_tokens": "true"},  # not all of one
            load_seconds=LOAD,
            models=(*DEFAULT_MODELS, *ADDED),
        )
        self.model = StatusWriter(workspace.status_file)
        self.model.write("ready")
        self.status_file = workspace.status_file
        self.health = ServerHealth(settings, workspace, self.server)

    def _model_files(self) -> dict[str, int]:
        """By its file, without those that show no command line: they just started, or ended."""
        return {line[-1]: pid for pid, line in children_of(self.server.pid).items() if line}

    def watch(self, seconds: float, has_beat: bool = True) -> None:
        """What `inflight serve` does all the time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if has_beat:
                self.model.beat()
            self.health.check_progress()
            time.sleep(0.01)

    def kill_model(self, model: str) -> None:
        """Kill the process of a model, and wait until it is dead."""
        files = self._model_files()
        (pid,) = (files[file] for file in files if file.endswith(f"/{model}/1/model.py"))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))

    def load(self, until: Callable[[float], bool] = lambda seconds: False) -> None:
        """What `inflight serve` does before the server is ready, ``until`` says that it is over
        after so many seconds; 30 s at most."""
        began = time.monotonic()
        while not until(time.monotonic() - began) and time.monotonic() < began + 30:
            self.health.check_loading()
            time.sleep(0.01)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start) -> Iterator[Running]:
    monkeypatch.setattr(process_module, "_PROBE_PERIOD_SECONDS", 0.1)
    monkeypatch.setattr(process_module, "_BEAT_SECONDS", 0.2)
    monkeypatch.setattr(process_module, "_HEALTH_SECONDS", 0.2)
    monkeypatch.setattr(process_module, "_FAREWELL_SECONDS", 0.1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Workspace() as workspace:
        made = Running(start, workspace)
        yield made
        made.server.stop(0.0, lambda: True)


@pytest.mark.slow
@pytest.mark.case(119)
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGSTOP, "tritonserver has not answered for"),
        (signal.SIGUSR1, "tritonserver has not answered a gRPC stream for"),
        (signal.SIGKILL, r"tritonserver ended \(killed by SIGKILL\)"),
    ],
)
def test_a_server_that_hangs_or_died_is_found_though_its_model_beats(
    running: Running, number: signal.Signals, message: str
) -> None:
    running.watch(0.2)
    os.kill(running.server.pid, number)
    began = time.monotonic()
    with pytest.raises(ServingError, match=message):
        running.watch(30.0)
    assert number is signal.SIGKILL or time.monotonic() - began >= STALL


@pytest.mark.slow
@pytest.mark.case(88)
def test_a_model_process_that_is_silent_is_found(running: Running) -> None:
    running.watch(0.2)
    with pytest.raises(ServingError, match="the model process was silent for"):
        running.watch(30.0, has_beat=False)


@pytest.mark.slow
def test_a_machine_that_was_stopped_and_goes_on_has_missed_nothing(running: Running) -> None:
    """`docker pause`: server, model and launcher stand still, the clock does not."""
    running.watch(0.2)
    time.sleep(4 * SILENCE)
    running.watch(0.05, has_beat=False)
    running.watch(0.2)


@pytest.mark.slow
def test_a_model_that_says_it_is_stuck_may_say_goodbye(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_FAREWELL_SECONDS", 1.0)  # many looks, also if it is busy
    running.model.write("unhealthy", error="nothing moves")
    running.watch(0.05)
    with pytest.raises(ServingError, match="the model is not healthy: nothing moves"):
        running.watch(30.0)


@pytest.mark.slow
@pytest.mark.case(90)
@pytest.mark.parametrize("model", ADDED)
def test_an_added_model_that_died_is_found_at_once(running: Running, model: str) -> None:
    running.watch(0.2)
    running.kill_model(model)
    with pytest.raises(ServingError, match=f"the process of {model} died: killed by SIGKILL"):
        running.health.check_processes()


@pytest.mark.slow
@pytest.mark.case(90)
def test_an_added_model_that_died_before_all_were_loaded_is_found_then(running: Running) -> None:
    """Not before: the process of one whose turn has not come is not there either."""
    running.kill_model("preprocessing")
    running.load(lambda seconds: seconds > 0.2)
    with pytest.raises(ServingError, match=r"the process of preprocessing died \("):
        running.health.check_processes()


@pytest.mark.slow
def test_no_added_model_is_blamed_where_triton_starts_models_in_another_way(
    running: Running,
) -> None:
    running.kill_model(LLM_MODEL_NAME)
    running.kill_model("preprocessing")
    running.watch(0.2)


@pytest.mark.slow
@pytest.mark.case(88)
def test_a_load_that_goes_on_may_take_long(running: Running) -> None:
    """Longer than any of the limits, and yet the server is not blamed when it serves at last."""

    def move_on(seconds: float) -> bool:
        running.model.write("loading", loaded_bytes=int(10 * seconds), total_bytes=100)
        return seconds > 1.5 * LOAD

    running.load(move_on)
    running.watch(0.1)


@pytest.mark.slow
@pytest.mark.case(88)
def test_a_model_process_that_is_silent_while_loading_is_found(running: Running) -> None:
    with running.model.beating(0.01):
        running.load(lambda seconds: seconds > 0.2)
    with pytest.raises(ServingError, match="the model process was silent for"):
        running.load()


@pytest.mark.slow
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

    def beat(seconds: float) -> bool:
        running.model.beat()
        return False

    with pytest.raises(ServingError, match=rf"loading has stood still for \d s with {stage}"):
        running.load(beat)


@pytest.mark.slow
@pytest.mark.case(88)
def test_a_server_that_waits_for_a_model_it_takes_for_dead_is_found(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before a load may stand still."""
    monkeypatch.setattr(process_module, "_REST_SECONDS", LOAD / 10)

    def beat(seconds: float) -> bool:
        running.model.beat()
        return seconds > LOAD / 2

    with pytest.raises(ServingError, match=r"with tensorrt_llm loaded \(was the machine busy"):
        running.load(beat)
