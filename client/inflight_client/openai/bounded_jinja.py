"""Jinja for templates of strangers: sandboxed, and bounded in time, text and what is multiplied.

Jinja's sandbox keeps a template from objects of Python, but not from looping for ever or making
texts that fill the memory.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError, filters, nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 16 * 2**20
"""Of a rendered text, and of every text on the way to it."""

MAX_SECONDS = 5.0

_FILTERS = vars(filters)
_FORMAT = filters.do_format.__code__
_CONCATENATIONS = (str_join.__code__, markup_join.__code__)
_WIDTH = re.compile(r"\d{8,}|\*")  # in a format: how far it pads, or that another value says so


class _LazyGenerator(CodeGenerator):
    """Computes nothing while compiling, also not what is constant: nothing is bounded then."""

    def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Refuses, by `TemplateError`, what would make a text or number that is too large."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _LazyGenerator

    def __init__(self, **options: Any) -> None:
        """``options`` are those of `jinja2.Environment`."""
        super().__init__(optimized=False, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """One of those operators."""
        if _result_size(operator, left, right) > MAX_CHARACTERS:
            raise TemplateError(f"the result of '{operator}' would be too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        """A function or a method: those of texts take no huge widths, nor multiply texts."""
        method = getattr(called, "__wrapped__", called)  # the sandbox wraps `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_values(owner, *args, *kwargs.values())
            if method.__name__.startswith("format"):
                _check_format(owner)
        return super().call(context, called, *args, **kwargs)


def join_bounded(pieces: Iterable[str]) -> str:
    """The text; `TemplateError` if it is too long."""
    found: list[str] = []
    length = 0
    for piece in pieces:
        found.append(piece)
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise TemplateError(f"the text has more than {MAX_CHARACTERS} characters")
    return "".join(found)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """`TemplateError` from whatever Python this thread runs for longer, loops of templates too.

    Texts that a template joins, and what its filters get, are measured on the way.
    """
    deadline = time.monotonic() + seconds

    def check(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TemplateError(f"it takes longer than {seconds:g} s")
        if event == "call" and frame.f_code in _CONCATENATIONS:
            parts = frame.f_locals.get("seq", ())
            if sum(len(part) for part in parts if isinstance(part, str)) > MAX_CHARACTERS:
                raise TemplateError("the result of '~' would be too large")
        elif event == "call" and frame.f_globals is _FILTERS:
            _check_values(*frame.f_locals.values())
            if frame.f_code is _FORMAT:
                _check_format(frame.f_locals["value"])
        return check

    before = sys.gettrace()
    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)


def _check_values(*values: Any) -> None:
    """What a method of a text, or a filter, gets: its result is no larger than their product."""
    sizes = sorted(len(value) for value in values if isinstance(value, Sized))
    widths = [value for value in values if isinstance(value, int)]
    if max(widths, default=0) > MAX_CHARACTERS or math.prod(sizes[-2:]) > MAX_CHARACTERS:
        raise TemplateError("the text would be too long")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDTH.search(text):
        raise TemplateError("the text would be too long")


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Characters, items or bits of the result, at most; more than the limit if it is unknown."""
    if operator == "%":
        is_wide = isinstance(left, str) and _WIDTH.search(left)
        return MAX_CHARACTERS + 1 if is_wide else 0
    if operator == "+":
        return sum(len(each) for each in (left, right) if isinstance(each, Sized))
    for sized, number in ((left, right), (right, left)):
        if isinstance(sized, Sized) and isinstance(number, int):
            return len(sized) * number
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return bits * right if operator == "**" else bits + right.bit_length()
    return 0
