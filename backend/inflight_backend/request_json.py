"""JSON objects in a request: bounded, without duplicate keys; errors name the field."""

from __future__ import annotations

import json
from typing import Any

from inflight_backend.errors import InvalidRequest

MAX_JSON_BYTES = 64 * 1024
"""Largest JSON object; the parser holds the GIL until it has read all of it."""

_MAX_SHOWN = 100


def read_json_object(
    field: str, text: bytes | str, max_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """Parse ``text``; `InvalidRequest` names ``field`` and the problem."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(data) > max_bytes:
        raise InvalidRequest(f"'{field}' has {len(data)} bytes, more than {max_bytes}")
    try:
        content = json.loads(data, object_pairs_hook=_unique)
    except _DoubledKey as doubled:
        raise InvalidRequest(f"'{field}' has the key {doubled} twice in one object") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"'{field}' is not valid JSON: {error}") from None
    except (ValueError, RecursionError):
        raise InvalidRequest(f"'{field}' is not valid JSON") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"'{field}' must be a JSON object")
    return content


class _DoubledKey(ValueError):
    """Parsers differ in which of the values they keep."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise _DoubledKey(repr(key[:_MAX_SHOWN]))
        content[key] = value
    return content
