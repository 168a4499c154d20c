"""Outgoing responses: slow readers, sends that raise or never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import (
    WAIT,
    Gate,
    Server,
    error_of,
    ids_of,
    last_error,
    wait_for_phase,
    wait_until,
)
from support.triton_stub import CountingEngine, FailingSender, FakePbUtils, FakeSender, HeldSender

from inflight_backend.requests.inference_request import NamedTensor
from inflight_backend.triton import dispatcher as module
from inflight_backend.triton.dispatcher import MergedResponse, ResponseDispatcher
from inflight_backend.triton.metrics import TritonMetrics
from inflight_backend.triton_io.sender import ResponseFactory, ResponseSender
from inflight_backend.triton_io.token_stream import TokenStream

NOT_SENT = ("the response could not be sent", FakePbUtils.TritonError.INTERNAL)
STALL = "0.5"
NO_PROGRESS = (
    "the server makes no progress; send the request to another server",
    FakePbUtils.TritonError.UNAVAILABLE,
)
LEAVING = (
    "the server is shutting down: this answer is not complete",
    FakePbUtils.TritonError.UNAVAILABLE,
)
LONG: dict[str, Any] = {"input_ids": [1], "request_output_len": 8000, "streaming": True}
"""It takes 40 s on the engine of `endless_engine`."""


def endless_engine() -> CountingEngine:
    return CountingEngine(
        num_blocks=9000, max_seq_len=9000, before_step=lambda batch: time.sleep(0.005)
    )


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


@contextmanager
def traffic(server: Server) -> Iterator[list[FakeSender]]:
    """Requests that keep coming meanwhile, from a thread of their own as in Triton."""
    senders: list[FakeSender] = []
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(0.01):
            senders.append(server.send(input_ids=[1], request_output_len=3, streaming=True))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield senders
    finally:
        is_over.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.case(92)
def test_a_send_that_never_returns_is_a_stall_whatever_else_comes(make_server: MakeServer) -> None:
    server = make_server(CountingEngine(), stall_seconds=STALL)
    stuck = HeldSender()
    server.send(sender=stuck, input_ids=[1], request_output_len=200, streaming=True)
    assert stuck.is_held.wait(WAIT)
    with traffic(server) as senders:
        feed = server.send(stats=True)
        asked = [server.send(describe=True), server.send("no", why=True)]
        wait_until(lambda: not server.model.is_ready())
    for sender in (*senders, *asked, feed):
        assert sender.is_final.wait(WAIT)
    assert {last_error(sender) for sender in senders} == {NO_PROGRESS}
    for question in ("describe", "why", "recording", "stats"):
        assert error_of(server.ask("no", (), **{question: True})) == NO_PROGRESS
    assert not stuck.is_final.is_set()
    time.sleep(float(STALL))  # long after it has ended; the loop had nothing to do meanwhile
    stuck.release.set()
    assert stuck.is_final.wait(WAIT)
    assert last_error(stuck) == NO_PROGRESS
    wait_until(server.model.is_ready)
    assert ids_of(server.ask(input_ids=[1], request_output_len=2)) == [1, 2, 3]
    assert server.model._manager._batcher.is_idle_and_intact()


@pytest.mark.slow
@pytest.mark.case(92)
def test_triton_s_own_thread_stuck_in_a_refusal_is_a_stall(make_server: MakeServer) -> None:
    server = make_server(CountingEngine(), stall_seconds=STALL)
    stuck = HeldSender()
    thread = threading.Thread(target=lambda: server.send(sender=stuck, request_output_len=1))
    thread.start()
    wait_until(lambda: not server.model.is_ready())
    stuck.release.set()
    thread.join()
    wait_until(server.model.is_ready)
    assert "input_ids" in error_of(stuck)[0]


class MuteSender(FakeSender):
    """The question whether its client has gone is not answered before ``release``."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.release = threading.Event(), threading.Event()

    def is_cancelled(self) -> bool:
        self.is_asked.set()
        assert self.release.wait(3 * WAIT)
        return False


@pytest.mark.slow
@pytest.mark.case(92)
@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_question_to_the_server_that_never_returns_is_a_stall(
    make_server: MakeServer, is_streaming: bool
) -> None:
    """Although the loop goes on; without streaming nothing waits for the stream's lock. The model
    can still be unloaded."""
    server = make_server(endless_engine(), stall_seconds=STALL)
    mute = MuteSender()
    server.send(sender=mute, **{**LONG, "streaming": is_streaming})
    with traffic(server) as senders:
        wait_until(lambda: not server.model.is_ready())
    for other in senders:
        assert other.is_final.wait(WAIT)
    if is_streaming:
        server.model.finalize()
    mute.release.set()
    assert mute.is_final.wait(WAIT)
    assert last_error(mute) == NO_PROGRESS
    wait_until(lambda: is_streaming or server.model.is_ready())


@pytest.mark.slow
def test_a_metric_that_never_returns_holds_up_the_first_answer_only(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error is counted before its client hears of it, and the server takes no number."""
    release, is_stuck = threading.Event(), threading.Event()

    def stand_still(*_: object) -> None:
        is_stuck.set()
        release.wait(3 * WAIT)

    monkeypatch.setattr(TritonMetrics, "update", stand_still)
    server = make_server(CountingEngine())
    assert is_stuck.wait(WAIT)
    begin = time.monotonic()
    senders = [server.send(request_output_len=1) for _ in range(2 * int(WAIT))]
    assert all(sender.is_final.wait(WAIT) for sender in senders)
    assert time.monotonic() - begin < WAIT, "a second for each"
    release.set()


@pytest.mark.slow
@pytest.mark.case(92, 123)
@pytest.mark.parametrize("what", ["step", "send", "question to the server"])
def test_a_model_with_a_thread_that_is_stuck_can_be_unloaded_at_once(
    make_server: MakeServer, gate: Gate, what: str
) -> None:
    """Nobody has called it a stall yet."""
    engine = CountingEngine(before_step=gate) if what == "step" else endless_engine()
    server = make_server(engine, stall_seconds=STALL)
    senders = {"send": HeldSender, "question to the server": MuteSender}
    sender: Any = senders.get(what, FakeSender)()
    if what == "step":
        gate.clear()
    server.send(sender=sender, **{**LONG, "request_output_len": 5 if what == "step" else 8000})
    if what != "step":
        assert (sender.is_held if what == "send" else sender.is_asked).wait(WAIT)
    unload = threading.Thread(target=server.model.finalize)
    unload.start()
    unload.join(WAIT)
    assert not unload.is_alive()
    gate.set()
    getattr(sender, "release", threading.Event()).set()
    assert sender.is_final.wait(WAIT)


@pytest.mark.slow
@pytest.mark.case(92)
def test_a_send_that_never_returns_hides_neither_a_cancel_nor_the_drain(
    make_server: MakeServer,
) -> None:
    server = make_server(endless_engine())
    stuck = HeldSender()
    server.send(sender=stuck, **LONG)
    assert stuck.is_held.wait(WAIT)
    other = server.send(**LONG)
    manager = server.model._manager
    wait_until(lambda: manager.get_num_active_requests() == 2)
    other.cancelled = True
    wait_until(lambda: manager.get_num_active_requests() == 1)
    server.drain_file.write_text("")
    wait_for_phase(server, "draining")
    stuck.cancelled = True
    stuck.release.set()
    wait_for_phase(server, "drained")


@pytest.mark.slow
@pytest.mark.case(92, 118)
def test_a_response_that_cannot_be_put_together_ends_its_request_only(
    make_server: MakeServer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(CountingEngine(before_step=gate))
    real, is_over = MergedResponse.add, threading.Event()

    def add(self: MergedResponse, tensors: Any, is_final: bool, error: str) -> None:
        if not is_over.is_set() and any(7 in tensor.tensor for tensor in tensors):
            is_over.set()
            raise MemoryError
        real(self, tensors, is_final, error)

    monkeypatch.setattr(MergedResponse, "add", add)
    gate.clear()
    victim = server.send("x", input_ids=[1], request_output_len=200, streaming=True)
    other = server.send(input_ids=[500], request_output_len=20, streaming=True)
    gate.set()
    for sender in (victim, other):
        assert sender.is_final.wait(WAIT)
    assert last_error(victim) == NOT_SENT
    assert ids_of(other) == list(range(501, 521))
    assert ids_of(server.ask("x", input_ids=[1], request_output_len=2)) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.case(118)
@pytest.mark.parametrize("error", [SystemExit("out"), MemoryError()])
def test_what_escapes_a_round_of_sending_ends_its_streams_and_not_the_thread(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    server = make_server(CountingEngine())
    real, errors = ResponseDispatcher._send_ends, [error]

    def send_ends(self: ResponseDispatcher, ends: Sequence[MergedResponse]) -> None:
        if errors:
            raise errors.pop()
        real(self, ends)

    monkeypatch.setattr(ResponseDispatcher, "_send_ends", send_ends)
    text, _ = error_of(server.ask("x", input_ids=[1], request_output_len=5))
    assert text == "the response could not be sent"
    assert ids_of(server.ask("x", input_ids=[1], request_output_len=2)) == [1, 2, 3]
    wait_until(lambda: not server.model._dispatcher._streams)


@pytest.mark.slow
@pytest.mark.case(118)
def test_a_round_that_fails_and_a_stop_that_fails_too_end_no_thread(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(CountingEngine())
    failures = [SystemExit("out"), MemoryError("in the stop")]
    send_round, stop = ResponseDispatcher._send_round, server.model._frontend.stop

    def fail_in_the_round(self: ResponseDispatcher, responses: Any) -> int:
        if responses and len(failures) == 2:
            raise failures.pop(0)
        return send_round(self, responses)

    def fail_in_the_stop(number: int) -> None:
        if len(failures) == 1:
            raise failures.pop()
        stop(number)

    monkeypatch.setattr(ResponseDispatcher, "_send_round", fail_in_the_round)
    monkeypatch.setattr(server.model._frontend, "stop", fail_in_the_stop)
    victim = server.send(input_ids=[1], request_output_len=200, streaming=True)
    assert victim.is_final.wait(WAIT)
    assert last_error(victim) == NOT_SENT
    assert not failures
    for text in ("SystemExit", "MemoryError: in the stop"):
        assert text in caplog.text
    assert ids_of(server.ask(input_ids=[1], request_output_len=2)) == [1, 2, 3]
    assert "unknown request" not in caplog.text, "it is known until it has ended"


@pytest.mark.slow
@pytest.mark.case(92)
def test_a_send_that_raises_keeps_no_other_stream_from_the_end_of_a_stall(
    make_server: MakeServer, gate: Gate
) -> None:
    server = make_server(CountingEngine(before_step=gate), stall_seconds=STALL)
    gate.clear()
    broken = [FailingSender(num_failures=99) for _ in range(3)]
    first = server.send(sender=broken[0], input_ids=[1], request_output_len=9, streaming=True)
    others = [server.send(input_ids=[1], request_output_len=9, streaming=True) for _ in range(2)]
    server.send("no", sender=broken[1], stats=True)
    feed = server.send(stats=True)
    server.send("x", sender=broken[2], recording=True)
    for sender in others:
        assert sender.is_final.wait(WAIT)
        assert last_error(sender) == NO_PROGRESS
    assert feed.is_final.wait(WAIT)
    assert not first.is_final.is_set()
    wait_until(lambda: server.model._frontend.num_live == 0)
    gate.set()
    wait_until(server.model.is_ready)


@pytest.mark.slow
@pytest.mark.case(92, 117)
def test_a_send_that_raises_keeps_no_other_stream_from_its_end_at_unload(
    make_server: MakeServer,
) -> None:
    server = make_server(endless_engine())
    broken = FailingSender(num_failures=0)
    senders = [
        server.send(sender=sender, **LONG) for sender in (broken, FakeSender(), FakeSender())
    ]
    feeds = [server.send(sender=FailingSender(99), stats=True), server.send(stats=True)]
    for sender in senders:
        assert sender.has_response.wait(WAIT)
    broken.num_failures = 99
    server.model.finalize()
    assert not server.model._manager._thread.is_alive()
    assert not server.model._dispatcher._thread.is_alive()
    for sender in senders[1:]:
        assert sender.is_final.is_set()
        assert last_error(sender) == LEAVING
    assert feeds[1].is_final.is_set()
