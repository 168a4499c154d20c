"""Fields of a JSON body, read one by one; what is left in the end, the table of fields decides."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from inflight_openai.errors import ApiError, bad_field, unsupported
from inflight_openai.field_table import GROUP_BY_NAME, Action, is_empty
from inflight_openai.private_log import get_logger

_logger = get_logger(__name__)

_MAX_SHOWN = 40  # characters of a number in an error
_MAX_LOGGED = 100  # unknown names, in a run
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)  # of a field; what is longer may be a text


class UnknownFields:
    """What becomes of fields that nobody knows: passed over with a line in the log, or refused."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def see(self, name: str) -> None:
        """A request has the field ``name``; `ApiError` if that is refused."""
        shown = name if _NAME.fullmatch(name) else "(no name of a field)"
        if self._is_strict:
            message = f"Unrecognized request argument supplied: {shown}"
            raise ApiError(400, message, shown, "unknown_parameter")
        if shown not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(shown)
            _logger.warning("the field %s of a request is unknown and passed over", shown)


class Body:
    """A request body; null, false and what is empty count as not given, where that may be."""

    def __init__(self, raw: bytes, unknown: UnknownFields | None = None) -> None:
        """`ApiError` unless ``raw`` is a JSON object in UTF-8, each key once."""
        self.unknown = unknown or UnknownFields()
        try:
            content = json.loads(
                raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique
            )
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not valid JSON: {error}") from None
        if not isinstance(content, dict):
            raise ApiError(400, "the body must be a JSON object")
        self._fields = {name: value for name, value in content.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        """A field of any kind; every field is taken once."""
        return self._fields.pop(name, default)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number within bounds; None if not given or empty."""
        value = self.take(name)
        if is_empty(value):
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_field(name, f"expected a whole number, got {kind_of(value)}")
        if not low <= value <= high:
            raise bad_field(name, f"{_shown(value)} is outside {low}..{high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A finite number within bounds; None if not given or empty."""
        value = self.take(name)
        if is_empty(value):
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise bad_field(name, f"expected a number, got {kind_of(value)}")
        if not (low <= value <= high and math.isfinite(value)):
            raise bad_field(name, f"{_shown(value)} is outside {low:g}..{high:g}")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false; ``default`` if not given or empty."""
        value = self.take(name)
        if is_empty(value) and value is not False:
            return default
        if not isinstance(value, bool):
            raise bad_field(name, f"expected true or false, got {kind_of(value)}")
        return value

    def text(self, name: str) -> str | None:
        """A string of valid Unicode; None if not given or empty."""
        value = self.take(name)
        return None if is_empty(value) else checked_text(name, value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; empty if not given."""
        value = self.take(name)
        if is_empty(value):
            return {}
        if not isinstance(value, dict):
            raise bad_field(name, f"expected an object, got {kind_of(value)}")
        return value

    def check_rest(self, call: str) -> None:
        """Decide about the fields that nobody took; `ApiError` for one that is refused."""
        for name, value in self._fields.items():
            group = GROUP_BY_NAME.get(name)
            if group is None:
                if not is_empty(value):
                    self.unknown.see(name)
            elif group.action is Action.PASSED:
                if group.kind and not (is_empty(value) or isinstance(value, group.kind)):
                    raise bad_field(name, f"expected {_NAMES[group.kind]}, got {kind_of(value)}")
            elif not group.asks_for_nothing(name, value):
                raise unsupported(name, f"there is no such field of {call}" if group.call else "")


def checked_text(name: str, value: Any) -> str:
    """``value`` itself if it is a string that can be encoded, else `ApiError`."""
    if not isinstance(value, str):
        raise bad_field(name, f"expected a string, got {kind_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise bad_field(name, f"no valid Unicode at position {error.start}") from None
    return value


_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}


def kind_of(value: Any) -> str:
    """What JSON calls such a value."""
    return "nothing" if value is None else _NAMES.get(type(value), "a number")


def _shown(value: float) -> str:
    """A number as errors quote it: whole ones of JSON may have thousands of digits."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key[:100]!r} is given twice in one object")
        content[key] = value
    return content
