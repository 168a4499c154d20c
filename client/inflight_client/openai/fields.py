"""Fields of a JSON body, read one by one; what nobody reads is refused by name in the end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from inflight_client.openai.errors import ApiError, bad_field, unsupported

_MAX_SHOWN = 40  # characters of a number in an error


class Body:
    """A request body; null counts as not given, as OpenAI's API has it."""

    def __init__(self, raw: bytes) -> None:
        """`ApiError` unless ``raw`` is a JSON object in UTF-8, each key once."""
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
        """A whole number within bounds; None if not given."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_field(name, f"expected a whole number, got {_kind(value)}")
        if not low <= value <= high:
            raise bad_field(name, f"{_shown(value)} is outside {low}..{high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A finite number within bounds; None if not given."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise bad_field(name, f"expected a number, got {_kind(value)}")
        if not (low <= value <= high and math.isfinite(value)):
            raise bad_field(name, f"{_shown(value)} is outside {low:g}..{high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; false if not given."""
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise bad_field(name, f"expected true or false, got {_kind(value)}")
        return value

    def text(self, name: str) -> str | None:
        """A string of valid Unicode; None if not given."""
        value = self.take(name)
        return None if value is None else checked_text(name, value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; empty if not given."""
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise bad_field(name, f"expected an object, got {_kind(value)}")
        return value

    def accept_neutral(self, name_to_values: Mapping[str, Sequence[Any]]) -> None:
        """Take fields we do not support when their value asks for nothing, else refuse them."""
        for name, values in name_to_values.items():
            value = self.take(name)
            if value is not None and value not in values:
                raise unsupported(name)

    def check_empty(self) -> None:
        """`ApiError` for a field that nobody took."""
        for name in self._fields:
            shown = name.encode("ascii", "replace").decode()[:100]
            message = f"Unrecognized request argument supplied: {shown}"
            raise ApiError(400, message, shown, "unknown_parameter")


def checked_text(name: str, value: Any) -> str:
    """``value`` itself if it is a string that can be encoded, else `ApiError`."""
    if not isinstance(value, str):
        raise bad_field(name, f"expected a string, got {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise bad_field(name, f"no valid Unicode at position {error.start}") from None
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    words = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return words.get(type(value), "a number")


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
