"""A user's callable at the logits of a request: what it gets, what it changes, how it fails."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.checkpoints import VOCAB_SIZE, oracle_logits, oracle_tokens
from support.manager_harness import (
    BOTH_LOOPS,
    GUARANTEED,
    MAX_UTILIZATION,
    Recorder,
    request,
    running,
    serve,
    small_engine,
)
from transformers import AutoTokenizer

from inflight_backend.engine import Engine
from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.logits_processors import (
    check_logits_processors,
    find_logits_processors,
)
from inflight_backend.manager.parameters import (
    KvCacheConfig,
    OverlapScheduler,
    TrtGptModelOptionalParams,
)
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.validation import PROCESSOR_FIELD

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


NUM_NEW = 8


Tokens = Sequence[Sequence[int]]


class OnlyHigher:
    """Each token must be larger than the one before it, modulo 150; remembers what it was given."""

    def __init__(self) -> None:
        self.shown: dict[int, list[list[int]]] = {}

    def __call__(self, request_id: int, logits: torch.Tensor, tokens: Tokens, stream: None) -> None:
        assert (logits.shape, logits.dtype) == ((1, 1, VOCAB_SIZE), torch.float32)
        assert stream is None  # on a CPU
        self.shown.setdefault(request_id, []).append(list(tokens[0]))
        logits[..., : tokens[0][-1] % 150 + 1] = -torch.inf


def only_higher_oracle(folder: Path, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_NEW):
        logits = oracle_logits(folder, tokens).clone()
        logits[: tokens[-1] % 150 + 1] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def raises(*_: Any) -> None:
    raise ValueError("the user's secret")


def leaves(*_: Any) -> None:
    raise SystemExit("the user's secret")


def nan(_: int, logits: torch.Tensor, *__: Any) -> None:
    logits[..., 5] = torch.nan


def unchanged(*_: Any) -> None:
    """Changes nothing."""


def late(_: int, logits: torch.Tensor, tokens: Tokens, __: int) -> None:
    if len(tokens[0]) >= len(PROMPT) + 3:
        raise RuntimeError


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return small_engine(folder, 512, max_batch_size=4)


def asking(
    request_id: int, prompt: Sequence[int], num_new: int, name: str, **values: Any
) -> InferenceRequest:
    return request(request_id, prompt, num_new, **{PROCESSOR_FIELD: name, **values})


def params_of(
    overlap: OverlapScheduler,
    processors: Mapping[str, Callable[..., Any]],
    has_chunks: bool = False,
) -> TrtGptModelOptionalParams:
    return TrtGptModelOptionalParams(
        max_batch_size=4,
        overlap_scheduler=overlap,
        enable_chunked_context=has_chunks,
        kv_cache_config=KvCacheConfig(enable_block_reuse=has_chunks),
        logits_processors=processors,
    )


@BOTH_LOOPS
@pytest.mark.parametrize("is_scarce", [False, True])
def test_processor_gets_the_text_so_far_and_changes_what_is_sampled(
    folder: Path, engine: Engine, overlap: OverlapScheduler, is_scarce: bool
) -> None:
    """Also in chunks and with pauses; another request of the batch gets what it would get alone."""
    prompts = {i: PROMPT[i:] for i in (1, 2, 3)}
    processor = OnlyHigher()
    params = params_of(overlap, {"only-higher": processor}, has_chunks=is_scarce)
    engine, policy = (
        (small_engine(folder, 40, max_batch_size=4), MAX_UTILIZATION)
        if is_scarce
        else (engine, GUARANTEED)
    )
    recorder = serve(
        [
            asking(i, prompt, NUM_NEW, "only-higher" if i < 3 else "")
            for i, prompt in prompts.items()
        ],
        engine,
        policy,
        params=params,
    )
    assert (max(stats["Paused Requests"] for stats in recorder.stats) > 0) == is_scarce
    assert recorder.tokens(3) == oracle_tokens(folder, prompts[3], NUM_NEW)
    for i in (1, 2):
        answer = recorder.tokens(i)
        assert answer == only_higher_oracle(folder, prompts[i])
        wanted = [prompts[i] + answer[:n] for n in range(NUM_NEW)]
        assert [text for n, text in enumerate(processor.shown[i]) if n < NUM_NEW] == wanted
    assert 3 not in processor.shown


class Phrase:
    """As TensorRT-LLM's processors are published: five arguments, and an instance per request."""

    made: ClassVar[list[Phrase]] = []

    def __init__(self) -> None:
        self.left = [11, 12, 13]
        self.made.append(self)

    def __call__(
        self,
        req_id: int,
        logits: torch.Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        assert (stream_ptr, client_id) == (None, None), (
            "torch.cuda.ExternalStream(0) fails on a CPU"
        )
        mask = torch.full_like(logits, -torch.inf, device="cpu")
        mask[:, :, self.left.pop(0) if self.left else 14] = 0
        with torch.cuda.stream(None):
            logits += mask.to(logits.device, non_blocking=True)


def test_published_processors_run_as_the_documentation_shows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """logits-processor-zoo, which is not installed here, extends a class of tensorrt_llm."""
    monkeypatch.setitem(sys.modules, "tensorrt_llm.sampling_params", None)
    zoo = types.ModuleType("logits_processor_zoo.trtllm")

    def published(name: str) -> Any:
        base = sys.modules["tensorrt_llm.sampling_params"].LogitsProcessor

        def begin(self: Phrase, phrase: str, tokenizer: str) -> None:
            assert (phrase, tokenizer) == ("\n\nReferences:", "the tokenizer")
            Phrase.__init__(self)

        return type(name, (base, Phrase), {"__init__": begin})

    vars(zoo)["__getattr__"] = published
    monkeypatch.setitem(sys.modules, zoo.__name__, zoo)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", {"my_checkpoint": "the tokenizer"}.get)
    page = (Path(__file__).parents[3] / "docs/sampling.md").read_text(encoding="utf-8")
    code = re.findall("```python\n(.*?)```", page, re.DOTALL)[1]
    module = types.ModuleType("my_module")
    exec(compile(code, "docs/sampling.md", "exec"), module.__dict__)
    processors = {"phrase": module.LastPhrase, "no-repeat": module.NoRepeat}
    names = {1: "phrase", 2: "no-repeat", 3: ""}
    liked = [100.0 * (token == 33) for token in range(VOCAB_SIZE)]
    recorder = serve(
        [asking(i, PROMPT, 6, name, embedding_bias=liked) for i, name in names.items()],
        engine,
        params=params_of(OverlapScheduler.OFF, processors),
    )
    assert recorder.tokens(1) == [11, 12, 13, 14, 14, 14]
    assert [token == 33 for token in recorder.tokens(2)] == [True, True, True, False, True, True]
    assert recorder.tokens(3) == [33] * 6


def three_arguments(req_id: int, logits: torch.Tensor, ids: Tokens) -> torch.Tensor:
    return torch.where(torch.arange(VOCAB_SIZE) == 17, logits.double(), -torch.inf)


def with_an_option(
    req_id: int, logits: torch.Tensor, ids: Tokens, stream: None, token: int = 18
) -> None:
    logits[..., token] = torch.inf


@BOTH_LOOPS
def test_class_has_an_instance_per_request_and_arguments_may_be_fewer(
    engine: Engine, overlap: OverlapScheduler
) -> None:
    """Also with a result of another type of numbers."""
    Phrase.made.clear()
    processors: dict[str, Callable[..., Any]] = {
        "phrase": Phrase,
        "three": three_arguments,
        "option": with_an_option,
    }
    recorder = Recorder(
        [
            asking(1, PROMPT, 5, "phrase"),
            asking(2, PROMPT, 4, "phrase"),
            asking(3, PROMPT, 3, "three"),
            asking(4, PROMPT, 2, "option"),
        ]
    )
    with running(recorder, engine, params=params_of(overlap, processors)) as manager:
        recorder.wait_for_finals(1, 2, 3, 4)
        assert not manager._rules
    assert [recorder.responses[i][-1][2] for i in (1, 2, 3, 4)] == [""] * 4
    assert recorder.tokens(1) == [11, 12, 13, 14, 14]
    assert recorder.tokens(2) == [11, 12, 13, 14]
    assert recorder.tokens(3) == [17] * 3
    assert recorder.tokens(4) == [18] * 2, "an option of its own is no client_id"
    assert len(Phrase.made) == 2


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1e-5, "random_seed": 3}, {"runtime_top_p": 0.9}]
)
def test_infinity_forces_its_token(engine: Engine, sampling: dict[str, Any]) -> None:
    """As some force the end of an answer; without it the tokens are sampled as usual."""

    def force(_: int, logits: torch.Tensor, tokens: Tokens, __: None) -> None:
        if len(tokens[0]) != len(PROMPT) + 1:
            logits[..., 33] = torch.inf

    answers = []
    for processor in (force, unchanged):
        recorder = Recorder([asking(1, PROMPT, 3, "force", repetition_penalty=0.01, **sampling)])
        with running(
            recorder, engine, params=params_of(OverlapScheduler.OFF, {"force": processor})
        ):
            recorder.wait_for_finals(1)
        assert recorder.responses[1][-1][2] == ""
        answers.append(recorder.tokens(1))
    assert (answers[0][0], answers[0][2]) == (33, 33)
    assert 33 not in answers[1]


class CannotBeMade(OnlyHigher):
    def __init__(self) -> None:
        raise KeyError("the user's secret")


@BOTH_LOOPS
@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (raises, "logits processor 'bad' failed"),
        (leaves, "logits processor 'bad' failed"),
        (CannotBeMade, "logits processor 'bad' failed"),
        (
            lambda _, logits, *__: logits[..., :-1],
            "'bad' returned [1, 1, 198] where logits of shape [1, 1, 199] belong",
        ),
        (lambda *_: "logits", "'bad' returned str where logits of shape [1, 1, 199] belong"),
        (nan, "no token could be drawn behind logits processor 'bad'"),
        (
            lambda _, logits, *__: torch.full_like(logits, -torch.inf),
            "no token could be drawn behind logits processor 'bad'",
        ),
        (late, "logits processor 'bad' failed"),
        (unchanged, ""),
    ],
)
def test_failing_processor_ends_only_its_request(
    folder: Path,
    engine: Engine,
    overlap: OverlapScheduler,
    processor: Callable[..., Any],
    message: str,
) -> None:
    """One that changes nothing does not fail: most have nothing to do at most tokens."""
    recorder = serve(
        [asking(1, PROMPT, 6, "bad"), request(2, PROMPT[2:], 6)],
        engine,
        params=params_of(overlap, {"bad": processor}),
    )
    assert recorder.tokens(2) == oracle_tokens(folder, PROMPT[2:], 6)
    assert [is_final for _, is_final, _ in recorder.responses[1]].count(True) == 1
    error = recorder.responses[1][-1][2]
    assert message in error
    assert "secret" not in error
    if not message:
        assert error == ""
        assert recorder.tokens(1) == oracle_tokens(folder, PROMPT, 6)
    assert recorder.stats[-1]["Used KV cache blocks"] == 0


@BOTH_LOOPS
def test_processor_that_fails_behind_the_last_token_fails_no_request(
    folder: Path, engine: Engine, overlap: OverlapScheduler
) -> None:
    """In the overlapped loop it is called once more before the stop word is found."""
    answer = oracle_tokens(folder, PROMPT, 6)
    stop_words = [answer[1:3], [2, -1]]
    recorder = serve(
        [asking(1, PROMPT, 6, "late", stop_words_list=stop_words)],
        engine,
        params=params_of(overlap, {"late": late}),
    )
    assert recorder.responses[1][-1][2] == ""
    assert recorder.tokens(1) == answer[:3]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("unknown", {}, "names 'unknown', and this server has no logits processor"),
        ("bad\n", {}, "names 'bad\\n', and this server has no logits processor"),
        ("bad", {"beam_width": 2}, "cannot go with a 'beam_width' above 1"),
        ("", {}, ""),
    ],
)
def test_processor_that_cannot_be_used_is_refused(
    name: str, values: dict[str, Any], message: str
) -> None:
    """The names of the others are not told."""
    recorder = serve([asking(1, [1, 2], 2, name, **values)], logits_processors={"bad": raises})
    error = recorder.responses[1][-1][2]
    assert error.startswith(f"'{PROCESSOR_FIELD}' {message}" if message else "")
    assert (error == "") == (message == "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("upper", "'upper' must have the form name=package.module:callable"),
        ("upper=shout", "= 'shout' must have the form package.module:callable"),
        ("a=os.path:join, a=os.path:split", "names 'a' twice"),
        ("a b=os.path:join", "not 'a b'"),
        ("=os.path:join", "not ''"),
        (f"{'x' * 65}=os.path:join", "1 to 64 letters"),
        ("a=os.path:no_such", "has no attribute 'no_such'"),
        ("a=no_such_module:f", "No module named"),
        ("a=os:name", "'a' is not callable"),
        ("a=os.path:split", "'a' must take (request_id, logits, tokens, stream), with a client_id"),
        ("a=io:StringIO", "or without the stream; of a class, its instances"),
    ],
)
def test_wrong_setting_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match="logits_processors") as caught:
        find_logits_processors(text)
    assert message in str(caught.value)


def test_class_that_needs_arguments_is_refused() -> None:
    """An instance of it, which serves all requests, is accepted."""

    class WithPhrase(OnlyHigher):
        def __init__(self, phrase: str) -> None:
            super().__init__()

    check_logits_processors({"a": WithPhrase(""), "b": OnlyHigher})
    with pytest.raises(ConfigurationError, match="'a' is a class that cannot be made without arg"):
        check_logits_processors({"a": WithPhrase})


def test_setting_names_several_processors() -> None:
    import os.path

    found = find_logits_processors(" join = os.path:join ,max=builtins:max,")
    assert found == {"join": os.path.join, "max": max}
    assert find_logits_processors(None) == {}
