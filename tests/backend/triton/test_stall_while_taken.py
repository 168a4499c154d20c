"""The watchdog ends a request while it is being taken: one final, and no place is lost."""

from __future__ import annotations

from typing import Any

import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import WAIT, error_of, ids_of
from support.triton_stub import CountingEngine, FakePbUtils, FakeResponse, FakeSender

from inflight_backend.triton.queue import RequestQueue
from inflight_backend.triton_io.sender import ResponseSender

NO_PROGRESS = "the server makes no progress; send the request to another server"


class CountedSender(FakeSender):
    """Counts the final sends that are tried."""

    num_finals = 0

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        self.num_finals += bool(flags)
        super().send(response, flags)


@pytest.mark.case(88)
def test_a_request_that_a_stall_ends_while_it_is_taken_ends_once(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(CountingEngine())
    put = server.model._queue.put

    def put_late(*requests: Any, **options: Any) -> None:
        server.model._end_streams()
        put(*requests, **options)

    monkeypatch.setattr(server.model._queue, "put", put_late)
    sender = CountedSender()
    server.send("x", sender=sender, input_ids=[1], request_output_len=3)
    assert error_of(sender) == (NO_PROGRESS, FakePbUtils.TritonError.UNAVAILABLE)
    assert sender.num_finals == 1
    assert caplog.text == ""
    assert server.model._frontend.num_live == 0
    server.model._queue.refuse("")
    monkeypatch.undo()
    assert ids_of(server.ask("x", input_ids=[1], request_output_len=2)) == [1, 2, 3]


@pytest.mark.case(88)
@pytest.mark.parametrize("question", ["describe", "why", "recording"])
def test_a_question_that_a_stall_ends_while_it_is_taken_keeps_no_place(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    """Whenever the stall comes: at the first look at the refusal, or before each step."""
    server = make_server(CountingEngine())
    introspection = server.model._frontend._introspection
    assert introspection is not None
    on_final = ResponseSender.on_final

    def late(self: ResponseSender, callback: Any) -> None:
        if self in introspection._waiting:
            server.model._end_streams()
        on_final(self, callback)

    class Stalling(RequestQueue):
        @property
        def refusal(self) -> str:
            server.model._end_streams()
            return super().refusal

    monkeypatch.setattr(ResponseSender, "on_final", late)
    server.model._queue.__class__ = Stalling
    sender = CountedSender()
    server.send("x", (), sender, **{question: True})
    assert error_of(sender)[0] == NO_PROGRESS
    assert sender.num_finals == 1
    assert not introspection._waiting
    assert introspection._recording_for is None
    server.model._queue.__class__ = RequestQueue
    server.model._queue.refuse("")
    assert server.ask("x", (), **{question: True}).responses[0].error is None


def test_an_answer_that_cannot_be_sent_is_tried_once_more(make_server: MakeServer) -> None:
    """The same end as before: nobody else has ended the stream."""
    server = make_server(CountingEngine())
    sender, failures = FakeSender(), [RuntimeError("shm full")]
    real = sender.send

    def fail_once(response: FakeResponse | None = None, flags: int = 0) -> None:
        if failures:
            raise failures.pop()
        real(response, flags)

    sender.send = fail_once  # type: ignore[method-assign]
    server.send("x", sender=sender, stop=True)
    assert error_of(sender)[0] == "the answer could not be sent"


@pytest.mark.case(88)
def test_a_feed_that_a_stall_ends_while_it_is_taken_is_no_subscriber(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(CountingEngine())
    dispatcher = server.model._dispatcher
    subscribe = dispatcher.subscribe

    def subscribe_late(*arguments: Any) -> None:
        server.model._end_streams()
        subscribe(*arguments)

    monkeypatch.setattr(dispatcher, "subscribe", subscribe_late)
    sender = CountedSender()
    server.send(sender=sender, stats=True)
    assert sender.is_final.wait(WAIT)
    assert sender.num_finals == 1
    assert not dispatcher._subscribers
    assert not server.model._frontend._feeds
