"""Calls written as a Python list: ``[get_weather(city="Rome", days=2)]`` (Llama 3.2 and 4)."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from contextlib import suppress

from inflight_openai.tools.reader import Part

_MARKS = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")
_MAX_LENGTH = 2**16  # of a list; Python's parser takes a long time, and much memory, for more


class PythonicReader:
    """An answer that begins with a list of calls is read when the list is complete."""

    def __init__(self) -> None:
        self._buffer = ""
        self._is_text = False

    def feed(self, text: str) -> Iterator[Part]:
        """See `Reader`."""
        self._buffer += text
        if not self._is_text:
            start = self._buffer.lstrip()
            for mark in _MARKS:
                start = start.removeprefix(mark)
            is_open = not start or start[0] == "[" or any(m.startswith(start) for m in _MARKS)
            self._is_text = not is_open or len(start) > _MAX_LENGTH
        if self._is_text and self._buffer:
            yield Part("content", self._buffer)
            self._buffer = ""

    def finish(self) -> Iterator[Part]:
        """See `Reader`."""
        text = self._buffer
        for mark in _MARKS:
            text = text.replace(mark, "")
        calls = _calls(text.strip())
        for index, (name, arguments) in enumerate(calls):
            yield Part("call", arguments, index, name)
        if self._buffer and not calls:
            yield Part("content", self._buffer)


def _calls(text: str) -> list[tuple[str, str]]:
    """Name and arguments (JSON) of each call in a list of them; empty if it is none."""
    with suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        body = ast.parse(text, mode="eval").body
        if isinstance(body, ast.List):
            return [_call(each) for each in body.elts]
    return []


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {each.arg: ast.literal_eval(each.value) for each in node.keywords if each.arg}
    return ast.unparse(node.func), json.dumps(arguments)
