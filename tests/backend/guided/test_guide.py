"""What a guide may be: kinds, sizes, depths, and what it may cost; all before it is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import fuzzing

from inflight_backend.errors import InvalidRequest
from inflight_backend.guided.bounds import MAX_SCHEMA_BYTES, check_schema, unrolled_size
from inflight_backend.guided.guide import Guide, GuideType
from inflight_backend.requests.guides import MAX_GUIDE_BYTES, MAX_GUIDE_DEPTH, read_guide
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_server.serve.settings import DEMO_MODEL


def ask(guide_type: Any, guide: Any = None) -> InferenceRequest:
    values = {"guided_decoding_guide_type": guide_type, "guided_decoding_guide": guide}
    sent = {name: value for name, value in values.items() if value is not None}
    return InferenceRequest.from_tokens(1, [1], 1, **sent)


def test_every_kind_is_read() -> None:
    assert read_guide(ask(None)) is None
    assert read_guide(ask("", "")) is None
    for guide_type in GuideType:
        text = "" if guide_type is GuideType.JSON else "x"
        guide = read_guide(ask(guide_type.value, text or None))
        assert guide is not None
        assert (guide.type, guide.text) == (guide_type, text)


@pytest.mark.parametrize(
    ("guide_type", "guide", "message"),
    [
        (None, "{}", "'guided_decoding_guide' is given without 'guided_decoding_guide_type'"),
        ("structural_tag", "{}", "'guided_decoding_guide_type' is 'structural_tag'"),
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
        ("regex", b"\xff", "'guided_decoding_guide' is not valid UTF-8"),
        ("regex", "a\0b", "'guided_decoding_guide' holds a zero byte"),
    ],
)
@pytest.mark.case(48, 49)
def test_refused_with_field_and_bound(guide_type: Any, guide: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_guide(ask(guide_type, guide))
    assert message in str(caught.value)


def test_brackets_in_strings_do_not_nest() -> None:
    assert read_guide(ask("json_schema", json.dumps({"const": "[" * 500}))) is not None
    assert read_guide(ask("regex", r"\(" * 500)) is not None
    after_a_quote = 'root ::= [^"(] # the "\n' + '"(" ' * 100
    assert read_guide(ask("ebnf_grammar", after_a_quote)) is not None


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        ("a{3}", 3),
        ("a{3,}b", 4),
        ("a{2,7}", 7),
        ("(ab){5}", 10),
        ("((a{10}){10}){10}", 1000),
        ("[a{9}]{3}", 3),
        (r"\{{4}", 4),
        ("a{x}", 4),
        ("(a{50}", 50),
    ],
)
def test_unrolled_size(pattern: str, size: int) -> None:
    assert unrolled_size(pattern) == size


@fuzzing
@given(st.text(alphabet="ab()[]{}\\,0159|*+?^$", max_size=200))
def test_sizes_of_any_text_are_found(pattern: str) -> None:
    assert unrolled_size(pattern) >= 0


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "'guided_decoding_guide' is not valid JSON"),
        ("[]", "must be a JSON object"),
        ("true", "must be a JSON object"),
        ('{"items": {"type": "null", "type": "string"}}', "has the key 'type' twice"),
        ('{"const": 1' + "0" * 5000 + "}", "is not valid JSON"),
        ('{"pattern": "a{21000}"}', "has 21000 symbols when written out, more than 20000"),
        ('{"patternProperties": {"a{9000}": {}, "b{11001}": {}}}', "has 20001 symbols"),
        ('{"items": {"x-guidance": {}}}', "has the key 'x-guidance'"),
        ('{"multipleOf": 10001}', "'multipleOf' numbers for one value whose product is above"),
        ('{"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}', "above 10000"),
        ('{"multipleOf": 1' + "0" * 400 + "}", "above 10000"),
    ],
)
def test_schemas_are_bounded(schema: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(schema)
    assert message in str(caught.value)


def test_without_llguidance_everything_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from inflight_backend.errors import ConfigurationError
    from inflight_backend.guided import service

    monkeypatch.setattr(service, "find_spec", lambda name: None)
    made = service.GuideService(service.GuidedDecodingConfig(), DEMO_MODEL, 270, can_mask=True)
    with pytest.raises(InvalidRequest, match="llguidance is not installed"):
        made.start(Guide(GuideType.JSON), lambda: None)
    config = service.GuidedDecodingConfig("llguidance")
    with pytest.raises(ConfigurationError, match="guided_decoding_backend is llguidance"):
        service.GuideService(config, DEMO_MODEL, 270, can_mask=True)
    with pytest.raises(ConfigurationError, match="choose one of auto, llguidance, none"):
        service.GuidedDecodingConfig("xgrammar")
