"""What guides allow, by the tokens that may come next, which are refused, and what they cost."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import fuzzing
from support.guided_answers import (
    EBNF,
    JSON,
    REGEX,
    SCHEMA,
    TAG,
    Answer,
    accepts,
    compile_guide,
    make_service,
    tokens,
)
from support.manager_harness import WAIT

from inflight_backend.errors import InvalidRequest
from inflight_backend.guided import matchers as module
from inflight_backend.guided.guide import Guide, GuideType
from inflight_backend.requests.guides import read_guide
from inflight_backend.requests.inference_request import InferenceRequest


def fields(count: int, field: dict[str, Any]) -> dict[str, Any]:
    names = [f"f{i}" for i in range(count)]
    return {"type": "object", "properties": dict.fromkeys(names, field), "required": names[:1]}


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ("root ::= [0-9]+", "2025", "x"),
        ('root ::= a "b"\na ::= [a-z]*  # greedy would swallow b', "aab", "aa"),
        ('root ::= (("a" | "b"){2}){2,3}', "abab", "abaab"),
        ('root ::= root "b" | "a"', "abb", "b"),
        (r'root ::= "\u0041\x42\U00000043\"\\"', 'ABC"\\', "ABC"),
        ("root ::= [^a-y]+", "z#/", "b"),
        ('root ::= "é#" x_1\nx_1 ::= "]"', "é#]", "é]"),
        ('root ::= x\r\nx ::= "a"\r\n  | "b"\r\n', "b", "a\r"),
        (r"root ::= [^\r\n\x0b\x85\u2028]+", "aé", "a\x85"),
        (r'root ::= [\0-\x1F] "\e\b\f\v\a"', "\x01\x1b\b\f\v\a", "a\x1b\b\f\v\a"),
        # Literals and classes that begin alike.
        ('root ::= "(" root ")" | "if " root | [a-z]+ ";"', "(if iffy;)", "(if )"),
        ('root ::= "(" root ")" | [a-z] ("<" "=x" | "<=" "y" | "<")', "(a<=x)", "(a<=)"),
    ],
)
def test_ebnf(grammar: str, good: str, bad: str) -> None:
    assert accepts(Guide(EBNF, grammar), good)
    assert not accepts(Guide(EBNF, grammar), bad)


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
        (fields(1, {"type": "integer"}), '{\r\n\t"f0":\n1\n}', '{\n\n"f0":1}'),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
            '{"next":' * 40 + "{}" + "}" * 40,
            '{"next": 3}',
        ),
    ],
    ids=[
        *("prices", "hosts", "words", "descriptions", "unknown names"),
        *("white space", "empty lines", "recursion"),
    ],
)
@pytest.mark.case(51, 54)
def test_schemas(schema: dict[str, Any], good: str, bad: str) -> None:
    assert accepts(Guide(SCHEMA, json.dumps(schema)), good)
    assert not accepts(Guide(SCHEMA, json.dumps(schema)), bad)


def test_json_is_an_object_or_an_array() -> None:
    blanks = "{" + " " * 200 + "}"
    for text, is_good in (('{"a": [1, null]}', 1), ("[]", 1), ("3", 0), ("{", 0), (blanks, 0)):
        assert accepts(JSON, text) is bool(is_good)


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


@pytest.mark.fast(20)
@pytest.mark.case(52)
@pytest.mark.parametrize(("schema", "bad"), KEYWORDS, ids=[str(schema) for schema, _ in KEYWORDS])
def test_every_keyword_is_followed_or_refused(schema: dict[str, Any], bad: str) -> None:
    """Those of drafts 4 to 2020-12 that rule anything out."""
    refusal = ""
    try:
        is_ignored = accepts(Guide(SCHEMA, json.dumps(schema)), bad)
    except InvalidRequest as error:
        is_ignored, refusal = False, str(error)
    assert not is_ignored
    if refusal:
        assert "Unimplemented keys: " in refusal
        assert any(f'"{keyword}"' in refusal for keyword in schema)


OLDER = {
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.mark.parametrize(
    ("content", "good", "bad"),
    [
        (OLDER, "so <f=a>12</f> and", "so <f=a>x</f>"),
        (OLDER, "", "<f=b>1</f>"),
        (
            {"format": {"type": "regex", "pattern": r"a/b\/c[/]\\"}},
            "a/b/c/\\",
            "a/b",
        ),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "any_text"},
                        {"type": "const_string", "value": ". "},
                        {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ">"},
                    ],
                }
            },
            "a.b. <c>",
            "a.b. <c> ",
        ),
    ],
)
def test_structural_tags(content: dict[str, Any], good: str, bad: str) -> None:
    """Those of tools are in tests/openai/test_tools.py."""
    guide = Guide(TAG, json.dumps(content))
    assert accepts(guide, good)
    assert not accepts(guide, bad)


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
        (
            REGEX,
            "a?" * 20_000,
            "takes more than 0.2 s of processor time to compile, the limit guided",
        ),
        (REGEX, "[", "is no regex that can be used: invalid regex"),
        (REGEX, r"[^\x00-\U0010FFFF]", "is no regex that can be used: there is no text"),
        (SCHEMA, '{"type": "nothing"}', "can be used: Invalid type: nothing"),
        (SCHEMA, '{"not": {}}', 'Unimplemented keys: ["not"]'),
        (SCHEMA, '{"$ref": "http://x/y"}', "Default retriever does not fetch"),
        (SCHEMA, '{"enum": []}', "Unsatisfiable schema"),
        (SCHEMA, '{"$ref": "#"}', "'guided_decoding_guide'"),
        (SCHEMA, '{"oneOf": [{"minimum": 1}, {"maximum": 9}]}', "two may fit one value; write"),
        (TAG, "{}", "is no structural_tag: format: expected an object with a type"),
        (TAG, '{"format": {"type": "grammar"}}', "format.type: expected one of const_string, "),
        (TAG, '{"format": {"type": "or", "elements": []}}', "format.elements: expected a list"),
        (TAG, '{"format": {"type": "regex", "pattern": 5}}', "format.pattern: expected a string"),
        (
            TAG,
            '{"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}',
            "format.tags: each tag begins with one of the triggers",
        ),
        (
            TAG,
            '{"format": {"type": "json_schema", "json_schema": {"not": {}}}}',
            'Unimplemented keys: ["not"]',
        ),
    ],
)
@pytest.mark.case(46, 51, 52, 53)
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
    (EBNF, f'root ::= r0\n{DOUBLED}\nr40 ::= "a"'),
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
    assert time.process_time() - start < 1


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
    assert all(answer.goes_on(token) for token in tokens(text))
    assert time.process_time() - began < 1.0  # 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "link", ['{"properties":{"a":%s}}', '{"anyOf":[%s,{"type":"null"}]}', '{"allOf":[%s]}']
)
def test_a_long_chain_of_references_is_compiled(link: str) -> None:
    """The library calls itself for each: its stack was full, which ends the process."""
    count = 125_000 // (len(link) + 30)
    parts = [f'"d{i}":' + link % f'{{"$ref":"#/$defs/d{i + 1}"}}' for i in range(count)]
    schema = f'{{"$ref":"#/$defs/d0","$defs":{{{",".join(parts)},"d{count}":{{}}}}}}'
    assert Answer(Guide(SCHEMA, schema), make_service(compile_seconds=10.0)).allowed()


def test_a_compiled_grammar_has_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COMPILED_BYTES", 2**20)
    large = Guide(EBNF, 'root ::= "' + "a" * 60_000 + '"')
    with pytest.raises(
        InvalidRequest, match=r"has \d{8} bytes when compiled; the limit is 1048576"
    ):
        compile_guide(large, make_service(compile_seconds=10.0)).take()


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
def test_any_guide_compiles_or_is_refused(guide: Guide) -> None:
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
