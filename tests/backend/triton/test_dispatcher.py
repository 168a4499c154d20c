"""Outgoing responses: feeds of statistics, slow readers, sends that raise or never return."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import WAIT, Server, error_of, ids_of, wait_until
from support.triton_stub import CountingEngine, FakePbUtils, FakeResponse, FakeSender

from inflight_backend.requests.inference_request import NamedTensor
from inflight_backend.status import read_status
from inflight_backend.triton import dispatcher as module
from inflight_backend.triton.dispatcher import MergedResponse, ResponseDispatcher
from inflight_backend.triton.metrics import TritonMetrics
from inflight_backend.triton_io import sender as sender_module
from inflight_backend.triton_io.sender import ResponseFactory, ResponseSender
from inflight_backend.triton_io.token_stream import TokenStream
from inflight_scheduler import ScheduledBatch


class Sent(ResponseSender):
    """A stream that keeps the iterations it is sent; ``gate`` holds every send back."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate
        self.iterations: list[int] = []
        self.finals: list[bool] = []

    def send(self, tensors: dict[str, Any], *, is_final: bool) -> None:
        self.gate.wait(10)
        lines = tensors["stats"].reshape(-1) if tensors else []
        self.iterations += [json.loads(line)["Iteration Counter"] for line in lines]
        self.finals.append(is_final)

    def close(self) -> None:
        self.send({}, is_final=True)


def stats_of(iteration: int) -> str:
    return json.dumps({"Iteration Counter": iteration})


def test_iterations_while_a_feed_opens_come_once_each() -> None:
    dispatcher = ResponseDispatcher(stop_request=lambda request_id: None)
    gate = threading.Event()
    early, late = Sent(gate), Sent(gate)

    def last_stats() -> str:
        """Iterations 3 and 4 are reported while this is answered, and 3 is in the answer."""
        dispatcher.return_stats(stats_of(3))
        dispatcher.return_stats(stats_of(4))
        return stats_of(3)

    dispatcher.subscribe(early, lambda: stats_of(0))
    for iteration in (1, 2):
        dispatcher.return_stats(stats_of(iteration))
    dispatcher.subscribe(late, last_stats)
    gate.set()
    while len(late.iterations) < 2:  # the timeout of the test ends it
        time.sleep(0.001)
    dispatcher.return_stats(stats_of(5))
    dispatcher.close()
    assert early.iterations == [0, 1, 2, 3, 4, 5]
    assert late.iterations == [3, 4, 5]
    for stream in (early, late):
        assert stream.finals == [False] * (len(stream.finals) - 1) + [True]


def test_an_answer_in_a_round_that_fails_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(ResponseDispatcher, "_send_round", fail)
    dispatcher = ResponseDispatcher(stop_request=lambda request_id: None)
    sender = FakeSender()
    dispatcher.answer(ResponseSender(sender, ResponseFactory(FakePbUtils)), "why", "{}")
    dispatcher.close()
    assert error_of(sender)[0] == "the answer could not be sent"


def test_tokens_that_wait_when_an_error_comes_are_told_before_it() -> None:
    dispatcher = ResponseDispatcher(stop_request=lambda request_id: None)
    dispatcher.close()  # the round is ours
    sender = FakeSender()
    stream = ResponseSender(sender, ResponseFactory(FakePbUtils))
    dispatcher.open(1, TokenStream(stream, frozenset({"output_ids"})))
    tokens = [NamedTensor("output_ids", np.array([[[5, 6]]], dtype=np.int32))]
    dispatcher._send_round([(1, tokens, False, ""), (1, [], True, "broken")])
    assert ids_of(sender) == [5, 6]
    assert [str(each.error or "") for each in sender.responses] == ["", "broken"]
    assert not dispatcher._streams


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


pytestmark = pytest.mark.slow

STALL = "0.5"

NO_PROGRESS = "the server makes no progress; send the request to another server"

LEAVING = "the server is shutting down: this answer is not complete"


class BrokenSender(FakeSender):
    """Every send raises from the moment it ``is_broken``."""

    def __init__(self, *, is_broken: bool = True) -> None:
        super().__init__()
        self.is_broken = is_broken

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        if self.is_broken:
            raise RuntimeError("shm full")
        super().send(response, flags)


class StuckSender(FakeSender):
    """A send does not return until released."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck = threading.Event()
        self.release = threading.Event()

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        self.is_stuck.set()
        assert self.release.wait(3 * WAIT)
        super().send(response, flags)


class Gate:
    """An engine hook: while closed, a step does not return."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.event.set()

    def __call__(self, batch: ScheduledBatch) -> None:
        assert self.event.wait(3 * WAIT)


def endless_engine() -> CountingEngine:
    """It takes 40 s for 8,000 tokens, and has room for them."""
    return CountingEngine(
        num_blocks=9000, max_seq_len=9000, before_step=lambda batch: time.sleep(0.005)
    )


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


def last_error(sender: FakeSender) -> tuple[str, int] | None:
    error = sender.responses[-1].error
    return None if error is None else (str(error), error.code)


@pytest.mark.case(92)
def test_a_send_that_never_returns_is_a_stall_whatever_else_comes(make_server: MakeServer) -> None:
    server = make_server(CountingEngine(), stall_seconds=STALL)
    stuck = StuckSender()
    server.send(sender=stuck, input_ids=[1], request_output_len=200, streaming=True)
    assert stuck.is_stuck.wait(WAIT)
    with traffic(server) as senders:
        feed = server.send(stats=True)
        asked = [server.send(describe=True), server.send("no", why=True)]
        wait_until(lambda: not server.model.is_ready())
    for sender in (*senders, *asked, feed):
        assert sender.is_final.wait(WAIT)
    assert {last_error(sender) for sender in senders} == {
        (NO_PROGRESS, FakePbUtils.TritonError.UNAVAILABLE)
    }
    for question in ("describe", "why", "recording", "stats"):
        sender = server.ask("no", (), **{question: True})
        assert error_of(sender)[0] == NO_PROGRESS
    assert not stuck.is_final.is_set()
    stuck.release.set()
    assert stuck.is_final.wait(WAIT)
    assert last_error(stuck) == (NO_PROGRESS, FakePbUtils.TritonError.UNAVAILABLE)
    wait_until(server.model.is_ready)
    assert ids_of(server.ask(input_ids=[1], request_output_len=2)) == [1, 2, 3]
    assert server.model._manager._batcher.is_idle_and_intact()


@pytest.mark.case(92)
def test_a_send_that_returns_long_after_its_request_has_ended(make_server: MakeServer) -> None:
    """The loop had nothing to do meanwhile, and was not stuck: nothing has to move in it."""
    server = make_server(CountingEngine(), stall_seconds=STALL)
    stuck = StuckSender()
    server.send(sender=stuck, input_ids=[1], request_output_len=5, streaming=True)
    wait_until(lambda: not server.model.is_ready())
    time.sleep(3 * float(STALL))
    stuck.release.set()
    wait_until(server.model.is_ready)
    assert ids_of(server.ask(input_ids=[1], request_output_len=2)) == [1, 2, 3]


@pytest.mark.case(92)
@pytest.mark.parametrize("by", ["stall", "drain", "cancel"])
def test_a_feed_to_be_ended_during_a_long_send_ends_when_that_returns(
    make_server: MakeServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    by: str,
) -> None:
    monkeypatch.setattr(sender_module, "_CLOSE_SECONDS", 0.0)  # the send takes longer
    server = make_server(CountingEngine(), stall_seconds=STALL if by == "stall" else "60")
    stuck = StuckSender()
    server.send(sender=stuck, stats=True)
    assert stuck.is_stuck.wait(WAIT)
    if by == "drain":
        server.drain_file.write_text("")
    elif by == "cancel":
        server.model._frontend._end_feed(server.model._frontend._feeds[0])
    wait_until(lambda: "a stream cannot be ended yet" in caplog.text)
    assert not stuck.is_final.is_set()
    stuck.release.set()
    assert stuck.is_final.wait(WAIT)
    assert not server.model._frontend._feeds
    if by != "drain":
        wait_until(server.model.is_ready)
        assert ids_of(server.ask(input_ids=[1], request_output_len=2)) == [1, 2, 3]


@pytest.mark.case(92)
def test_a_stream_to_be_ended_during_a_long_question_ends_when_that_returns() -> None:
    has_asked, release = threading.Event(), threading.Event()

    class SlowAnswer(FakeSender):
        def is_cancelled(self) -> bool:
            has_asked.set()
            assert release.wait(3 * WAIT)
            return super().is_cancelled()

    sender = SlowAnswer()
    slow = ResponseSender(sender, ResponseFactory(FakePbUtils))
    asking = threading.Thread(target=slow.is_cancelled)
    asking.start()
    assert has_asked.wait(WAIT)
    slow.abort("no more")
    assert not sender.is_final.is_set()
    release.set()
    asking.join()
    assert error_of(sender) == ("no more", FakePbUtils.TritonError.UNAVAILABLE)


@pytest.mark.case(92)
def test_triton_s_own_thread_stuck_in_a_refusal_is_a_stall(make_server: MakeServer) -> None:
    server = make_server(CountingEngine(), stall_seconds=STALL)
    stuck = StuckSender()
    thread = threading.Thread(target=lambda: server.send(sender=stuck, request_output_len=1))
    thread.start()
    wait_until(lambda: not server.model.is_ready())
    stuck.release.set()
    thread.join()
    wait_until(server.model.is_ready)
    assert "input_ids" in error_of(stuck)[0]


@pytest.mark.case(92)
def test_a_question_to_the_server_that_never_returns_is_a_stall(make_server: MakeServer) -> None:
    """And the model can still be unloaded."""
    gate, release = Gate(), threading.Event()
    server = make_server(CountingEngine(before_step=gate), stall_seconds=STALL)
    gate.event.clear()
    sender = FakeSender()
    sender.is_cancelled = lambda: release.wait(3 * WAIT) and False  # type: ignore[method-assign]
    server.send(sender=sender, input_ids=[1], request_output_len=200, streaming=True)
    with traffic(server) as senders:
        wait_until(lambda: not server.model.is_ready())
    for other in senders:
        assert other.is_final.wait(WAIT)
    gate.event.set()
    server.model.finalize()
    release.set()


@pytest.mark.case(92)
def test_a_question_that_never_returns_is_a_stall_although_all_else_moves(
    make_server: MakeServer,
) -> None:
    """The loop goes on; nothing is to be sent, nobody waits for the stream's lock."""
    release = threading.Event()
    server = make_server(endless_engine(), stall_seconds=STALL)
    sender = FakeSender()
    sender.is_cancelled = lambda: release.wait(3 * WAIT) and False  # type: ignore[method-assign]
    server.send(sender=sender, input_ids=[1], request_output_len=8000)
    wait_until(lambda: not server.model.is_ready())
    release.set()
    assert sender.is_final.wait(WAIT)
    assert last_error(sender) == (NO_PROGRESS, FakePbUtils.TritonError.UNAVAILABLE)
    wait_until(server.model.is_ready)


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


@pytest.mark.case(92, 123)
@pytest.mark.parametrize("what", ["step", "send", "question to the server"])
def test_a_model_with_a_thread_that_is_stuck_can_be_unloaded_at_once(
    make_server: MakeServer, what: str
) -> None:
    """Nobody has called it a stall yet."""
    gate, release, has_asked = Gate(), threading.Event(), threading.Event()
    engine = CountingEngine(before_step=gate) if what == "step" else endless_engine()
    server = make_server(engine, stall_seconds=STALL)

    def is_cancelled() -> bool:
        has_asked.set()
        return release.wait(3 * WAIT) and False

    sender = FakeSender() if what != "send" else StuckSender()
    if what == "step":
        gate.event.clear()
    elif what != "send":
        sender.is_cancelled = is_cancelled  # type: ignore[method-assign]
    length = 5 if what == "step" else 8000
    server.send(sender=sender, input_ids=[1], request_output_len=length, streaming=True)
    if isinstance(sender, StuckSender):
        assert sender.is_stuck.wait(WAIT)
    elif what != "step":
        assert has_asked.wait(WAIT)
    unload = threading.Thread(target=server.model.finalize)
    unload.start()
    unload.join(WAIT)
    assert not unload.is_alive()
    gate.event.set()
    release.set()
    if isinstance(sender, StuckSender):
        sender.release.set()
    assert sender.is_final.wait(WAIT)


@pytest.mark.case(92)
def test_a_send_that_never_returns_hides_neither_a_cancel_nor_the_drain(
    make_server: MakeServer,
) -> None:
    server = make_server(endless_engine())
    stuck = StuckSender()
    server.send(sender=stuck, input_ids=[1], request_output_len=8000, streaming=True)
    assert stuck.is_stuck.wait(WAIT)
    other = server.send(input_ids=[1], request_output_len=8000, streaming=True)
    manager = server.model._manager
    wait_until(lambda: manager.get_num_active_requests() == 2)
    other.cancelled = True
    wait_until(lambda: manager.get_num_active_requests() == 1)
    server.drain_file.write_text("")

    def phase() -> str:
        status = read_status(server.status_file)
        assert status is not None
        return status.phase

    wait_until(lambda: phase() == "draining")
    stuck.cancelled = True
    stuck.release.set()
    wait_until(lambda: phase() == "drained")


@pytest.mark.case(92, 118)
def test_a_response_that_cannot_be_put_together_ends_its_request_only(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    server = make_server(CountingEngine(before_step=gate))
    real, is_over = MergedResponse.add, threading.Event()

    def add(self: MergedResponse, tensors: Any, is_final: bool, error: str) -> None:
        if not is_over.is_set() and any(7 in tensor.tensor for tensor in tensors):
            is_over.set()
            raise MemoryError
        real(self, tensors, is_final, error)

    monkeypatch.setattr(MergedResponse, "add", add)
    gate.event.clear()
    victim = server.send("x", input_ids=[1], request_output_len=200, streaming=True)
    other = server.send(input_ids=[500], request_output_len=20, streaming=True)
    gate.event.set()
    for sender in (victim, other):
        assert sender.is_final.wait(WAIT)
    assert last_error(victim) == (
        "the response could not be sent",
        FakePbUtils.TritonError.INTERNAL,
    )
    assert ids_of(other) == list(range(501, 521))
    assert ids_of(server.ask("x", input_ids=[1], request_output_len=2)) == [1, 2, 3]


@pytest.mark.case(118)
@pytest.mark.parametrize("error", [SystemExit("out"), MemoryError()])
def test_what_escapes_a_round_of_sending_ends_its_streams_and_not_the_thread(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    server = make_server(CountingEngine())
    real, errors = ResponseDispatcher._send_ends, [error]

    def send_ends(self: ResponseDispatcher, ends: Sequence[tuple[int, MergedResponse]]) -> None:
        if errors:
            raise errors.pop()
        real(self, ends)

    monkeypatch.setattr(ResponseDispatcher, "_send_ends", send_ends)
    text, _ = error_of(server.ask("x", input_ids=[1], request_output_len=5))
    assert text == "the response could not be sent"
    assert ids_of(server.ask("x", input_ids=[1], request_output_len=2)) == [1, 2, 3]
    wait_until(lambda: not server.model._dispatcher._streams)


@pytest.mark.case(118)
def test_a_round_that_fails_and_a_stop_that_fails_too_end_no_thread(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(CountingEngine())
    failures = [SystemExit("out"), MemoryError("in the stop")]
    send_round, stop = ResponseDispatcher._send_round, server.model._frontend.stop

    def fail_in_the_round(self: ResponseDispatcher, items: Any) -> int:
        if len(failures) == 2:
            raise failures.pop(0)
        return send_round(self, items)

    def fail_in_the_stop(number: int) -> None:
        if len(failures) == 1:
            raise failures.pop()
        stop(number)

    monkeypatch.setattr(ResponseDispatcher, "_send_round", fail_in_the_round)
    monkeypatch.setattr(server.model._frontend, "stop", fail_in_the_stop)
    victim = server.send(input_ids=[1], request_output_len=200, streaming=True)
    assert victim.is_final.wait(WAIT)
    assert last_error(victim) == (
        "the response could not be sent",
        FakePbUtils.TritonError.INTERNAL,
    )
    assert not failures
    assert "SystemExit" in caplog.text
    assert "MemoryError: in the stop" in caplog.text
    assert "NoneType" not in caplog.text
    assert ids_of(server.ask(input_ids=[1], request_output_len=2)) == [1, 2, 3]
    assert "unknown request" not in caplog.text, "it is known until it has ended"


def test_a_feed_that_ends_while_it_is_looked_at_hides_no_other(make_server: MakeServer) -> None:
    server = make_server(CountingEngine(), cancellation_check_period_ms="60000")
    frontend = server.model._frontend

    class JustEnded(ResponseSender):
        """The watchdog ends it between the look at the list and the look at it."""

        @property
        def is_closed(self) -> bool:
            frontend._end_feed(self)
            return True

    other = server.send(stats=True)
    assert other.has_response.wait(WAIT)
    other.cancelled = True
    frontend._feeds.insert(0, JustEnded(FakeSender(), ResponseFactory(FakePbUtils)))
    frontend.check_cancelled()
    assert other.is_final.is_set()


@pytest.mark.case(92)
def test_a_send_that_raises_keeps_nobody_else_from_the_end_of_a_stall(
    make_server: MakeServer,
) -> None:
    gate = Gate()
    server = make_server(CountingEngine(before_step=gate), stall_seconds=STALL)
    gate.event.clear()
    broken = [BrokenSender() for _ in range(3)]
    first = server.send(sender=broken[0], input_ids=[1], request_output_len=9, streaming=True)
    others = [server.send(input_ids=[1], request_output_len=9, streaming=True) for _ in range(2)]
    server.send("no", sender=broken[1], stats=True)
    feed = server.send(stats=True)
    server.send("x", sender=broken[2], recording=True)
    for sender in others:
        assert sender.is_final.wait(WAIT)
        assert last_error(sender) == (NO_PROGRESS, FakePbUtils.TritonError.UNAVAILABLE)
    assert feed.is_final.wait(WAIT)
    assert not first.is_final.is_set()
    wait_until(lambda: server.model._frontend.num_live == 0)
    wait_until(lambda: not server.model._frontend._introspection._waiting)  # type: ignore[union-attr]
    gate.event.set()
    wait_until(server.model.is_ready)


@pytest.mark.case(92, 117)
def test_a_send_that_raises_keeps_nothing_from_its_end_at_unload(make_server: MakeServer) -> None:
    server = make_server(endless_engine())
    broken = BrokenSender(is_broken=False)
    senders = [
        server.send(sender=sender, input_ids=[1], request_output_len=8000, streaming=True)
        for sender in (broken, FakeSender(), FakeSender())
    ]
    feeds = [server.send(sender=BrokenSender(), stats=True), server.send(stats=True)]
    for sender in senders:
        assert sender.has_response.wait(WAIT)
    broken.is_broken = True
    server.model.finalize()
    assert not server.model._manager._thread.is_alive()
    assert not server.model._dispatcher._thread.is_alive()
    for sender in senders[1:]:
        assert sender.is_final.is_set()
        assert last_error(sender) == (LEAVING, FakePbUtils.TritonError.UNAVAILABLE)
    assert feeds[1].is_final.is_set()
