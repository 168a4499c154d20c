"""Outgoing responses: slow readers, and faults of sending."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from backend.triton.conftest import MakeServer
from support.manager_harness import Once
from support.triton_harness import (
    WAIT,
    ids_of,
    last_error,
    wait_until,
)
from support.triton_stub import CountingEngine, FakePbUtils, FakeSender, HeldSender

from inflight_backend.requests.inference_request import NamedTensor
from inflight_backend.triton import dispatcher as module
from inflight_backend.triton.dispatcher import MergedResponse, ResponseDispatcher
from inflight_backend.triton_io.answer_stream import TokenStream
from inflight_backend.triton_io.sender import ResponseFactory, ResponseSender

NOT_SENT = ("the response could not be sent", FakePbUtils.TritonError.INTERNAL)


class Reader:
    """A stream of `ResponseDispatcher`; ``is_behind`` as the test wants it."""

    def __init__(self, dispatcher: ResponseDispatcher, request_id: int) -> None:
        self.is_behind = False
        self.sender = FakeSender()
        factory = ResponseFactory(FakePbUtils)
        stream = ResponseSender(self.sender, factory, lambda: self.is_behind)
        dispatcher.open(request_id, TokenStream(stream, frozenset({"output_ids"})))

    @property
    def sizes(self) -> list[int]:
        """Tokens of each response."""
        tensors = [each for response in self.sender.responses for each in response.output_tensors]
        return [tensor.as_numpy().size for tensor in tensors]


def put(
    dispatcher: ResponseDispatcher,
    request_id: int,
    *tokens: int,
    is_final: bool = False,
    error: str = "",
) -> None:
    ids = [NamedTensor("output_ids", np.array([tokens], np.int32))] if tokens else []
    dispatcher.send_response(request_id, ids, is_final, error)


@pytest.fixture
def make_dispatcher() -> Iterator[Callable[..., ResponseDispatcher]]:
    made: list[ResponseDispatcher] = []

    def make(**options: Any) -> ResponseDispatcher:
        made.append(ResponseDispatcher(stop_request=lambda request_id: None, **options))
        return made[-1]

    yield make
    for dispatcher in made:
        dispatcher.close()


@pytest.fixture
def dispatcher(make_dispatcher: Callable[..., ResponseDispatcher]) -> ResponseDispatcher:
    return make_dispatcher()


@contextmanager
def held(dispatcher: ResponseDispatcher) -> Iterator[None]:
    """While entered, nothing is sent: what is put travels in one round."""
    release = threading.Event()

    def wait() -> None:
        assert release.wait(WAIT)

    dispatcher.call_soon(wait)
    try:
        yield
    finally:
        release.set()


def test_tokens_that_wait_when_an_error_comes_are_told_before_it(
    dispatcher: ResponseDispatcher,
) -> None:
    reader = Reader(dispatcher, 1)
    with held(dispatcher):
        put(dispatcher, 1, 5, 6)
        put(dispatcher, 1, error="broken")
    assert reader.sender.is_final.wait(WAIT)
    assert ids_of(reader.sender) == [5, 6]
    assert [str(each.error or "") for each in reader.sender.responses] == ["", "broken"]


def test_what_has_no_room_travels_together_once_there_is(dispatcher: ResponseDispatcher) -> None:
    slow, other = Reader(dispatcher, 1), Reader(dispatcher, 2)
    put(dispatcher, 1, 1)
    wait_until(lambda: slow.sizes == [1])
    slow.is_behind = True
    for token in (2, 3, 4):
        put(dispatcher, 1, token)
        put(dispatcher, 2, token)
    wait_until(lambda: sum(other.sizes) == 3)
    assert slow.sizes == [1]
    slow.is_behind = False
    dispatcher.resume()
    wait_until(lambda: slow.sizes == [1, 3])
    assert ids_of(slow.sender) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("merges", "is_behind", "sizes"),
    [(True, False, [5]), (False, False, [1, 1, 2, 1]), (False, True, [5])],
)
def test_what_has_piled_up_leaves_at_once_or_step_by_step(
    make_dispatcher: Callable[..., ResponseDispatcher],
    merges: bool,
    is_behind: bool,
    sizes: list[int],
) -> None:
    """By steps as the peer sends it: its clients may count responses, or take no two tokens in one.
    Accepted drafts are of one step there, too. An end does not wait for a slow reader: it frees the
    request's id, and comes last anyway."""
    dispatcher = make_dispatcher(merges=merges)
    readers = [Reader(dispatcher, 1), Reader(dispatcher, 2)]
    with held(dispatcher):
        for reader in readers:
            reader.is_behind = is_behind
        for tokens in ((1,), (2,), (3, 4)):
            for request_id in (1, 2):
                put(dispatcher, request_id, *tokens)
        for request_id in (1, 2):
            put(dispatcher, request_id, 5, is_final=True)
    for reader in readers:
        assert reader.sender.is_final.wait(WAIT)
        assert reader.sizes == sizes
        assert ids_of(reader.sender) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("shares_cores", [True, False])
def test_in_a_rest_first_tokens_ends_and_answers_leave_and_other_tokens_wait(
    make_dispatcher: Callable[..., ResponseDispatcher],
    monkeypatch: pytest.MonkeyPatch,
    shares_cores: bool,
) -> None:
    prefix = "_SHARED" if shares_cores else ""
    longest = "_MAX_SHARED_REST_SECONDS" if shares_cores else "_MAX_REST_SECONDS"
    for name, value in (("_FEW_REQUESTS", 0), (f"{prefix}_REST", 1e12), (longest, 1e6)):
        monkeypatch.setattr(module, name, value)
    dispatcher = make_dispatcher()
    dispatcher.shares_cores = shares_cores
    first, second, third = (Reader(dispatcher, number) for number in (1, 2, 3))
    put(dispatcher, 1, 1)
    wait_until(lambda: first.sizes == [1])
    for token in (2, 3):
        put(dispatcher, 1, token)
    put(dispatcher, 2, 1)
    wait_until(lambda: second.sizes == [1])
    put(dispatcher, 2, 2)
    is_called = threading.Event()
    dispatcher.call_soon(is_called.set)
    assert is_called.wait(WAIT)
    put(dispatcher, 3, error="broken")
    assert third.sender.is_final.wait(WAIT)
    assert (first.sizes, second.sizes) == ([1], [1])
    put(dispatcher, 1, 4, is_final=True)
    assert first.sender.is_final.wait(WAIT)
    assert first.sizes == [1, 3]
    assert second.sizes == [1]
    dispatcher.close()
    assert ids_of(second.sender) == [1, 2]


def test_a_frozen_reader_keeps_no_other_request_out(
    dispatcher: ResponseDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_BACKLOG", 3)
    frozen, other = Reader(dispatcher, 1), Reader(dispatcher, 2)
    frozen.is_behind = True
    for token in range(10):
        put(dispatcher, 1, token)
    put(dispatcher, 2, 1)
    wait_until(lambda: other.sizes == [1])
    assert not dispatcher.is_behind


def test_a_round_that_fails_loses_nothing_of_a_request_that_is_not_in_it(
    dispatcher: ResponseDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, unlucky = Reader(dispatcher, 1), Reader(dispatcher, 2)
    slow.is_behind = True
    put(dispatcher, 1, 1)
    put(dispatcher, 2, 1)
    wait_until(lambda: unlucky.sizes == [1])  # the other one has been looked at by then
    real, failures = dispatcher._merge, [MemoryError()]

    def fail_once(response: Any) -> None:
        if response[0] == 2 and failures:
            raise failures.pop()
        real(response)

    monkeypatch.setattr(dispatcher, "_merge", fail_once)
    put(dispatcher, 2, 2, is_final=True)
    wait_until(unlucky.sender.is_final.is_set)
    assert last_error(unlucky.sender) == NOT_SENT
    slow.is_behind = False
    put(dispatcher, 1, 2, is_final=True)
    wait_until(slow.sender.is_final.is_set)
    assert ids_of(slow.sender) == [1, 2]


@pytest.mark.case(71)
def test_what_waits_to_be_sent_keeps_new_requests_out_by_its_number(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton takes no response: what waits for it stays bounded, and all of it leaves later."""
    monkeypatch.setattr(module, "_MAX_BACKLOG", 100)
    server = make_server(CountingEngine())
    stuck = HeldSender()
    server.send("stuck", sender=stuck, input_ids=[1], request_output_len=5, streaming=True)
    assert stuck.is_held.wait(WAIT)  # with what it has taken so far, which does not count
    others = [
        server.send(f"{i}", input_ids=[1], request_output_len=40, streaming=True) for i in range(30)
    ]
    wait_until(lambda: server.model._dispatcher.is_behind)
    wait_until(lambda: server.model._manager.get_num_active_requests() == 0)
    assert len(server.model._queue) > 20, "only what was active went on"
    stuck.release.set()
    for sender in (stuck, *others):
        assert sender.is_final.wait(WAIT)
    assert ids_of(others[-1]) == list(range(2, 42))


@pytest.mark.case(71)
def test_what_waits_to_be_sent_counts_by_its_size_until_it_is_sent(
    dispatcher: ResponseDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few large responses: beams say everything each time, and a row of logits is a vocabulary."""
    monkeypatch.setattr(module, "_MAX_BACKLOG_BYTES", 4500)
    answer = FakeSender()
    with held(dispatcher):
        put(dispatcher, 0, 1)
        row = NamedTensor("generation_logits", np.zeros((1, 1, 1, 1000), dtype=np.float32))
        dispatcher.send_response(0, [row], False, "")
        assert not dispatcher.is_behind
        dispatcher.answer(ResponseSender(answer, ResponseFactory(FakePbUtils)), "why", 500 * "x")
        assert dispatcher.is_behind
    wait_until(lambda: not dispatcher.is_behind)
    assert answer.is_final.is_set()


@pytest.mark.fast(2)
@pytest.mark.case(92, 118)
@pytest.mark.parametrize("stop_fails", [False, True])
@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (MergedResponse, "add", MemoryError()),
        (ResponseDispatcher, "_send_ends", SystemExit("out")),
        (ResponseDispatcher, "_send_round", MemoryError()),
    ],
)
def test_fault_in_a_round_ends_its_requests_and_not_the_thread(
    make_server: MakeServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    name: str,
    error: BaseException,
    stop_fails: bool,
) -> None:
    server = make_server(CountingEngine())
    once = Once(getattr(owner, name), error)
    monkeypatch.setattr(owner, name, lambda *arguments, **options: once(*arguments, **options))
    stop = Once(server.model._frontend.stop, MemoryError("in the stop"))
    monkeypatch.setattr(server.model._frontend, "stop", stop)
    once.arm()
    if stop_fails:
        stop.arm()
    victim = server.send("x", input_ids=[1], request_output_len=200, streaming=True)
    assert victim.is_final.wait(WAIT)
    assert last_error(victim) == NOT_SENT
    for text in (type(error).__name__, *(["MemoryError: in the stop"] if stop_fails else [])):
        assert text in caplog.text
    assert "unknown request" not in caplog.text, "it is known until it has ended"
    assert ids_of(server.ask("x", input_ids=[1], request_output_len=2)) == [1, 2, 3]
    wait_until(lambda: not server.model._dispatcher._streams)
