"""Patterns that one string has to match at once are few: llguidance cannot bear many."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight_backend.errors import InvalidRequest
from inflight_backend.guided.bounds import MAX_JOINED, check_schema
from inflight_backend.guided.joined_patterns import count_joined

PATTERNS = [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(16)]
HALF, REST = PATTERNS[:8], PATTERNS[8:]
MANY_BY_REFERENCE = {"$ref": "#/$defs/many", "$defs": {"many": {"allOf": PATTERNS}}}


def in_field(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"name": schema}}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": PATTERNS},
        {"allOf": [{"allOf": HALF}, {"allOf": REST}]},
        {"allOf": [in_field({"allOf": HALF}), in_field({"allOf": REST})]},
        {"allOf": [*HALF[1:], {"anyOf": [{"const": 1}, {"format": "date", "pattern": "a"}]}]},
        {"$ref": "#/$defs/half", "allOf": REST, "$defs": {"half": {"allOf": HALF}}},
        {"$ref": "#half", "allOf": REST, "$defs": {"half": {"$anchor": "half", "allOf": HALF}}},
        {"$ref": "#/$defs/a~1%62/0", "allOf": REST, "$defs": {"a/b": [{"allOf": HALF}]}},
        in_field({"allOf": [{"$ref": "#"}, *map(in_field, PATTERNS)]}),
        in_field({"items": {"allOf": PATTERNS}}),
        {"patternProperties": {"a": {"allOf": HALF}}} | in_field({"allOf": REST}),
        {"properties": {"definitions": {"allOf": PATTERNS}}},
        {"patternProperties": {"$defs": {"allOf": PATTERNS}}},
        {"$defs": {"many": {}}} | in_field({"$id": "x:/y"} | MANY_BY_REFERENCE),
        {"$schema": "http://json-schema.org/draft-04/schema#", "$defs": {"many": {}}}
        | in_field({"id": "x:/y"} | MANY_BY_REFERENCE),
    ],
)
def test_too_many_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MAX_JOINED} patterns and formats"):
        check_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "count"),
    [
        ({"allOf": HALF}, 8),
        ({"properties": {f"name{i}": each for i, each in enumerate(PATTERNS)}}, 1),
        ({"anyOf": PATTERNS}, 1),
        (in_field({"items": in_field({"items": [*PATTERNS]})}), 1),
        ({"$ref": "#/$defs/a", "$defs": {"a": in_field({"$ref": "#/$defs/a"}), "b": HALF[0]}}, 0),
        (in_field({"allOf": [{"$ref": "#"}, {"title": "again"}], "pattern": "a"}), 1),
        ({"properties": {"pattern": {"type": "string"}, "allOf": {"pattern": "a"}}}, 1),
        ({"allOf": [in_field({"$ref": "#node"})], "$anchor": "node", "format": "date"}, 1),
        (
            in_field({"$ref": "#"})
            | {"additionalProperties": {"$ref": "#"}, "items": HALF[0], "$defs": {"a": PATTERNS}},
            1,
        ),
        ({"default": {"id": "5"}, "$ref": "#/$defs/0", "$defs": {"0": HALF[0], "1": PATTERNS}}, 1),
        ({"$id": "x:/y", "$ref": "#/$defs/0", "$defs": {"0": HALF[0], "1": PATTERNS}}, 1),
        ({"$ref": "#/allOf/0", "allOf": [HALF[0], {"$ref": "#/allOf/" + "9" * 5000}]}, 1),
    ],
)
def test_what_people_write_is_counted_rightly(schema: dict[str, Any], count: int) -> None:
    assert count_joined(schema, MAX_JOINED) == count


def test_references_without_end_are_not_followed_for_ever() -> None:
    chain = {f"n{i}": {"$ref": f"#/$defs/n{i + 1}"} for i in range(1500)}
    schema = {"$ref": "#/$defs/n0", "$defs": chain | {"n1500": PATTERNS[0]}}
    assert count_joined(schema, MAX_JOINED) in (1, MAX_JOINED + 1)
