"""Kinds, sizes and depths of guides, and what they may cost; checked before they are compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight_backend.errors import InvalidRequest
from inflight_backend.guided.guide import GuideType
from inflight_backend.requests.guides import (
    MAX_GUIDE_BYTES,
    MAX_GUIDE_DEPTH,
    MAX_SCHEMA_BYTES,
    read_guide,
)
from inflight_backend.requests.inference_request import InferenceRequest


def ask(guide_type: Any, guide: Any = None) -> InferenceRequest:
    values = {"guided_decoding_guide_type": guide_type, "guided_decoding_guide": guide}
    sent = {name: value for name, value in values.items() if value is not None}
    return InferenceRequest.from_tokens(1, [1], 1, **sent)


def test_every_kind_is_read() -> None:
    assert read_guide(ask(None)) is None
    assert read_guide(ask("", "")) is None
    for guide_type in GuideType:
        text = "" if guide_type is GuideType.JSON else "{}"
        guide = read_guide(ask(guide_type.value, text or None))
        assert guide is not None
        assert (guide.type, guide.text) == (guide_type, text)


@pytest.mark.parametrize(
    ("guide_type", "guide", "message"),
    [
        (None, "{}", "'guided_decoding_guide' is given without 'guided_decoding_guide_type'"),
        ("lark", "{}", "'guided_decoding_guide_type' is 'lark'"),
        ("", "{}", "'guided_decoding_guide_type' is ''"),
        ("json", "{}", "json, which takes none"),
        ("regex", None, "'guided_decoding_guide' is missing or empty: regex needs it"),
        ("json_schema", "", "'guided_decoding_guide' is missing or empty: json_schema needs it"),
        ("regex", "a" * (MAX_GUIDE_BYTES + 1), f"65537 bytes, more than {MAX_GUIDE_BYTES}"),
        ("json_schema", json.dumps({"title": "a" * 270_000}), f"more than {MAX_SCHEMA_BYTES}"),
        ("regex", "(" * (MAX_GUIDE_DEPTH + 1), f"more than {MAX_GUIDE_DEPTH} brackets deep"),
        ("json_schema", '{"a":[' * 33, f"more than {MAX_GUIDE_DEPTH} brackets deep"),
        ("json_schema", '{"items":' * 500 + "{}" + "}" * 500, "brackets deep"),
        ("json_schema", json.dumps({"enum": list(range(100_000))}), "bytes, more than"),
        ("json_schema", "{", "'guided_decoding_guide' is not valid JSON"),
        ("json_schema", "[]", "must be a JSON object"),
        ("json_schema", '{"items": {"type": "null", "type": ""}}', "has the key 'type' twice"),
        ("json_schema", '{"const": 1' + "0" * 5000 + "}", "is not valid JSON"),
        ("structural_tag", '{"format": {"x-guidance": {}}}', "has the key 'x-guidance'"),
        ("structural_tag", "[]", "must be a JSON object"),
        ("regex", b"\xff", "'guided_decoding_guide' is not valid UTF-8"),
        ("regex", "a\0b", "'guided_decoding_guide' holds a zero byte"),
        ("ebnf_grammar", 'root ::= "a" (= "b")', "has '(=': look-ahead, macros and counts"),
        ("ebnf_grammar", "root ::= ExcludeToken(1)", "has 'ExcludeToken(': look-ahead"),
        ("ebnf_grammar", 'root ::= "a"{1,4294967297}', "has '4294967297': look-ahead"),
    ],
)
@pytest.mark.case(48, 49)
def test_refused_with_field_and_bound(guide_type: Any, guide: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_guide(ask(guide_type, guide))
    assert message in str(caught.value)


def test_quoted_text_is_not_searched_for_brackets_and_macros() -> None:
    assert read_guide(ask("json_schema", json.dumps({"const": "[" * 500}))) is not None
    assert read_guide(ask("regex", r"\(" * 500)) is not None
    after_a_quote = 'root ::= [^"(] # the "\n' + '"(" "(=" "Token(1)" [(=] ' * 100
    assert read_guide(ask("ebnf_grammar", after_a_quote)) is not None


def test_a_schema_sets_no_options_of_the_compiler() -> None:
    with pytest.raises(InvalidRequest, match="has the key 'x-guidance'"):
        read_guide(ask("json_schema", '{"items": {"x-guidance": {}}}'))
