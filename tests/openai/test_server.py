"""A run of `inflight openai`: its output, its signals, and limits for slow connections."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from client.conftest import Local
from support.local_server import Arrival, LocalTriton, ModelError
from support.openai_front import COMPLETION, COMPLETIONS_PATH, DESCRIPTION, app_of

from inflight_backend.log import leave_out_messages
from inflight_openai import app, server, triton_client
from inflight_openai.server import run, serving
from inflight_openai.settings import FrontSettings

WAIT_SECONDS = 90.0
COMMAND = [sys.executable, "-c", "from inflight_client.cli import main; main()", "openai"]
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"
SECRET = b'{"prompt": "SECRETWORD"}'
LOGS_MUCH = """
import logging, sys
from inflight_openai import server
server._FLUSH_SECONDS = float(sys.argv[1])
logging.root.addHandler(server.Console())
for number in range(int(sys.argv[2])):
    logging.warning("%d %s", number, "x" * 900)
sys.exit(3)
"""


def exchange(local: Local, *messages: bytes, pause: float = 0.0) -> bytes:
    """What a connection receives until its end for ``messages`` with pauses between them."""

    async def ask() -> bytes:
        async with app_of(local) as front, serving(front) as [listening]:
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            for message in messages:
                writer.write(message)
                await asyncio.sleep(pause)
            received = b""
            with suppress(ConnectionError):
                received = await reader.read()
            writer.close()
            return received

    return asyncio.run(asyncio.wait_for(ask(), WAIT_SECONDS))


def post(body: bytes) -> bytes:
    head = f"POST {COMPLETIONS_PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.fast(1)
@pytest.mark.parametrize("messages", [(), (HEALTH,), (b"G", b"E", b"T", b" ")])
def test_a_slow_head_ends_the_connection(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch, messages: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)
    begin = time.monotonic()
    assert exchange(local_grpc, *messages, pause=0.1) == b""
    assert time.monotonic() - begin < 5


def test_the_head_s_time_ends_with_the_head(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the second request of a connection."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    body = json.dumps(COMPLETION).encode()
    last = post(body)
    received = exchange(local_grpc, HEALTH + b"\r\n", last[:-3], last[-3:], pause=0.3)
    assert received.count(b"HTTP/1.1 200 OK") == 2


def test_a_huge_head_ends_the_connection(local_grpc: Local) -> None:
    assert exchange(local_grpc, HEALTH, *[b"x" * 2**15] * 4, pause=0.05) == b""


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_connection_that_has_ended_is_not_kept(local_grpc: Local, is_reset: bool) -> None:
    """Its timer for a next request may not hold it for more than a minute."""

    async def count_kept() -> int:
        async with app_of(local_grpc) as front, serving(front) as [listening]:
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(HEALTH + b"\r\n")
            assert await reader.read(12) == b"HTTP/1.1 200"
            await asyncio.sleep(0.1)  # the answer has ended
            assert _num_connections() == 1
            linger = struct.pack("ii", 1, 0)  # with it, a close is a reset
            if is_reset:
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
            writer.close()
            await asyncio.sleep(0.2)
            return _num_connections()

    assert asyncio.run(asyncio.wait_for(count_kept(), WAIT_SECONDS)) == 0


def _num_connections() -> int:
    gc.collect()
    return sum(type(each) is server.Connection for each in gc.get_objects())  # not of proxies


# The log.


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[io.StringIO]:
    """Everything that is logged, as the front formats it."""
    caplog.set_level(logging.DEBUG)
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.addFilter(leave_out_messages)
    logging.root.addHandler(handler)
    yield written
    logging.root.removeHandler(handler)


class Panic(BaseException):
    """Like those of libraries in Rust."""


@pytest.mark.case(123)
@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_an_exception_is_logged_without_its_message(
    local_grpc: Local,
    log: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[BaseException],
) -> None:
    secret = "SECRET" + "WORD"  # the log shows lines of code

    def fail(*_: object) -> None:
        raise kind(f"no such thing in '{secret}'")

    monkeypatch.setattr(app, "parse_completion", fail)
    assert b" 500 " in exchange(local_grpc, post(SECRET))
    assert kind.__name__ in log.getvalue()
    assert "in fail" in log.getvalue()
    assert "SECRETWORD" not in log.getvalue()


@pytest.mark.case(123)
def test_a_body_longer_than_it_says_is_not_logged(local_grpc: Local, log: io.StringIO) -> None:
    """uvicorn takes the rest for another request."""
    received = exchange(local_grpc, HEALTH + b"\r\n", b"SECRETWORD{} /\r\n\r\n", pause=0.2)
    assert b"HTTP/1.1 400 " in received
    assert "Invalid HTTP request" in log.getvalue()
    assert "SECRETWORD" not in log.getvalue()


@pytest.mark.slow
def test_the_last_lines_are_written_when_the_process_ends() -> None:
    command = [sys.executable, "-c", LOGS_MUCH, "30", "900"]
    ended = subprocess.run(command, capture_output=True, timeout=60)
    assert ended.returncode == 3
    assert ended.stderr.decode().splitlines() == [f"{number} {'x' * 900}" for number in range(900)]


# The process.


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_it_asks_a_silent_server(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        accepted = []

        def accept() -> None:
            accepted.append(silent.accept()[0])
            os.kill(os.getpid(), number)

        thread = threading.Thread(target=accept)
        thread.start()
        begin = time.monotonic()
        run(FrontSettings(url=f"127.0.0.1:{silent.getsockname()[1]}", port=0))
        thread.join()
        accepted[0].close()
    assert time.monotonic() - begin < triton_client._DESCRIBE_SECONDS / 2


def describe(self: LocalTriton, arrival: Arrival) -> Iterator[dict[str, Any]]:
    """Answers `describe` only; each failure is a line of the log."""
    if not arrival.values.get("describe"):
        raise ModelError("out of order")
    yield {"description": [json.dumps(DESCRIPTION)]}


@pytest.fixture(params=["gone", "slow", "full"])
def broken_output(request: pytest.FixtureRequest) -> Iterator[int]:
    """A pipe without a reader, a full pipe that nobody reads, and a full disk."""
    if request.param == "full":
        writer = os.open("/dev/full", os.O_WRONLY)
        yield writer
        os.close(writer)
        return
    reader, writer = os.pipe()
    if request.param == "gone":
        os.close(reader)
    else:
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
    yield writer
    os.close(writer)
    if request.param != "gone":
        os.close(reader)


@pytest.fixture(autouse=True)
def hangup_is_not_ignored() -> Iterator[None]:
    """As below nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def describing(local_grpc: Local, monkeypatch: pytest.MonkeyPatch) -> Local:
    """A server that answers `describe` only; each failure is a line of the front's log."""
    monkeypatch.setattr(LocalTriton, "answer", describe)
    return local_grpc


@contextmanager
def front_process(
    local: Local, port: int, *, prefix: Sequence[str] = (), **settings: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """`inflight openai` in front of ``local``, killed at the end of the block if it still runs."""
    command = [*prefix, *COMMAND, f"--url={local.url}", f"--port={port}"]
    with subprocess.Popen(command, **settings) as front:
        try:
            yield front
        finally:
            front.kill()


def wait_until_it_listens(front: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        assert front.poll() is None
        assert time.monotonic() < deadline
        with suppress(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False)
            return
        time.sleep(0.05)


def status_of_a_request(port: int) -> int:
    url = f"http://127.0.0.1:{port}{COMPLETIONS_PATH}"
    return httpx.post(url, json=COMPLETION, trust_env=False, timeout=WAIT_SECONDS).status_code


@pytest.mark.slow
def test_a_broken_output_changes_nothing_else(
    describing: Local, free_port: int, broken_output: int
) -> None:
    streams: dict[str, Any] = {"stdout": broken_output, "stderr": broken_output}
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with front_process(describing, free_port, env=environment, **streams) as front:
        wait_until_it_listens(front, free_port)
        time.sleep(0.2)  # until it has printed
        assert [status_of_a_request(free_port) for _ in range(3)] == [503] * 3
        front.send_signal(signal.SIGTERM)
        assert front.wait(WAIT_SECONDS) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_output_and_exit_code(describing: Local, free_port: int, number: signal.Signals) -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with front_process(describing, free_port, **pipes) as front:
        assert front.stdout is not None
        assert front.stdout.readline() == b"\n"
        assert front.stdout.readline() == b"inflight openai is ready\n"
        *_, last = iter(front.stdout.readline, b"Ctrl-C stops it.\n")
        assert status_of_a_request(free_port) == 503
        front.send_signal(number)
        rest, errors = front.communicate(timeout=WAIT_SECONDS)
    assert (last, rest, front.returncode) == (b"\n", b"", 0)
    assert errors == (
        b"the server failed a request: out of order\n"
        b"stopping: running requests may finish within 30 s\n"
    )


def describe_and_wait(self: LocalTriton, arrival: Arrival) -> Iterator[dict[str, Any]]:
    if arrival.request_id:  # of a completion
        arrival.is_left.wait(WAIT_SECONDS)
    else:
        yield from describe(self, arrival)


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait_for_running_requests(
    local_grpc: Local, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalTriton, "answer", describe_and_wait)
    arrivals = local_grpc.triton.arrivals
    with front_process(local_grpc, free_port, stderr=subprocess.PIPE) as front:
        wait_until_it_listens(front, free_port)
        with socket.create_connection(("127.0.0.1", free_port)) as client:
            client.sendall(post(json.dumps(COMPLETION).encode()))
            while not (running := [each for each in arrivals if each.request_id]):
                time.sleep(0.01)
            front.send_signal(signal.SIGINT)
            assert front.stderr is not None
            assert front.stderr.readline().startswith(b"stopping: ")
            front.send_signal(signal.SIGINT)
            assert front.wait(WAIT_SECONDS) == 130
            assert front.stderr.read() == b""
    assert running[0].is_left.wait(WAIT_SECONDS)


@pytest.mark.slow
def test_nohup_ignores_hangup(describing: Local, free_port: int) -> None:
    streams: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    with front_process(describing, free_port, prefix=["nohup"], **streams) as front:
        wait_until_it_listens(front, free_port)
        front.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        wait_until_it_listens(front, free_port)
        front.send_signal(signal.SIGTERM)
        assert front.wait(WAIT_SECONDS) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--url=127.0.0.1:{free}"], "no server answers at .*"),
        (
            ["--port={taken}"],
            r"--port \d+ cannot be used on 127.0.0.1 \(Address already in use\): "
            "stop what uses it or choose another port",
        ),
        (
            ["--port={free}", "--host=192.0.2.1"],  # reserved for documentation
            r"--host 192.0.2.1 cannot be used \((?!.*port).*",
        ),
    ],
)
def test_a_failed_start_is_one_line(
    describing: Local, free_port: int, options: list[str], error: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"free": free_port, "taken": taken.getsockname()[1]}
        command = [*COMMAND, f"--url={describing.url}"]
        command += [option.format(**ports) for option in options]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(f"error: {error}\n", ended.stderr)
