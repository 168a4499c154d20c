"""Guided answers parse, whatever schedules them and however they are drawn; nobody else notices."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from support.checkpoints import write_checkpoint
from support.guided_answers import MANY_WAYS
from support.manager_harness import Recorder, request, running

from inflight_backend.guided import compiler as compiler_module
from inflight_backend.guided.compiler import GuidedDecodingConfig
from inflight_backend.guided.guide import Guide, GuideType
from inflight_backend.guided.masks import AnswerGuides
from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_backend.manager.step_loop import OverlapScheduler
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.speculative.drafter import SpeculativeDecodingConfig
from inflight_backend.text.tokenizer import TextCodec
from inflight_recorder.replay import replay
from inflight_recorder.storage import open_recording
from inflight_scheduler import CapacitySchedulerPolicy, TrtGptModelType
from inflight_server.serve.settings import DEMO_MODEL

CODEC = TextCodec(DEMO_MODEL)
END = CODEC.end_id
BOTH = (OverlapScheduler.OFF, OverlapScheduler.ON)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,4}$"},
        "size": {"type": "integer", "minimum": -5, "maximum": 900},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{2,5}-(\d{1,3}|none)(, [^a-y\n]{3}){0,2}\."
EBNF = 'root ::= term (" + " term){1,3}\nterm ::= [0-9]{1,2} | "(" term ")"'
ALL_SCHEMAS = [
    {"type": "boolean"},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"anyOf": [{"const": "a b"}, {"type": "array", "items": {"type": "null"}, "maxItems": 3}]},
    {"$ref": "#/$defs/d", "$defs": {"d": {"enum": [1, "two", [3]]}}},
    {"type": "string", "maxLength": 5},
    {"type": "string", "format": "date"},
]

COULD_NOT_BE_COMPILED = "'guided_decoding_guide' could not be compiled: the server failed"

Check = Callable[[str], object]
GUIDES: list[tuple[str, str | None, Check]] = [
    ("json_schema", json.dumps(SCHEMA), lambda text: jsonschema.validate(json.loads(text), SCHEMA)),
    ("regex", REGEX, lambda text: match(REGEX, text)),
    ("ebnf_grammar", EBNF, lambda text: match(r"[0-9()]+( \+ [0-9()]+){1,3}", text)),
]


def match(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text), text


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with the demo's tokenizer, and ids the tokenizer has not."""
    folder = write_checkpoint(tmp_path_factory.mktemp("random") / "model", vocab_size=270)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    return folder


def ask(number: int, guide_type: str = "", guide: str | None = None, **values: Any) -> Any:
    if guide_type:
        values["guided_decoding_guide_type"] = guide_type
    if guide is not None:
        values["guided_decoding_guide"] = guide
    prompt = CODEC.encode("one two three four five " + str(number % 3), 99)
    if "exclude_input_in_output" not in values:
        values["exclude_input_in_output"] = True
    return request(number, prompt, values.pop("num_new", 210), **values)


def params(**changes: Any) -> TrtGptModelOptionalParams:
    given = TrtGptModelOptionalParams(
        max_batch_size=6,
        device="cpu",
        max_num_tokens=64,
        kv_cache_config=KvCacheConfig(max_tokens=512, tokens_per_block=8),
    )
    return replace(given, **changes)


def serve(
    folder: Path, requests: list[InferenceRequest], settings: Any, **options: Any
) -> Recorder:
    recorder = Recorder(requests)
    with running(recorder, folder, params=settings, **options) as manager:
        recorder.wait_for_finals(*(each.request_id for each in requests))
        assert manager.get_num_active_requests() == 0
    return recorder


def text_of(recorder: Recorder, number: int) -> str:
    assert recorder.responses[number][-1][2] == ""
    return CODEC.decode(recorder.tokens(number))


def mixed_requests() -> list[InferenceRequest]:
    """Every kind of guide, greedy and drawn, beside requests without any."""
    drawn = {"runtime_top_k": 200, "temperature": 2.0}
    requests = []
    for number in range(1, 13):
        kind = number % 4
        values: dict[str, Any] = {} if number > 6 else {**drawn, "random_seed": number}
        if kind == 3:
            requests.append(ask(number, num_new=120, streaming=number > 6, **values))
        else:
            guide_type, guide, _ = GUIDES[kind]
            requests.append(ask(number, guide_type, guide, streaming=number > 6, **values))
    return requests


@pytest.mark.slow
@pytest.mark.parametrize("policy", CapacitySchedulerPolicy)
def test_every_answer_parses_in_both_loops_under_all_policies(
    policy: CapacitySchedulerPolicy, random_model: Path, tmp_path: Path
) -> None:
    given = []
    for choice in BOTH:
        file = tmp_path / f"{choice.value}.jsonl"
        settings = params(
            overlap_scheduler=choice,
            record_file=str(file),
            enable_chunked_context=True,
            context_chunk_unit=8,
            kv_cache_config=KvCacheConfig(max_tokens=264, tokens_per_block=8),
        )
        recorder = serve(random_model, mixed_requests(), settings, policy=policy)
        for number in range(1, 13):
            text = text_of(recorder, number)
            if number % 4 != 3:
                GUIDES[number % 4][2](text)
        if policy is CapacitySchedulerPolicy.MAX_UTILIZATION:
            assert sum(stats["Paused Requests"] for stats in recorder.stats) > 0
        with open_recording(file) as reader:
            assert replay(reader).divergence is None
        given.append([recorder.tokens(number) for number in range(1, 13)])
    assert given[0] == given[1]


@pytest.mark.slow
def test_requests_without_a_guide_get_what_they_would_get_alone(random_model: Path) -> None:
    together = serve(random_model, mixed_requests(), params(overlap_scheduler=BOTH[1]))
    alone = [each for each in mixed_requests() if each.request_id % 4 == 3]
    recorder = serve(random_model, alone, params())
    for each in alone:
        assert recorder.tokens(each.request_id) == together.tokens(each.request_id)


def test_others_verify_drafts_beside_guided_answers(random_model: Path) -> None:
    """Rows of drafts stand before the guided ones, whose masks must find theirs."""

    def requests() -> list[InferenceRequest]:
        guided = [ask(number, *GUIDES[number][:2], num_new=60) for number in (1, 2)]
        return [*guided, ask(3, num_new=60), ask(4, num_new=60)]

    plain = serve(random_model, requests(), params())
    ngram = params(speculative_decoding_config=SpeculativeDecodingConfig("ngram"))
    drafted = serve(random_model, requests(), ngram)
    for number in range(1, 5):
        assert drafted.tokens(number) == plain.tokens(number)
    beside = [
        stats["Generation Requests"] - stats["Requests with Draft Tokens"]
        for stats in drafted.stats
        if "Draft Tokens" in stats
    ]
    assert max(beside) > 0


@pytest.mark.parametrize("folder_name", ["random", "demo"])
def test_schemas(folder_name: str, random_model: Path) -> None:
    folder = random_model if folder_name == "random" else DEMO_MODEL
    requests = [
        ask(10 * i + j, "json_schema", json.dumps(schema), **values)
        for i, schema in enumerate(ALL_SCHEMAS)
        for j, values in enumerate(({}, {"runtime_top_k": 100, "random_seed": i}))
    ]
    recorder = serve(folder, requests, params(overlap_scheduler=BOTH[1]))
    for each in requests:
        schema = ALL_SCHEMAS[each.request_id // 10]
        jsonschema.validate(json.loads(text_of(recorder, each.request_id)), schema)


def test_json_cut_by_the_length_is_the_beginning_of_json(random_model: Path) -> None:
    drawn: dict[str, Any] = {"runtime_top_k": 200, "num_new": 40}
    requests = [ask(n, "json", random_seed=n, **drawn) for n in range(12)]
    recorder = serve(random_model, requests, params())
    ended = [n for n in range(12) if len(recorder.tokens(n)) < 40]
    assert ended
    for number in ended:
        assert isinstance(json.loads(text_of(recorder, number)), dict | list)


def test_v1_batching_guides_too(random_model: Path) -> None:
    requests = [ask(i, *GUIDES[i][:2]) for i in range(3)] + [ask(3, num_new=5)]
    recorder = serve(random_model, requests, params(), model_type=TrtGptModelType.V1)
    for number, (_, _, check) in enumerate(GUIDES):
        check(text_of(recorder, number))


def test_the_end_comes_where_the_grammar_says(random_model: Path) -> None:
    """A grammar that is through ends the answer although min_length and a bias forbid that; one
    that is not is never ended; a stop word ends any; another end_id than the model's works."""
    never_end = {"min_length": 50, "embedding_bias": [0.0] * END + [-1e9] + [0.0] * (269 - END)}
    always_end = {"embedding_bias": [0.0] * END + [1e9] + [0.0] * (269 - END)}
    stop = {"stop_words_list": [CODEC.encode_word("b"), [1]]}
    recorder = serve(
        random_model,
        [
            ask(1, "regex", "abc", **never_end),
            ask(2, "regex", "a{3,9}", **always_end),
            ask(3, "regex", "a+bc+", **stop),
            ask(4, "regex", "ab?", end_id=265),
        ],
        params(),
    )
    assert [text_of(recorder, number) for number in (1, 2)] == ["abc", "aaa"]
    match("a+b", text_of(recorder, 3))
    match("ab?", text_of(recorder, 4))


@pytest.mark.case(53)
def test_a_grammar_against_all_other_rules_fails_alone(random_model: Path) -> None:
    forbid_a = [CODEC.encode_word("a") + CODEC.encode_word("b"), [1, 2]]
    requests = [ask(1, "regex", "[ab]", bad_words_list=forbid_a), ask(2, "regex", "[ab]")]
    recorder = serve(random_model, requests, params())
    assert "no token could be drawn" in recorder.responses[1][-1][2]
    match("[ab]", text_of(recorder, 2))


@pytest.mark.parametrize("num_dear", [1, 4])  # few are followed one by one, many side by side
@pytest.mark.parametrize("choice", BOTH)
def test_what_becomes_too_dear_on_the_way_fails_alone(
    choice: OverlapScheduler,
    num_dear: int,
    random_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(compiler_module._LIMITS, "step_max_items", 400)
    requests = [ask(number, "json_schema", MANY_WAYS) for number in range(num_dear)]
    recorder = serve(
        random_model,
        [*requests, ask(90, num_new=20), ask(91, "regex", "a{9}")],
        params(overlap_scheduler=choice),
    )
    for each in requests:
        error = recorder.responses[each.request_id][-1][2]
        assert "'guided_decoding_guide' cannot be followed any further" in error
        assert "verbose" not in error
    assert len(recorder.tokens(90)) == 20
    assert text_of(recorder, 91) == "a" * 9


@pytest.mark.slow
@pytest.mark.parametrize("choice", BOTH)
def test_an_answer_that_meets_a_limit_leaves_all_others_theirs(
    choice: OverlapScheduler, random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one guide share what they find out, and its limits: the first to meet one, after
    however many, ended those under way and all to come."""
    monkeypatch.setitem(compiler_module._LIMITS, "max_lexer_states", 600)
    drawn: dict[str, Any] = {"runtime_top_k": 200, "num_new": 90}
    requests = [ask(n, "regex", "x(.{0,90}y){2}", random_seed=n, **drawn) for n in range(16)]
    recorder = serve(random_model, requests, params(overlap_scheduler=choice))
    for number in range(16):
        match("x[^\n]+", text_of(recorder, number))


@pytest.mark.case(55)
def test_others_are_served_while_a_grammar_is_compiled(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, too, before it was admitted; and two of one id are one."""
    from threading import Event

    may_compile = Event()
    to_grammar = compiler_module.to_grammar
    monkeypatch.setattr(
        compiler_module, "to_grammar", lambda guide: may_compile.wait(9) and to_grammar(guide)
    )
    guided = [ask(1, "regex", "abc"), ask(2, "regex", "abcd"), ask(1, "regex", "x")]
    recorder = Recorder([*guided, ask(3, num_new=8)])
    with running(recorder, random_model, params=params()) as manager:
        recorder.wait_for_finals(3)
        assert manager.get_num_active_requests() == 2
        recorder.stops = {2}
        recorder.wait_for_finals(2)
        may_compile.set()
        recorder.wait_for_finals(1)
    assert recorder.responses[2] == [([], True, "")]
    assert text_of(recorder, 1) == "abc"


@pytest.mark.case(89)
@pytest.mark.parametrize("place", ["to_grammar", "guides"])
def test_a_guide_that_cannot_be_taken_ends_its_request_only(
    place: str, random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the library, or once it is compiled; sent again, it is compiled anew."""
    is_broken = True
    owner, name = (
        (compiler_module, "to_grammar") if place == "to_grammar" else (AnswerGuides, "add")
    )
    real = getattr(owner, name)

    def fail(*args: Any) -> Any:
        is_mine = args[0] == Guide(GuideType.REGEX, "abcd") or args[1:2] == (2,)
        if is_broken and is_mine:
            raise BaseException("as a panic of a library in Rust")
        return real(*args)

    monkeypatch.setattr(owner, name, fail)
    requests = [ask(2, "regex", "abcd"), ask(3, "regex", "abc"), ask(4, num_new=8)]
    recorder = Recorder([ask(1, num_new=30), *requests])
    with running(recorder, random_model, params=params()) as manager:
        recorder.wait_for_finals(1, 2, 3, 4)
        (response,) = recorder.responses.pop(2)
        assert response[2] in ("the request could not be taken", COULD_NOT_BE_COMPILED)
        assert [len(recorder.tokens(number)) for number in (1, 4)] == [30, 8]
        assert text_of(recorder, 3) == "abc"
        assert manager.get_num_active_requests() == 0
        assert not manager._rules
        is_broken = False
        recorder.pending.append(requests[0])
        recorder.wait_for_finals(2)
        assert text_of(recorder, 2) == "abcd"


@pytest.mark.slow
def test_bad_guides_are_answered_and_hurt_nobody(random_model: Path) -> None:
    bad = [("regex", "("), ("json_schema", "[]"), ("ebnf_grammar", "x"), ("regex", "a?" * 20_000)]
    requests = [ask(i, *guide) for i, guide in enumerate(bad)] + [ask(9, num_new=10)]
    recorder = serve(random_model, requests, params())
    for number in range(len(bad)):
        assert recorder.responses[number][-1][2].startswith("'guided_decoding_guide' ")
    assert len(recorder.tokens(9)) == 10


@pytest.mark.contract("tensorrt_llm parameter", "guided_decoding_backend")
def test_a_server_that_guides_nothing_says_so(random_model: Path) -> None:
    settings = params(guided_decoding_config=GuidedDecodingConfig("none"))
    recorder = serve(random_model, [ask(1, "json", end_id=END)], settings)
    assert "guided_decoding_backend is none" in recorder.responses[1][-1][2]
