"""The guide of a request: its type and bounds. Compiling it comes later."""

from __future__ import annotations

import re
from typing import Any

from inflight_backend.errors import InvalidRequest
from inflight_backend.guided.guide import GUIDE_FIELD, TYPE_FIELD, Guide, GuideType
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.values import read_json_object, text_bytes

MAX_GUIDE_BYTES = 64 * 1024
"""Size of a regex or of a grammar."""

MAX_SCHEMA_BYTES = 256 * 1024
"""Size of a schema or a structural tag; schemas of people's tools, which explain every key, have up
to some 250 KB."""

MAX_GUIDE_DEPTH = 64
"""Brackets open at once in a guide, of any kind."""

_ESCAPE, _STRING = r"\\.", r'"[^"\\]*(?:\\.[^"\\]*)*"?'
_CLASS, _COMMENT = r"\[[^\]\\]*(?:\\.[^\]\\]*)*\]?", r"#[^\n]*"
_PLAIN_TEXT = {  # whose brackets nest nothing
    GuideType.JSON_SCHEMA: re.compile(_STRING, re.DOTALL),
    GuideType.STRUCTURAL_TAG: re.compile(_STRING, re.DOTALL),
    GuideType.REGEX: re.compile(_ESCAPE, re.DOTALL),
    GuideType.EBNF_GRAMMAR: re.compile("|".join((_ESCAPE, _STRING, _CLASS, _COMMENT)), re.DOTALL),
}
_OBJECTS = frozenset({GuideType.JSON_SCHEMA.value, GuideType.STRUCTURAL_TAG.value})
_BRACKET = re.compile(r"[()\[\]{}]")
# xgrammar checks no look-ahead while it masks, lets macros name tokens that are no text, and reads
# counts modulo 2^32.
_EBNF_REFUSED = re.compile(r"\(\s*=|\b(?:(?:Exclude)?Token|(?:Token)?TagDispatch)\s*\(|\b\d{10,}")


def read_guide(request: InferenceRequest) -> Guide | None:
    """The guide of ``request``, None if it sends none; `InvalidRequest` names field and bound."""
    if not request.has_tensor(TYPE_FIELD):
        if request.has_tensor(GUIDE_FIELD):
            raise InvalidRequest(
                f"'{GUIDE_FIELD}' is given without '{TYPE_FIELD}': say which of {_known()} it is"
            )
        return None
    name = _string(request, TYPE_FIELD)
    max_bytes = MAX_SCHEMA_BYTES if name.lower() in _OBJECTS else MAX_GUIDE_BYTES
    text = _string(request, GUIDE_FIELD, max_bytes) if request.has_tensor(GUIDE_FIELD) else ""
    if not name and not text:
        return None  # of several rows in one request, one without a guide
    try:
        guide_type = GuideType(name.lower())
    except ValueError:
        raise InvalidRequest(
            f"'{TYPE_FIELD}' is {name[:40]!r}, which this server does not know; send one of "
            f"{_known()}"
        ) from None
    if guide_type is GuideType.JSON:
        if text:
            raise InvalidRequest(
                f"'{GUIDE_FIELD}' is given with '{TYPE_FIELD}' json, which takes none; send "
                "json_schema to use a schema"
            )
        return Guide(guide_type)
    if not text:
        raise InvalidRequest(f"'{GUIDE_FIELD}' is missing or empty: {guide_type.value} needs it")
    plain = _PLAIN_TEXT[guide_type].sub("", text)
    _check_depth(plain)
    if guide_type.value in _OBJECTS:
        _check_schema(read_json_object(GUIDE_FIELD, text, MAX_SCHEMA_BYTES))
    elif guide_type is GuideType.EBNF_GRAMMAR:
        _check_ebnf(plain)
    return Guide(guide_type, text)


def _string(request: InferenceRequest, name: str, max_bytes: int = MAX_GUIDE_BYTES) -> str:
    tensor = request.get_tensor(name)
    if tensor.size != 1:
        raise InvalidRequest(f"'{name}' must hold one string, got {tensor.size}")
    data = text_bytes(request, name)
    if len(data) > max_bytes:
        raise InvalidRequest(f"'{name}' has {len(data)} bytes, more than {max_bytes}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"'{name}' is not valid UTF-8") from None
    if "\0" in text:
        raise InvalidRequest(f"'{name}' holds a zero byte; write it as an escape")
    return text


def _check_depth(plain: str) -> None:
    """Refuse what is nested so deeply that a parser might not return; ``plain`` has no quotes."""
    depth = 0
    for bracket in _BRACKET.findall(plain):
        depth = depth + 1 if bracket in "([{" else max(depth - 1, 0)
        if depth > MAX_GUIDE_DEPTH:
            raise InvalidRequest(
                f"'{GUIDE_FIELD}' is nested more than {MAX_GUIDE_DEPTH} brackets deep"
            )


def _check_schema(schema: dict[str, Any]) -> None:
    """Refuse the key with which a schema would set options of llguidance."""
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list):
            waiting += node.values() if isinstance(node, dict) else node
        if isinstance(node, dict) and "x-guidance" in node:
            raise InvalidRequest(f"'{GUIDE_FIELD}' has the key 'x-guidance'; leave it out")


def _check_ebnf(plain: str) -> None:
    """Refuse what xgrammar would not follow; ``plain`` has no quotes, classes and comments."""
    if refused := _EBNF_REFUSED.search(plain):
        raise InvalidRequest(
            f"'{GUIDE_FIELD}' has {refused[0][:40]!r}: look-ahead, macros and counts of more than "
            "9 digits are not supported"
        )


def _known() -> str:
    return ", ".join(each.value for each in GuideType)
