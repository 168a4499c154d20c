"""Grammars become matchers, each once, or errors that say what is wrong; never more than that."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import fuzzing
from tokenizers import Tokenizer

from inflight_backend.errors import CapacityExceeded, InvalidRequest, ServingError
from inflight_backend.guided import compiler as module
from inflight_backend.guided.compiler import GuideCompiler
from inflight_backend.guided.ebnf import to_lark
from inflight_backend.guided.guide import Guide, GuideType

TOKENIZER = Path(__file__).parents[3] / "backend/inflight_backend/demo_model/tokenizer.json"
VOCAB_SIZE = 270  # some ids more than the tokenizer has
WAIT = 60.0
EBNF = GuideType.EBNF_GRAMMAR


@pytest.fixture(scope="module")
def compiler() -> Iterator[GuideCompiler]:
    made = GuideCompiler(TOKENIZER.read_text, VOCAB_SIZE, 0)
    yield made
    made.close()


def compile_guide(compiler: GuideCompiler, guide: Guide) -> Any:
    pending = compiler.start(guide)
    deadline = time.monotonic() + WAIT
    while not pending.is_settled:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return pending.take()


def accepts(compiler: GuideCompiler, guide_type: GuideType, grammar: str, text: str) -> bool:
    """True if ``text``, and an end behind it, is what the grammar allows."""
    matcher = compile_guide(compiler, Guide(guide_type, grammar))
    ids = Tokenizer.from_file(str(TOKENIZER)).encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "a" | "b"', "a", "c"),
        ("root ::= [0-9]+", "2025", "x"),
        ('root ::= [a-z]* "b"', "aab", "aa"),
        ('root ::= a "b"\na ::= [a-z]*  # greedy would swallow b', "aab", "aa"),
        ('root ::= ("a"{2}){2}', "aaaa", "aaa"),
        ('root ::= (("a" | "b"){2}){2,3}', "abab", "abaab"),
        ('root ::= "a"\n  # or\n  | "c"', "c", "b"),
        ('root ::= "a" root | ""', "aaa", "b"),
        ('root ::= root "b" | "a"', "abb", "b"),
        (r'root ::= "\u0041\x42\U00000043\"\\"', 'ABC"\\', "ABC"),
        (r"root ::= [\u0041-C\-]+", "A-C", "D"),
        (r"root ::= [\]\[]+", "][", "\\"),
        ("root ::= [^a-y]+", "z#/", "b"),
        ('root ::= "a/b" foo-Bar\nfoo-Bar ::= [/]', "a/b/", "a/b"),
        ('root ::= "é#" x_1\nx_1 ::= "]"', "é#]", "é]"),
        ('root ::= "a"{2,}', "aaa", "a"),
    ],
)
def test_ebnf(compiler: GuideCompiler, grammar: str, good: str, bad: str) -> None:
    assert accepts(compiler, EBNF, grammar, good)
    assert not accepts(compiler, EBNF, grammar, bad)


@pytest.mark.parametrize(
    ("guide_type", "grammar", "message"),
    [
        (EBNF, 'answer ::= "a"', "there is no rule 'root'"),
        (EBNF, "root ::= a", "there is no rule 'a'"),
        (EBNF, "root ::= [a&&b]", "has && in a [class]; escape it"),
        (EBNF, r"root ::= [\d]", r"has \d, which is no escape"),
        (EBNF, r'root ::= "\uD800"', "which is no character"),
        (EBNF, "start: /a/", "is no EBNF grammar"),
        (EBNF, "\n".join(f'r{i} ::= "a"' for i in range(300)), "has 300 rules, more than 256"),
        (EBNF, 'root ::= (a{100}){100}\na ::= "x"', "has 10001 symbols when written out"),
        (EBNF, 'root ::= a{4999}\na ::= "x" "y"', "has 5001 symbols when written out"),
        (GuideType.REGEX, "a(?=b)", "look-around"),
        (GuideType.REGEX, "(a)\\1", "backreferences are not supported"),
        (GuideType.REGEX, "((a{100}){100}){100}", "has 1000000 symbols when written out"),
        (GuideType.REGEX, "[", "is no regex that can be used: invalid regex"),
        (GuideType.REGEX, r"[^\x00-\U0010FFFF]", "is no regex that can be used: there is no text"),
        (GuideType.JSON_SCHEMA, '{"type": "nothing"}', "can be used: Invalid type: nothing"),
        (GuideType.JSON_SCHEMA, '{"not": {}}', 'Unimplemented keys: ["not"]'),
        (GuideType.JSON_SCHEMA, '{"$ref": "http://x/y"}', "Default retriever does not fetch"),
        (GuideType.JSON_SCHEMA, '{"enum": []}', "Unsatisfiable schema"),
    ],
)
@pytest.mark.case(46, 52, 53)
def test_refused_by_name(
    compiler: GuideCompiler, guide_type: GuideType, grammar: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_guide(compiler, Guide(guide_type, grammar))
    assert message in str(caught.value)
    assert "'guided_decoding_guide'" in str(caught.value)
    assert "llguidance" not in str(caught.value), "the grammar is shown that we made of it"


def test_json_is_an_object_or_an_array(compiler: GuideCompiler) -> None:
    for text, is_good in (('{"a": [1, null]}', True), ("[]", True), ("3", False), ("{", False)):
        assert accepts(compiler, GuideType.JSON, "", text) is is_good


@pytest.mark.case(47, 50)
@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        ("foo**", "foooo", "bar"),
        ("(a+)+$", "a" * 4000, "a" * 4000 + "b"),
        ("(a|aa)+b", "a" * 4000 + "b", "a" * 4000),
    ],
)
def test_a_regex_takes_linear_time(
    compiler: GuideCompiler, regex: str, good: str, bad: str
) -> None:
    """Backtracking would take longer than the universe has lasted."""
    began = time.monotonic()
    assert accepts(compiler, GuideType.REGEX, regex, good)
    assert not accepts(compiler, GuideType.REGEX, regex, bad)
    assert time.monotonic() - began < WAIT


@pytest.mark.case(55)
@pytest.mark.parametrize(
    ("guide_type", "grammar", "text"),
    [
        (EBNF, 'root ::= "a" root "' + "b" * 4000 + '" | "c"', "a" * 300 + "c"),
        (EBNF, 'root ::= r{20}\nr ::= "' + "a" * 2500 + '"', "a" * 40),
        (GuideType.JSON_SCHEMA, json.dumps({"const": "a" * 60_000}), '"' + "a" * 40),
    ],
)
def test_a_token_costs_little_however_much_is_bound_to_follow(
    compiler: GuideCompiler, guide_type: GuideType, grammar: str, text: str
) -> None:
    """On the loop's thread: a walk through all that follows took minutes, 50 and 35 ms a token."""
    matcher = compile_guide(compiler, Guide(guide_type, grammar))
    began = time.thread_time()
    for token in Tokenizer.from_file(str(TOKENIZER)).encode(text, add_special_tokens=False).ids:
        assert matcher.consume_token(token)
        matcher.compute_bitmask()
    assert time.thread_time() - began < 0.5  # 0.01


@pytest.mark.case(51)
def test_a_schema_may_refer_to_itself_unless_it_says_nothing_else(compiler: GuideCompiler) -> None:
    node: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}
    node["additionalProperties"] = False
    schema = json.dumps({"$ref": "#/$defs/n", "$defs": {"n": node}})
    deep = '{"next":' * 40 + "{}" + "}" * 40
    assert accepts(compiler, GuideType.JSON_SCHEMA, schema, deep)
    assert not accepts(compiler, GuideType.JSON_SCHEMA, schema, '{"next": 3}')
    with pytest.raises(InvalidRequest, match="'guided_decoding_guide'"):
        compile_guide(compiler, Guide(GuideType.JSON_SCHEMA, '{"$ref": "#"}'))


CHAINS = """
import json, sys, time
from inflight_backend.guided import compiler as module
from inflight_backend.guided.compiler import GuideCompiler
from inflight_backend.guided.guide import Guide, GuideType
from inflight_server.serve.settings import DEMO_MODEL

module.COMPILE_SECONDS = 100.0  # 2 are needed
compiler = GuideCompiler((DEMO_MODEL / "tokenizer.json").read_text, 270, 0)
for link in ('{"properties":{"a":%s}}', '{"anyOf":[%s,{"type":"null"}]}', '{"allOf":[%s]}'):
    count = 125_000 // (len(link) + 30)
    parts = [f'"d{i}":' + link % f'{{"$ref":"#/$defs/d{i + 1}"}}' for i in range(count)]
    schema = f'{{"$ref":"#/$defs/d0","$defs":{{{",".join(parts)},"d{count}":{{}}}}}}'
    pending = compiler.start(Guide(GuideType.JSON_SCHEMA, schema))
    while not pending.is_settled:
        time.sleep(0.01)
    print(len(schema), pending.take().is_stopped())
compiler.close()
"""


def test_a_long_chain_of_references_does_not_end_the_process() -> None:
    """The library calls itself for each: its stack was full, which nothing can catch."""
    done = subprocess.run(
        [sys.executable, "-c", CHAINS], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("False") == 3


@pytest.mark.case(54)
def test_white_space_comes_to_an_end(compiler: GuideCompiler) -> None:
    """A model that likes blanks cannot fill its answer with them."""
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    for guide_type, text in ((GuideType.JSON, ""), (GuideType.JSON_SCHEMA, schema)):
        assert accepts(compiler, guide_type, text, '{ "a":1}')
        assert not accepts(compiler, guide_type, text, "{" + " " * 200 + '"a":1}')


@pytest.mark.case(55)
def test_equal_grammars_are_compiled_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    to_grammar = module.to_grammar
    monkeypatch.setattr(module, "MAX_CACHED", 2)

    def note(guide: Guide) -> str:
        compiled.append(guide.text)
        return to_grammar(guide)

    monkeypatch.setattr(module, "to_grammar", note)
    own = GuideCompiler(TOKENIZER.read_text, VOCAB_SIZE, 0)
    for text in "aabbacab":
        first = compile_guide(own, Guide(GuideType.REGEX, text))
        assert first.consume_token(own.load_tokenizer().tokenize_str(text)[0])
        assert not compile_guide(own, Guide(GuideType.REGEX, text)).is_stopped(), "its own copy"
    own.close()
    assert compiled == ["a", "b", "c", "b"]


def test_who_waits_too_long_is_told_whether_it_was_their_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is being compiled may be too much; one that waits behind others may be good."""
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.0)
    num_begun, may_compile = threading.Semaphore(0), threading.Event()
    to_grammar = module.to_grammar

    def wait(guide: Guide) -> str:
        num_begun.release()
        assert may_compile.wait(WAIT)
        return to_grammar(guide)

    monkeypatch.setattr(module, "to_grammar", wait)
    own = GuideCompiler(TOKENIZER.read_text, VOCAB_SIZE, 0)
    begun = [own.start(Guide(GuideType.REGEX, text)) for text in "ab"]
    for _ in begun:
        assert num_begun.acquire(timeout=WAIT)
    waiting = own.start(Guide(GuideType.REGEX, "c"))
    for pending in begun:
        with pytest.raises(InvalidRequest, match="not compiled within 0 s; simplify it"):
            pending.take()
    with pytest.raises(CapacityExceeded, match="could not be begun within 0 s: other grammars"):
        waiting.take()
    may_compile.set()
    own.close()


@pytest.mark.parametrize("error", [ValueError("secret"), MemoryError(), BaseException("secret")])
def test_a_failure_of_ours_is_told_and_not_kept(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A BaseException is what a panic of a library in Rust is; nobody sees the grammar."""
    guide = Guide(GuideType.REGEX, "secret")
    own = GuideCompiler(TOKENIZER.read_text, VOCAB_SIZE, 0)

    def fail(_: Guide) -> str:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, "to_grammar", fail)
        for _ in range(2):
            with pytest.raises(ServingError, match="could not be compiled") as refusal:
                compile_guide(own, guide)
            assert type(refusal.value) is ServingError, "neither the request's fault nor the load's"
            assert "secret" not in str(refusal.value)
    assert type(error).__name__ in caplog.text
    assert "in fail" in caplog.text, "where it was raised"
    assert "secret" not in caplog.text
    assert not compile_guide(own, guide).is_stopped(), "the next one who sends it gets it"
    own.close()


def test_who_sends_a_bad_grammar_again_is_not_kept(compiler: GuideCompiler) -> None:
    """Its error is kept; with it would be the frames of all who got it, and their requests."""

    class Request:
        """What the frame of who asks holds."""

    def ask() -> weakref.ref[Request]:
        request = Request()
        with pytest.raises(InvalidRequest, match="unclosed group"):
            compile_guide(compiler, Guide(GuideType.REGEX, "kept("))
        return weakref.ref(request)

    asked = [ask() for _ in range(3)]
    gc.collect()
    assert [each() for each in asked] == [None] * 3


def test_a_tokenizer_that_cannot_be_used_is_told() -> None:
    own = GuideCompiler(lambda: "{}", VOCAB_SIZE, 0)
    with pytest.raises(InvalidRequest, match="cannot be used with the tokenizer of this model"):
        compile_guide(own, Guide(GuideType.JSON))
    own.close()


RUBBISH = st.text(alphabet='ab()[]{}\\,019|*+?^$:="# \nroot', max_size=60)
SCHEMAS = st.recursive(
    st.sampled_from([{"type": "string"}, {"type": "integer"}, {}, {"const": 1}, {"type": "zzz"}]),
    lambda inner: st.one_of(
        st.builds(lambda each: {"type": "array", "items": each}, inner),
        st.builds(lambda each: {"anyOf": [each, {"type": "null"}]}, inner),
        st.builds(
            lambda a, b: {"properties": {"a": a}, "required": ["a"], "allOf": [b]}, inner, inner
        ),
    ),
    max_leaves=6,
)


@pytest.mark.case(122)
@fuzzing
@given(
    st.one_of(
        st.builds(Guide, st.sampled_from(list(GuideType)[1:]), RUBBISH),
        st.builds(lambda schema: Guide(GuideType.JSON_SCHEMA, json.dumps(schema)), SCHEMAS),
        st.builds(lambda text: Guide(EBNF, "root ::= " + text), RUBBISH),
    )
)
def test_whatever_is_sent_compiles_or_is_refused(compiler: GuideCompiler, guide: Guide) -> None:
    start = time.process_time()  # of all threads
    with suppress(InvalidRequest):
        compile_guide(compiler, guide)
    assert time.process_time() - start < 5


@pytest.mark.case(122)
@fuzzing
@given(RUBBISH)
def test_the_converter_refuses_in_one_way_only(text: str) -> None:
    with suppress(InvalidRequest):
        assert "start: " in to_lark("root ::= " + text)
