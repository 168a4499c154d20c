"""The guide of a request: its type and bounds. Compiling it comes later."""

from __future__ import annotations

import re

from inflight_backend.errors import InvalidRequest
from inflight_backend.guided.bounds import MAX_SCHEMA_BYTES
from inflight_backend.guided.guide import GUIDE_FIELD, TYPE_FIELD, Guide, GuideType
from inflight_backend.requests.inference_request import InferenceRequest

MAX_GUIDE_BYTES = 64 * 1024
"""Size of a regex or of a grammar; a schema may have `MAX_SCHEMA_BYTES`."""

MAX_GUIDE_DEPTH = 64
"""Brackets open at once in a guide, of any kind."""

_ESCAPE, _STRING = r"\\.", r'"[^"\\]*(?:\\.[^"\\]*)*"?'
_CLASS, _COMMENT = r"\[[^\]\\]*(?:\\.[^\]\\]*)*\]?", r"#[^\n]*"
_PLAIN_TEXT = {  # whose brackets nest nothing
    GuideType.JSON_SCHEMA: re.compile(_STRING, re.DOTALL),
    GuideType.REGEX: re.compile(_ESCAPE, re.DOTALL),
    GuideType.EBNF_GRAMMAR: re.compile("|".join((_ESCAPE, _STRING, _CLASS, _COMMENT)), re.DOTALL),
}
_BRACKET = re.compile(r"[()\[\]{}]")


def read_guide(request: InferenceRequest) -> Guide | None:
    """The guide of ``request``, None if it sends none; `InvalidRequest` names field and bound."""
    if not request.has_tensor(TYPE_FIELD):
        if request.has_tensor(GUIDE_FIELD):
            raise InvalidRequest(
                f"'{GUIDE_FIELD}' is given without '{TYPE_FIELD}': say which of {_known()} it is"
            )
        return None
    name = _string(request, TYPE_FIELD)
    is_schema = name.lower() == GuideType.JSON_SCHEMA.value
    max_bytes = MAX_SCHEMA_BYTES if is_schema else MAX_GUIDE_BYTES
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
    _check_depth(guide_type, text)
    return Guide(guide_type, text)


def _string(request: InferenceRequest, name: str, max_bytes: int = MAX_GUIDE_BYTES) -> str:
    tensor = request.get_tensor(name)
    if tensor.size != 1:
        raise InvalidRequest(f"'{name}' must hold one string, got {tensor.size}")
    value = tensor.reshape(-1)[0]
    data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    if len(data) > max_bytes:
        raise InvalidRequest(f"'{name}' has {len(data)} bytes, more than {max_bytes}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"'{name}' is not valid UTF-8") from None
    if "\0" in text:
        raise InvalidRequest(f"'{name}' holds a zero byte; write it as an escape")
    return text


def _check_depth(guide_type: GuideType, text: str) -> None:
    """Refuse what is nested so deeply that a parser might not come back; quoted text is skipped."""
    depth = 0
    for bracket in _BRACKET.findall(_PLAIN_TEXT[guide_type].sub("", text)):
        depth = depth + 1 if bracket in "([{" else max(depth - 1, 0)
        if depth > MAX_GUIDE_DEPTH:
            raise InvalidRequest(
                f"'{GUIDE_FIELD}' is nested more than {MAX_GUIDE_DEPTH} brackets deep"
            )


def _known() -> str:
    return ", ".join(each.value for each in GuideType)
