"""Exactly one final for every request, under any order of everything that can end one, and nothing
held any more when it leaves.

The engine takes a step only when told to, so that what happens between two steps is chosen here:
hypothesis writes the story, the rules must hold whatever it is.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
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
from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.serve.settings import DEMO_MODEL
from inflight_backend.triton import frontend
from inflight_backend.triton.arrivals import ArrivalQueue, RequestIds
from inflight_scheduler import ScheduledBatch

NUM_NAMES = 6
KINDS = ("ok", "raise", "not a number", "one not a number", "exit", "wrong count")
LONGEST = 40
NOTHING_MOVES = "nothing moves"
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequences": {"num_return_sequences": 3},
    "drafts": {"draft_input_ids": [1, 2, 0]},  # for a prompt of zeros
    "beams": {"beam_width": 3},
    "guided": {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]{30,60}"},
}


class Steps:
    """Grants steps of an engine, and says how each goes."""

    def __init__(self) -> None:
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

    def take(
        self, execute: Callable[[ScheduledBatch], list[int]], batch: ScheduledBatch
    ) -> list[int]:
        if not self.is_free:
            assert self._granted.acquire(timeout=WAIT)
        kind = self._kinds.pop(0) if self._kinds else "ok"
        tokens = execute(batch)
        if kind == "raise":
            raise RuntimeError("a step")
        if kind == "exit":
            raise SystemExit("a thread")
        if kind == "not a number":
            return [-1] * len(tokens)
        if kind == "one not a number":
            return [-1, *tokens[1:]]
        return tokens[:-1] if kind == "wrong count" else tokens


class SteppedEngine(CountingEngine):
    """Takes a step when one is granted, the way it is asked to."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps = Steps()

    def submit(self, batch: ScheduledBatch) -> CountedStep:
        """What goes wrong is heard of late, when the step is read."""
        try:
            return super().submit(batch)
        except Exception as error:
            return LostStep(error)

    def execute(self, batch: ScheduledBatch) -> list[int]:
        return self.steps.take(super().execute, batch)


def stepped_demo() -> tuple[Any, Steps]:
    """The demo model on the real engine, which has beams and takes masks."""
    config = EngineConfig(
        device="cpu",
        max_batch_size=4,
        max_beam_width=3,
        max_num_tokens=64,
        max_tokens_in_paged_kv_cache=384,
    )
    engine: Any = Engine.load(DEMO_MODEL, config)
    steps, real = Steps(), engine.execute
    engine.execute = lambda batch: steps.take(real, batch)
    return engine, steps


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
        self.what_it_holds: Callable[[], list[str]] = list

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        self.num_finals += bool(flags)
        error = response.error if response is not None else None
        if flags and str(error) != NOTHING_MOVES:  # a stall does not wait
            self.violations += self.what_it_holds()
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

    def __init__(self, server: Server, steps: Steps, *, counts: bool = True) -> None:
        """``counts``: a token is the one before it plus 1."""
        self.server = server
        self.steps = steps
        self.sent: list[tuple[int, StrictSender]] = []
        self._counts = counts
        self._num_sent = 0

    def send(self, name: int, prompt_len: int, num_tokens: int, form: str = "plain") -> None:
        """A stream that counts from a number of its own; refused if its id is in flight."""
        self._num_sent += 1
        start = 0 if form == "drafts" or not self._counts else 20 * self._num_sent
        sender = StrictSender()
        # Only this thread sends, so the numbers that the next request gets are known.
        first = next(copy.copy(self.server.model._frontend._ids._numbers))
        numbers = range(first, first + FORMS[form].get("num_return_sequences", 1))
        sender.what_it_holds = lambda: self._held_by(numbers)
        self.sent.append((start, sender))
        self.server.send(
            f"r{name}",
            sender=sender,
            outputs=("output_ids", "sequence_index"),
            input_ids=[start] * prompt_len,
            request_output_len=num_tokens,
            streaming=True,
            **FORMS[form],
        )

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
        self.server.model._frontend.fail_all(NOTHING_MOVES)

    def step(self, kind: str) -> None:
        self.steps.grant(kind)

    def _held_by(self, numbers: range) -> list[str]:
        """What the requests with these numbers hold of the batch manager."""
        manager = self.server.model._manager
        batcher = manager._batcher
        active = [n for n in numbers if n in manager._intake._preparing or manager._active.get(n)]
        blocks = [n for n in numbers if batcher.block_manager.num_distinct_blocks_of(n)]
        held = {"a place": active, "blocks": blocks}
        return [f"{what} of {which} at the final" for what, which in held.items() if which]

    def finish(self, is_unloaded: bool) -> None:
        """Let everything run out, or unload right away; then check every rule."""
        self.steps.let_go()
        if is_unloaded:
            self.server.model.finalize()
        for start, sender in self.sent:
            assert sender.is_final.wait(WAIT), "a request without an end"
            assert (sender.num_finals, sender.violations) == (1, [])
            for ids in sequences_of(sender).values() if self._counts else ():
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
def loaded(engine: Any, **parameters: str) -> Iterator[Server]:
    """A model with four places around ``engine``; what is stopped at its end has time to end."""
    with (
        mock.patch.object(triton_model, "exit_with_parent"),
        mock.patch.object(gpt_manager, "load_engine", return_value=engine),
        mock.patch.object(frontend, "_LAST_SECONDS", WAIT),
        mock.patch.dict(sys.modules, {"triton_python_backend_utils": FakePbUtils}),
        tempfile.TemporaryDirectory() as folder,
    ):
        yield Server(
            Path(folder),
            engine,
            enable_chunked_context="true",
            enable_kv_cache_reuse="true",
            max_queue_size="3",
            **parameters,
        )


@contextmanager
def story(policy: str, overlap: str) -> Iterator[Story]:
    """Chunks of 8 tokens, and a pool that two long requests fill."""
    engine = SteppedEngine(num_blocks=16, max_num_tokens=8, max_seq_len=64)
    options = {"overlap_scheduler": overlap, "max_draft_len": "3"}
    with loaded(engine, batch_scheduler_policy=policy, **options) as server:
        yield Story(server, engine.steps)


@contextmanager
def demo_story(policy: str) -> Iterator[Story]:
    """The same with the real engine."""
    engine, steps = stepped_demo()
    options = {"max_beam_width": "3", "tokenizer_dir": str(DEMO_MODEL)}
    with loaded(engine, batch_scheduler_policy=policy, **options) as server:
        yield Story(server, steps, counts=False)


def sequences_of(sender: FakeSender) -> dict[int, list[int]]:
    """Tokens by ``sequence_index``, 0 for the only one."""
    found: dict[int, list[int]] = {}
    for response in sender.responses:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors}
        if tensors:
            index = int(tensors["sequence_index"].item()) if "sequence_index" in tensors else 0
            found.setdefault(index, []).extend(tensors["output_ids"].reshape(-1).tolist())
    return found


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
        for kind in ("ok", "ok", "one not a number", "ok", "ok"):
            told.step(kind)
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
        told.server.drain_file.write_text("stop")
        wait_until(lambda: bool(told.server.model._arrivals._stops))
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
        told.finish(is_unloaded=False)
        assert str(sender.responses[-1].error) == "the response could not be sent"


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
