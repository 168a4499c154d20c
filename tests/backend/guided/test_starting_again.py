"""An answer that meets a limit may start again with a matcher of its own, while everybody waits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.guided_answers import MANY_WAYS

from inflight_backend.guided import compiler as compiler_module
from inflight_backend.guided import masks as masks_module
from inflight_backend.guided.compiler import GuideCompiler
from inflight_backend.guided.guide import Guide, GuideType
from inflight_backend.guided.masks import AnswerGuides
from inflight_scheduler import LlmRequest
from inflight_server.serve.settings import DEMO_MODEL

VOCAB_SIZE, END, NUM_ANSWERS = 270, 0, 8
SHARED = Guide(GuideType.REGEX, "x(.{0,90}y){2}")  # states that all its answers have in common


class Answers:
    """Several of one guide. Each goes on with what ``choose`` takes of the tokens it may have."""

    def __init__(
        self,
        guide: Guide,
        choose: Callable[[Sequence[int]], int],
        num_answers: int = NUM_ANSWERS,
    ) -> None:
        self._choose = choose
        self._guides = AnswerGuides(VOCAB_SIZE)
        self._guides.tokenizer_end_id = END
        self._requests = [LlmRequest(number, [5], 999, end_id=END) for number in range(num_answers)]
        compiler = GuideCompiler((DEMO_MODEL / "tokenizer.json").read_text, VOCAB_SIZE, END)
        for request in self._requests:
            pending = compiler.start(guide)
            while not pending.is_settled:
                time.sleep(0.001)
            self._guides.add(request.request_id, pending.take(), pending.recompile)
        compiler.close()

    def errors(self) -> list[str]:
        """Of those that cannot go on."""
        found = [self._guides.error_of(request.request_id) for request in self._requests]
        return [error for error in found if error]

    def step(self) -> None:
        """A token for each that can."""
        rows = self._guides.masks(list(enumerate(self._requests)), {})
        for request, row in zip(self._requests, rows, strict=True):
            bits = np.unpackbits(row[2:].view(np.uint8), bitorder="little")
            allowed = [int(token) for token in bits.nonzero()[0] if token != END]
            if allowed:
                request.add_new_token(self._choose(allowed))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that were compiled; each takes 0.03 s at least."""
    grammars: list[str] = []
    match = compiler_module._match

    def note(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        grammars.append(grammar)
        time.sleep(0.03)
        return match(tokenizer, grammar)

    monkeypatch.setattr(compiler_module, "_match", note)
    monkeypatch.setattr(compiler_module, "_MAX_RECOMPILE_SECONDS", 9.0)
    return grammars


def limit(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    monkeypatch.setattr(compiler_module, "_LIMITS", {**compiler_module._LIMITS, **limits})


def test_nobody_starts_again_to_meet_a_limit_that_is_not_shared(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read the whole answer again took 2 s where its text can be understood in many ways."""
    limit(monkeypatch, step_max_items=400)
    answers = Answers(Guide(GuideType.JSON_SCHEMA, MANY_WAYS), random.Random(1).choice)
    while not answers.errors():
        answers.step()
    assert all("Too many items" in each or "Current row" in each for each in answers.errors())
    assert len(compiled) == 1


def test_a_step_waits_only_so_long_for_those_that_start_again(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All answers of a guide meet a limit that they share at once."""
    monkeypatch.setattr(masks_module, "_MAX_SECONDS_AGAIN", 0.05)
    limit(monkeypatch, max_lexer_states=600)
    answers = Answers(SHARED, random.Random(1).choice)
    counts = [len(compiled)]
    while not answers.errors():
        answers.step()
        counts.append(len(compiled))
    assert max(after - before for before, after in pairwise(counts)) in (1, 2)


def test_an_answer_that_cannot_be_read_again_in_time_ends(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks_module, "_MAX_SECONDS_AGAIN", 0.02)
    limit(monkeypatch, max_lexer_states=600)
    answers = Answers(SHARED, random.Random(1).choice, num_answers=1)
    while len(compiled) == 1:
        answers.step()
    assert len(answers.errors()) == 1


def test_where_no_thread_can_be_started_only_who_needs_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop is in the midst of a step of all."""
    limit(monkeypatch, max_lexer_states=600)
    answers = Answers(SHARED, random.Random(1).choice)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    while not answers.errors():
        answers.step()
    assert "too many states" in answers.errors()[0]


def test_all_of_them_start_again_if_that_is_quick(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks_module, "_MAX_SECONDS_AGAIN", 60.0)
    limit(monkeypatch, max_lexer_states=600)
    answers = Answers(SHARED, random.Random(1).choice)
    while len(compiled) == 1:
        answers.step()
    answers.step()
    assert answers.errors() == []
    while not answers.errors():
        answers.step()
        assert len(compiled) <= 1 + NUM_ANSWERS, "once: its own limits it would meet again"
