"""Each guide is compiled once, in bounded time and number, and a fault of one is its own."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.guided_answers import (
    EBNF,
    JSON,
    REGEX,
    VOCAB_SIZE,
    Answer,
    HeldCompiler,
    compile_guide,
    make_service,
    tokens,
)
from support.manager_harness import LOOP_FAILED, WAIT, Recorder, request, running
from support.triton_harness import wait_until
from tokenizers import Tokenizer, models

from inflight_backend.errors import (
    CapacityExceeded,
    ConfigurationError,
    InvalidRequest,
    ServingError,
)
from inflight_backend.guided import compiler as module
from inflight_backend.guided import matchers
from inflight_backend.guided.compiler import GuidedDecodingConfig, GuideService, PendingGuide
from inflight_backend.guided.guide import Guide
from inflight_backend.manager.gpt_manager import GptManager
from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_server.serve.settings import DEMO_MODEL


def start(service: GuideService, text: str) -> PendingGuide:
    return service.start(Guide(REGEX, text), lambda: None)


@pytest.mark.case(55)
def test_equal_guides_are_compiled_once_and_few_are_kept(
    held: HeldCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.go_on.set()
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    own = make_service()
    for text in "aabbacab":
        assert Answer(Guide(REGEX, text), own).goes_on(tokens(text)[0])
        assert Answer(Guide(REGEX, text), own).goes_on(tokens(text)[0]), "a matcher each"
    assert held.begun == ["a", "b", "c", "b"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hangs", "crashes"])
def test_a_compilation_that_hangs_or_crashes_ends_its_request_only(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried in a child process, so neither its thread nor the server is lost."""
    server, match = os.getpid(), matchers._match

    def fail(*args: Any) -> Any:
        if os.getpid() != server:
            threading.Event().wait() if fault == "hangs" else os.abort()
        return match(*args)

    own = make_service()
    with monkeypatch.context() as patch:
        patch.setattr(matchers, "_match", fail)
        patch.setattr(module, "COMPILE_SECONDS", 0.5 if fault == "hangs" else WAIT)
        for text in "abc":  # more than there are threads
            with pytest.raises(
                InvalidRequest,
                match=r"not compiled within|takes more than 512 MiB to compile, or ends",
            ):
                compile_guide(Guide(REGEX, text), own).take()
    compile_guide(Guide(REGEX, "d"), own).take()


@pytest.fixture
def busy(held: HeldCompiler) -> Iterator[GuideService]:
    """A service all of whose threads are at work, on the guides "x" and "y"."""
    own = make_service()
    at_work = [start(own, text) for text in "xy"]
    wait_until(lambda: sorted(held.begun) == ["x", "y"])
    yield own
    held.go_on.set()
    own.close()
    del at_work


def test_a_request_that_waits_too_long_is_told_whether_its_own_guide_took_long(
    busy: GuideService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is being compiled may be too much; one that waits behind others may be good."""
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.0)
    with pytest.raises(InvalidRequest, match="not compiled within 0 s; simplify it"):
        start(busy, "x").take()
    waiting = start(busy, "c")
    wait_until(lambda: waiting.is_settled)
    with pytest.raises(CapacityExceeded, match="could not be begun within 0 s: other grammars"):
        waiting.take()


@pytest.mark.slow
@pytest.mark.case(55)
def test_a_bounded_number_waits(
    busy: GuideService, held: HeldCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 20)
    waiting = [start(busy, f"a{{{number}}}") for number in range(20)]
    with pytest.raises(CapacityExceeded, match=r"'guided_decoding_guide' .* 20 "):
        start(busy, "one more")
    assert not start(busy, "a{5}").is_settled, "one that waits already"
    assert not start(busy, "x").is_settled, "one that is compiled now"
    del waiting[7]
    kept = start(busy, "z")
    held.go_on.set()
    wait_until(lambda: kept.is_settled)
    kept.take()
    assert "a{7}" not in held.begun
    assert len(held.begun) == 2 + 20


def test_guides_without_a_request_are_not_compiled(busy: GuideService, held: HeldCompiler) -> None:
    """Theirs were refused, stopped or cancelled: ten times as many as may wait."""
    for number in range(10 * module.MAX_WAITING):
        start(busy, f"a{{{number}}}")
    again, last = start(busy, "a{0}"), start(busy, "z")
    held.go_on.set()
    wait_until(lambda: again.is_settled and last.is_settled)
    assert held.begun[2:] == ["a{0}", "z"]


@pytest.mark.parametrize("error", [ValueError("secret"), MemoryError(), BaseException("secret")])
def test_a_failure_of_ours_is_told_and_not_kept(
    error: BaseException, held: HeldCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    """A BaseException is what a panic of a library in Rust is; no log has the grammar."""
    guide = Guide(REGEX, "secret")
    own = make_service()
    held.go_on.set()
    held.error = error
    for _ in range(2):
        with pytest.raises(ServingError, match="could not be compiled") as refusal:
            compile_guide(guide, own).take()
        assert type(refusal.value) is ServingError, "neither the request's fault nor the load's"
        assert "secret" not in str(refusal.value)
    assert type(error).__name__ in caplog.text
    assert "in to_grammar" in caplog.text, "where it was raised"
    assert "secret" not in caplog.text
    held.error = None
    compile_guide(guide, own).take()  # the next request that sends it gets it


def test_a_bad_grammar_sent_again_keeps_no_request_alive() -> None:
    """Its error is kept; with it would be the frames of all who got it, and their requests."""

    class Request:
        """What the frame of who asks holds."""

    def ask() -> weakref.ref[Request]:
        request = Request()
        with pytest.raises(InvalidRequest, match="unclosed group"):
            compile_guide(Guide(REGEX, "kept(")).take()
        return weakref.ref(request)

    asked = [ask() for _ in range(3)]
    gc.collect()
    assert [each() for each in asked] == [None] * 3


def test_a_tokenizer_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    own = GuideService(GuidedDecodingConfig(), tmp_path, VOCAB_SIZE)
    with pytest.raises(InvalidRequest, match="cannot be used with the tokenizer of this model"):
        compile_guide(JSON, own).take()
    with pytest.raises(ConfigurationError, match="llguidance: the tokenizer cannot be used"):
        GuideService(GuidedDecodingConfig("llguidance"), tmp_path, VOCAB_SIZE)


@pytest.mark.parametrize("missing", ["llguidance", "xgrammar"])
def test_without_a_library_its_guides_are_refused_and_everything_else_runs(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == missing else name)
    own = make_service()
    if missing == "xgrammar":
        with pytest.raises(InvalidRequest, match=r"pip install '\.\[guided\]'"):
            own.start(Guide(EBNF, 'root ::= "a"'), lambda: None)
        compile_guide(JSON, own).take()
        return
    with pytest.raises(InvalidRequest, match="llguidance is not installed"):
        own.start(JSON, lambda: None)
    with pytest.raises(ConfigurationError, match="guided_decoding_backend is llguidance"):
        GuideService(GuidedDecodingConfig("llguidance"), DEMO_MODEL, VOCAB_SIZE)
    with pytest.raises(ConfigurationError, match="choose one of auto, llguidance, none"):
        GuidedDecodingConfig("xgrammar")
    with pytest.raises(ConfigurationError, match=r"compile_seconds is 0: .* between 0\.01 and 10"):
        GuidedDecodingConfig(compile_seconds=0)


@pytest.mark.case(89)
def test_a_loop_that_fails_tells_the_requests_that_wait_for_their_grammar(
    held: HeldCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [RuntimeError("ours"), SystemExit("of a callback")]

    def fail(manager: GptManager) -> None:
        if manager._intake and failures:
            raise failures.pop()

    guided: dict[str, Any] = {
        "guided_decoding_guide_type": "regex",
        "guided_decoding_guide": "[ab]{2}",
    }
    recorder = Recorder()
    requests = {number: request(number, [5], 3, **guided) for number in (1, 2)}
    params = TrtGptModelOptionalParams(max_batch_size=8, device="cpu", max_num_tokens=64)
    with running(recorder, DEMO_MODEL, params=params) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(GptManager, "finish_timed_out_requests", fail)
            for number, each in requests.items():
                recorder.pending.append(each)
                manager.wake()
                recorder.wait_for_finals(number)
        held.go_on.set()
        for number in (1, 2):
            assert recorder.responses[number] == [([], True, LOOP_FAILED)]
        recorder.pending.append(requests[1])
        manager.wake()
        wait_until(lambda: len(recorder.responses[1]) > 1)
        recorder.wait_for_finals(1)
        assert recorder.responses[1][-1][2] == "", "its id is free, and it is guided"
