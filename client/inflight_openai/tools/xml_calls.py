"""Calls whose arguments are elements, without JSON (Qwen3-Coder, Qwen3.5; GLM 4.5 and later).

``<tool_call><function=f><parameter=city>Rome</parameter></function></tool_call>`` and
``<tool_call>f<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>``. A value is JSON
where it can be read as such and the schema does not say that it is a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from inflight_openai.tools.reader import Part, held_back

_BEGIN, _END = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"\s*(?:<function=([^>]+)>|([^\s<]+))")
_ARGUMENT = re.compile(
    r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>"
    r"|<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>\n?(.*?)\n?</arg_value>",
    re.DOTALL,
)


class XmlReader:
    """Text with calls in it, each of which is read when it is complete."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """``schemas``: of the arguments, by name of the tool."""
        self._schemas = schemas
        self._buffer = ""
        self._num_calls = 0

    def feed(self, text: str) -> Iterator[Part]:
        """See `Reader`."""
        self._buffer += text
        while self._buffer:
            before, has_begun, rest = self._buffer.partition(_BEGIN)
            if not has_begun:
                end = len(before) - held_back(before, (_BEGIN,))
                before = before[:end].rstrip()
            if before.strip():
                yield Part("content", before if not has_begun else before.rstrip())
            if not has_begun:
                self._buffer = self._buffer[len(before) :]
                return
            call, has_end, behind = rest.partition(_END)
            if not has_end:
                self._buffer = _BEGIN + rest
                return
            yield from self._call(call)
            self._buffer = behind

    def finish(self) -> Iterator[Part]:
        """See `Reader`."""
        if self._buffer.startswith(_BEGIN):
            yield from self._call(self._buffer.removeprefix(_BEGIN))
        elif self._buffer and not (self._num_calls and self._buffer.isspace()):
            yield Part("content", self._buffer)

    def _call(self, text: str) -> Iterator[Part]:
        found = _NAME.match(text)
        if found is None:
            yield Part("content", f"{_BEGIN}{text}{_END}")
            return
        name = found[1] or found[2]
        arguments = {
            key or other_key: self._value(name, key or other_key, value or other)
            for key, value, other_key, other in _ARGUMENT.findall(text)
        }
        yield Part("call", json.dumps(arguments, ensure_ascii=False), self._num_calls, name)
        self._num_calls += 1

    def _value(self, name: str, key: str, text: str) -> Any:
        properties = self._schemas.get(name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        if not (isinstance(schema, dict) and schema.get("type") == "string"):
            with suppress(ValueError):
                return json.loads(text)
        return text
