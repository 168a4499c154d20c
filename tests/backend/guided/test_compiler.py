"""Guides become matchers, each once, or errors, in bounded time and memory."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.context_free import CHARACTERS, Grammar, random_rules
from support.fuzzing import fuzzing
from support.guided_answers import (
    EBNF,
    REGEX,
    SCHEMA,
    VOCAB_SIZE,
    Answer,
    accepts,
    compile_guide,
    make_compiler,
    tokens,
)
from support.manager_harness import WAIT, Recorder, request, running
from support.triton_harness import wait_until

from inflight_backend.errors import (
    CapacityExceeded,
    ConfigurationError,
    InvalidRequest,
    ServingError,
)
from inflight_backend.guided import compiler as module
from inflight_backend.guided.compiler import GuideCompiler, GuidedDecodingConfig, GuideService
from inflight_backend.guided.guide import Guide, GuideType
from inflight_backend.manager.gpt_manager import GptManager
from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_backend.requests.guides import read_guide
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_server.serve.settings import DEMO_MODEL

JSON = Guide(GuideType.JSON)


def fields(count: int, field: dict[str, Any]) -> dict[str, Any]:
    names = [f"f{i}" for i in range(count)]
    return {"type": "object", "properties": dict.fromkeys(names, field), "required": names[:1]}


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
        # Lines: a rule goes on until the next one begins.
        ('root ::= "a"\n  "b"\n', "ab", "a"),
        ('root ::=\n  "a" |\n  "b"', "b", "ab"),
        ('root\n  ::= "a"\n  | x\nx ::= "b"', "b", "a\n"),
        ('root ::= x\r\nx ::= "a"\r\n  | "b"\r\n', "b", "a\r"),
        ('root ::= (  # first\n  "a"  # "quoted"\n  x\n)\n\n# second\nx ::= "b"', "ab", "a"),
        ('x ::= "" | [ ]\nroot ::= x [a]', "a", "  a"),
        # Names that the converter would make one, and one that Lark has.
        (
            'root ::= Ab ab a-b a_b\nAb ::= "1"\nab ::= "2"\na-b ::= "3"\na_b ::= "4"',
            "1234",
            "1222",
        ),
        ('root ::= start\nstart ::= "a"', "a", "b"),
        # Escapes of xgrammar and of llama.cpp.
        (r'root ::= "\/\'\?\t" [\^\$\.\*\+\?\(\)\{\}\|\/]+', "/'?\t^$.*+?(){}|/", "/'?\ta"),
        (r"root ::= [^\r\n\x0b\x85\u2028]+", "aé", "a\x85"),
        (r'root ::= "\xE9\xff"', "éÿ", "é"),
        (r'root ::= [\0-\x1F] "\e\b\f\v\a"', "\x01\x1b\b\f\v\a", "a\x1b\b\f\v\a"),
        ('root ::= "a" [^] "b"', "a\nb", "ab"),
        ('root ::= "a"{0} "b"{0,0} "c"{2, 2}', "cc", "acc"),
        # Literals and classes that begin alike.
        ('root ::= "(" root ")" | "if " root | [a-z]+ ";"', "(if iffy;)", "(if )"),
        ('root ::= "(" root ")" | [a-z] ("<" "=x" | "<=" "y" | "<")', "(a<=x)", "(a<=)"),
        ('root ::= root "+" n | n\nn ::= [0-9]+ "!"?', "1+22!+3", "1!!"),
    ],
)
def test_ebnf(grammar: str, good: str, bad: str) -> None:
    assert accepts(Guide(EBNF, grammar), good)
    assert not accepts(Guide(EBNF, grammar), bad)


@pytest.mark.slow
@fuzzing
@given(st.integers(0, 10**9))
def test_an_ebnf_grammar_allows_what_it_derives_and_nothing_else(seed: int) -> None:
    """After every prefix, against Earley's algorithm; grammars whose parts begin alike."""
    source = random.Random(seed)
    rules = random_rules(source)
    grammar, text = Grammar(rules), "\n".join(f"{name} ::= {each}" for name, each in rules.items())
    assume(grammar.is_whole)
    try:
        Answer(Guide(EBNF, text))
    except InvalidRequest:  # xgrammar crashes on a rule that repeats itself
        assume(False)
    for _ in range(2):
        chart, prefix = grammar.begin(), ""
        for _ in range(6):
            derived = grammar.next(chart)
            assert accepts(Guide(EBNF, text), prefix) == grammar.may_end(chart), (text, prefix)
            allowed = _allowed_characters(Guide(EBNF, text), prefix)
            assert allowed == derived, (text, prefix)
            if not derived:
                break
            prefix += source.choice(sorted(derived))
            chart = grammar.read(chart, prefix[-1])


def _allowed_characters(guide: Guide, prefix: str) -> set[str]:
    found = set()
    for character in CHARACTERS:
        answer = Answer(guide)
        for token in tokens(prefix + character):
            if token not in answer.allowed():
                break
            answer.add(token)
        else:
            found.add(character)
    return found


PRICE = {"type": "number", "minimum": 0, "multipleOf": 0.01}
WORDS = {"type": "string", "pattern": r"^(?:\S+\s+){0,199}\S+$"}
HOST = {"type": "string", "pattern": r"^([a-z0-9-]{1,63}\.){1,127}[a-z]{2,63}$"}
NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/n"}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (fields(3, PRICE), '{"f0":0.25,"f2":7}', '{"f0":0.255}'),
        (fields(2, HOST), '{"f0":"a.bc"}', '{"f0":".bc"}'),
        (fields(40, WORDS), '{"f0":"a b"}', '{"f0":" b"}'),
        (fields(20, {"type": "integer", "description": "d" * 11_000}), '{"f0":1}', '{"f0":"1"}'),
        # Names that are no keywords rule nothing out: tools write their own.
        ({"type": "integer", "example": 5, "x-order": 1, "multipleof": 3}, "4", "a"),
        # White space comes to an end.
        (fields(1, {"type": "integer"}), '{ "f0":1}', "{" + " " * 200 + '"f0":1}'),
    ],
    ids=["prices", "hosts", "words", "descriptions", "unknown names", "white space"],
)
@pytest.mark.case(54)
def test_schemas(schema: dict[str, Any], good: str, bad: str) -> None:
    assert accepts(Guide(SCHEMA, json.dumps(schema)), good)
    assert not accepts(Guide(SCHEMA, json.dumps(schema)), bad)


def test_json_is_an_object_or_an_array() -> None:
    blanks = "{" + " " * 200 + "}"
    for text, is_good in (('{"a": [1, null]}', 1), ("[]", 1), ("3", 0), ("{", 0), (blanks, 0)):
        assert accepts(JSON, text) is bool(is_good)


@pytest.mark.case(51)
def test_a_schema_may_refer_to_itself_unless_it_says_nothing_else() -> None:
    schema = Guide(SCHEMA, json.dumps({"$ref": "#/$defs/n", "$defs": {"n": NODE}}))
    assert accepts(schema, '{"next":' * 40 + "{}" + "}" * 40)
    assert not accepts(schema, '{"next": 3}')
    with pytest.raises(InvalidRequest, match="'guided_decoding_guide'"):
        compile_guide(Guide(SCHEMA, '{"$ref": "#"}')).take()


INTEGERS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "integer"}}
ONE: dict[str, Any] = {"type": "integer"}
KEYWORDS: list[tuple[dict[str, Any], str]] = [
    ({**INTEGERS, "minProperties": 1}, "{}"),
    ({**INTEGERS, "maxProperties": 1}, '{"a":1,"b":2}'),
    ({**INTEGERS, "required": ["a"]}, "{}"),
    ({**INTEGERS, "propertyNames": {"pattern": "^b"}}, '{"a":1}'),
    ({**INTEGERS, "dependencies": {"a": ["b"]}}, '{"a":1}'),
    ({**INTEGERS, "dependentRequired": {"a": ["b"]}}, '{"a":1}'),
    ({**INTEGERS, "dependentSchemas": {"a": {"required": ["b"]}}}, '{"a":1}'),
    ({"patternProperties": {"^a": ONE}, "unevaluatedProperties": False}, '{"b":1}'),
    ({"patternProperties": {"^a": ONE}, "additionalProperties": False}, '{"b":1}'),
    ({"properties": {"a": ONE}}, '{"a":""}'),
    ({"type": "array", "items": ONE}, '[""]'),
    ({"type": "array", "minItems": 1}, "[]"),
    ({"type": "array", "items": ONE, "maxItems": 1}, "[1,2]"),
    ({"type": "array", "prefixItems": [ONE], "items": False}, "[1,2]"),
    ({"type": "array", "items": [ONE], "additionalItems": False}, "[1,2]"),
    ({"type": "array", "prefixItems": [ONE], "unevaluatedItems": False}, "[1,2]"),
    ({"type": "array", "items": ONE, "uniqueItems": True}, "[1,1]"),
    ({"type": "array", "contains": ONE}, '[""]'),
    ({"type": "array", "items": ONE, "contains": ONE, "minContains": 2}, "[1]"),
    ({"type": "array", "items": ONE, "contains": ONE, "maxContains": 1}, "[1,1]"),
    ({"type": "string", "minLength": 2}, '"a"'),
    ({"type": "string", "maxLength": 1}, '"ab"'),
    ({"type": "string", "pattern": "^a$"}, '"b"'),
    ({"type": "string", "format": "date"}, '"a"'),
    ({**ONE, "minimum": 3}, "2"),
    ({**ONE, "minimum": 3, "exclusiveMinimum": True}, "3"),  # of draft 4
    ({**ONE, "exclusiveMinimum": 3}, "3"),
    ({**ONE, "maximum": 3}, "4"),
    ({"type": "number", "exclusiveMaximum": 3}, "3.0"),
    ({**ONE, "multipleOf": 3}, "4"),
    ({"enum": [1, "a"]}, "2"),
    ({"const": {"a": 1}}, '{"a":2}'),
    ({"allOf": [ONE, {"minimum": 3}]}, "2"),
    ({"anyOf": [ONE, {"type": "string"}], "minimum": 3}, "2"),
    ({"oneOf": [ONE, {"type": "string"}]}, "true"),
    ({"not": ONE}, "1"),
    ({"if": ONE, "then": {"minimum": 3}}, "1"),
    ({"$ref": "#/$defs/a", "$defs": {"a": ONE}, "minimum": 3}, "2"),
    ({"$dynamicRef": "#a"}, "1"),
    ({"$recursiveRef": "#"}, "1"),
]


@pytest.mark.case(52)
@pytest.mark.parametrize(("schema", "bad"), KEYWORDS, ids=[str(schema) for schema, _ in KEYWORDS])
def test_every_keyword_is_followed_or_refused(schema: dict[str, Any], bad: str) -> None:
    """Those of drafts 4 to 2020-12 that rule anything out."""
    refusal = ""
    try:
        is_passed_over = accepts(Guide(SCHEMA, json.dumps(schema)), bad)
    except InvalidRequest as error:
        is_passed_over, refusal = False, str(error)
    assert not is_passed_over
    if refusal:
        assert "Unimplemented keys: " in refusal
        assert any(f'"{keyword}"' in refusal for keyword in schema)


@pytest.mark.fast(8)
@pytest.mark.parametrize(
    ("guide_type", "grammar", "message"),
    [
        (EBNF, 'answer ::= "a"', 'The root rule with name "root" is not found'),
        (EBNF, "root ::= a", 'Rule "a" is not defined'),
        (EBNF, r"root ::= [\d]", "Character class escape is not supported"),
        (EBNF, "start: /a/", "is no ebnf_grammar that can be used: EBNF lexer error at line 1"),
        (EBNF, "root ::= root", "there is no text that it allows"),
        (EBNF, 'root ::= [a-b] "c"{3,2}', "Lower bound is larger than upper bound"),
        (REGEX, "a(?=b)", "look-around"),
        (REGEX, "(a)\\1", "backreferences are not supported"),
        (REGEX, "a?" * 20_000, "takes too much time or memory to compile; simplify it"),
        (REGEX, "[", "is no regex that can be used: invalid regex"),
        (REGEX, r"[^\x00-\U0010FFFF]", "is no regex that can be used: there is no text"),
        (SCHEMA, '{"type": "nothing"}', "can be used: Invalid type: nothing"),
        (SCHEMA, '{"not": {}}', 'Unimplemented keys: ["not"]'),
        (SCHEMA, '{"$ref": "http://x/y"}', "Default retriever does not fetch"),
        (SCHEMA, '{"enum": []}', "Unsatisfiable schema"),
        (SCHEMA, '{"oneOf": [{"minimum": 1}, {"maximum": 9}]}', "two may fit one value; write"),
    ],
)
@pytest.mark.case(46, 52, 53)
def test_refused_by_name(guide_type: GuideType, grammar: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_guide(Guide(guide_type, grammar)).take()
    assert message in str(caught.value)
    assert "'guided_decoding_guide'" in str(caught.value)
    for internal in ("llguidance", "coerce", ".cc:"):  # our grammar, options and places in code
        assert internal not in str(caught.value)


@pytest.mark.case(47, 50)
@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        ("foo**", "foooo", "bar"),
        ("(a+)+$", "a" * 4000, "a" * 4000 + "b"),
        ("(a|aa)+b", "a" * 4000 + "b", "a" * 4000),
    ],
)
def test_a_regex_takes_linear_time(regex: str, good: str, bad: str) -> None:
    """Backtracking would take longer than the universe has lasted."""
    began = time.monotonic()
    assert accepts(Guide(REGEX, regex), good)
    assert not accepts(Guide(REGEX, regex), bad)
    assert time.monotonic() - began < WAIT


MULTIPLES = [{"type": "integer", "multipleOf": each} for each in (99_991, 99_989, 997, 991)]
DOUBLED = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40))
ATTACKS: list[tuple[GuideType, Any]] = [
    (REGEX, "((a{1000}){1000}){1000}"),
    (REGEX, "((a{1,999}b?){1,999}c?){1,999}"),
    (REGEX, "(.*a.*b)" * 900),
    (SCHEMA, {"allOf": MULTIPLES[:2]}),
    (SCHEMA, {"allOf": MULTIPLES[2:]}),
    (SCHEMA, {"allOf": [{"pattern": f".*a.{{{i}}}b.*"} for i in range(16)]}),
    (SCHEMA, {"allOf": [{"pattern": f".*a.{{{i}}}b.*"} for i in range(1000, 1008)]}),
    (SCHEMA, {"enum": [f"k{i}" for i in range(20_000)]}),
    (SCHEMA, {"type": "array", "minItems": 10**9}),
    (SCHEMA, {"allOf": [{"anyOf": [fields(i + 1, PRICE) for i in range(4)]}] * 12}),
    (EBNF, "root ::= " + "(" * 60 + '"a"' + ")*" * 60),
    (EBNF, 'root ::= "a"{1,1000000000}'),
    (EBNF, 'root ::= "a" r0\nr0 ::= (r0){0,2}'),  # its compilation fills the stack
    (
        EBNF,
        "root ::= r0\n"
        + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40))
        + '\nr40 ::= "a"',
    ),
    (EBNF, "root ::= " + " ".join("[a-z]?" for _ in range(1000))),
    (EBNF, "root ::= " + " | ".join(f"[{chr(0x4E00 + 2 * i)}!]" for i in range(7000))),
]


@pytest.mark.fast(3)
@pytest.mark.case(55)
@pytest.mark.parametrize(("guide_type", "guide"), ATTACKS, ids=range(len(ATTACKS)))
def test_a_guide_that_means_harm_compiles_or_is_refused_in_seconds(
    guide_type: GuideType, guide: Any
) -> None:
    text = guide if isinstance(guide, str) else json.dumps(guide)
    start = time.process_time()  # of all threads
    with suppress(InvalidRequest):
        Answer(Guide(guide_type, text)).allowed()
    assert time.process_time() - start < 8


@pytest.mark.case(55)
@pytest.mark.parametrize(
    ("guide", "text"),
    [
        (Guide(EBNF, 'root ::= "a" root "' + "b" * 4000 + '" | "c"'), "a" * 300 + "c"),
        (Guide(EBNF, 'root ::= r{20}\nr ::= "' + "a" * 2500 + '"'), "a" * 40),
        (Guide(SCHEMA, json.dumps({"const": "a" * 60_000})), '"' + "a" * 40),
    ],
)
def test_a_token_costs_little_however_much_is_bound_to_follow(guide: Guide, text: str) -> None:
    """On the loop's thread: a walk through all that follows took minutes, 50 and 35 ms a token."""
    answer = Answer(guide)
    began = time.process_time()
    for token in tokens(text):
        assert token in answer.allowed()
        answer.add(token)
    assert time.process_time() - began < 1.0  # 0.05


CHAINS = """
import json, sys, time
from inflight_backend.guided import compiler as module
from inflight_backend.guided.compiler import GuideCompiler
from inflight_backend.guided.guide import Guide, GuideType
from inflight_server.serve.settings import DEMO_MODEL

module.COMPILE_SECONDS = 100.0  # 2 are needed
compiler = GuideCompiler((DEMO_MODEL / "tokenizer.json").read_text, 270, 1)
for link in ('{"properties":{"a":%s}}', '{"anyOf":[%s,{"type":"null"}]}', '{"allOf":[%s]}'):
    count = 125_000 // (len(link) + 30)
    parts = [f'"d{i}":' + link % f'{{"$ref":"#/$defs/d{i + 1}"}}' for i in range(count)]
    schema = f'{{"$ref":"#/$defs/d0","$defs":{{{",".join(parts)},"d{count}":{{}}}}}}'
    pending = compiler.start(Guide(GuideType.JSON_SCHEMA, schema))
    while not pending.is_settled:
        time.sleep(0.01)
    print(len(schema), pending.take().is_error())
compiler.close()
"""


@pytest.mark.slow
def test_a_long_chain_of_references_does_not_end_the_process() -> None:
    """The library calls itself for each: its stack was full, which nothing can catch."""
    done = subprocess.run(
        [sys.executable, "-c", CHAINS], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("False") == 3


@pytest.mark.case(55)
def test_equal_guides_are_compiled_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    to_grammar = module.to_grammar

    def note(guide: Guide) -> str:
        compiled.append(guide.text)
        return to_grammar(guide)

    monkeypatch.setattr(module, "MAX_CACHED", 2)
    monkeypatch.setattr(module, "to_grammar", note)
    own = make_compiler()
    for text in "aabbacab":
        answer = Answer(Guide(REGEX, text), own)
        answer.add(tokens(text)[0])
        assert Answer(Guide(REGEX, text), own).allowed() == {tokens(text)[0]}, "a matcher each"
    assert compiled == ["a", "b", "c", "b"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hangs", "crashes"])
def test_a_compilation_that_hangs_or_crashes_ends_its_request_only(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried in a child process, so neither its thread nor the server is lost."""
    server, match = os.getpid(), module._match

    def fail(*args: Any) -> Any:
        if os.getpid() != server:
            threading.Event().wait() if fault == "hangs" else os.abort()
        return match(*args)

    own = make_compiler()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_match", fail)
        patch.setattr(module, "COMPILE_SECONDS", 0.5 if fault == "hangs" else WAIT)
        for text in "abc":  # more than there are threads
            with pytest.raises(
                InvalidRequest, match=r"not compiled within|too much time or memory"
            ):
                compile_guide(Guide(REGEX, text), own).take()
    compile_guide(Guide(REGEX, "d"), own).take()


def test_a_compiled_grammar_has_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COMPILED_BYTES", 2**20)
    large = Guide(EBNF, 'root ::= "' + "a" * 60_000 + '"')
    with pytest.raises(InvalidRequest, match="too much time or memory"):
        compile_guide(large, make_compiler()).take()


def test_a_request_that_waits_too_long_is_told_whether_its_own_guide_took_long(
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
    own = make_compiler()
    begun = [own.start(Guide(REGEX, text)) for text in "ab"]
    for _ in begun:
        assert num_begun.acquire(timeout=WAIT)
    waiting = own.start(Guide(REGEX, "c"))
    for pending in begun:
        with pytest.raises(InvalidRequest, match="not compiled within 0 s; simplify it"):
            pending.take()
    with pytest.raises(CapacityExceeded, match="could not be begun within 0 s: other grammars"):
        waiting.take()
    may_compile.set()
    own.close()


def regex(number: int) -> Guide:
    return Guide(REGEX, f"a{{{number}}}")


class SlowCompiler:
    """Its grammars are compiled when ``may_compile`` is set; ``compiled`` has their texts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_compile = threading.Event()
        self.compiled: list[str] = []
        self._to_grammar = module.to_grammar
        monkeypatch.setattr(module, "to_grammar", self._compile)
        self.own = make_compiler()

    def _compile(self, guide: Guide) -> str:
        self.compiled.append(guide.text)
        assert self.may_compile.wait(WAIT)
        return self._to_grammar(guide)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowCompiler]:
    """All its threads are at work."""
    made = SlowCompiler(monkeypatch)
    held = [made.own.start(Guide(REGEX, text)) for text in "xy"]
    wait_until(lambda: sorted(made.compiled) == ["x", "y"])
    yield made
    made.may_compile.set()
    made.own.close()
    del held


@pytest.mark.slow
@pytest.mark.case(55)
def test_a_bounded_number_waits(slow: SlowCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 20)
    monkeypatch.setattr(module, "MAX_CACHED", 9)
    waiting = [slow.own.start(regex(number)) for number in range(module.MAX_WAITING)]
    with pytest.raises(CapacityExceeded, match=f"'guided_decoding_guide' .* {module.MAX_WAITING} "):
        slow.own.start(regex(-1))
    assert not slow.own.start(regex(5)).is_settled, "one that waits already"
    assert not slow.own.start(Guide(REGEX, "x")).is_settled, "one that is compiled now"
    del waiting[7]
    kept = slow.own.start(Guide(REGEX, "z"))
    slow.may_compile.set()
    wait_until(lambda: kept.is_settled)
    kept.take()
    wait_until(lambda: len(slow.compiled) == 2 + module.MAX_WAITING)
    assert regex(7).text not in slow.compiled
    assert len(slow.own._compiled) == module.MAX_CACHED


def test_what_nobody_waits_for_any_longer_is_not_compiled(slow: SlowCompiler) -> None:
    """Its requests were refused, stopped or cancelled: ten times as many as may wait."""
    for number in range(10 * module.MAX_WAITING):
        slow.own.start(regex(number))
    again, last = slow.own.start(regex(0)), slow.own.start(Guide(REGEX, "z"))
    slow.may_compile.set()
    wait_until(lambda: again.is_settled and last.is_settled)
    assert slow.compiled[2:] == [regex(0).text, "z"]
    assert len(slow.own._waiting) == 0


@pytest.mark.parametrize("error", [ValueError("secret"), MemoryError(), BaseException("secret")])
def test_a_failure_of_ours_is_told_and_not_kept(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A BaseException is what a panic of a library in Rust is; nobody sees the grammar."""
    guide = Guide(REGEX, "secret")
    own = make_compiler()

    def fail(_: Guide) -> str:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, "to_grammar", fail)
        for _ in range(2):
            with pytest.raises(ServingError, match="could not be compiled") as refusal:
                compile_guide(guide, own).take()
            assert type(refusal.value) is ServingError, "neither the request's fault nor the load's"
            assert "secret" not in str(refusal.value)
    assert type(error).__name__ in caplog.text
    assert "in fail" in caplog.text, "where it was raised"
    assert "secret" not in caplog.text
    compile_guide(guide, own).take()  # the next request that sends it gets it
    own.close()


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


def test_a_tokenizer_that_cannot_be_used_is_told() -> None:
    own = GuideCompiler(lambda: "{}", VOCAB_SIZE, 0)
    with pytest.raises(InvalidRequest, match="cannot be used with the tokenizer of this model"):
        compile_guide(JSON, own).take()


@pytest.mark.parametrize("missing", ["llguidance", "xgrammar"])
def test_without_a_library_its_guides_are_refused_and_everything_else_runs(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == missing else name)
    made = GuideService(GuidedDecodingConfig(), DEMO_MODEL, 270, can_mask=True)
    if missing == "xgrammar":
        with pytest.raises(InvalidRequest, match=r"pip install '\.\[guided\]'"):
            made.start(Guide(EBNF, 'root ::= "a"'), lambda: None)
        made.start(JSON, lambda: None)
        return
    with pytest.raises(InvalidRequest, match="llguidance is not installed"):
        made.start(JSON, lambda: None)
    with pytest.raises(ConfigurationError, match="guided_decoding_backend is llguidance"):
        GuideService(GuidedDecodingConfig("llguidance"), DEMO_MODEL, 270, can_mask=True)
    with pytest.raises(ConfigurationError, match="choose one of auto, llguidance, none"):
        GuidedDecodingConfig("xgrammar")


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


@pytest.mark.slow
@pytest.mark.case(122)
@fuzzing
@given(
    st.one_of(
        st.builds(Guide, st.sampled_from(list(GuideType)[1:]), RUBBISH),
        st.builds(lambda schema: Guide(SCHEMA, json.dumps(schema)), SCHEMAS),
        st.builds(lambda text: Guide(EBNF, "root ::= " + text), RUBBISH),
    )
)
def test_whatever_is_sent_compiles_or_is_refused(guide: Guide) -> None:
    sent: dict[str, Any] = {"guide_type": guide.type.value, "guide": guide.text}
    start = time.process_time()  # of all threads
    with suppress(InvalidRequest):
        request = InferenceRequest.from_tokens(
            1, [1], 1, **{f"guided_decoding_{name}": value for name, value in sent.items()}
        )
        read = read_guide(request)
        assert read is not None
        compile_guide(read).take()
    assert time.process_time() - start < 5


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


@pytest.mark.slow
@pytest.mark.case(55)
def test_a_hundred_grammars_at_once_beside_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream gets a token in every iteration, also while all of them wait; all are answered,
    and no more are kept than may be."""
    prompt, num_tokens = tokens("one two"), 200
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
