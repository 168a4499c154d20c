"""What the readers of all methods do with keys."""

from __future__ import annotations

import re

from inflight_backend.models.checkpoint_files import JsonReader

_LEFT_OUT = ("modules_to_not_convert", "ignored_layers")
NOT_QUANTISED = ("quant_method", *_LEFT_OUT)
"""What every method may say; which linears are not quantised is seen by their tensors."""
_LEFT_OUT_BY_ONE = ("ignore", "exclude_modules", "llm_int8_skip_modules")
"""The same in single methods."""


def left_out(reader: JsonReader) -> tuple[str, ...]:
    """Names and patterns (behind "re:") of what is not quantised, by any method's key."""
    never = "-:"  # of GPTQModel
    found = [f"re:{each[2:]}" for each in reader.section("dynamic") if each.startswith(never)]
    for key in (*_LEFT_OUT, *_LEFT_OUT_BY_ONE):
        names = reader.texts(key) if reader.is_list(key) else []
        for name in names:
            if name.startswith("re:"):
                check_pattern(reader, key, name.removeprefix("re:"))
        found += names
    return tuple(found)


def check_keys(reader: JsonReader, *known: str) -> None:
    """`CheckpointError` for a key that is not ``known`` and has a value."""
    for key in reader:
        if key not in known:
            reader.fail(key, f"is not supported; supported: {', '.join(known)}")


def choose(reader: JsonReader, key: str, *choices: str, default: str | None = None) -> str:
    """The text of ``key``, one of ``choices``."""
    found = reader.text(key) if default is None else reader.text(key, default=default)
    if found not in choices:
        reader.fail(key, f"{found!r} is not supported; supported: {', '.join(choices)}")
    return found


def choose_number(reader: JsonReader, key: str, *choices: int) -> int:
    """The integer of ``key``, one of ``choices``."""
    found = reader.integer(key)
    if found not in choices:
        supported = ", ".join(map(str, choices))
        reader.fail(key, f"{found} is not supported; supported: {supported}")
    return found


def group_size(reader: JsonReader) -> int | None:
    """``group_size``; -1, or none at all, is one group: None."""
    size = reader.integer("group_size", default=-1, minimum=-1)
    if size == 0:
        reader.fail("group_size", "must be -1 or above 0, not 0")
    return None if size < 0 else size


def check_pattern(reader: JsonReader, key: str, pattern: str) -> None:
    """`CheckpointError` about ``key`` for what is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        reader.fail(key, f"has the pattern {pattern!r}, which is no regular expression: {error}")
