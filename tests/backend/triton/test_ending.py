"""Exactly one final for every request, under any order of everything that can end one, and nothing
held any more when it leaves.

The engine takes a step only when told to, so that what happens between two steps is chosen here:
hypothesis writes the story, the rules must hold whatever it is.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from backend.triton.conftest import MakeServer
from hypothesis import given, settings
from hypothesis import strategies as st
from support.triton_harness import WAIT, Gate, Server, ids_of, wait_until
from support.triton_stories import (
    KINDS,
    LONGEST,
    NUM_NAMES,
    SteppedEngine,
    StrictSender,
    demo_story,
    sequences_of,
    story,
)
from support.triton_stub import CountingEngine

from inflight_backend.triton import frontend
from inflight_backend.triton.queue import RequestIds, RequestQueue

pytestmark = pytest.mark.slow

names = st.integers(0, NUM_NAMES - 1)


def acts_with(forms: list[str], kinds: list[str]) -> st.SearchStrategy[Any]:
    """What may happen: requests of these forms, steps that go like this, and all that ends one."""
    return st.one_of(
        st.tuples(
            st.just("send"), names, st.integers(1, 20), st.integers(1, LONGEST),
            st.sampled_from(forms),
        ),
        st.tuples(st.just("stop"), names),
        st.tuples(st.just("cancel"), names),
        st.tuples(st.just("expire"), names),
        st.tuples(st.just("abandon")),
        st.tuples(st.just("step"), st.sampled_from(["ok", "ok", "ok", *kinds])),
        st.tuples(st.just("step"), st.just("ok")),
    )  # fmt: skip


acts = acts_with(["plain", "plain", "sequences", "drafts"], list(KINDS))
demo_acts = acts_with(["plain", "sequences", "beams", "guided"], ["raise", "exit"])


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


@pytest.mark.case(56, 57, 60, 62, 67, 86, 89, 117, 118)
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@settings(max_examples=12, deadline=None)
@given(story_acts=st.lists(demo_acts, min_size=4, max_size=30), is_unloaded=st.booleans())
def test_one_final_with_beams_and_guides(
    policy: str, story_acts: list[Any], is_unloaded: bool
) -> None:
    with demo_story(policy) as told:
        for act, *arguments in story_acts:
            getattr(told, act)(*arguments)
        told.finish(is_unloaded)


@pytest.mark.parametrize("form", ["plain", "sequences", "beams", "guided"])
def test_the_demo_story_tells_of_every_form(form: str) -> None:
    with demo_story("guaranteed_no_evict") as told:
        told.send(1, 4, 20, form)
        told.finish(is_unloaded=False)
        assert [response.error for response in told.sent[0][1].responses if response.error] == []


def test_the_story_tells_of_drafts() -> None:
    with story("guaranteed_no_evict", "off") as told:
        told.send(1, 4, 9, "drafts")
        told.finish(is_unloaded=False)
        assert sequences_of(told.sent[0][1]) == {0: list(range(1, 10))}
        assert len(told.server.engine.batches) == 7, "two of nine tokens were right guesses"


@pytest.mark.case(118)
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_one_broken_sequence_ends_its_request_when_the_others_have_ended(overlap: str) -> None:
    with story("guaranteed_no_evict", overlap) as told:
        told.send(1, 4, 20, "sequences")
        for kind in ("ok", "ok", "one not a number", "ok"):  # the last tells of the one before
            told.step(kind)
        sender, queue = told.sent[0][1], told.server.model._queue
        # Else the others run on in vain.
        wait_until(lambda: bool(queue._stops) or sender.is_final.is_set())
        for _ in range(4):
            told.step("ok")
        assert sender.is_final.wait(WAIT)
        told.finish(is_unloaded=False)
        assert "logits are not finite" in str(told.sent[0][1].responses[-1].error)


@pytest.mark.case(126)
@pytest.mark.parametrize("form", ["plain", "sequences"])
def test_the_end_of_the_drain_time_frees_before_it_tells(form: str) -> None:
    with story("guaranteed_no_evict", "off") as told:
        told.send(1, 4, 40, form)
        told.step("ok")
        assert told.sent[0][1].has_response.wait(WAIT)
        told.send(2, 4, 40)  # now there is room in the queue
        told.step("ok")
        told.server.end_all()
        wait_until(lambda: bool(told.server.model._queue._stops))
        for _ in range(60):
            told.step("ok")
        for _, sender in told.sent:
            assert sender.is_final.wait(WAIT)
            assert sender.responses[-1].error is not None
            assert "this answer is not complete" in str(sender.responses[-1].error)
        told.finish(is_unloaded=False)


@pytest.mark.case(92, 118)
def test_a_send_that_raises_is_told_when_its_request_is_free() -> None:
    with story("guaranteed_no_evict", "off") as told:
        told.send(1, 4, 40)
        sender = told.sent[0][1]
        real, failures = sender.send, [RuntimeError("no shared memory")]

        def fail_once(response: Any = None, flags: int = 0) -> None:
            if failures:
                raise failures.pop()
            real(response, flags)

        sender.send = fail_once  # type: ignore[method-assign]
        for _ in range(4):
            told.step("ok")
        model = told.server.model
        wait_until(lambda: not failures)
        wait_until(
            lambda: bool(model._queue._stops) or not model._manager.get_num_active_requests()
        )
        told.finish(is_unloaded=False)
        assert str(sender.responses[-1].error) == "the response could not be sent"
        assert len(told.server.engine.batches) < 20, "it is stopped, not served to its end"


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
    assert server.model._queue._stops == set()
    assert server.model._frontend._ids._name_to_number == {}


@pytest.mark.case(63)
def test_stops_that_nobody_fetches_are_bounded_by_what_is_in_flight() -> None:
    """The loop is stuck; the same requests are stopped again and again."""
    queue = RequestQueue(10)
    for number in range(100_000):
        queue.stop(number % 256)
    assert len(queue.poll_stop_signals()) == 256


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
        engine.steps.grant("ok")
    for sender in senders:
        sender.cancelled = True
    server.model._frontend.check_cancelled()
    engine.steps.grant("ok")
    for sender in senders:
        assert sender.is_final.wait(WAIT)
        assert (sender.num_finals, sender.violations) == (1, [])
    assert len(engine.batches) <= 4, "one iteration later everything is free"
    assert server.model._manager._batcher.is_idle_and_intact()
    engine.steps.let_go()


def test_what_is_not_free_in_time_is_ended_all_the_same(
    server: Server, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend, "_LAST_SECONDS", 0.05)
    gate.clear()
    sender = server.send(input_ids=[1], request_output_len=5, streaming=True)
    wait_until(lambda: server.model._manager.get_num_active_requests() == 1)
    server.model._frontend.end_all("leaving")
    assert sender.is_final.is_set(), "its step has not returned"
    assert str(sender.responses[-1].error) == "leaving"
