"""Very many grammars: few are kept, a bounded number waits, and only while somebody wants them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from backend.guided.test_compiler import TOKENIZER, VOCAB_SIZE, compile_guide
from support.manager_harness import WAIT, Recorder, request, running
from support.triton_harness import wait_until

from inflight_backend.errors import CapacityExceeded, ServingError
from inflight_backend.guided import compiler as module
from inflight_backend.guided.compiler import GuideCompiler
from inflight_backend.guided.guide import Guide, GuideType
from inflight_backend.manager.gpt_manager import GptManager
from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_backend.text.tokenizer import TextCodec
from inflight_server.serve.settings import DEMO_MODEL

CODEC = TextCodec(DEMO_MODEL)


def regex(number: int) -> Guide:
    return Guide(GuideType.REGEX, f"a{{{number}}}")


class SlowCompiler:
    """Its grammars are compiled when ``may_compile`` is set; ``compiled`` has their texts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_compile = threading.Event()
        self.compiled: list[str] = []
        self._to_grammar = module.to_grammar
        monkeypatch.setattr(module, "to_grammar", self._compile)
        self.own = GuideCompiler(TOKENIZER.read_text, VOCAB_SIZE, 0)

    def _compile(self, guide: Guide) -> str:
        self.compiled.append(guide.text)
        assert self.may_compile.wait(WAIT)
        return self._to_grammar(guide)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowCompiler]:
    """All its threads are at work."""
    made = SlowCompiler(monkeypatch)
    held = [made.own.start(Guide(GuideType.REGEX, text)) for text in "xy"]
    wait_until(lambda: sorted(made.compiled) == ["x", "y"])
    yield made
    made.may_compile.set()
    made.own.close()
    del held


@pytest.mark.case(55)
def test_a_bounded_number_waits(slow: SlowCompiler) -> None:
    waiting = [slow.own.start(regex(number)) for number in range(module.MAX_WAITING)]
    with pytest.raises(CapacityExceeded, match=f"'guided_decoding_guide' .* {module.MAX_WAITING} "):
        slow.own.start(regex(-1))
    assert not slow.own.start(regex(5)).is_settled, "one that waits already"
    assert not slow.own.start(Guide(GuideType.REGEX, "x")).is_settled, "one that is compiled now"
    del waiting[7]
    kept = slow.own.start(Guide(GuideType.REGEX, "z"))
    slow.may_compile.set()
    wait_until(lambda: kept.is_settled)
    assert kept.take().consume_token(slow.own.load_tokenizer().tokenize_str("z")[0])
    wait_until(lambda: len(slow.compiled) == 2 + module.MAX_WAITING)
    assert regex(7).text not in slow.compiled
    assert len(slow.own._compiled) == module.MAX_CACHED


def test_what_nobody_waits_for_any_longer_is_not_compiled(slow: SlowCompiler) -> None:
    """Its requests were refused, stopped or cancelled: ten times as many as may wait."""
    for number in range(10 * module.MAX_WAITING):
        slow.own.start(regex(number))
    again, last = slow.own.start(regex(0)), slow.own.start(Guide(GuideType.REGEX, "z"))
    slow.may_compile.set()
    wait_until(lambda: again.is_settled and last.is_settled)
    assert slow.compiled[2:] == [regex(0).text, "z"]
    assert len(slow.own._waiting) == 0


def test_a_library_that_breaks_is_an_error_and_may_work_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Panic(BaseException):
        """As those of Rust's that cross into Python."""

    real = module.to_grammar
    failures: list[BaseException] = [Panic(), RuntimeError("secret")]

    def fail_twice(guide: Guide) -> str:
        if failures:
            raise failures.pop()
        return real(guide)

    monkeypatch.setattr(module, "to_grammar", fail_twice)
    own = GuideCompiler(TOKENIZER.read_text, VOCAB_SIZE, 0)
    for _ in range(2):
        with pytest.raises(ServingError, match="'guided_decoding_guide' could not be"):
            compile_guide(own, regex(1))
    assert compile_guide(own, regex(1)).consume_token(own.load_tokenizer().tokenize_str("a")[0])
    own.close()
    assert own._num_workers == 0


@pytest.mark.case(89)
def test_a_loop_that_fails_tells_those_who_wait_for_their_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_compile, to_grammar = threading.Event(), module.to_grammar
    monkeypatch.setattr(
        module, "to_grammar", lambda guide: may_compile.wait(WAIT) and to_grammar(guide)
    )
    failures = [RuntimeError("ours"), SystemExit("of a callback")]

    def fail(manager: GptManager) -> None:
        if manager._intake and failures:
            raise failures.pop()

    guided: dict[str, Any] = {
        "guided_decoding_guide_type": "regex",
        "guided_decoding_guide": "[ab]{2}",
    }
    recorder = Recorder()
    params = TrtGptModelOptionalParams(max_batch_size=8, device="cpu", max_num_tokens=64)
    with running(recorder, DEMO_MODEL, params=params) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(GptManager, "finish_timed_out_requests", fail)
            for number in (1, 2):
                recorder.pending.append(request(number, [5], 3, **guided))
                manager.wake()
                recorder.wait_for_finals(number)
        may_compile.set()
        for number in (1, 2):
            error = "the batch manager failed while it held this request"
            assert recorder.responses[number] == [([], True, error)]
        recorder.pending.append(request(1, [5], 3, **guided))
        manager.wake()
        wait_until(lambda: len(recorder.responses[1]) > 1)
        recorder.wait_for_finals(1)
        assert recorder.responses[1][-1][2] == "", "its id is free, and it is guided"


@pytest.mark.case(55)
def test_a_hundred_grammars_at_once_beside_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream gets a token in every iteration, also while all of them wait; all are answered,
    and no more are kept than may be."""
    prompt, num_tokens = CODEC.encode("one two", 99), 200
    guided = {
        number: request(
            number,
            prompt,
            2,
            guided_decoding_guide_type="json_schema",
            guided_decoding_guide=json.dumps({"type": "object", "required": [f"name{number}"]}),
        )
        for number in range(1, 101)
    }
    may_compile = threading.Event()
    to_grammar = module.to_grammar
    monkeypatch.setattr(module, "COMPILE_SECONDS", WAIT)  # those that wait, on a busy machine
    monkeypatch.setattr(
        module, "to_grammar", lambda guide: may_compile.wait(WAIT) and to_grammar(guide)
    )
    recorder = Recorder([request(0, prompt, num_tokens)])
    times: list[float] = []
    num_iterations = 0

    def on_response(request_id: int, is_final: bool) -> None:
        nonlocal num_iterations
        if request_id == 0:
            times.append(time.monotonic())
            num_iterations = len(recorder.stats) + 1
            if len(times) == 20:
                recorder.pending.extend(guided.values())
            if len(times) == 70:
                assert recorder.finals() == set()
                may_compile.set()

    recorder.on_response = on_response
    params = TrtGptModelOptionalParams(
        max_batch_size=128,
        device="cpu",
        max_num_tokens=256,
        kv_cache_config=KvCacheConfig(max_tokens=4096, tokens_per_block=8),
    )
    with running(recorder, DEMO_MODEL, params=params) as manager:
        recorder.wait_for_finals(0, *guided)
        compiler = manager._guide_service._compiler
        assert compiler is not None
        assert len(compiler._compiled) == module.MAX_CACHED
    assert all(recorder.responses[number][-1][2] == "" for number in range(101))
    assert max(b - a for a, b in pairwise(times)) < 5.0  # 0.3 s on two idle cores
    assert len(times) == num_iterations == num_tokens, "a token in every iteration"
    alone = Recorder([request(0, prompt, num_tokens)])
    with running(alone, DEMO_MODEL, params=params):
        alone.wait_for_finals(0)
    assert recorder.tokens(0) == alone.tokens(0)
