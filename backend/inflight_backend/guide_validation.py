"""The guide of a request, with the checks that need no compiler."""

from __future__ import annotations

from inflight_backend.errors import InvalidRequest
from inflight_backend.guided.guide import GUIDE_FIELD, TYPE_FIELD, Guide, GuideType
from inflight_backend.inference_request import InferenceRequest

MAX_GUIDE_BYTES = 64 * 1024
"""Size of a guide."""

MAX_GUIDE_DEPTH = 64
"""Brackets open at once in a guide, of any kind."""

_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_QUOTED = {"json_schema": '"', "regex": "", "ebnf_grammar": '"'}


def read_guide(request: InferenceRequest) -> Guide | None:
    """The guide of ``request``, None if it sends none; `InvalidRequest` names field and bound."""
    if not request.has_tensor(TYPE_FIELD):
        if request.has_tensor(GUIDE_FIELD):
            raise InvalidRequest(
                f"'{GUIDE_FIELD}' is given without '{TYPE_FIELD}': say which of {_known()} it is"
            )
        return None
    name = _string(request, TYPE_FIELD)
    text = _string(request, GUIDE_FIELD) if request.has_tensor(GUIDE_FIELD) else ""
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


def _string(request: InferenceRequest, name: str) -> str:
    tensor = request.get_tensor(name)
    if tensor.size != 1:
        raise InvalidRequest(f"'{name}' must hold one string, got {tensor.size}")
    value = tensor.reshape(-1)[0]
    data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    if len(data) > MAX_GUIDE_BYTES:
        raise InvalidRequest(f"'{name}' has {len(data)} bytes, more than {MAX_GUIDE_BYTES}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"'{name}' is not valid UTF-8") from None
    if "\0" in text:
        raise InvalidRequest(f"'{name}' holds a zero byte; write it as an escape")
    return text


def _check_depth(guide_type: GuideType, text: str) -> None:
    """Refuse what is nested so deeply that a parser might not come back; quoted text is skipped."""
    quote, depth, is_quoted, is_escaped = _QUOTED[guide_type.value], 0, False, False
    for character in text:
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif quote and character == quote:
            is_quoted = not is_quoted
        elif not is_quoted:
            depth = max(depth + _BRACKETS.get(character, 0), 0)
            if depth > MAX_GUIDE_DEPTH:
                raise InvalidRequest(
                    f"'{GUIDE_FIELD}' is nested more than {MAX_GUIDE_DEPTH} brackets deep"
                )


def _known() -> str:
    return ", ".join(each.value for each in GuideType)
