"""Grammars of requests that were not taken, or have ended, are not compiled."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backend.triton.conftest import MakeServer
from fakes import CountingEngine, FakePbUtils, FakeSender
from triton_harness import WAIT, Server, error_of, wait_until, wait_until_queued

from inflight_backend.guided import compiler
from inflight_backend.guided.guide import Guide
from inflight_backend.serve.settings import DEMO_MODEL
from inflight_backend.step_outputs import MaskSource
from inflight_scheduler import ScheduledBatch


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
def guiding(
    make_server: MakeServer, tmp_path: Path, gate: threading.Event, held: HeldCompiler
) -> Iterator[Server]:
    """A server that guides, with one place and a queue of four."""
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)

    def wait_at_gate(batch: ScheduledBatch) -> None:
        assert gate.wait(WAIT)

    engine = MaskingEngine(vocab_size=300, before_step=wait_at_gate)
    yield make_server(engine, max_batch_size="1", max_queue_size="4")
    gate.set()
    held.go_on.set()


def send(server: Server, text: str, **values: Any) -> FakeSender:
    """A request with the regex ``text``, which is also its id."""
    values = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": text, **values}
    return server.send(text, input_ids=[1], end_id=0, request_output_len=5, **values)


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


def test_too_many_grammars_are_a_named_refusal(
    guiding: Server, held: HeldCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_WAITING", 1)
    held.go_on.clear()
    taken = [send(guiding, text) for text in "ab"]
    wait_until(lambda: sorted(held.texts) == ["a", "b"])
    taken.append(send(guiding, "c"))
    text, code = error_of(send(guiding, "d"))
    assert "'guided_decoding_guide' cannot be compiled now: 1 grammars wait" in text
    assert code == FakePbUtils.TritonError.UNAVAILABLE
    held.go_on.set()
    assert all(sender.is_final.wait(WAIT) for sender in taken)
