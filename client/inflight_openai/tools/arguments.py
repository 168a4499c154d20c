"""The schema of the arguments of a call, or of an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_COMBINED = frozenset(
    ("allOf", "not", "if", "dependentSchemas", "patternProperties", "unevaluatedProperties")
)
_BESIDE_PROPERTIES = frozenset(("anyOf", "oneOf", "$ref"))
_BY_NAME = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_NO_URI = re.compile(r'[\s<>"{}|\\^`]')


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """``schema``, where objects that list their ``properties`` have no others, unless it says so.

    A JSON schema lets any others in, of which a function knows nothing; a model that a guide leaves
    the choice may never end. Unchanged where an object is put together of several schemas. An
    ``$id`` that is a title ("Output Format"), as some clients have it, is left out.
    """
    if _NO_URI.search(str(schema.get("$id", ""))):
        schema = {key: each for key, each in schema.items() if key != "$id"}
    return schema if _is_combined(schema) else _closed(schema)


def _is_combined(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        keys = schema.keys()
        if keys & _COMBINED or ("properties" in keys and keys & _BESIDE_PROPERTIES):
            return True
        return any(map(_is_combined, schema.values()))
    return isinstance(schema, list) and any(map(_is_combined, schema))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    own = dict(schema)
    for name in _BY_NAME:
        if isinstance(parts := own.get(name), Mapping):
            own[name] = {key: _closed(part) for key, part in parts.items()}
    for name in _LISTS:
        if isinstance(parts := own.get(name), list):
            own[name] = [_closed(part) for part in parts]
    if "items" in own:
        own["items"] = _closed(own["items"])
    if isinstance(own.get("properties"), Mapping):
        own.setdefault("additionalProperties", False)
    return own
