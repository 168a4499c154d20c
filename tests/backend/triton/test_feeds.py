"""Feeds of statistics: no gap, no double, and an end."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import (
    WAIT,
    Server,
    error_of,
    ids_of,
    values_of,
    wait_for_phase,
    wait_until,
)
from support.triton_stub import CountingEngine, FailingSender, FakePbUtils, FakeSender, HeldSender

from inflight_backend.triton import feeds as module
from inflight_backend.triton.feeds import StatisticsFeeds
from inflight_backend.triton_io import sender as sender_module
from inflight_backend.triton_io.sender import ResponseFactory, ResponseSender


def stats_of(iteration: int) -> str:
    return json.dumps({"Iteration Counter": iteration})


def iterations_of(sender: FakeSender) -> list[int]:
    return [json.loads(line)["Iteration Counter"] for line in values_of(sender, "stats")]


def test_every_iteration_from_the_last_one_comes_once() -> None:
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    feeds = StatisticsFeeds(calls.put)
    early, late = FakeSender(), FakeSender()
    feeds.open(ResponseSender(early, ResponseFactory(FakePbUtils)), lambda: stats_of(0), str)
    for iteration in (1, 2):
        feeds.add(stats_of(iteration))
    adding = threading.Thread(target=feeds.add, args=(stats_of(3),))

    def last_stats() -> str:
        """Iteration 3 is reported while this is answered."""
        adding.start()
        return stats_of(3)

    feeds.open(ResponseSender(late, ResponseFactory(FakePbUtils)), last_stats, str)
    adding.join()
    while not calls.empty():
        calls.get()()
    feeds.add(stats_of(4))
    calls.get()()
    assert iterations_of(early) == [0, 1, 2, 3, 4]
    assert iterations_of(late) == [3, 4]
    assert len(early.responses) == 2, "what has piled up travels together"
    feeds.close()
    for sender in (early, late):
        assert sender.is_final.is_set()
        assert [each.error for each in sender.responses] == [None] * len(sender.responses)


@pytest.mark.case(71)
def test_feeds_are_few_and_end(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(CountingEngine())
    feeds = [server.send(stats=True) for _ in range(16)]
    text, code = error_of(server.ask(stats=True))
    assert text.startswith("16 feeds of statistics are open, which is the limit")
    assert code == FakePbUtils.TritonError.UNAVAILABLE
    assert len(server.ask(stats=True, streaming=False).responses) == 1
    feeds[0].cancelled = True
    assert feeds[0].is_final.wait(WAIT)
    feeds[0] = server.send(stats=True)  # there is room again
    monkeypatch.setattr(module, "_MAX_FEED_BYTES", 3000)
    server.ask(input_ids=[1], request_output_len=30)
    for feed in feeds:
        assert feed.is_final.wait(WAIT)
    broken = server.send(sender=FailingSender(), stats=True)
    assert broken.is_final.wait(WAIT)
    assert error_of(broken)[0] == "the statistics could not be sent"


def test_a_drain_ends_feeds_and_opens_none(server: Server) -> None:
    """An open stream keeps Triton from exiting."""
    feed = server.send(stats=True)
    server.drain_file.write_text("")
    wait_for_phase(server, "drained")
    assert feed.is_final.is_set()
    assert [each.error for each in feed.responses if each is not None and each.error] == []
    assert "shutting down" in error_of(server.ask(stats=True))[0]
    assert len(server.ask(stats=True, streaming=False).responses) == 1


@pytest.mark.slow
@pytest.mark.case(92)
@pytest.mark.parametrize("by", ["stall", "drain", "cancel"])
def test_a_feed_to_be_ended_during_a_long_send_ends_when_that_returns(
    make_server: MakeServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    by: str,
) -> None:
    monkeypatch.setattr(sender_module, "_CLOSE_SECONDS", 0.0)  # the send takes longer
    server = make_server(CountingEngine(), stall_seconds="0.5" if by == "stall" else "60")
    stuck = HeldSender()
    server.send(sender=stuck, stats=True)
    assert stuck.is_held.wait(WAIT)
    if by == "drain":
        server.drain_file.write_text("")
    elif by == "cancel":
        server.model._feeds.close()
    wait_until(lambda: "a stream cannot be ended yet" in caplog.text)
    assert not stuck.is_final.is_set()
    stuck.release.set()
    assert stuck.is_final.wait(WAIT)
    assert len(server.model._feeds) == 0
    if by != "drain":
        wait_until(server.model.is_ready)
        assert ids_of(server.ask(input_ids=[1], request_output_len=2)) == [1, 2, 3]


def test_a_feed_that_ends_while_it_is_looked_at_hides_no_other() -> None:
    feeds = StatisticsFeeds(lambda run: None)

    class JustEnded(ResponseSender):
        """The watchdog ends it between the look at the list and the look at it."""

        @property
        def is_closed(self) -> bool:
            feeds.close(self)
            return True

    other: Any = FakeSender()
    for kind, sender in ((JustEnded, FakeSender()), (ResponseSender, other)):
        feeds.open(kind(sender, ResponseFactory(FakePbUtils)), lambda: stats_of(0), str)
    other.cancelled = True
    feeds.check_cancelled()
    assert other.is_final.is_set()


@pytest.mark.case(88)
def test_a_feed_that_a_stall_ends_while_it_is_opened_ends_once(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(CountingEngine())
    real = server.model._feeds.open

    def open_late(*arguments: Any) -> None:
        server.model._end_streams()
        real(*arguments)

    monkeypatch.setattr(server.model._feeds, "open", open_late)
    sender = FailingSender(num_failures=0)
    server.send(sender=sender, stats=True)
    assert sender.is_final.wait(WAIT)
    assert str(sender.responses[-1].error).startswith("the server makes no progress")
    assert sender.num_finals == 1
    assert len(server.model._feeds) == 0
