"""The socket of ``tensorrt_llm`` for relaying models: which peers it accepts, and slow ones."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from backend.triton.conftest import MakeServer
from support.relay_harness import answer_on, answer_to, asking, ids_in, packed
from support.triton_harness import WAIT, Gate, Server, wait_until
from support.triton_stub import CountingEngine

from inflight_backend.errors import CapacityExceeded
from inflight_backend.requests.inference_request import Array
from inflight_backend.triton import relay_server as relay_listener
from inflight_backend.triton import relay_wire as relay_socket
from inflight_backend.triton.relay_server import RelayConnection
from inflight_backend.triton.relay_wire import (
    LastTensors,
    Message,
    RelayedEnd,
    RelayedError,
    address_of,
    connect,
    pack,
    read_messages,
)
from inflight_scheduler import ScheduledBatch


def test_who_has_connected_before_the_listener_is_shut_is_served(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_listener, "_MAX_ACCEPTED", 1)
    relays, go_on = server.model._relays, threading.Event()

    def be_busy() -> None:
        assert go_on.wait(WAIT)

    relays._tell(be_busy)
    with ExitStack() as stack:
        connections = [stack.enter_context(asking(packed(3))) for _ in range(6)]
        relays.shut()
        go_on.set()
        assert [ids_in(answer_on(each)) for each in connections] == [[2, 3, 4]] * 6


def test_while_too_many_files_are_open_those_who_connect_wait_and_the_loop_rests(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, tries, is_full = socket.socket.accept, list[float](), threading.Event()

    def fail(listening: socket.socket) -> tuple[socket.socket, object]:
        if is_full.is_set():
            tries.append(time.monotonic())
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", fail)
    monkeypatch.setattr(relay_listener, "_ACCEPT_PAUSE", 0.02)
    is_full.set()
    with asking(packed(3)) as connection:
        wait_until(lambda: len(tries) > 3)
        is_full.clear()
        assert ids_in(answer_on(connection)) == [2, 3, 4]
    assert min(later - earlier for earlier, later in itertools.pairwise(tries)) > 0.019


@pytest.mark.parametrize("num_bytes", [0, 5, 20, len(packed(3)) - 1])
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_message_that_is_cut_off_is_none(num_bytes: int, is_reset: bool) -> None:
    here, there = socket.socketpair()
    with here:
        with there:
            if is_reset:
                here.sendall(b"never read")
            there.sendall(packed(3) + packed(3)[:num_bytes])
        assert len(list(read_messages(here))) == 1


def test_only_a_process_of_the_same_user_and_parent_is_one_of_ours() -> None:
    class Peer:
        """A connection to a process of ``user``."""

        def __init__(self, process: int, user: int) -> None:
            self.credentials = relay_socket._CREDENTIALS.pack(process, user, 0)

        def getsockopt(self, *_: int) -> bytes:
            return self.credentials

    def is_sibling(process: int, user: int) -> bool:
        return relay_socket.is_sibling(Peer(process, user))  # type: ignore[arg-type]

    assert is_sibling(os.getpid(), os.geteuid())
    assert not is_sibling(os.getpid(), os.geteuid() + 1)
    assert not is_sibling(os.getppid(), os.geteuid())


@pytest.mark.parametrize(
    ("wrong", "message", "code"),
    [
        ({"beam_width": 9}, "'beam_width' is 9, more than max_beam_width", "INVALID_ARG"),
        ({"stop": True}, "a stop request needs the request id", "INVALID_ARG"),
        ({"lora_task_id": 1}, "'lora_task_id'", "UNSUPPORTED"),
    ],
)
def test_what_is_wrong_is_told_with_its_code(
    server: Server, wrong: dict[str, object], message: str, code: str
) -> None:
    [error, end] = answer_to(packed(3, **wrong))
    assert isinstance(error, RelayedError)
    assert error.message.startswith(message)
    assert error.code == code
    assert isinstance(end, RelayedEnd)
    assert ids_in(answer_to(packed(3))) == [2, 3, 4]


def test_a_request_whose_relay_has_gone_ends(make_server: MakeServer) -> None:
    engine = CountingEngine(
        num_blocks=9000, max_seq_len=9000, before_step=lambda batch: time.sleep(0.001)
    )
    server = make_server(engine)
    with asking(packed(8000)) as connection:
        assert next(read_messages(connection))
    wait_until(lambda: server.model._manager.get_num_active_requests() == 0)
    assert len(engine.batches) < 7000
    wait_until(lambda: server.model._relays.num_open == 0)


@pytest.mark.parametrize("message", [pack({}), pack(RelayedEnd()), b"\0\0\0\1\0\0\0\0{"])
def test_what_is_no_request_ends_its_connection_only(server: Server, message: bytes) -> None:
    with asking(message) as connection:
        assert connection.recv(1) == b""
    assert ids_in(answer_to(packed(3))) == [2, 3, 4]


def test_a_part_that_cannot_be_written_ends_its_connection(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the relay would pass on the rest as if that were all."""
    write, calls = asyncio.StreamWriter.write, itertools.count(1)
    steps, has_first = itertools.count(1), threading.Event()

    def fail_once(writer: asyncio.StreamWriter, data: bytes) -> None:
        if next(calls) == 2:
            raise MemoryError
        write(writer, data)

    def wait_for_reader(_: object) -> None:
        if next(steps) == 5:  # else one part might hold all tokens
            has_first.wait(WAIT)

    monkeypatch.setattr(asyncio.StreamWriter, "write", fail_once)
    server = make_server(CountingEngine(before_step=wait_for_reader))
    with asking(packed(30)) as connection:
        messages = read_messages(connection)
        came = [next(messages)]
        has_first.set()
        came += messages
    assert not any(isinstance(each, RelayedEnd) for each in came)
    assert ids_in(came) == list(range(2, 2 + len(ids_in(came))))
    wait_until(lambda: server.model._relays.num_open == 0)
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


@pytest.mark.usefixtures("server")
def test_many_strangers_take_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is looked at and closed before the next one is let in."""
    counts: list[int] = []

    def look(_: socket.socket) -> bool:
        counts.append(len(os.listdir("/proc/self/fd")))
        return False

    monkeypatch.setattr(relay_listener, "is_sibling", look)
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(200)]
        for stranger in strangers:
            stranger.settimeout(WAIT)
            stranger.connect(address_of("tensorrt_llm"))
        for stranger in strangers:
            assert stranger.recv(1) == b""
    assert len(counts) == 200
    assert max(counts) - min(counts) < 20


def test_who_takes_the_place_of_the_model_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_socket, "is_sibling", lambda connection: False)
    with (
        socket.socket(socket.AF_UNIX) as listening,
        socket.socket(socket.AF_UNIX) as connection,
    ):
        listening.bind(address_of("tensorrt_llm"))
        listening.listen()
        with pytest.raises(Exception, match="has gone, or another process is in its place"):
            connect(connection, "tensorrt_llm")


def test_a_model_that_lets_nobody_in_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_socket, "_QUEUE_SECONDS", 0.1)
    with ExitStack() as stack:
        listening, first, second = (
            stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)
        )
        listening.bind(address_of("tensorrt_llm"))
        listening.listen(0)
        connect(first, "tensorrt_llm")
        with pytest.raises(CapacityExceeded, match="'tensorrt_llm' takes no requests just now"):
            connect(second, "tensorrt_llm")
        assert first.gettimeout() is None


def test_a_model_that_is_loaded_again_takes_over(make_server: MakeServer) -> None:
    """Triton loads the new one first, then unloads the old one."""
    old, new = make_server(CountingEngine()), make_server(CountingEngine())
    assert ids_in(answer_to(packed(3))) == [2, 3, 4]
    old.model.finalize()
    assert ids_in(answer_to(packed(4))) == [2, 3, 4, 5]
    assert (len(old.engine.batches), len(new.engine.batches)) == (3, 4)


@pytest.mark.slow
def test_no_request_is_lost_while_the_model_is_loaded_again(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have connected to the old one, or have asked it just now, are served by it."""
    monkeypatch.setattr(relay_socket, "_CONNECT_SECONDS", WAIT)  # a busy machine may take a second
    server = make_server(CountingEngine())
    answers: list[list[Message]] = []
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


def test_there_are_as_many_open_files_as_requests_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if 0 <= hard < 8192 else 8192
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        relay_socket.allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
        relay_socket.allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_connection_is_done_once_its_whole_answer_is_written_or_nobody_is_there() -> None:
    """The server leaves when all are."""
    posted: list[bytes] = []
    connection = RelayConnection(lambda _, message: posted.append(message))
    part: dict[str, Array] = {"output_ids": np.zeros((1, 1), dtype=np.int32)}
    assert not connection.is_done, "its request may be on its way"
    connection.send(part)
    connection.num_written = 1
    assert not connection.is_done, "there is more to come"
    connection.send(part, flags=1)
    assert not connection.is_done, "the end is not written"
    assert posted == [pack(part), pack(LastTensors(part)) + pack(RelayedEnd())]
    connection.num_written = 2
    assert connection.is_done
    connection.waits_for_room = True
    assert not connection.is_done, "asyncio still holds some of it"
    connection.is_gone = True
    assert connection.is_done
    connection.send(None, flags=1)
    assert len(posted) == 2, "there is nobody to write to"


def test_an_end_that_is_posted_during_the_look_at_its_connection_is_not_written_yet() -> None:
    class EndsNow(RelayConnection):
        @property
        def waits_for_room(self) -> bool:
            """Looked at last; another thread sends the end just then."""
            self.send(None, flags=1)
            return False

        @waits_for_room.setter
        def waits_for_room(self, value: bool) -> None: ...

    assert not EndsNow(lambda *_: None).is_done


def test_a_frozen_relay_costs_a_few_messages(make_server: MakeServer, gate: Gate) -> None:
    """The tokens it has no room for are kept as numbers, and sent when it goes on."""

    def one_at_a_time(batch: ScheduledBatch) -> None:
        """Else a dispatcher that had no turn would send hundreds in a message, and a listener that
        had none would let it go on."""
        server.send_all()
        is_written = threading.Event()
        server.model._relays._tell(is_written.set)
        assert is_written.wait(WAIT)
        gate(batch)

    server = make_server(
        CountingEngine(
            num_blocks=2000, max_seq_len=4000, vocab_size=4000, before_step=one_at_a_time
        )
    )
    with asking(packed(500)) as connection:
        gate.close_after(400)
        assert gate.is_reached.wait(WAIT)
        [held] = server.model._dispatcher._pieces.values()
        assert len(held.ids) > 250, "without a limit of messages: what the listener had no turn for"
        answer = iter(read_messages(connection))
        came = [next(answer) for _ in range(5)]
        while len(ids_in(came)) < 399:  # without another token
            came.append(next(answer))
        gate.set()
        came += answer_until_end(answer)
    assert ids_in(came) == list(range(2, 502))


def test_a_listener_that_gets_no_turn_has_a_few_messages_to_write(
    make_server: MakeServer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is kept as numbers until it has written these."""
    monkeypatch.setattr(relay_listener, "_MAX_POSTED", 4)  # the socket has room for more

    def one_at_a_time(batch: ScheduledBatch) -> None:
        server.send_all()
        gate(batch)

    server = make_server(
        CountingEngine(num_blocks=2000, max_seq_len=4000, before_step=one_at_a_time)
    )
    gate.clear()
    loop_goes_on = threading.Event()
    with asking(packed(500)) as connection:
        wait_until(lambda: server.model._manager.get_num_active_requests() == 1)
        server.model._relays._loop.call_soon_threadsafe(loop_goes_on.wait, WAIT)
        gate.close_after(400)
        gate.set()
        assert gate.is_reached.wait(WAIT)
        [way_back] = server.model._relays._open
        assert way_back.num_waiting == 4
        loop_goes_on.set()
        answer = iter(read_messages(connection))
        came: list[Message] = []
        while len(ids_in(came)) < 399:  # without another token
            came.append(next(answer))
        gate.set()
        came += answer_until_end(answer)
    assert ids_in(came) == list(range(2, 502))


def test_who_falls_behind_just_before_there_is_room_hears_of_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dispatcher takes the last place and keeps what comes next, then the count goes down."""
    monkeypatch.setattr(relay_listener, "_MAX_POSTED", 2)
    part: dict[str, Array] = {"output_ids": np.zeros((1, 1), dtype=np.int32)}
    relays, has_heard, was_behind = server.model._relays, threading.Event(), list[bool]()

    class TakenMeanwhile(RelayConnection):
        num = 0

        @property
        def num_written(self) -> int:
            """When the first message is counted, the second one is there."""
            return self.num

        @num_written.setter
        def num_written(self, value: int) -> None:
            if value == 1:
                self.send(part)
                was_behind.append(self.is_behind)
            self.num = value

    monkeypatch.setattr(relays, "_on_room", has_heard.set)
    with asking(packed(3)[:5]):
        wait_until(lambda: relays.num_open == 1)
        [way_back] = relays._open
        wait_until(lambda: hasattr(way_back, "writer"))
        way_back.__class__ = TakenMeanwhile
        way_back.send(part)
        assert has_heard.wait(WAIT)
    assert was_behind == [True]


def answer_until_end(answer: Iterator[Message]) -> list[Message]:
    came: list[Message] = []
    for each in answer:
        if isinstance(each, RelayedEnd):
            return came
        came.append(each)
    raise AssertionError("no end")
