"""The way back of one relayed request: when it is behind, when there is room again, when done."""

from __future__ import annotations

import queue
import socket
import threading

import numpy as np
import pytest
from triton_harness import WAIT

from inflight_backend.inference_request import Array
from inflight_backend.triton import relay_listener
from inflight_backend.triton.relay_listener import RelayConnection, RelayListener
from inflight_backend.triton.relay_messages import LastTensors, RelayedEnd, RelayedRequest, pack
from inflight_backend.triton.relay_socket import connect


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


def test_who_falls_behind_while_a_message_is_written_hears_of_the_room_that_this_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was held back would wait for the next token else, which may be a long time."""
    monkeypatch.setattr(relay_listener, "_MAX_POSTED", 2)
    part: dict[str, Array] = {"output_ids": np.zeros((1, 1), dtype=np.int32)}
    was_behind: list[bool] = []

    class PostsNow(RelayConnection):
        @property
        def num_written(self) -> int:
            """Counted last; another thread sends one more just before."""
            return int(vars(self)["num_written"])

        @num_written.setter
        def num_written(self, number: int) -> None:
            if not was_behind:
                self.send(part)
                was_behind.append(self.is_behind)
            vars(self)["num_written"] = number

    there_is_room = threading.Event()
    accepted: queue.SimpleQueue[RelayConnection] = queue.SimpleQueue()
    listener = RelayListener("alone", lambda _, way: accepted.put(way), there_is_room.set)
    try:
        with socket.socket(socket.AF_UNIX) as relay:
            connect(relay, "alone")
            relay.sendall(pack(RelayedRequest({}, [])))
            way_back = accepted.get(timeout=WAIT)
            way_back.__class__ = PostsNow
            way_back.send(part)
            assert there_is_room.wait(WAIT)
        assert was_behind == [True]
    finally:
        listener.close()
