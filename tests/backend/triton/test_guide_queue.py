"""Grammars of requests that were not taken, or have ended, are not compiled."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import WAIT, Server, error_of, wait_until, wait_until_queued
from support.triton_stub import CountingEngine, FakePbUtils, FakeSender

from inflight_backend.engine.interface import MaskSource
from inflight_backend.guided import compiler
from inflight_backend.guided.guide import Guide
from inflight_scheduler import ScheduledBatch
from inflight_server.serve.settings import DEMO_MODEL


class MaskingEngine(CountingEngine):
    """Says that it masks, so that guides are taken; what is drawn does not matter here."""

    def mask_next(self, source: MaskSource) -> None:
        """Not needed."""


class HeldCompiler:
    """``texts`` of the grammars whose turn came; while ``go_on`` is not set that is all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self._to_grammar = compiler.to_grammar
        monkeypatch.setattr(compiler, "to_grammar", self._note)

    def _note(self, guide: Guide) -> str:
        self.texts.append(guide.text)
        assert self.go_on.wait(WAIT)
        return self._to_grammar(guide)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCompiler]:
    made = HeldCompiler(monkeypatch)
    yield made
    made.go_on.set()


@pytest.fixture
def make_guiding(
    make_server: MakeServer, tmp_path: Path, gate: threading.Event, held: HeldCompiler
) -> Iterator[Callable[..., Server]]:
    """A factory of servers that guide, with one place and a queue of four."""
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)

    def wait_at_gate(batch: ScheduledBatch) -> None:
        assert gate.wait(WAIT)

    def make(**parameters: str) -> Server:
        engine = MaskingEngine(vocab_size=300, before_step=wait_at_gate)
        return make_server(engine, max_batch_size="1", max_queue_size="4", **parameters)

    yield make
    gate.set()
    held.go_on.set()


@pytest.fixture
def guiding(make_guiding: Callable[..., Server]) -> Server:
    """A server of that kind."""
    return make_guiding()


def send(server: Server, text: str, **values: Any) -> FakeSender:
    """A request with the regex ``text``, which is also its id."""
    values = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": text, **values}
    return server.send(text, input_ids=[1], end_id=0, request_output_len=5, **values)


def wait_for(sender: FakeSender) -> FakeSender:
    assert sender.is_final.wait(WAIT)
    return sender


def test_what_a_full_queue_refuses_is_not_compiled(
    guiding: Server, gate: threading.Event, held: HeldCompiler
) -> None:
    gate.clear()
    taken = [guiding.send(input_ids=[1], request_output_len=2)]
    wait_until(lambda: guiding.model._manager.get_num_active_requests() == 1)
    taken += [guiding.send(input_ids=[1], request_output_len=2) for _ in range(4)]
    wait_until_queued(guiding, 4)
    for number in range(50):
        text, code = error_of(send(guiding, f"a{{{number}}}"))
        assert "Maximum queue size of 4 has been reached" in text
        assert code == FakePbUtils.TritonError.UNAVAILABLE
    gate.set()
    assert all(sender.is_final.wait(WAIT) for sender in taken)
    assert send(guiding, "last").is_final.wait(WAIT)
    assert held.texts == ["last"]


def test_what_was_stopped_cancelled_or_overdue_is_not_compiled(
    guiding: Server, held: HeldCompiler
) -> None:
    held.go_on.clear()
    first = [send(guiding, text) for text in "ab"]
    wait_until(lambda: sorted(held.texts) == ["a", "b"])
    stopped, overdue = send(guiding, "c"), send(guiding, "d", max_queue_time_ms=1)
    guiding.send("c", stop=True)
    assert stopped.is_final.wait(WAIT)
    assert overdue.is_final.wait(WAIT)
    assert error_of(overdue)[0].endswith("in the queue, and its grammar is being compiled")
    [answer] = guiding.ask("a", why=True).responses
    assert b'"its grammar is being compiled"' in answer.output_tensors[0].as_numpy()[0, 0]
    cancelled = send(guiding, "e")
    cancelled.cancelled = True
    assert cancelled.is_final.wait(WAIT)
    last = send(guiding, "f")
    held.go_on.set()
    assert all(sender.is_final.wait(WAIT) for sender in (*first, last))
    assert sorted(held.texts) == ["a", "b", "f"]


def test_a_grammar_that_takes_its_time_is_no_stall(
    make_guiding: Callable[..., Server], held: HeldCompiler
) -> None:
    server = make_guiding(stall_seconds="0.2")
    held.go_on.clear()
    sender = send(server, "a")
    wait_until(lambda: held.texts == ["a"])
    deadline = time.monotonic() + 0.8
    while time.monotonic() < deadline:
        assert server.model.is_ready()
        time.sleep(0.01)
    held.go_on.set()
    assert sender.is_final.wait(WAIT)
    assert sender.responses[-1].error is None


def test_a_grammar_that_fails_for_us_is_not_the_clients_fault(
    guiding: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(guide: Guide) -> str:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "to_grammar", fail)
        text, code = error_of(wait_for(send(guiding, "a")))
    assert text == "'guided_decoding_guide' could not be compiled: the server failed"
    assert code == FakePbUtils.TritonError.INTERNAL
    assert error_of(wait_for(send(guiding, "(")))[1] == FakePbUtils.TritonError.INVALID_ARG
    assert wait_for(send(guiding, "a")).responses[-1].error is None


def test_a_grammar_whose_turn_does_not_come_may_be_sent_again(
    guiding: Server, held: HeldCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.go_on.clear()
    first = [send(guiding, text) for text in "ab"]
    wait_until(lambda: sorted(held.texts) == ["a", "b"])
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "COMPILE_SECONDS", 0.0)
        text, code = error_of(wait_for(send(guiding, "c")))
    assert "other grammars were compiled; try again later" in text
    assert code == FakePbUtils.TritonError.UNAVAILABLE
    again = send(guiding, "c")
    held.go_on.set()
    assert all(wait_for(sender).responses[-1].error is None for sender in (*first, again))


def test_too_many_grammars_are_a_named_refusal(
    guiding: Server, held: HeldCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_WAITING", 1)
    held.go_on.clear()
    taken = [send(guiding, "a")]
    wait_until(lambda: held.texts == ["a"])  # else "b" finds it waiting, and is refused
    taken.append(send(guiding, "b"))
    wait_until(lambda: held.texts == ["a", "b"])
    taken.append(send(guiding, "c"))
    text, code = error_of(send(guiding, "d"))
    assert "'guided_decoding_guide' cannot be compiled now: 1 grammars wait" in text
    assert code == FakePbUtils.TritonError.UNAVAILABLE
    held.go_on.set()
    assert all(sender.is_final.wait(WAIT) for sender in taken)
