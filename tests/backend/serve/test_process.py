"""Stopping a process group, whatever its members do. Real processes, no server."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.server_logs import without_grpc

from inflight_backend.errors import ServingError
from inflight_server.serve import process as process_module
from inflight_server.serve.process import ServerProcess, children_of, end_of, is_running

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


def start(code: str, log: Path) -> tuple[ServerProcess, str]:
    """Start ``code`` and wait for the first line it prints."""
    with log.open("wb") as output:
        process = ServerProcess([sys.executable, "-c", code], os.environ, output)
    wait_until(lambda: without_grpc(log.read_text()).endswith("\n"))
    return process, without_grpc(log.read_text()).strip()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def not_hurried() -> bool:
    return False


def test_polite_process_ends_when_it_is_asked(tmp_path: Path) -> None:
    process, _ = start(DEFAULT, tmp_path / "log")
    assert process.exit_status() is None
    process.stop(30, not_hurried)
    assert process.exit_status() == "killed by SIGINT"


@pytest.mark.case(100)
def test_a_service_manager_that_asks_everybody_to_end_reaches_the_launcher_only(
    tmp_path: Path,
) -> None:
    process, _ = start(DEFAULT, tmp_path / "log")
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.3)
    assert process.exit_status() is None
    process.stop(30, not_hurried)
    assert process.exit_status() == "killed by SIGINT"


def limit_of_server(which: str, own: tuple[int, int], log: Path) -> int:
    """The soft limit of a server whose launcher has the limit ``own``, which stays as it is."""
    number = getattr(resource, which)
    before = resource.getrlimit(number)
    resource.setrlimit(number, own)
    try:
        process, told = start(LIMIT % which, log)
        process.stop(0, not_hurried)
        assert resource.getrlimit(number) == own
    finally:
        resource.setrlimit(number, before)
    return int(told)


@pytest.mark.case(72)
def test_a_server_may_have_more_connections_than_a_shell_gives_descriptors(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert hard > 1024
    assert limit_of_server("RLIMIT_NOFILE", (1024, hard), tmp_path / "log") == min(hard, 2**16)


def limit_of_stack(own: int, log: Path) -> int:
    """Of a server whose launcher has the soft limit ``own``."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    assert hard == resource.RLIM_INFINITY or hard >= 2**30
    return limit_of_server("RLIMIT_STACK", (own, hard), log)


@pytest.mark.case(40)
@pytest.mark.parametrize("own", [2**23, resource.RLIM_INFINITY])
def test_the_threads_of_a_server_have_room_for_deep_json(tmp_path: Path, own: int) -> None:
    """Without a limit they would have the 2 MB that the C library gives them."""
    assert limit_of_stack(own, tmp_path / "log") == 2**30


def test_stacks_stay_as_they_are_where_reserved_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of a server could not be started else."""
    strict = tmp_path / "overcommit"
    strict.write_text("2\n")
    monkeypatch.setattr(process_module, "_OVERCOMMIT", strict)
    assert limit_of_stack(2**23, tmp_path / "log") == 2**23
    monkeypatch.setattr(process_module, "_OVERCOMMIT", tmp_path / "no such system")
    assert limit_of_stack(2**23, tmp_path / "log") == 2**30


def test_stubborn_process_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    process, _ = start(STUBBORN, tmp_path / "log")
    process.stop(0.2, not_hurried)
    assert process.exit_status() == "killed by SIGKILL"


def test_hurried_caller_does_not_wait(tmp_path: Path) -> None:
    process, _ = start(STUBBORN, tmp_path / "log")
    begin = time.monotonic()
    process.stop(60, lambda: True)
    assert time.monotonic() - begin < 30
    assert process.exit_status() == "killed by SIGKILL"


def test_model_process_goes_with_its_server(tmp_path: Path) -> None:
    process, model = start(PARENT, tmp_path / "log")
    assert is_running(int(model))
    process.stop(30, not_hurried)
    assert not Path(f"/proc/{model}").exists()  # reaped too


def test_model_process_whose_server_died_is_reaped(tmp_path: Path) -> None:
    process, model = start(PARENT, tmp_path / "log")
    os.kill(process.pid, 9)
    wait_until(lambda: process.exit_status() is not None)
    assert is_running(int(model))
    process.stop(0, not_hurried)
    assert not Path(f"/proc/{model}").exists()


def test_a_process_that_does_not_end_when_killed_is_left_behind_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one that waits for a device in the kernel."""
    monkeypatch.setattr(process_module, "_KILLED_SECONDS", 0.3)
    process, _ = start(TRACEABLE, tmp_path / "log")
    command = [sys.executable, "-c", TRACER, str(process.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == b"traced\n"
        began = time.monotonic()
        process.stop(0, not_hurried)
        assert time.monotonic() - began < 20
        assert f"tritonserver ({process.pid}) was killed and does not end" in capfd.readouterr().err
        tracer.kill()
    process.stop(0, not_hurried)
    assert process.exit_status() == "killed by SIGKILL"
    assert capfd.readouterr().err == ""


def test_exit_code_in_words(tmp_path: Path) -> None:
    process, _ = start("print('up'); raise SystemExit(3)", tmp_path / "log")
    wait_until(lambda: process.exit_status() is not None)
    assert process.exit_status() == "exit code 3"
    process.stop(0, not_hurried)


def test_missing_binary_is_one_clear_error() -> None:
    with pytest.raises(ServingError, match="cannot start /nonexistent: No such file"):
        ServerProcess(["/nonexistent"], os.environ, subprocess.DEVNULL)


@pytest.mark.case(124)
def test_server_dies_with_its_launcher(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, time\n"
        "from inflight_server.serve.process import ServerProcess\n"
        f"p = ServerProcess([{sys.executable!r}, '-c', {STUBBORN!r}], os.environ, "
        "subprocess.DEVNULL)\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        server = int(launcher.stdout.readline())
        launcher.kill()
    wait_until(lambda: not is_running(server))


def test_zombie_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(lambda: not is_running(child.pid))
    assert Path(f"/proc/{child.pid}").exists()
    child.wait()
    assert not is_running(child.pid)


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("import os; os.abort()", "killed by SIGABRT"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 1)", "killed by signal 35"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_how_a_process_of_somebody_else_ended(code: str, end: str) -> None:
    """As that of the model, which tritonserver starts and does not reap."""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_until(lambda: not is_running(process.pid))
        assert end_of(process.pid) == end
    assert end_of(process.pid) == ""
    assert end_of(os.getpid()) == ""


def test_a_name_that_is_no_text_hides_no_process(tmp_path: Path) -> None:
    """Whoever looks for the processes of added models sees all that run on the machine."""
    process, _ = start(CUT_NAME, tmp_path / "log")
    name = Path(f"/proc/{process.pid}/comm").read_bytes()
    assert process.pid in children_of(os.getpid())
    assert is_running(process.pid)
    process.stop(0, not_hurried)
    assert name == b"abcdefghijklmn\xc3\n"
