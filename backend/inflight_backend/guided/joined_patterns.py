"""How much of a JSON schema one value has to obey at once: patterns, their sizes, multiples.

llguidance looks whether any string can match, and no limit of its own stops it in the midst of
that (measured with 1.9.1: 8 patterns take up to 0.05 s, 12 take 4 s, 16 more time and memory than
any machine has; multiples of 97 and of 89 take 0.02 s, of 997 and of 991 4 s).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

_NUMBER = re.compile(r"\d{1,9}")  # a longer one, of thousands of digits, Python would not read
_MAX_PASSES = 50  # references that lead to references: who has a longer chain is refused
_ALSO = ("anyOf", "oneOf")  # of the same value
_NAMED = ("properties", "patternProperties")  # which may be of one value; those of `items` are not
_APART = ("$defs", "definitions")  # they count where they are referred to


Weigh = Callable[[dict[str, Any]], dict[Any, float]]
"""What a part of a schema says of its value itself, and how much each of it counts."""


def patterns_and_formats(node: dict[str, Any]) -> dict[Any, float]:
    """Each of those that ``node`` has counts as one."""
    found = [(key, node.get(key)) for key in ("pattern", "format")]
    return {(key, value): 1 for key, value in found if isinstance(value, str)}


def count_joined(
    schema: dict[str, Any], limit: float, weigh: Weigh = patterns_and_formats
) -> float:
    """At least the weight of all that applies to one value (by default the number of patterns and
    formats for one string); above ``limit`` it is some number above it."""
    nodes = list(_inner_first(schema))
    weights = {id(node): weigh(node) for node in nodes if isinstance(node, dict)}
    # References in a part with a base of its own lead somewhere else: all count as the most.
    home = None if _has_bases(nodes[:-1], schema) else schema
    most = sum({key: each[key] for each in weights.values() for key in each}.values())
    own = {place: sum(each.values()) for place, each in weights.items()}
    counts: dict[int, float] = {}
    for _ in range(_MAX_PASSES):
        before = dict(counts)
        for node in nodes:
            counts[id(node)] = min(_count(node, home, counts, own, most), most)
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


def _has_bases(nodes: Sequence[Any], schema: dict[str, Any]) -> bool:
    """True if one of ``nodes``, inside ``schema``, may name itself. In draft 4 the key is ``id``,
    which else is in many a value."""
    objects = [node for node in nodes if isinstance(node, dict)]
    is_old = any("draft-04" in str(node.get("$schema")) for node in (schema, *objects))
    keys = ("$id", "id") if is_old else ("$id",)
    return any(isinstance(node.get(key), str) for node in objects for key in keys)


def _count(
    node: Any, home: Any, counts: dict[int, float], own: dict[int, float], most: float
) -> float:
    """Of ``node``, whose parts are counted; all there is weighs ``most``.

    References lead into ``home``.
    """
    if isinstance(node, list):
        return _largest(node, counts)
    total = named = others = 0.0
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
    return total + max(own[id(node)], named, others)


def _largest(nodes: Iterable[Any], counts: dict[int, float]) -> float:
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
