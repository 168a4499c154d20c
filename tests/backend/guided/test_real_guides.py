"""Guides as people write them: found in public collections of schemas and grammars, where bounds
and a converter that its authors' own examples had passed refused them, or worse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from inflight_backend.errors import InvalidRequest
from inflight_backend.guided.bounds import check_schema
from inflight_backend.guided.compiler import GuideCompiler
from inflight_backend.guided.guide import Guide, GuideType
from inflight_server.serve.settings import DEMO_MODEL

TOKENIZER = DEMO_MODEL / "tokenizer.json"
EBNF, SCHEMA = GuideType.EBNF_GRAMMAR, GuideType.JSON_SCHEMA
WORDS = r"^(?:\S+\s+){0,199}\S+$"
HOST = r"^([a-z0-9-]{1,63}\.){1,127}[a-z]{2,63}$"
PRICE = {"type": "number", "minimum": 0, "multipleOf": 0.01}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GuideCompiler]:
    made = GuideCompiler(TOKENIZER.read_text, 270, 0)
    yield made
    made.close()


def accepts(compiler: GuideCompiler, guide: Guide, text: str) -> bool:
    """True if ``text``, and an end behind it, is what the guide allows."""
    pending = compiler.start(guide)
    while not pending.is_settled:
        pass
    matcher = pending.take()
    ids = Tokenizer.from_file(str(TOKENIZER)).encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def fields(count: int, field: dict[str, Any]) -> dict[str, Any]:
    names = [f"f{i}" for i in range(count)]
    return {"type": "object", "properties": dict.fromkeys(names, field), "required": names[:1]}


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        # Lines: a rule goes on until the next one begins.
        ('root ::= "a"\n  "b"\n', "ab", "a"),
        ('root ::=\n  "a" |\n  "b"', "b", "ab"),
        ('root\n  ::= "a"\n  | x\nx ::= "b"', "b", "a\n"),
        ('root ::= x\r\nx ::= "a"\r\n  | "b"\r\n', "b", "a\r"),
        ('root ::= (  # first\n  "a"  # "quoted"\n  x\n)\n\n# second\nx ::= "b"', "ab", "a"),
        ("x ::= | [ ]\nroot ::= x [a]", "a", "  a"),
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
        ('root ::= "(" root ")" | "a\n\tb" root | [\r\n]', "(a\n\tb\n)", "(ab)"),  # as they stand
        ('root ::= "a"{0} "b"{0,0} "c"{2, 2}', "cc", "acc"),
    ],
)
def test_grammars(compiler: GuideCompiler, grammar: str, good: str, bad: str) -> None:
    assert accepts(compiler, Guide(EBNF, grammar), good)
    assert not accepts(compiler, Guide(EBNF, grammar), bad)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (fields(3, PRICE), '{"f0":0.25,"f2":7}', '{"f0":0.255}'),
        (fields(2, {"type": "string", "pattern": HOST}), '{"f0":"a.bc"}', '{"f0":".bc"}'),
        (fields(40, {"type": "string", "pattern": WORDS}), '{"f0":"a b"}', '{"f0":" b"}'),
        (fields(20, {"type": "integer", "description": "d" * 11_000}), '{"f0":1}', '{"f0":"1"}'),
    ],
    ids=["prices", "hosts", "words", "descriptions"],
)
def test_schemas(compiler: GuideCompiler, schema: dict[str, Any], good: str, bad: str) -> None:
    assert accepts(compiler, Guide(SCHEMA, json.dumps(schema)), good)
    assert not accepts(compiler, Guide(SCHEMA, json.dumps(schema)), bad)


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
def test_every_keyword_is_followed_or_refused(
    compiler: GuideCompiler, schema: dict[str, Any], bad: str
) -> None:
    """Those of drafts 4 to 2020-12 that rule anything out."""
    refusal = ""
    try:
        is_passed_over = accepts(compiler, Guide(SCHEMA, json.dumps(schema)), bad)
    except InvalidRequest as error:
        is_passed_over, refusal = False, str(error)
    assert not is_passed_over
    if refusal:
        assert "Unimplemented keys: " in refusal
        assert any(f'"{keyword}"' in refusal for keyword in schema)


def test_what_is_no_keyword_rules_nothing_out(compiler: GuideCompiler) -> None:
    """As in JSON Schema: tools write names of their own."""
    schema = {**ONE, "example": 5, "x-order": 1, "discriminator": {}, "multipleof": 3}
    assert accepts(compiler, Guide(SCHEMA, json.dumps(schema)), "4")


def test_only_what_is_compiled_is_counted() -> None:
    check_schema(json.dumps({"title": "\ud800" + "t" * 140_000}))  # half a character at first
    check_schema(json.dumps({"enum": list(range(10_000))}, indent=8))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"allOf": [{"pattern": "a{9000}"}, {"pattern": "b{11001}"}]}, "has 20001 symbols"),
        (fields(11, {"pattern": "a{4999}"}), "has 54989 symbols when written out, more than 50000"),
        (
            {"type": "integer", "multipleOf": 1.2345678},
            "for one value whose product is above 10000",
        ),
        ({"$ref": "#/$defs/a", "multipleOf": 0.01, "$defs": {"a": {"multipleOf": 101}}}, "product"),
        ({"pattern": "a?" * 2001}, "has 20010 symbols"),
        ({"pattern": "(a|)" * 1700}, "has 20400 symbols"),
        (fields(6, {"multipleOf": 9973}), "'multipleOf' numbers whose sum is above 50000"),
        ({"const": "a" * 140_000}, "bytes besides titles and descriptions, more than 131072"),
    ],
)
def test_what_takes_long_is_refused_before(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(json.dumps(schema))
    assert message in str(caught.value)


def test_an_error_names_no_option_and_no_line_of_ours(compiler: GuideCompiler) -> None:
    one_of = json.dumps({"oneOf": [{"minimum": 1}, {"maximum": 9}]})
    for guide, message in (
        (Guide(SCHEMA, one_of), "two may fit one value; write 'anyOf'"),
        (Guide(EBNF, 'root ::= x y w\nx ::= "d"\ny ::= "a"\nz ::= "b"\n\nw ::= [Z-A]'), "Z-A"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            accepts(compiler, guide, "")
        assert message in str(caught.value)
        assert "coerce" not in str(caught.value)
        assert "rule4" not in str(caught.value)
