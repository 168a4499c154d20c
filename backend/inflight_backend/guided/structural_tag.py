"""Guides of type ``structural_tag``: text in which parts between tags follow a schema, as calls of
tools do.

The object is xgrammar's (https://xgrammar.mlc.ai, structural tags), which TensorRT-LLM, vLLM and
SGLang take: ``{"format": {"type": "triggered_tags", ...}}``, or the older form with ``structures``
and ``triggers``. Types of a format: ``sequence`` and ``or`` (``elements``), ``const_string``
(``value``), ``json_schema`` (``json_schema``), ``regex`` (``pattern``), ``any_text``, ``tag``
(``begin``, ``content``, ``end``), ``triggered_tags`` (``triggers``, ``tags``) and
``tags_with_separator`` (``tags``, ``separator``); the last two with ``at_least_one`` and
``stop_after_first``. It becomes a grammar of llguidance, in which special tokens of the tokenizer
are tokens wherever a text has them, and no token of other text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from inflight_backend.errors import InvalidRequest
from inflight_backend.guided.guide import GUIDE_FIELD

_MAX_FORMATS = 1024
_SLASH = re.compile(r"\\.|/", re.DOTALL)
_MAX_TRIGGER = 128  # characters


class StructuralTagWriter:
    """Writes one grammar."""

    def __init__(self, special: Mapping[str, int], json_rule: Callable[[Any], str]) -> None:
        """``special``: ids of special tokens by text; ``json_rule``: a schema in the grammar."""
        self._special = special
        self._json_rule = json_rule
        self._rules: list[str] = []
        self._num_formats = 0
        texts = sorted(filter(None, special), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, texts))})" if texts else r"(?!)()")

    def write(self, content: Mapping[str, Any]) -> str:
        """The grammar of the object of a guide; `InvalidRequest` names what is wrong in it."""
        if "structures" in content:
            content = {"format": _from_older(content)}
        start = self._format(content.get("format"), "format")
        return "\n".join([f"start: {start}", r"TEXT: /(.|\n)*/", *self._rules])

    def _format(self, value: Any, place: str) -> str:
        """The expression of a format."""
        self._num_formats += 1
        if self._num_formats > _MAX_FORMATS:
            raise _wrong(place, f"there are more than {_MAX_FORMATS} formats")
        if not isinstance(value, dict):
            raise _wrong(place, "expected an object with a type")
        kind = value.get("type")
        writers: dict[Any, Callable[[dict[str, Any], str], str]] = {
            "const_string": lambda value, place: self._text(value, "value", place) or '""',
            "any_text": lambda value, place: "TEXT",
            "json_schema": self._schema,
            "regex": self._regex,
            "tag": self._tag,
            "sequence": self._sequence,
            "or": self._alternatives,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }
        if not isinstance(kind, str) or kind not in writers:
            raise _wrong(f"{place}.type", f"expected one of {', '.join(writers)}")
        return writers[kind](value, place)

    def _schema(self, value: Mapping[str, Any], place: str) -> str:
        schema = value.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise _wrong(f"{place}.json_schema", "expected an object")
        return self._rule(self._json_rule(schema))

    def _regex(self, value: Mapping[str, Any], place: str) -> str:
        pattern = _SLASH.sub(_escaped_slash, _string(value, "pattern", place))
        return self._rule(f"/{pattern}/") if pattern else '""'

    def _alternatives(self, value: Mapping[str, Any], place: str) -> str:
        elements = _list(value, "elements", place)
        return f"({' | '.join(self._format(each, f'{place}.elements') for each in elements)})"

    def _sequence(self, value: Mapping[str, Any], place: str) -> str:
        place += ".elements"
        parts: list[str] = []
        for each in _list(value, "elements", place):
            is_behind_text = bool(parts) and parts[-1] == "TEXT"
            is_constant = isinstance(each, dict) and each.get("type") == "const_string"
            if is_behind_text and is_constant:
                parts[-1] = self._text_until(_string(each, "value", place))
            else:
                parts.append(self._format(each, place))
        return f"({' '.join(parts)})"

    def _tag(self, value: Mapping[str, Any], place: str, skipped: str = "") -> str:
        """``skipped``: the part of its beginning that stands in the grammar already."""
        begin = self._literal(_string(value, "begin", place).removeprefix(skipped))
        content = self._format(value.get("content"), f"{place}.content")
        end = _string(value, "end", place)
        rest = self._text_until(end) if content == "TEXT" and end else ""
        return self._rule(f"{begin} {rest or f'{content} {self._literal(end)}'}")

    def _triggered(self, value: Mapping[str, Any], place: str) -> str:
        """Text with tags in it, each from its trigger on."""
        triggers = [each for each in _list(value, "triggers", place) if isinstance(each, str)]
        by_trigger: dict[str, list[str]] = {}
        for tag in _tags(value, place):
            begin = _string(tag, "begin", place)
            found = [each for each in triggers if each and begin.startswith(each)]
            if not found or len(found[0]) > _MAX_TRIGGER:
                raise _wrong(f"{place}.tags", "each tag begins with one of the triggers")
            first = self._split.split(found[0])  # a token, or the text before one
            trigger = first[0] or first[1]
            by_trigger.setdefault(trigger, []).append(self._tag(tag, place, skipped=trigger))
        parts = [
            self._rule(f"{self._text_until(trigger)} ({' | '.join(tags)})")
            for trigger, tags in by_trigger.items()
        ]
        tags = f"({' | '.join(parts)})"
        if value.get("stop_after_first") is True:
            return tags if value.get("at_least_one") is True else f"({tags} | TEXT)"
        return f"({tags}{'+' if value.get('at_least_one') is True else '*'} TEXT)"

    def _separated(self, value: Mapping[str, Any], place: str) -> str:
        """Tags and nothing else."""
        found = [self._tag(tag, place) for tag in _tags(value, place)]
        one = self._rule(" | ".join(found))
        separator = self._text(value, "separator", place)
        several = one if value.get("stop_after_first") is True else f"{one} ({separator} {one})*"
        return f"({several})" if value.get("at_least_one") is True else f"({several})?"

    def _text_until(self, end: str) -> str:
        """Any text up to the first ``end``, and that."""
        before, *rest = self._split.split(end)
        behind = self._literal("".join(rest))
        if not before:
            return f"TEXT {behind}"
        name = f"lazy_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: TEXT {json.dumps(before)}")
        return f"{name} {behind}"

    def _text(self, value: Mapping[str, Any], key: str, place: str) -> str:
        return self._literal(_string(value, key, place))

    def _literal(self, text: str) -> str:
        """A text, its special tokens as tokens."""
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece)
            for piece in self._split.split(text)
            if piece
        )

    def _rule(self, expression: str) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name


def _escaped_slash(match: re.Match[str]) -> str:
    """Between slashes stands an expression in the grammar."""
    return r"\/" if match[0] == "/" else match[0]


def _from_older(content: Mapping[str, Any]) -> dict[str, Any]:
    """The form with ``structures`` as a format."""
    tags = [
        {
            "type": "tag",
            "begin": each.get("begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema")},
            "end": each.get("end"),
        }
        for each in _list(content, "structures", "structures")
        if isinstance(each, dict)
    ]
    return {"type": "triggered_tags", "triggers": content.get("triggers"), "tags": tags}


def _tags(value: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    tags = _list(value, "tags", place)
    if not tags or not all(isinstance(each, dict) for each in tags):
        raise _wrong(f"{place}.tags", "expected a list of at least one tag")
    return tags


def _list(value: Mapping[str, Any], key: str, place: str) -> list[Any]:
    found = value.get(key)
    if not isinstance(found, list) or not found:
        raise _wrong(f"{place}.{key}", "expected a list that is not empty")
    return found


def _string(value: Mapping[str, Any], key: str, place: str) -> str:
    found = value.get(key, "")
    if not isinstance(found, str):
        raise _wrong(f"{place}.{key}", "expected a string")
    return found


def _wrong(place: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"'{GUIDE_FIELD}' is no structural_tag: {place}: {message}")
