"""The socket of ``tensorrt_llm`` for relaying models: which peers it accepts, and slow ones."""

from __future__ import annotations

import errno
import itertools
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from backend.triton.conftest import MakeServer
from support.relay_harness import answer_on, answer_to, asking, ids_in, packed
from support.triton_harness import WAIT, Gate, Server, wait_until, wait_until_queued
from support.triton_stub import CountingEngine

from inflight_backend.triton import relay_server as module
from inflight_backend.triton import relay_wire
from inflight_backend.triton.relay_wire import (
    RelayedRequest,
    RelayedResponse,
    address_of,
    connect,
    pack,
)
from inflight_protocol.tensors import make_inputs

PART = RelayedResponse({"output_ids": np.zeros((1, 1, 100), dtype=np.int32)})


def test_a_relay_that_has_connected_before_the_listener_is_shut_is_served(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, go_on = module.RelayListener._start, threading.Event()

    def start_later(listener: module.RelayListener, unix_socket: socket.socket) -> None:
        assert go_on.wait(WAIT)
        start(listener, unix_socket)

    monkeypatch.setattr(module.RelayListener, "_start", start_later)
    with ExitStack() as stack:
        connections = [stack.enter_context(asking(packed(3))) for _ in range(6)]
        server.model._relays.shut()
        go_on.set()
        assert [ids_in(answer_on(each)) for each in connections] == [[2, 3, 4]] * 6


def test_while_too_many_files_are_open_those_who_connect_wait_and_the_loop_rests(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, tries, is_full = socket.socket.accept, list[float](), threading.Event()

    def fail(listening: socket.socket) -> tuple[socket.socket, object]:
        if is_full.is_set():
            tries.append(time.monotonic())
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", fail)
    monkeypatch.setattr(module, "_ACCEPT_PAUSE", 0.02)
    is_full.set()
    make_server(CountingEngine())
    with asking(packed(3)) as connection:
        wait_until(lambda: len(tries) > 3)
        is_full.clear()
        assert ids_in(answer_on(connection)) == [2, 3, 4]
    assert min(later - earlier for earlier, later in itertools.pairwise(tries)) > 0.019


@pytest.mark.parametrize(
    ("wrong", "message", "code"),
    [
        ({"beam_width": 9}, "'beam_width' is 9, more than max_beam_width", "INVALID_ARG"),
        ({"stop": True}, "a stop request needs the request id", "INVALID_ARG"),
        ({"lora_task_id": 1}, "'lora_task_id'", "UNSUPPORTED"),
    ],
)
def test_errors_keep_their_code(
    server: Server, wrong: dict[str, object], message: str, code: str
) -> None:
    [response] = answer_to(packed(3, **wrong))
    assert response.error.startswith(message)
    assert response.code == code
    assert ids_in(answer_to(packed(3))) == [2, 3, 4]


def test_an_answer_that_goes_on_keeps_its_place_and_its_time(
    make_server: MakeServer, gate: Gate
) -> None:
    """The limits of the queue are for what begins; the time of the run goes on."""
    limits = {"max_batch_size": "1", "max_queue_size": "1", "max_queue_seconds": "0.05"}
    server = make_server(CountingEngine(before_step=gate), max_run_seconds="60", **limits)
    gate.close_after(0)
    first = server.send(input_ids=[4], request_output_len=1)
    assert gate.is_reached.wait(WAIT)
    inputs = make_inputs({"input_ids": [1], "request_output_len": 3})
    message = pack(RelayedRequest(inputs, ["output_ids"], begun=time.monotonic()))
    with asking(message) as one, asking(message) as another:
        wait_until_queued(server, 2)
        time.sleep(0.1)
        gate.set()
        assert [ids_in(answer_on(each)) for each in (one, another)] == [[1, 2, 3, 4]] * 2
    assert first.is_final.wait(WAIT)
    late = pack(RelayedRequest(inputs, ["output_ids"], begun=time.monotonic() - 61))
    [response] = answer_to(late)
    assert "deadline" in response.error


@pytest.mark.parametrize("message", [pack(PART), b"\0" * 7 + b"\1{"], ids=["response", "nonsense"])
def test_what_is_no_request_ends_its_connection_only(server: Server, message: bytes) -> None:
    with asking(message) as connection:
        assert connection.recv(1) == b""
    assert ids_in(answer_to(packed(3))) == [2, 3, 4]


STRANGER = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(10)
connection.connect(bytes.fromhex(sys.argv[1]))
try:
    connection.sendall(bytes.fromhex(sys.argv[2]))
    print(connection.recv(1))
except ConnectionError:
    print(b"")
"""


def test_a_process_that_the_server_has_not_started_is_not_served(server: Server) -> None:
    """A child of this one, which is in the place of a model: the server has started no child."""
    address = address_of("tensorrt_llm").hex()
    command = [sys.executable, "-c", STRANGER, address, packed(3).hex()]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "b''\n"
    assert server.engine.batches == []


def test_too_many_threads_end_one_connection_only(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with socket.socket(socket.AF_UNIX) as connection:
            connect(connection, "tensorrt_llm")
            assert connection.recv(1) == b""
    wait_until(lambda: server.model._relays.num_open == 0)
    assert ids_in(answer_to(packed(3))) == [2, 3, 4]


@pytest.mark.slow
def test_no_request_is_lost_while_the_model_is_loaded_again(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have connected to the old one, or have asked it just now, are served by it."""
    monkeypatch.setattr(relay_wire, "_CONNECT_SECONDS", WAIT)  # a busy machine may take a second
    server = make_server(CountingEngine())
    answers: list[list[RelayedResponse]] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers.append(answer_to(packed(3)))

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask) for _ in range(8)]
        try:
            for _ in range(5):
                new = make_server(CountingEngine())
                time.sleep(0.05)
                server.model.finalize()
                server = new
        finally:
            is_over.set()
    for each in asking:
        each.result()
    assert {tuple(ids_in(answer)) for answer in answers} == {(2, 3, 4)}
