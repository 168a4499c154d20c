"""Exactly one final for every request, under any order of everything that can end one.

The engine takes a step only when told to, so that what happens between two steps is chosen here:
hypothesis writes the story, the rules must hold whatever it is.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from backend.triton.conftest import MakeServer
from fakes import CountedStep, CountingEngine, FakePbUtils, FakeResponse, FakeSender
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_harness import WAIT, Server, ids_of, wait_until

from inflight_backend import gpt_manager, triton_model
from inflight_backend.triton.arrivals import ArrivalQueue, RequestIds
from inflight_scheduler import ScheduledBatch

NUM_NAMES = 6
KINDS = ("ok", "raise", "not a number", "exit", "wrong count")
LONGEST = 40


class SteppedEngine(CountingEngine):
    """Takes a step when one is granted, the way it is asked to."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._granted = threading.Semaphore(0)
        self._kinds: list[str] = []
        self.is_free = False

    def grant(self, kind: str) -> None:
        self._kinds.append(kind)
        self._granted.release()

    def let_go(self) -> None:
        """No waiting from now on."""
        self.is_free = True
        self._granted.release()

    def submit(self, batch: ScheduledBatch) -> CountedStep:
        """What goes wrong is heard of late, when the step is read."""
        try:
            return super().submit(batch)
        except Exception as error:
            return LostStep(error)

    def execute(self, batch: ScheduledBatch) -> list[int]:
        if not self.is_free:
            assert self._granted.acquire(timeout=WAIT)
        kind = self._kinds.pop(0) if self._kinds else "ok"
        tokens = super().execute(batch)
        if kind == "raise":
            raise RuntimeError("a step")
        if kind == "exit":
            raise SystemExit("a thread")
        if kind == "not a number":
            return [-1] * len(tokens)
        return tokens[:-1] if kind == "wrong count" else tokens


class LostStep(CountedStep):
    """A submitted step that fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def read(self) -> list[int]:
        raise self._error


class StrictSender(FakeSender):
    """Counts what Triton would die of instead of raising where it might be swallowed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_finals = 0
        self.violations: list[str] = []

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        self.num_finals += bool(flags)
        if self.is_final.is_set():
            self.violations.append("a send after the final")
        super().send(response, flags)

    def is_cancelled(self) -> bool:
        if self.is_final.is_set():
            self.violations.append("is_cancelled() after the final")
            return False
        return self.cancelled


class Story:
    """A loaded model and everything that was sent to it."""

    def __init__(self, server: Server, engine: SteppedEngine) -> None:
        self.server = server
        self.engine = engine
        self.sent: list[tuple[int, StrictSender]] = []
        self._num_sent = 0

    def send(self, name: int, prompt_len: int, num_tokens: int) -> None:
        """A stream that counts from a number of its own; refused if its id is in flight."""
        self._num_sent += 1
        start = 20 * self._num_sent
        sender = self.server.send(
            f"r{name}",
            sender=StrictSender(),
            input_ids=[start] * prompt_len,
            request_output_len=num_tokens,
            streaming=True,
        )
        assert isinstance(sender, StrictSender)
        self.sent.append((start, sender))

    def stop(self, name: int) -> None:
        ack = self.server.ask(f"r{name}", stop=True)
        assert [response.error for response in ack.responses] == [None]

    def cancel(self, name: int) -> None:
        if name < len(self.sent):
            self.sent[name][1].cancelled = True
            self.server.model._frontend.check_cancelled()

    def expire(self, name: int) -> None:
        """Let the run deadline of the oldest active request pass, if there is any."""
        manager = self.server.model._manager

        def expire() -> None:
            for request in list(manager._active)[:1]:
                request.run_deadline = time.monotonic()
                manager._deadlines.add(request)

        manager._ask(expire)

    def abandon(self) -> None:
        """What the watchdog does when nothing moves."""
        self.server.model._frontend.fail_all("nothing moves")

    def step(self, kind: str) -> None:
        self.engine.grant(kind)

    def finish(self, is_unloaded: bool) -> None:
        """Let everything run out, or unload right away; then check every rule."""
        self.engine.let_go()
        if is_unloaded:
            self.server.model.finalize()
        for start, sender in self.sent:
            assert sender.is_final.wait(WAIT), "a request without an end"
            assert (sender.num_finals, sender.violations) == (1, [])
            ids = ids_of(sender)
            assert ids == list(range(start + 1, start + 1 + len(ids))), "a gap or a double"
        manager = self.server.model._manager
        wait_until(lambda: manager.get_num_active_requests() == 0)
        assert manager._batcher.is_idle_and_intact()
        frontend = self.server.model._frontend
        assert frontend.num_live == 0
        assert frontend._ids._name_to_number == {}
        wait_until(lambda: not self.server.model._dispatcher._streams)
        if not is_unloaded:
            self.server.model.finalize()


@contextmanager
def story(policy: str, overlap: str) -> Iterator[Story]:
    """Four places, chunks of 8 tokens, and a pool that two long requests fill."""
    engine = SteppedEngine(num_blocks=16, max_num_tokens=8, max_seq_len=64)
    patches = (
        mock.patch.object(triton_model, "exit_with_parent"),
        mock.patch.object(gpt_manager, "load_engine", return_value=engine),
        mock.patch.dict(sys.modules, {"triton_python_backend_utils": FakePbUtils}),
    )
    with tempfile.TemporaryDirectory() as folder, patches[0], patches[1], patches[2]:
        server = Server(
            Path(folder),
            engine,
            batch_scheduler_policy=policy,
            enable_chunked_context="true",
            enable_kv_cache_reuse="true",
            max_queue_size="3",
            overlap_scheduler=overlap,
        )
        yield Story(server, engine)


names = st.integers(0, NUM_NAMES - 1)
acts = st.one_of(
    st.tuples(st.just("send"), names, st.integers(1, 20), st.integers(1, LONGEST)),
    st.tuples(st.just("stop"), names),
    st.tuples(st.just("cancel"), names),
    st.tuples(st.just("expire"), names),
    st.tuples(st.just("abandon")),
    st.tuples(st.just("step"), st.sampled_from(["ok", "ok", "ok", *KINDS])),
    st.tuples(st.just("step"), st.just("ok")),
)


@pytest.mark.case(56, 57, 58, 59, 60, 61, 62, 66, 67, 86, 87, 89, 99, 117, 118)
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("overlap", ["off", "on"])
@settings(max_examples=60, deadline=None)
@given(story_acts=st.lists(acts, min_size=4, max_size=40), is_unloaded=st.booleans())
def test_one_final_whatever_happens(
    overlap: str, policy: str, story_acts: list[Any], is_unloaded: bool
) -> None:
    with story(policy, overlap) as told:
        for act, *arguments in story_acts:
            getattr(told, act)(*arguments)
        told.finish(is_unloaded)


@pytest.mark.case(62)
@pytest.mark.parametrize("delay", [0.0, 0.0005, 0.001, 0.002])
def test_a_stop_beside_the_last_token_gives_one_final(
    make_server: MakeServer, delay: float
) -> None:
    server = make_server(CountingEngine())
    for number in range(20):
        sender = StrictSender()
        server.send(
            "x", sender=sender, input_ids=[1], request_output_len=1 + number % 5, streaming=True
        )
        time.sleep(delay)
        server.ask("x", stop=True)
        assert sender.is_final.wait(WAIT)
        assert (sender.num_finals, sender.violations) == (1, [])


@pytest.mark.case(63)
def test_stops_for_ids_never_seen_are_not_remembered(make_server: MakeServer) -> None:
    server = make_server(CountingEngine())
    for number in range(2000):
        server.send(f"never {number}", stop=True)
    assert server.model._arrivals._stops == set()
    assert server.model._frontend._ids._name_to_number == {}


@pytest.mark.case(63)
def test_stops_that_nobody_fetches_are_bounded_by_what_is_in_flight() -> None:
    """The loop is stuck; the same requests are stopped again and again."""
    arrivals = ArrivalQueue(10)
    for number in range(100_000):
        arrivals.stop(number % 256)
    assert len(arrivals.poll_stop_signals()) == 256


@pytest.mark.case(64)
def test_ids_are_compared_and_not_hashed_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two strings of equal hash, which a map of hashes would take for one."""

    class Same(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return 7

    ids = RequestIds()
    first, second = ids.reserve(Same("a")), ids.reserve(Same("b"))
    assert first != second
    assert (ids.find(Same("a")), ids.find(Same("b"))) == (first, second)


@pytest.mark.case(65)
def test_a_huge_id_is_refused_and_a_line_break_does_no_harm(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(CountingEngine())
    refused = server.ask("x" * 1_000_000, input_ids=[1], request_output_len=1)
    assert str(refused.responses[0].error) == (
        "the request id has 1000000 characters, more than 1024"
    )
    name = "a\nERROR faked line\x1b[2J"
    assert ids_of(server.ask(name, input_ids=[1], request_output_len=2)) == [1, 2, 3]
    server.ask(name, stop=True)
    assert "faked" not in caplog.text


@pytest.mark.case(75)
def test_all_clients_vanish_at_once(make_server: MakeServer) -> None:
    engine = SteppedEngine(num_blocks=400)
    server = make_server(engine, max_batch_size="64")
    senders = [StrictSender() for _ in range(80)]
    for number, sender in enumerate(senders):
        server.send(
            f"{number}", sender=sender, input_ids=[1], request_output_len=99, streaming=True
        )
    for _ in range(3):
        engine.grant("ok")
    for sender in senders:
        sender.cancelled = True
    server.model._frontend.check_cancelled()
    engine.grant("ok")
    for sender in senders:
        assert sender.is_final.wait(WAIT)
        assert (sender.num_finals, sender.violations) == (1, [])
    assert len(engine.batches) <= 4, "one iteration later everything is free"
    assert server.model._manager._batcher.is_idle_and_intact()
    engine.let_go()
