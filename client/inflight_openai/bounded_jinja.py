"""Jinja for templates of strangers: sandboxed, and bounded in time, text and what is multiplied.

Jinja's sandbox keeps a template from objects of Python, but not from looping for ever or making
texts that fill the memory. What runs in C cannot be interrupted and stops every other thread, so
nothing is made that could take long there: the text of a list of lists is as long, and comparing it
takes as long, as if each were in it as often as it is named (`weigh`); long numbers are divided
digit by digit.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from mmap import PAGESIZE
from types import FrameType
from typing import Any

from jinja2 import TemplateError, filters, nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 16 * 2**20
"""Of a rendered text, and of every text on the way to it."""

MAX_SECONDS = 5.0

MAX_BYTES = 512 * 2**20
"""By which the process may grow meanwhile: many texts, each of them within its bound."""

_MAX_BITS = 2**17
_ITEM = 16  # what an item counts beside its characters: a million of them is the limit
_MAX_UNWEIGHED = 4096  # items of a sum: templates collect messages one by one
_ITEMS: type[Any] = type({}.items())
_CONTAINERS: tuple[type[Any], ...] = (
    list,
    tuple,
    set,
    frozenset,
    dict,
    *map(type, ({}.keys(), {}.values())),
    _ITEMS,
)
# `collections.abc.Sized` would count Jinja's own objects, of which some only say that they are.
_SIZED: tuple[type[Any], ...] = (str, bytes, range, *_CONTAINERS)

_FILTERS = vars(filters)
_FORMAT = filters.do_format.__code__
_CONCATENATIONS = (str_join.__code__, markup_join.__code__)
_WIDTH = re.compile(
    r"\d{8,}|%[-#0 +]*\*"
)  # in a format: how far it pads, or that another value says so


class _LazyGenerator(CodeGenerator):
    """Computes nothing while compiling, also not what is constant: nothing is bounded then."""

    def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_List(self, node: nodes.List, frame: Any) -> None:
        self.write("environment.bounded(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:
        self.write("environment.bounded(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:
        is_value = node.ctx == "load"  # else names to be set
        self.write("environment.bounded(" if is_value else "")
        super().visit_Tuple(node, frame)
        self.write(")" if is_value else "")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Refuses, by `TemplateError`, what would make a text or number that is too large."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _LazyGenerator
    concat = staticmethod(lambda pieces: join_bounded(pieces))  # of macros and blocks

    def __init__(self, **options: Any) -> None:
        """``options`` are those of `jinja2.Environment`."""
        super().__init__(optimized=False, finalize=self.bounded, **options)

    def bounded(self, value: Any) -> Any:
        """``value``; `TemplateError` if it is too large."""
        if weigh(value) > MAX_CHARACTERS:
            raise TemplateError(f"a value has more than {MAX_CHARACTERS} characters")
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """One of those operators."""
        if (
            _result_size(operator, left, right) > MAX_CHARACTERS
            or _num_bits(operator, left, right) > _MAX_BITS
        ):
            raise TemplateError(f"the result of '{operator}' would be too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        """A function or a method: those of texts take no huge widths, nor multiply texts."""
        self.bounded((args, kwargs))
        method = getattr(called, "__wrapped__", called)  # the sandbox wraps `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_values(owner, *args, *kwargs.values())
            if method.__name__.startswith("format"):
                _check_format(owner)
        return self.bounded(super().call(context, called, *args, **kwargs))


def weigh(value: Any, known: dict[int, int] | None = None) -> int:
    """Characters of ``value`` and all that it holds, as often as that is named, and 16 for each
    item; of what is too large only that it is. O(different items), which do not change meanwhile.
    """
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, _CONTAINERS):
        return 1
    known = {} if known is None else known
    if (before := known.get(id(value))) is not None:
        return before
    # The pairs of a view of items are made for whoever asks, so what is next may have the same id.
    parts = chain.from_iterable(value) if isinstance(value, _ITEMS) else value
    weight = 1
    for part in parts:
        weight += _ITEM + (len(part) if type(part) is str else weigh(part, known))
        if isinstance(value, dict):
            weight += weigh(value[part], known)
        if weight > MAX_CHARACTERS:
            break
    known[id(value)] = weight
    return weight


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
def limits(seconds: float) -> Iterator[None]:
    """`TemplateError` from whatever Python this thread runs for longer, loops of templates too.

    Texts that a template joins, what its filters get, and what all of it takes (`MAX_BYTES`) are
    measured on the way.
    """
    deadline = time.monotonic() + seconds
    memory = _open_memory()
    most_bytes = _resident_bytes(memory) + MAX_BYTES

    def check(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TemplateError(f"it takes longer than {seconds:g} s")
        if frame.f_code in _OURS:
            return None  # not line by line, which takes long
        if event == "call" and _resident_bytes(memory) > most_bytes:
            raise TemplateError(f"it takes more than {MAX_BYTES >> 20} MB of memory")
        if event == "call" and frame.f_code in _CONCATENATIONS:
            parts = frame.f_locals.get("seq", ())
            if weigh(parts) > MAX_CHARACTERS:
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
        if memory is not None:
            os.close(memory)


def _open_memory() -> int | None:
    """A descriptor of what Linux tells of this process's memory; None elsewhere."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _resident_bytes(memory: int | None) -> int:
    return 0 if memory is None else int(os.pread(memory, 256, 0).split()[1]) * PAGESIZE


def _check_values(*values: Any) -> None:
    """What a method of a text, or a filter, gets: its result is no larger than their product."""
    sizes = sorted(len(value) for value in values if isinstance(value, _SIZED))
    widths = [value for value in values if isinstance(value, int)]
    largest = max(math.prod(sizes[-2:]), *widths, weigh(values))
    if largest > MAX_CHARACTERS:
        raise TemplateError("the text would be too long")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDTH.search(text):
        raise TemplateError("the text would be too long")


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Characters and items of the result, at most; more than the limit if it is unknown."""
    if operator == "%":
        if not isinstance(left, str):
            return 0
        return MAX_CHARACTERS + 1 if _WIDTH.search(left) else left.count("%") * weigh(right)
    if operator == "+":
        length = sum(len(each) for each in (left, right) if isinstance(each, _SIZED))
        return length if length < _MAX_UNWEIGHED else weigh(left) + weigh(right)
    for sized, number in ((left, right), (right, left)):
        if isinstance(sized, _SIZED) and isinstance(number, int):
            return weigh(sized) * number
    return 0


def _num_bits(operator: str, left: Any, right: Any) -> int:
    """Bits of the result, at most."""
    if not (isinstance(left, int) and isinstance(right, int)):
        return 0
    bits = left.bit_length()
    return bits * right if operator == "**" else bits + right.bit_length()


_OURS = frozenset(
    each.__code__ for each in (weigh, _num_bits, _result_size, BoundedEnvironment.bounded)
)
