"""Bounds on what a grammar costs, found before it is compiled: llguidance unrolls repetitions, and
no limit of its own stops it in the middle of that (measured with 1.9.1: a{100000} takes 4 s)."""

from __future__ import annotations

import re
from typing import Any

from inflight_backend.errors import InvalidRequest
from inflight_backend.guided.guide import GUIDE_FIELD
from inflight_backend.guided.joined_patterns import count_joined
from inflight_backend.request_json import read_json_object

MAX_UNROLLED = 5000
"""Characters of a regex, or symbols of an EBNF grammar, with every repetition written out."""

MAX_JOINED = 8
"""Patterns and formats of a schema that one string has to match."""

MAX_MULTIPLE = 10_000
"""Product of all ``multipleOf`` in a schema: the numbers of states that remainders take."""

_REPETITION = re.compile(r"\{(\d{1,9})(?:(,)(\d{0,9}))?\}")  # never a pattern of a client's


def check_unrolled(size: int) -> None:
    """`InvalidRequest` if a grammar is too large with every repetition written out."""
    if size > MAX_UNROLLED:
        raise InvalidRequest(
            f"'{GUIDE_FIELD}' repeats so much that it has {size} symbols when written out, more "
            f"than {MAX_UNROLLED}; lower the numbers in {{...}}"
        )


def unrolled_size(pattern: str) -> int:
    """Characters of a regex with every counted repetition written out; at least the true number
    for whatever the compiler accepts."""
    open_sizes: list[int] = []
    total = last = index = 0
    while index < len(pattern):
        character = pattern[index]
        match = _REPETITION.match(pattern, index) if character == "{" else None
        if match is not None:
            times = max(int(match[1]), int(match[3] or 0), 1)
            total, last, index = total + last * (times - 1), last * times, match.end()
        elif character == "(":
            open_sizes.append(total)
            total, last, index = 0, 0, index + 1
        elif character == ")" and open_sizes:
            total, last, index = total + open_sizes.pop(), max(total, 1), index + 1
        else:
            index = _end_of_atom(pattern, index)
            total, last = total + 1, 1
    return total + sum(open_sizes)


def check_schema(text: str) -> None:
    """`InvalidRequest` unless ``text`` is a JSON object whose patterns and numbers are bounded."""
    schema = read_json_object(GUIDE_FIELD, text)
    size, multiple = 0, 1.0
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            if "x-guidance" in node:  # it would set patterns and rules of the compiler
                raise InvalidRequest(f"'{GUIDE_FIELD}' has the key 'x-guidance'; leave it out")
            waiting += node.values()
            size += sum(map(unrolled_size, _patterns(node)))
            multiple *= _multiple(node.get("multipleOf"))
    check_unrolled(size)
    if count_joined(schema, MAX_JOINED) > MAX_JOINED:
        raise InvalidRequest(
            f"'{GUIDE_FIELD}' has more than {MAX_JOINED} patterns and formats for one string; "
            "leave some out of 'allOf' and of what '$ref' joins"
        )
    if multiple > MAX_MULTIPLE:
        raise InvalidRequest(
            f"'{GUIDE_FIELD}' has 'multipleOf' numbers whose product is above {MAX_MULTIPLE}"
        )


def _patterns(node: dict[str, Any]) -> list[str]:
    named = node.get("patternProperties")
    patterns = [*named] if isinstance(named, dict) else []
    return [*patterns, node["pattern"]] if isinstance(node.get("pattern"), str) else patterns


def _multiple(value: object) -> float:
    if not isinstance(value, int | float) or value <= 0:
        return 1.0
    try:
        number = float(value)
    except OverflowError:
        return float("inf")
    return max(number, 1 / number)


def _end_of_atom(pattern: str, index: int) -> int:
    """Behind the escape, the class or the character at ``index``."""
    if pattern[index] == "\\":
        return index + 2
    if pattern[index] != "[":
        return index + 1
    index += 1
    while index < len(pattern) and pattern[index] != "]":
        index += 2 if pattern[index] == "\\" else 1
    return index + 1
