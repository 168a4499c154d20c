"""Bounds on what a grammar costs, found before it is compiled: llguidance unrolls some repetitions,
and no limit of its own stops it in the middle of that."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

from inflight_backend.errors import InvalidRequest
from inflight_backend.guided.guide import GUIDE_FIELD
from inflight_backend.guided.joined_patterns import count_joined
from inflight_backend.request_json import read_json_object

MAX_UNROLLED = 20_000
"""Size of a regex, as `pattern_size` has it; of a schema, that of the patterns that one string has
to match. A host's name as its standard has it is one of 8,128."""

MAX_SYMBOLS = 5000
"""Symbols of an EBNF grammar with every repetition written out."""

MAX_UNROLLED_IN_ALL = 50_000
"""Size of all patterns of a schema: some 0.1 s of compiling."""

MAX_JOINED = 8
"""Patterns and formats of a schema that one string has to match."""

MAX_MULTIPLE = 10_000
"""Product of the ``multipleOf`` that one number has to obey: the states that remainders take."""

MAX_MULTIPLES_IN_ALL = 50_000
"""Sum of all ``multipleOf`` in a schema, as in `MAX_MULTIPLE`: half a second of compiling."""

MAX_SCHEMA_BYTES = 256 * 1024
"""Size of a schema; those of people's tools, which explain every key, have up to some 250 KB."""

MAX_BYTES_TO_COMPILE = 128 * 1024
"""Size of a schema without blanks and what it explains: at most some 2 seconds of compiling."""

_EXPLANATIONS = ("title", "description", "markdownDescription", "$comment")

_OPTIONAL = ("?", "*", "+", "{", "|)", "(|", "||")
_OPTIONAL_SIZE = 8  # a?a?a?... takes the square of its length, (a?){9999} nothing worth mentioning
_REPETITION = re.compile(r"\{(\d{1,9})(?:(,)(\d{0,9}))?\}")  # never a pattern of a client's


def check_unrolled(size: int, limit: int = MAX_UNROLLED) -> None:
    """`InvalidRequest` if a grammar is too large with every repetition written out."""
    if size > limit:
        raise InvalidRequest(
            f"'{GUIDE_FIELD}' repeats so much that it has {size} symbols when written out, more "
            f"than {limit}; lower the numbers in {{...}}, or leave out some of what may be missing"
        )


def pattern_size(pattern: str) -> int:
    """Characters of a regex: with every counted repetition written out, or as it stands, where each
    that is repeated or may be missing counts as more; whichever are more."""
    num_optional = sum(map(pattern.count, _OPTIONAL))
    return max(unrolled_size(pattern), len(pattern) + _OPTIONAL_SIZE * num_optional)


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
    schema = read_json_object(GUIDE_FIELD, text, MAX_SCHEMA_BYTES)
    num_bytes, size, product, multiples = _num_bytes(schema), 0, 1.0, 0.0
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            if "x-guidance" in node:  # it would set patterns and rules of the compiler
                raise InvalidRequest(f"'{GUIDE_FIELD}' has the key 'x-guidance'; leave it out")
            waiting += node.values()
            explained = (node.get(key) for key in _EXPLANATIONS)
            num_bytes -= sum(_num_bytes(each) for each in explained if isinstance(each, str))
            size += sum(map(pattern_size, _patterns(node)))
            multiple = _multiple(node.get("multipleOf"))
            product, multiples = product * multiple, multiples + multiple - 1
    if num_bytes > MAX_BYTES_TO_COMPILE:
        raise InvalidRequest(
            f"'{GUIDE_FIELD}' has {num_bytes} bytes besides titles and descriptions, more than "
            f"{MAX_BYTES_TO_COMPILE}"
        )
    check_unrolled(size, MAX_UNROLLED_IN_ALL)
    if size > MAX_UNROLLED:  # else no string has to match so much
        check_unrolled(round(count_joined(schema, MAX_UNROLLED, _sizes)))
    if count_joined(schema, MAX_JOINED) > MAX_JOINED:
        raise InvalidRequest(
            f"'{GUIDE_FIELD}' has more than {MAX_JOINED} patterns and formats for one string; "
            "leave some out of 'allOf' and of what '$ref' joins"
        )
    limit = math.log(MAX_MULTIPLE + 0.5)  # the logarithms are rounded
    if product > MAX_MULTIPLE and count_joined(schema, limit, _logarithms) > limit:
        raise InvalidRequest(
            f"'{GUIDE_FIELD}' has 'multipleOf' numbers for one value whose product is above "
            f"{MAX_MULTIPLE}"
        )
    if multiples > MAX_MULTIPLES_IN_ALL:
        raise InvalidRequest(
            f"'{GUIDE_FIELD}' has 'multipleOf' numbers whose sum is above {MAX_MULTIPLES_IN_ALL}"
        )


def _num_bytes(value: object) -> int:
    """Of JSON without blanks. An escape may have stood for half a character."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return len(text.encode("utf-8", "surrogatepass"))


def _sizes(node: dict[str, Any]) -> dict[Any, float]:
    return {pattern: pattern_size(pattern) for pattern in _patterns(node)}


def _logarithms(node: dict[str, Any]) -> dict[Any, float]:
    """Of what is multiplied, to be added up."""
    multiple = _multiple(node.get("multipleOf"))
    return {multiple: math.log(multiple)} if multiple > 1 else {}


def _patterns(node: dict[str, Any]) -> list[str]:
    named = node.get("patternProperties")
    patterns = [*named] if isinstance(named, dict) else []
    return [*patterns, node["pattern"]] if isinstance(node.get("pattern"), str) else patterns


def _multiple(value: object) -> float:
    """How many states its remainders take: 7 for 7, 100 for 0.01, 12345 for 1.2345."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return 1.0
    number = Decimal(repr(value) if isinstance(value, float) else value).normalize()
    exponent = number.as_tuple().exponent
    if not isinstance(exponent, int):
        return math.inf
    scale = Decimal(1).scaleb(max(-exponent, 0))
    return float(max(number * scale, scale))


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
