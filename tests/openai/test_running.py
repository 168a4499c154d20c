"""A run of `inflight openai` from its beginning to its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError

import pytest
from client.conftest import Local
from client.local_server import Arrival, LocalTriton, ModelError
from client.openai.front import DESCRIPTION

pytestmark = pytest.mark.slow

WAIT_SECONDS = 90.0
COMMAND = [sys.executable, "-c", "from inflight_client.cli import main; main()", "openai"]


def describe(self: LocalTriton, arrival: Arrival) -> Iterator[dict[str, Any]]:
    """All that works; each failure makes a line of the log."""
    if not arrival.values.get("describe"):
        raise ModelError("out of order")
    yield {"description": [json.dumps(DESCRIPTION)]}


@pytest.fixture(params=["gone", "slow", "full"])
def unheard(request: pytest.FixtureRequest) -> Iterator[int]:
    """What takes nothing: a pipe whose reader is gone, one that nobody reads, and a full disk."""
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
    """As it is below nohup."""
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


def test_a_front_that_nobody_hears_serves_and_ends_in_order(
    local_grpc: Local, free_port: int, unheard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalTriton, "answer", describe)
    command = [*COMMAND, f"--url={local_grpc.url}", f"--port={free_port}"]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # nothing is ever left without a buffer
    with subprocess.Popen(command, env=environment, stdout=unheard, stderr=unheard) as front:
        try:
            wait_until_it_listens(front, free_port)
            time.sleep(0.2)  # what it says comes after that
            assert [status_of_a_request(free_port) for _ in range(3)] == [503] * 3
            front.send_signal(signal.SIGTERM)
            assert front.wait(WAIT_SECONDS) == 0
        finally:
            front.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_it_says_goes_where_it_should(
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


def test_a_terminal_that_goes_stops_nothing_that_nohup_has_started(
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


def test_why_it_cannot_start_is_one_line(free_port: int) -> None:
    command = [*COMMAND, f"--url=127.0.0.1:{free_port}"]
    ended = subprocess.run(command, capture_output=True, timeout=WAIT_SECONDS)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr.startswith(b"error: no server answers at ")
    assert ended.stderr.count(b"\n") == 1


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


def test_a_host_that_is_not_ours_is_named(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    host = "192.0.2.1"  # of documentation, nobody's
    monkeypatch.setattr(LocalTriton, "answer", describe)
    command = [*COMMAND, f"--url={local_grpc.url}", f"--port={free_port}", f"--host={host}"]
    ended = subprocess.run(command, capture_output=True, timeout=WAIT_SECONDS)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr.startswith(f"error: --host {host} cannot be used (".encode())
    assert b"port" not in ended.stderr
    assert ended.stderr.count(b"\n") == 1
