"""Streams whose reader says that it has no room: what comes meanwhile travels together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.triton_harness import WAIT, ids_of, wait_until
from support.triton_stub import FakePbUtils, FakeSender

from inflight_backend.triton import dispatcher as module
from inflight_backend.triton.dispatcher import ResponseDispatcher
from inflight_backend.triton_io.sender import ResponseFactory, ResponseSender
from inflight_backend.triton_io.token_stream import TokenStream


class Reader:
    """A stream of `ResponseDispatcher`; ``is_behind`` as the test wants it."""

    def __init__(self, dispatcher: ResponseDispatcher, request_id: int) -> None:
        self.is_behind = False
        self.sender = FakeSender()
        factory = ResponseFactory(FakePbUtils)
        stream = ResponseSender(self.sender, factory, lambda: self.is_behind)
        dispatcher.open(request_id, TokenStream(stream, frozenset({"output_ids"}), constants={}))

    @property
    def sizes(self) -> list[int]:
        """Tokens of each response."""
        tensors = [each for response in self.sender.responses for each in response.output_tensors]
        return [tensor.as_numpy().size for tensor in tensors]


def put(
    dispatcher: ResponseDispatcher, request_id: int, tokens: Sequence[int], *, is_final: bool
) -> None:
    ids = np.array([tokens], np.int32)
    dispatcher.send_response(request_id, [("output_ids", ids)], is_final, "")  # type: ignore[list-item]


@pytest.fixture
def dispatcher() -> Any:
    made = ResponseDispatcher(stop_request=lambda request_id: None)
    yield made
    made.close()


def test_what_has_no_room_travels_together_once_there_is(dispatcher: ResponseDispatcher) -> None:
    slow, other = Reader(dispatcher, 1), Reader(dispatcher, 2)
    put(dispatcher, 1, [1], is_final=False)
    wait_until(lambda: slow.sizes == [1])
    slow.is_behind = True
    for token in (2, 3, 4):
        put(dispatcher, 1, [token], is_final=False)
        put(dispatcher, 2, [token], is_final=False)
    wait_until(lambda: sum(other.sizes) == 3)
    assert slow.sizes == [1]
    slow.is_behind = False
    dispatcher.resume()
    wait_until(lambda: slow.sizes == [1, 3])
    assert ids_of(slow.sender) == [1, 2, 3, 4]


class Held:
    """A stream on which a send takes as long as the test wants: all else waits meanwhile."""

    is_behind = False

    def __init__(self) -> None:
        self.gate = threading.Event()

    def send(self, tensors: Any, *, is_final: bool) -> None:
        self.gate.wait(WAIT)


@pytest.mark.parametrize(("merges", "sizes"), [(True, [5]), (False, [1, 1, 2, 1])])
def test_what_has_piled_up_leaves_at_once_or_step_by_step(merges: bool, sizes: list[int]) -> None:
    """By steps as the peer sends it: its clients may count responses, or take no two tokens in one.
    Accepted drafts are of one step there, too."""
    dispatcher = ResponseDispatcher(stop_request=lambda request_id: None, merges=merges)
    held, first, second = Held(), Reader(dispatcher, 1), Reader(dispatcher, 2)
    dispatcher.answer(held, "why", "")  # type: ignore[arg-type]
    for tokens in ([1], [2], [3, 4]):
        for request_id in (1, 2):
            put(dispatcher, request_id, tokens, is_final=False)
    for request_id in (1, 2):
        put(dispatcher, request_id, [5], is_final=True)
    held.gate.set()
    for reader in (first, second):
        assert reader.sender.is_final.wait(WAIT)
        assert reader.sizes == sizes
        assert ids_of(reader.sender) == [1, 2, 3, 4, 5]
    dispatcher.close()


def test_a_reader_without_room_gets_the_steps_together_all_the_same() -> None:
    dispatcher = ResponseDispatcher(stop_request=lambda request_id: None, merges=False)
    slow = Reader(dispatcher, 1)
    slow.is_behind = True
    for token in (1, 2):
        put(dispatcher, 1, [token], is_final=False)
    put(dispatcher, 1, [3], is_final=True)
    assert slow.sender.is_final.wait(WAIT)
    assert slow.sizes == [3]
    dispatcher.close()


def test_a_frozen_reader_keeps_nobody_out(
    dispatcher: ResponseDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_BACKLOG", 3)
    frozen = Reader(dispatcher, 1)
    frozen.is_behind = True
    for token in range(10):
        put(dispatcher, 1, [token], is_final=False)
    wait_until(lambda: 1 in dispatcher._pieces and len(dispatcher._pieces[1].ids) == 10)
    assert not dispatcher.is_behind


def test_an_end_does_not_wait(dispatcher: ResponseDispatcher) -> None:
    """It frees the request's id, and comes last anyway."""
    slow = Reader(dispatcher, 1)
    slow.is_behind = True
    put(dispatcher, 1, [1], is_final=False)
    put(dispatcher, 1, [2], is_final=True)
    wait_until(slow.sender.is_final.is_set)
    assert ids_of(slow.sender) == [1, 2]


def test_a_round_that_fails_loses_nothing_of_who_is_not_in_it(
    dispatcher: ResponseDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, unlucky = Reader(dispatcher, 1), Reader(dispatcher, 2)
    slow.is_behind = True
    put(dispatcher, 1, [1], is_final=False)
    wait_until(lambda: 1 in dispatcher._pieces)
    real, failures = dispatcher._merge, [MemoryError()]

    def fail_once(item: Any) -> None:
        if failures:
            raise failures.pop()
        real(item)

    monkeypatch.setattr(dispatcher, "_merge", fail_once)
    put(dispatcher, 2, [1], is_final=True)
    wait_until(unlucky.sender.is_final.is_set)
    slow.is_behind = False
    put(dispatcher, 1, [2], is_final=True)
    wait_until(slow.sender.is_final.is_set)
    assert ids_of(slow.sender) == [1, 2]
