"""Calls that are JSON objects with a name in them, and calls whose name stands before the JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any

from inflight_openai.tools.reader import JsonScanner, Part, held_back

_ARGUMENTS = ("arguments", "parameters")
_MAX_HEADER = 256  # characters of a name and what stands around it


class TaggedReader:
    """Text, in which calls stand behind an opening mark.

    With ``header`` a call is that expression, whose group ``name`` is the tool, and a JSON object;
    else an object that has both. What may stand between calls is left out: blanks, brackets and
    commas of lists, and ``fillers``.
    """

    def __init__(
        self,
        openers: Sequence[str],
        fillers: Sequence[str],
        header: re.Pattern[str] | None = None,
        *,
        may_be_bare: bool = False,
    ) -> None:
        """``may_be_bare``: an answer that begins with an object, or a list of them, is calls."""
        self._openers, self._fillers, self._header = openers, fillers, header
        self._may_be_bare = may_be_bare
        self._buffer = ""
        self._state = "start"
        self._num_calls = 0
        self._call: _JsonCall | None = None
        self._is_doubtful = False  # a mark was read, and no call yet: `_raw` is what came since
        self._raw = ""

    def feed(self, text: str) -> Iterator[Part]:
        """See `Reader`."""
        self._buffer += text
        self._raw += text if self._is_doubtful else ""
        while self._buffer:
            before = (len(self._buffer), self._state, self._call)
            if self._call is not None:
                yield from self._read_call(self._call)
            elif self._state == "between":
                yield from self._read_between()
            else:
                yield from self._read_text()
            if before == (len(self._buffer), self._state, self._call):
                return  # it must see more

    def finish(self) -> Iterator[Part]:
        """See `Reader`."""
        rest = self._raw if self._is_doubtful else self._buffer
        is_text = self._state != "between" and rest.strip()
        if rest and (self._is_doubtful or is_text or not self._num_calls):
            yield Part("content", rest)

    def _read_text(self) -> Iterator[Part]:
        """Content up to an opening mark; blanks before it, and between calls, are left out."""
        if self._state == "start" and self._may_be_bare:
            start = self._buffer.lstrip()
            if not start:
                return
            if start[0] in "{[":
                self._begin_calls(self._buffer, start)
                return
        places = {self._buffer.find(each): each for each in self._openers}
        places.pop(-1, None)
        if places:
            place = min(places)
            text, raw = self._buffer[:place].rstrip(), self._buffer[place:]
            self._begin_calls(raw, raw.removeprefix(places[place]))
        else:
            end = len(self._buffer) - held_back(self._buffer, self._openers)
            text = self._buffer[:end].rstrip()
            if not text:
                return
            self._buffer = self._buffer[len(text) :]
            self._state = "text"
        if text.strip():
            yield Part("content", text)

    def _begin_calls(self, raw: str, behind: str) -> None:
        self._state, self._buffer = "between", behind
        self._is_doubtful, self._raw = self._num_calls == 0, raw

    def _is_no_call(self) -> Iterator[Part]:
        """What came since the mark is text, though it may be in the middle of it."""
        self._state = "text"
        if self._is_doubtful:
            yield Part("content", self._raw)
            self._is_doubtful, self._raw, self._buffer = False, "", ""

    def _read_between(self) -> Iterator[Part]:
        """What stands before a call and behind it."""
        rest = self._buffer.lstrip()
        if not rest:
            self._buffer = ""
            return
        self._buffer = rest
        if self._header is not None and (found := self._header.match(rest)):
            self._buffer = rest[found.end() :]
            self._call = _JsonCall(self._num_calls, found["name"])
            return
        for each in self._fillers:
            if rest.startswith(each):
                self._buffer = rest[len(each) :]
                return
        if self._header is None and rest[0] == "{":
            self._call = _JsonCall(self._num_calls)
        elif self._header is None and rest[0] in "[],;":
            self._buffer = rest[1:]
        elif held_back(rest, self._fillers) < len(rest) and not self._may_become_header(rest):
            yield from self._is_no_call()

    def _may_become_header(self, rest: str) -> bool:
        """Whether the header may still be complete: there is no JSON yet, and not too much text."""
        return self._header is not None and "{" not in rest and len(rest) < _MAX_HEADER

    def _read_call(self, call: _JsonCall) -> Iterator[Part]:
        text, self._buffer = self._buffer, ""
        rest = yield from call.feed(text)
        if call.has_begun:
            self._is_doubtful, self._raw = False, ""
        if call.is_done:
            self._num_calls += call.has_begun
            self._call, self._buffer = None, rest
            if not call.has_begun:
                yield from self._is_no_call()


class _JsonCall:
    """One call, whose arguments are given as they come; it has not begun if it is none."""

    def __init__(self, index: int, name: str = "") -> None:
        """``name``: of the tool, if the object is the arguments alone."""
        self._index, self._name = index, name
        self._is_object = not name
        self._scanner = JsonScanner()
        self._num_sent = 0
        self.has_begun = False
        self.is_done = False

    def feed(self, text: str) -> Generator[Part, None, str]:
        """Read on; returns what stands behind the call."""
        if not self._scanner.text:
            text = text.lstrip()
            if text and text[0] != "{":  # no arguments
                self.is_done = True
                return text
        rest = self._scanner.feed(text)
        self.is_done = self._scanner.is_done
        if not self._is_object:
            yield from self._send(self._scanner.text)
        elif name := self._whole_name():
            self._name = name
            yield from self._send_arguments()
        if self.is_done and not self.has_begun:
            yield from self._inner_call()
        return rest

    def _whole_name(self) -> str:
        if not self._scanner.has_ended("name"):
            return ""
        with suppress(ValueError):
            name = json.loads(self._scanner.value("name") or "")
            return name if isinstance(name, str) else ""
        return ""

    def _send_arguments(self) -> Iterator[Part]:
        key = next((each for each in _ARGUMENTS if self._scanner.value(each) is not None), None)
        if key is None:
            if self.is_done:
                yield from self._send("{}")
            return
        value = self._scanner.value(key) or ""
        has_ended = self._scanner.has_ended(key)
        if value.startswith('"'):  # JSON in JSON
            if not has_ended:
                return
            with suppress(ValueError):
                value = json.loads(value)
        if not has_ended:
            value = value.rstrip()
        yield from self._send(value)

    def _send(self, arguments: str) -> Iterator[Part]:
        """What is new in ``arguments``."""
        name = "" if self.has_begun else self._name
        new = arguments[self._num_sent :]
        if new or name:
            self.has_begun = True
            self._num_sent = len(arguments)
            yield Part("call", new, self._index, name)

    def _inner_call(self) -> Iterator[Part]:
        """Of an object without a name: a call in an object of its own, if it has one."""
        with suppress(ValueError):
            function = json.loads(self._scanner.text).get("function")
            if isinstance(function, dict) and isinstance(name := function.get("name"), str):
                arguments: Any = next((function[key] for key in _ARGUMENTS if key in function), {})
                self._name = name
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                yield from self._send(text)
