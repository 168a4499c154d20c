"""Values out of a recording: each is checked for its type and its bounds before it is used.

All raise `RecordingError`, which names the field and the bound.
"""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any, TypeVar

from inflight_recorder.errors import RecordingError
from inflight_recorder.records import MAX_NUM_REQUESTS

MAX_ID = 2**64 - 1
MAX_TIME = 2**53  # microseconds; what a JSON number holds exactly everywhere

_Enum = TypeVar("_Enum", bound=Enum)


def read_member(enum: type[_Enum], name: str, value: Any) -> _Enum:
    """The member of ``enum`` with this name, in lower case."""
    members = {member.name.lower(): member for member in enum}
    if not isinstance(value, str) or value not in members:
        raise RecordingError(f"{name} is {shorten(value)}: it must be one of {', '.join(members)}")
    return members[value]


def read_flag(content: dict[str, Any], name: str) -> bool:
    """A truth value, False if it is missing."""
    value = content.get(name, False)
    if not isinstance(value, bool):
        raise RecordingError(f"{name}: true or false is expected, not {shorten(value)}")
    return value


def read_row(fields: Any, name: str, minimum: int, maximum: int) -> list[Any]:
    """A list of so many values."""
    if not isinstance(fields, list) or not minimum <= len(fields) <= maximum:
        raise RecordingError(f"{name}: lists of {minimum} to {maximum} values are expected")
    return fields


def read_list(content: dict[str, Any], key: str, max_length: int) -> list[Any]:
    """The list under ``key``, empty if it is missing."""
    value = content.get(key, [])
    if not isinstance(value, list) or len(value) > max_length:
        raise RecordingError(f"{key} must be a list of at most {max_length} values")
    return value


def read_ids(content: dict[str, Any], key: str) -> tuple[int, ...]:
    """The request ids under ``key``."""
    return tuple([read_id(value, key) for value in read_list(content, key, MAX_NUM_REQUESTS)])


def read_id(value: Any, name: str) -> int:
    """The id of a request."""
    return read_integer(value, name, 0, MAX_ID)


def read_integer(value: Any, name: str, minimum: int = 0, maximum: int = MAX_ID) -> int:
    """A whole number between two bounds; no float, no truth value."""
    if type(value) is not int:
        raise RecordingError(f"{name}: a whole number is expected, not {shorten(value)}")
    if not minimum <= value <= maximum:
        raise RecordingError(
            f"{name} is {shorten(value)}: it must be between {minimum} and {maximum}"
        )
    return value


def read_priority(value: Any) -> float:
    """A number from 0 to 1 (so no NaN either)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise RecordingError(f"a priority is {shorten(value)}: it must be between 0 and 1")
    return float(value)


def read_number(value: Any, name: str) -> float:
    """A finite number that is not negative."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise RecordingError(f"{name} is {shorten(value)}: it must be a number, 0 or more")
    return float(value)


def read_text(value: Any) -> str:
    """A text of at most 1000 characters, all of which can be written and drawn."""
    if not isinstance(value, str) or len(value) > 1000 or not value.isprintable():
        raise RecordingError(f"a text is expected, not {shorten(value)}")
    return value


def shorten(value: Any) -> str:
    """``value`` as an error shows it: some 40 characters, whatever it is."""
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
