"""How many patterns of a JSON schema one string has to match at once.

llguidance looks whether any string can, and no limit of its own stops it in the midst of that
(measured with 1.9.1: 8 patterns take up to 0.05 s, 12 take 4 s, 16 more time and memory than any
machine has).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

_NUMBER = re.compile(r"\d{1,9}")  # a longer one, of thousands of digits, Python would not read
_MAX_PASSES = 50  # references that lead to references: who has a longer chain is refused
_ALSO = ("anyOf", "oneOf")  # of the same value
_NAMED = ("properties", "patternProperties")  # which may be of one value; those of `items` are not
_APART = ("$defs", "definitions")  # they count where they are referred to


def count_joined(schema: dict[str, Any], limit: int) -> int:
    """At least the number of patterns and formats that apply to one string; above ``limit`` it is
    some number above it."""
    nodes = list(_inner_first(schema))
    # References in a part with a base of its own lead somewhere else: all count as the most.
    home = None if _has_bases(nodes[:-1], schema) else schema
    most = len({each for node in nodes for each in _own(node)})
    counts: dict[int, int] = {}
    for _ in range(_MAX_PASSES):
        before = dict(counts)
        for node in nodes:
            counts[id(node)] = min(_count(node, home, counts, most), most)
        if counts == before or counts[id(schema)] > limit:
            return counts[id(schema)]
    return limit + 1


def _inner_first(schema: dict[str, Any]) -> Iterator[dict[str, Any] | list[Any]]:
    found: list[dict[str, Any] | list[Any]] = []
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list):
            found.append(node)
            waiting += node.values() if isinstance(node, dict) else node
    yield from reversed(found)


def _own(node: Any) -> list[tuple[str, str]]:
    found = [(key, node.get(key)) for key in ("pattern", "format") if isinstance(node, dict)]
    return [(key, value) for key, value in found if isinstance(value, str)]


def _has_bases(nodes: Sequence[Any], schema: dict[str, Any]) -> bool:
    """True if one of ``nodes``, inside ``schema``, may name itself. In draft 4 the key is ``id``,
    which else is in many a value."""
    objects = [node for node in nodes if isinstance(node, dict)]
    is_old = any("draft-04" in str(node.get("$schema")) for node in (schema, *objects))
    keys = ("$id", "id") if is_old else ("$id",)
    return any(isinstance(node.get(key), str) for node in objects for key in keys)


def _count(node: Any, home: Any, counts: dict[int, int], most: int) -> int:
    """Of ``node``, whose parts are counted; there are ``most`` patterns and formats in all.

    References lead into ``home``.
    """
    if isinstance(node, list):
        return _largest(node, counts)
    total = named = others = 0
    for key, value in node.items():
        if key == "allOf" and isinstance(value, list):
            total += sum(counts.get(id(each), 0) for each in value)
        elif key == "$ref" and isinstance(value, str):
            target = _find(home, value)
            total += most if target is None else counts.get(id(target), 0)
        elif key in _ALSO:
            total += counts.get(id(value), 0)
        elif key in _NAMED and isinstance(value, dict):
            named += _largest(value.values(), counts)  # whatever their names
        elif key not in _APART:
            others = max(others, counts.get(id(value), 0))
    return total + max(len(_own(node)), named, others)


def _largest(nodes: Iterable[Any], counts: dict[int, int]) -> int:
    return max((counts.get(id(each), 0) for each in nodes), default=0)


def _find(schema: Any, reference: str) -> Any:
    """What a reference into this schema leads to; None if it is another kind, or leads nowhere."""
    if not reference.startswith("#"):
        return None
    node = schema
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and _NUMBER.fullmatch(name) and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node if reference == "#" or "/" in reference else None
