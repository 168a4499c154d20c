"""A relay that is slower than the engine, a listener that gets no turn: what is kept for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from backend.triton.conftest import MakeServer
from support.relay_harness import asking, ids_in, packed
from support.triton_harness import WAIT, Gate, Server, wait_until
from support.triton_stub import CountingEngine

from inflight_backend.requests.inference_request import Array
from inflight_backend.triton import relay_server as relay_listener
from inflight_backend.triton.relay_server import RelayConnection
from inflight_backend.triton.relay_wire import LastTensors, Message, RelayedEnd, pack, read_messages
from inflight_scheduler import ScheduledBatch


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
