"""A run of `inflight openai`: its output, its signals, and limits for slow connections."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError

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


def wait_until_it_listens(front: subprocess.Popen[bytes], port: int) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        assert front.poll() is None
        assert time.monotonic() < deadline
        with suppress(OSError), direct.open(f"http://127.0.0.1:{port}/v1/models"):
            return
        time.sleep(0.05)


def status_of_a_request(port: int) -> int:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    body = json.dumps({"model": DESCRIPTION["model"], "prompt": [1], "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
    try:
        with direct.open(request, timeout=WAIT_SECONDS) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


@pytest.mark.slow
def test_a_broken_output_changes_nothing_else(
    local_grpc: Local, free_port: int, broken_output: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalTriton, "answer", describe)
    command = [*COMMAND, f"--url={local_grpc.url}", f"--port={free_port}"]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        command, env=environment, stdout=broken_output, stderr=broken_output
    ) as front:
        try:
            wait_until_it_listens(front, free_port)
            time.sleep(0.2)  # until it has printed
            assert [status_of_a_request(free_port) for _ in range(3)] == [503] * 3
            front.send_signal(signal.SIGTERM)
            assert front.wait(WAIT_SECONDS) == 0
        finally:
            front.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_output_and_exit_code(
    local_grpc: Local, free_port: int, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(LocalTriton, "answer", describe)
    command = [*COMMAND, f"--url={local_grpc.url}", f"--port={free_port}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as front:
        try:
            assert front.stdout is not None
            assert front.stdout.readline() == b"\n"
            assert front.stdout.readline() == b"inflight openai is ready\n"
            *_, last = iter(front.stdout.readline, b"Ctrl-C stops it.\n")
            assert status_of_a_request(free_port) == 503
            front.send_signal(number)
            rest, errors = front.communicate(timeout=WAIT_SECONDS)
        finally:
            front.kill()
    assert (last, rest, front.returncode) == (b"\n", b"", 0)
    assert errors == (
        b"the server failed a request: out of order\n"
        b"stopping: running requests may finish within 30 s\n"
    )


def describe_and_wait(self: LocalTriton, arrival: Arrival) -> Iterator[dict[str, Any]]:
    if arrival.values.get("describe"):
        yield {"description": [json.dumps(DESCRIPTION)]}
    else:
        arrival.is_left.wait(WAIT_SECONDS)


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait_for_running_requests(
    local_grpc: Local, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalTriton, "answer", describe_and_wait)
    command = [*COMMAND, f"--url={local_grpc.url}", f"--port={free_port}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as front:
        try:
            wait_until_it_listens(front, free_port)
            with socket.create_connection(("127.0.0.1", free_port)) as client:
                client.sendall(post(json.dumps(COMPLETION).encode()))
                while len(local_grpc.triton.arrivals) < 2:
                    time.sleep(0.01)
                front.send_signal(signal.SIGINT)
                assert front.stderr is not None
                assert front.stderr.readline().startswith(b"stopping: ")
                front.send_signal(signal.SIGINT)
                assert front.wait(WAIT_SECONDS) == 130
                assert front.stderr.read() == b""
        finally:
            front.kill()
    assert local_grpc.triton.arrivals[1].is_left.wait(WAIT_SECONDS)


@pytest.mark.slow
def test_nohup_ignores_hangup(
    local_grpc: Local, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalTriton, "answer", describe)
    command = ["nohup", *COMMAND, f"--url={local_grpc.url}", f"--port={free_port}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as front:
        try:
            wait_until_it_listens(front, free_port)
            front.send_signal(signal.SIGHUP)
            time.sleep(0.2)
            wait_until_it_listens(front, free_port)
            front.send_signal(signal.SIGTERM)
            assert front.wait(WAIT_SECONDS) == 0
        finally:
            front.kill()


@pytest.mark.slow
def test_a_missing_server_is_one_line(free_port: int) -> None:
    command = [*COMMAND, f"--url=127.0.0.1:{free_port}"]
    ended = subprocess.run(command, capture_output=True, timeout=WAIT_SECONDS)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr.startswith(b"error: no server answers at ")
    assert ended.stderr.count(b"\n") == 1


@pytest.mark.slow
def test_a_port_in_use_is_named(local_grpc: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalTriton, "answer", describe)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*COMMAND, f"--url={local_grpc.url}", f"--port={port}"]
        ended = subprocess.run(command, capture_output=True, timeout=WAIT_SECONDS)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr.decode() == (
        f"error: --port {port} cannot be used on 127.0.0.1 (Address already in use): "
        "stop what uses it or choose another port\n"
    )


@pytest.mark.slow
def test_a_host_of_another_machine_is_named(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    host = "192.0.2.1"  # reserved for documentation
    monkeypatch.setattr(LocalTriton, "answer", describe)
    command = [*COMMAND, f"--url={local_grpc.url}", f"--port={free_port}", f"--host={host}"]
    ended = subprocess.run(command, capture_output=True, timeout=WAIT_SECONDS)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr.startswith(f"error: --host {host} cannot be used (".encode())
    assert b"port" not in ended.stderr
    assert ended.stderr.count(b"\n") == 1
