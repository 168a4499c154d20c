"""What an answer must be: ``response_format``, and what other servers call such fields, as the
tensors of guided decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

from inflight_openai.errors import bad_field, unsupported
from inflight_openai.field_table import is_empty
from inflight_openai.fields import Body, UnknownFields, checked_text

Guide = dict[str, object]
"""The two tensors of a guide; empty for none."""

_META = re.compile(r"([\\.+*?()|\[\]{}^$])")
_STRUCTURED_OFF = (
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
    "structural_tag",
)


def read_guide(body: Body) -> tuple[str, Guide]:
    """The guide of a request and the field that gave it; `ApiError` if several do."""
    found: list[tuple[str, Guide]] = []
    for name, read in _READERS.items():
        value = body.take(name)
        if not is_empty(value) and (guide := read(name, value)):
            found.append((name, guide))
    name = "structured_outputs"
    found += _structured_outputs(name, body.mapping(name), body.unknown)
    if len(found) > 1:
        raise bad_field(found[1][0], f"given beside {found[0][0]}: an answer has one guide")
    return found[0] if found else ("response_format", {})


def _guide(kind: str, text: str) -> Guide:
    return {"guided_decoding_guide_type": kind, "guided_decoding_guide": text}


def _schema(name: str, value: Any) -> Guide:
    """A JSON schema, as an object or as its text."""
    if isinstance(value, str):
        return _guide("json_schema", checked_text(name, value))
    if not isinstance(value, dict):
        raise bad_field(name, "the schema must be an object")
    try:
        return _guide("json_schema", json.dumps(value, separators=(",", ":")))
    except RecursionError:  # it was read with a few frames more to go
        raise bad_field(name, "the schema is nested too deeply") from None


def _object(name: str, value: Any) -> Guide:
    if value is not True:
        raise bad_field(name, "expected true or false")
    # The server's own json allows arrays as well.
    return _schema(name, {"type": "object"})


def _regex(name: str, value: Any) -> Guide:
    return _guide("regex", checked_text(name, value))


def _grammar(name: str, value: Any) -> Guide:
    return _guide("ebnf_grammar", checked_text(name, value))


def _choice(name: str, value: Any) -> Guide:
    if not isinstance(value, list):
        raise bad_field(name, "expected a list of strings")
    texts = [_META.sub(r"\\\1", checked_text(name, each)) for each in value]
    return _guide("regex", f"({'|'.join(texts)})")


def _response_format(name: str, value: Any) -> Guide:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        # OpenAI promises an object. Its schema may stand right here, as other servers have it.
        schema = value.get("schema")
        if not isinstance(schema, (dict, NoneType)):
            raise bad_field(name, "schema must be an object")
        return _object(name, True) if schema is None else _schema(name, schema)
    if kind == "json_schema":
        holder = value.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            raise bad_field(name, "json_schema.schema must be an object")
        return _schema(name, schema)
    if kind in ("regex", "ebnf"):
        return (_regex if kind == "regex" else _grammar)(f"{name}.{kind}", value.get(kind))
    raise bad_field(name, "type must be text, json_object, json_schema, regex or ebnf")


def _structured_outputs(
    name: str, value: Mapping[str, Any], unknown: UnknownFields
) -> list[tuple[str, Guide]]:
    found = []
    for key, each in value.items():
        full = f"{name}.{key}"
        if is_empty(each) or key == "disable_fallback":
            continue
        if key in _STRUCTURED_READERS:
            found.append((full, _STRUCTURED_READERS[key](full, each)))
        elif key in _STRUCTURED_OFF:
            raise unsupported(full)
        else:
            unknown.see(full)
    return found


_Reader = Callable[[str, Any], Guide]

_STRUCTURED_READERS: Mapping[str, _Reader] = {
    "json": _schema,
    "json_object": _object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_READERS: Mapping[str, _Reader] = {
    "response_format": _response_format,
    **{f"guided_{name}": read for name, read in _STRUCTURED_READERS.items()},
    "regex": _regex,
    "ebnf": _grammar,
    "grammar": _grammar,
    "json_schema": _schema,
}
"""Fields of OpenAI, then of vLLM, SGLang (three) and llama.cpp."""
