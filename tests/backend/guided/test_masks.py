"""Guided answers match, however they are scheduled and sampled; no other request notices."""

from __future__ import annotations

import json
import pkgutil
import random
import re
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from llguidance import LLMatcher, LLTokenizer
from support import manager_harness
from support.checkpoints import write_checkpoint
from support.guided_answers import (
    MANY_WAYS,
    REGEX,
    SCHEMA,
    Answer,
    HeldCompiler,
    make_service,
    mask_maker,
)
from support.manager_harness import Recorder, request, running

from inflight_backend.guided import masks as masks_module
from inflight_backend.guided import matchers
from inflight_backend.guided.compiler import GuidedDecodingConfig
from inflight_backend.guided.guide import Guide
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
VOCAB_SIZE, END, OTHER_END = 270, CODEC.end_id, 265  # the last is of the model only
BOTH = (OverlapScheduler.OFF, OverlapScheduler.ON)
OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,4}$"},
        "size": {"type": "integer", "minimum": -5, "maximum": 900},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
PATTERN = r"[a-f]{2,5}-(\d{1,3}|none)(, [^a-y\n]{3}){0,2}\."
RULES = 'root ::= term (" + " term){1,3}\nterm ::= [0-9]{1,2} | "(" term ")"'
ALL_SCHEMAS = [
    {"type": "boolean"},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"anyOf": [{"const": "a b"}, {"type": "array", "items": {"type": "null"}, "maxItems": 3}]},
    {"$ref": "#/$defs/d", "$defs": {"d": {"enum": [1, "two", [3]]}}},
    {"type": "string", "maxLength": 5},
    {"type": "string", "format": "date"},
]
Check = Callable[[str], object]
GUIDES: list[tuple[str, str, Check]] = [
    ("json_schema", json.dumps(OBJECT), lambda text: jsonschema.validate(json.loads(text), OBJECT)),
    ("regex", PATTERN, lambda text: match(PATTERN, text)),
    ("ebnf_grammar", RULES, lambda text: match(r"[0-9()]+( \+ [0-9()]+){1,3}", text)),
]


def match(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text), text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with the demo's tokenizer, and ids the tokenizer has not; texts end at either
    of two ids."""
    folder = write_checkpoint(tmp_path_factory.mktemp("random") / "model", vocab_size=VOCAB_SIZE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, OTHER_END]}))
    return folder


def ask(number: int, guide_type: str = "", guide: str = "", **values: Any) -> InferenceRequest:
    if guide_type:
        values["guided_decoding_guide_type"] = guide_type
    if guide:
        values["guided_decoding_guide"] = guide
    prompt = CODEC.encode("one two three four five " + str(number % 3), 99)
    num_new = values.pop("num_new", 210)
    return request(number, prompt, num_new, exclude_input_in_output=True, **values)


PARAMS = TrtGptModelOptionalParams(
    max_batch_size=6,
    device="cpu",
    max_num_tokens=64,
    kv_cache_config=KvCacheConfig(max_tokens=512, tokens_per_block=8),
)
serve = partial(manager_harness.serve, params=PARAMS)


def text_of(recorder: Recorder, number: int) -> str:
    """The text of an answer, or its error."""
    return recorder.responses[number][-1][2] or CODEC.decode(recorder.tokens(number))


def mixed_requests() -> list[InferenceRequest]:
    """Every kind of guide, greedy and sampled, beside requests without any."""
    sampled = {"runtime_top_k": 200, "temperature": 2.0}
    requests = []
    for number in range(1, 13):
        kind = number % 4
        values: dict[str, Any] = {} if number > 6 else {**sampled, "random_seed": number}
        if kind == 3:
            requests.append(ask(number, num_new=120, streaming=number > 6, **values))
        else:
            guide_type, guide, _ = GUIDES[kind]
            requests.append(ask(number, guide_type, guide, streaming=number > 6, **values))
    return requests


@pytest.mark.slow
@pytest.mark.parametrize("policy", CapacitySchedulerPolicy)
def test_every_answer_matches_in_both_loops_under_all_policies(
    policy: CapacitySchedulerPolicy, model: Path, tmp_path: Path
) -> None:
    """Requests without a guide get the answers that they would get alone."""
    alone = [each for each in mixed_requests() if each.request_id % 4 == 3]
    recorder = serve(alone, model)
    unguided = [recorder.tokens(each.request_id) for each in alone]
    given = []
    for choice in BOTH:
        file = tmp_path / f"{choice.value}.jsonl"
        recorder = serve(
            mixed_requests(),
            model,
            policy,
            overlap_scheduler=choice,
            record_file=str(file),
            enable_chunked_context=True,
            context_chunk_unit=8,
            kv_cache_config=KvCacheConfig(max_tokens=264, tokens_per_block=8),
        )
        for number in range(1, 13):
            if number % 4 != 3:
                GUIDES[number % 4][2](text_of(recorder, number))
        if policy is CapacitySchedulerPolicy.MAX_UTILIZATION:
            assert sum(stats["Paused Requests"] for stats in recorder.stats) > 0
        with open_recording(file) as reader:
            assert replay(reader).divergence is None
        assert [recorder.tokens(each.request_id) for each in alone] == unguided
        given.append([recorder.tokens(number) for number in range(1, 13)])
    assert given[0] == given[1]


def test_other_requests_verify_drafts_beside_guided_answers(model: Path) -> None:
    """Rows of drafts stand before the guided ones, whose masks must find theirs."""

    def requests() -> list[InferenceRequest]:
        guided = [ask(number, *GUIDES[number][:2], num_new=60) for number in (1, 2)]
        return [*guided, ask(3, num_new=60), ask(4, num_new=60)]

    plain = serve(requests(), model)
    ngram = SpeculativeDecodingConfig("ngram")
    drafted = serve(requests(), model, speculative_decoding_config=ngram)
    for number in range(1, 5):
        assert drafted.tokens(number) == plain.tokens(number)
    beside = [
        stats["Generation Requests"] - stats["Requests with Draft Tokens"]
        for stats in drafted.stats
        if "Draft Tokens" in stats
    ]
    assert max(beside) > 0


@pytest.mark.parametrize("folder_name", ["random", "demo"])
def test_schemas(folder_name: str, model: Path) -> None:
    folder = model if folder_name == "random" else DEMO_MODEL
    requests = [
        ask(10 * i + j, "json_schema", json.dumps(schema), **values)
        for i, schema in enumerate(ALL_SCHEMAS)
        for j, values in enumerate(({}, {"runtime_top_k": 100, "random_seed": i}))
    ]
    recorder = serve(requests, folder, overlap_scheduler=BOTH[1])
    for each in requests:
        schema = ALL_SCHEMAS[each.request_id // 10]
        jsonschema.validate(json.loads(text_of(recorder, each.request_id)), schema)


def test_v1_batching_guides_too(model: Path) -> None:
    requests = [ask(i, *GUIDES[i][:2]) for i in range(3)] + [ask(3, num_new=5)]
    recorder = serve(requests, model, model_type=TrtGptModelType.V1)
    for number, (_, _, check) in enumerate(GUIDES):
        check(text_of(recorder, number))


def token(text: str) -> int:
    [token_id] = CODEC.encode_word(text)
    return token_id


def bias(**values: float) -> dict[str, Any]:
    """The bias of tokens by their text, and of ``end`` and ``other_end``."""
    found = [0.0] * VOCAB_SIZE
    for text, value in values.items():
        found[{"end": END, "other_end": OTHER_END}.get(text) or token(text)] = value
    return {"embedding_bias": found}


LIKES_OTHER_END = bias(a=1e6, other_end=1e9)
"""The other end wherever it may come, else "a"."""


@pytest.mark.parametrize(
    ("regex", "values", "text"),
    [
        # A grammar that is through ends the answer although min_length and a bias forbid that; one
        # that is not is never ended; a stop word ends any.
        ("abc", {"min_length": 20, **bias(end=-1e9)}, "abc"),
        ("abc", {"end_id": END, "stop_token_ids": [OTHER_END], "min_length": 20}, "abc"),
        ("a{3,9}", bias(a=1e6, end=1e9), "aaa"),
        ("a+bc+", {"stop_words_list": [CODEC.encode_word("b"), [1]], **bias(b=1e6)}, "ab"),
        ("ab?", {"end_id": OTHER_END, **LIKES_OTHER_END}, "a"),
        # Every end id ends an answer where the grammar may. The checkpoint's are for a request that
        # names no end.
        ("a{3,9}", {"end_id": END, "stop_token_ids": [269, OTHER_END], **LIKES_OTHER_END}, "aaa"),
        ("a{3,9}", {"end_id": END, "stop_token_ids": [269], **bias(a=1e6, end=1e9)}, "aaa"),
        ("a{3,9}", {"end_id": END, **LIKES_OTHER_END}, "a" * 9),
        ("a{3,9}", {"stop_token_ids": [269], **LIKES_OTHER_END}, "aaa"),
        ("a{3,9}", LIKES_OTHER_END, "aaa"),
        (
            "a{3,9}",
            {"stop_token_ids": [*range(128)]},
            "'stop_token_ids' holds 129 ids, more than 128; those that the checkpoint",
        ),
        # A stop token that is text ends nothing before the grammar, and the answer is whole then.
        ("a[bc]a", {"end_id": END, "stop_token_ids": [token("b")], **bias(b=1e9, c=1e6)}, "aca"),
        (
            "a{2}[ab]*",
            {"end_id": END, "stop_token_ids": [token("b"), OTHER_END], **bias(b=1e9, a=1e6)},
            "aa",
        ),
        (
            "aba",
            {"end_id": END, "stop_token_ids": [token("b")]},
            "allows nothing here but 'end_id' or 'stop_token_ids' as text, and no end yet",
        ),
    ],
)
def test_the_end_comes_where_the_grammar_says(
    model: Path, regex: str, values: dict[str, Any], text: str
) -> None:
    """vLLM's rule."""
    found = text_of(serve([ask(1, "regex", regex, num_new=30, **values)], model), 1)
    assert text in found if " " in text else text == found


@pytest.mark.case(53)
def test_a_grammar_against_all_other_rules_fails_alone(model: Path) -> None:
    forbid_a = [CODEC.encode_word("a") + CODEC.encode_word("b"), [1, 2]]
    requests = [ask(1, "regex", "[ab]", bad_words_list=forbid_a), ask(2, "regex", "[ab]")]
    recorder = serve(requests, model)
    assert "no token could be drawn" in text_of(recorder, 1)
    match("[ab]", text_of(recorder, 2))


@pytest.mark.parametrize("num_dear", [1, 4])  # few are followed one by one, many side by side
@pytest.mark.parametrize("choice", BOTH)
def test_an_answer_that_meets_its_own_limit_fails_alone(
    choice: OverlapScheduler, num_dear: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(matchers._LIMITS, "step_max_items", 400)
    requests = [ask(number, "json_schema", MANY_WAYS) for number in range(num_dear)]
    others = [ask(90, num_new=20), ask(91, "regex", "a{9}")]
    recorder = serve([*requests, *others], model, overlap_scheduler=choice)
    for each in requests:
        error = text_of(recorder, each.request_id)
        assert "'guided_decoding_guide' cannot be followed any further" in error
        assert "verbose" not in error
    assert len(recorder.tokens(90)) == 20
    assert text_of(recorder, 91) == "a" * 9


@pytest.mark.case(55)
def test_other_requests_are_served_while_a_grammar_is_compiled(
    model: Path, held: HeldCompiler
) -> None:
    """It is stopped, too, before it was admitted; and two of one id are one."""
    guided = [ask(1, "regex", "abc"), ask(2, "regex", "abcd"), ask(1, "regex", "x")]
    recorder = Recorder([*guided, ask(3, num_new=8)])
    with running(recorder, model, params=PARAMS) as manager:
        recorder.wait_for_finals(3)
        assert manager.get_num_active_requests() == 2
        recorder.stops = {2}
        recorder.wait_for_finals(2)
        held.go_on.set()
        recorder.wait_for_finals(1)
    assert recorder.responses[2] == [([], True, "")]
    assert text_of(recorder, 1) == "abc"


@pytest.mark.case(89)
@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("compiler.to_grammar", "'guided_decoding_guide' could not be compiled: the server failed"),
        ("masks.GuidedAnswer.__init__", "the request could not be taken"),
    ],
)
def test_a_guide_that_cannot_be_taken_ends_its_request_only(
    place: str, error: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the library, or once it is compiled; sent again, it is compiled again."""
    requests = [ask(2, "regex", "abcd"), ask(3, "regex", "abc"), ask(4, num_new=8)]
    with monkeypatch.context() as patch:
        real: Any = pkgutil.resolve_name(f"inflight_backend.guided.{place}")

        def fail(*args: Any) -> Any:
            guide = Guide(REGEX, "abcd")
            if guide in args or "abcd" in getattr(args[-1], "grammar", ""):
                raise BaseException("as a panic of a library in Rust")
            return real(*args)

        patch.setattr(f"inflight_backend.guided.{place}", fail)
        recorder = Recorder([ask(1, num_new=30), *requests])
        with running(recorder, model, params=PARAMS) as manager:
            recorder.wait_for_finals(1, 2, 3, 4)
            assert recorder.responses.pop(2)[0][2] == error
            assert [len(recorder.tokens(number)) for number in (1, 4)] == [30, 8]
            assert text_of(recorder, 3) == "abc"
            assert manager.get_num_active_requests() == 0
            patch.undo()
            recorder.pending.append(requests[0])
            recorder.wait_for_finals(2)
            assert text_of(recorder, 2) == "abcd"


@pytest.mark.contract("tensorrt_llm parameter", "guided_decoding_backend")
def test_a_server_that_guides_nothing_says_so(model: Path) -> None:
    config = GuidedDecodingConfig("none")
    recorder = serve([ask(1, "json", end_id=END)], model, guided_decoding_config=config)
    assert "guided_decoding_backend is none" in text_of(recorder, 1)


SHARED = Guide(REGEX, "x(.{0,90}y){2}")  # states that all its answers have in common


class Answers:
    """Several answers of one guide, each with random tokens that it may have."""

    def __init__(self, guide: Guide, num_answers: int = 8) -> None:
        self._random = random.Random(1)
        self._mask_maker, service = mask_maker(), make_service()
        self._answers = [Answer(guide, service) for _ in range(num_answers)]

    def errors(self) -> list[str]:
        """Of those that cannot continue."""
        return [each.state.error for each in self._answers if each.state.error]

    def step(self) -> None:
        """A token for each that can continue."""
        guided = [(n, each.request, each.state) for n, each in enumerate(self._answers)]
        rows = self._mask_maker.masks(guided, {})
        for answer, row in zip(self._answers, rows, strict=True):
            if allowed := sorted(answer.allowed_by(row) - {END}):
                answer.request.add_new_token(self._random.choice(allowed))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that were compiled; each takes 0.03 s at least."""
    grammars: list[str] = []
    real = matchers._match

    def note(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        grammars.append(grammar)
        time.sleep(0.03)
        return real(tokenizer, grammar)

    monkeypatch.setattr(matchers, "_match", note)
    monkeypatch.setattr(matchers, "_MAX_RECOMPILE_SECONDS", 9.0)
    return grammars


def test_no_answer_starts_again_to_meet_a_limit_that_is_not_shared(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read the whole answer again took 2 s where its text can be understood in many ways."""
    monkeypatch.setitem(matchers._LIMITS, "step_max_items", 400)
    answers = Answers(Guide(SCHEMA, MANY_WAYS))
    while not answers.errors():
        answers.step()
    assert all("Too many items" in each or "Current row" in each for each in answers.errors())
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("seconds", "num_answers", "most_in_a_step", "num_errors"),
    [(0.05, 8, (1, 2), None), (0.02, 1, (1,), 1), (60.0, 8, None, 0)],
)
def test_a_step_waits_only_so_long_for_answers_that_start_again(
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    num_answers: int,
    most_in_a_step: tuple[int, ...] | None,
    num_errors: int | None,
) -> None:
    """All answers of a guide meet a limit that they share at once, and start again at most once:
    their own limits they would meet again."""
    monkeypatch.setattr(masks_module, "_MAX_SECONDS_AGAIN", seconds)
    monkeypatch.setitem(matchers._LIMITS, "max_lexer_states", 600)
    answers = Answers(SHARED, num_answers)
    while len(compiled) == 1:
        answers.step()
    if num_errors is not None:
        assert len(answers.errors()) == num_errors
    counts = [1, len(compiled)]
    while not answers.errors():
        answers.step()
        counts.append(len(compiled))
    if most_in_a_step is not None:
        assert max(after - before for before, after in pairwise(counts)) in most_in_a_step
    assert len(compiled) <= 1 + num_answers


def test_where_no_thread_can_be_started_an_answer_that_needs_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop is in the midst of a step of all."""
    monkeypatch.setitem(matchers._LIMITS, "max_lexer_states", 600)
    answers = Answers(SHARED)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    while not answers.errors():
        answers.step()
    assert "too many states" in answers.errors()[0]
