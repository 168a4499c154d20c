"""Typed access to a JSON object of a checkpoint; every complaint names the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import is_lfs_pointer

_MAX_BYTES = 64 * 2**20  # the index of a very large checkpoint has some 10 MB
_REQUIRED: Any = object()  # default of a key without a default


class JsonReader:
    """One JSON object; ``null`` counts as absent, and a missing required key is an error."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    @classmethod
    def from_file(cls, path: Path) -> JsonReader:
        """Read a file; `CheckpointError` if it is no JSON object or holds NaN or Infinity."""
        name = path.name
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise CheckpointError(f"{name}: larger than {_MAX_BYTES} bytes")
            values = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
        except OSError as error:
            raise CheckpointError(f"{name}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            why = "a pointer of Git LFS; run git lfs pull" if is_lfs_pointer(path) else error
            raise CheckpointError(f"{name}: not valid JSON ({why})") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{name}: must hold a JSON object")
        return cls(values, name)

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return (key for key, value in self._values.items() if value is not None)

    def equals(self, other: JsonReader) -> bool:
        """True if both objects hold the same."""
        return self._values == other._values

    def is_null(self, key: str) -> bool:
        """True when the key is written as ``null``."""
        return key in self._values and self._values[key] is None

    def fail(self, key: str, complaint: str) -> NoReturn:
        """Raise `CheckpointError` about ``key``."""
        raise CheckpointError(f"{self._where}: {key} {complaint}")

    def integer(
        self, key: str, *, default: int = _REQUIRED, minimum: int = 1, maximum: int = 2**24
    ) -> int:
        """An integer between the bounds."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"must be an integer, not {_show(value)}")
        if key in self and not minimum <= value <= maximum:
            self.fail(key, f"must be between {minimum} and {maximum}, not {_show(value)}")
        return value

    def number(self, key: str, *, default: float = _REQUIRED) -> float:
        """A finite number above 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(key, f"must be a number, not {_show(value)}")
        if not (math.isfinite(value) and 0 < value <= 1e30):
            self.fail(key, f"must be finite and above 0, not {_show(value)}")
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {_show(value)}")
        return value

    def text(self, key: str, *, default: str = _REQUIRED) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            self.fail(key, f"must be a string, not {_show(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings; an absent one is empty."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.fail(key, f"must be a list of strings, not {_show(value)}")
        return value

    def section(self, key: str) -> JsonReader:
        """A nested object; an absent one is empty."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            self.fail(key, f"must be an object, not {_show(value)}")
        return JsonReader(value, f"{self._where}: {key}")

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            self.fail(key, "is missing")
        return default


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
