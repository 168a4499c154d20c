"""Reads single values of a request, each checked against its bounds by name: numbers, truth
values, and small JSON objects."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import InferenceRequest

MAX_JSON_BYTES = 64 * 1024
"""Size of a JSON object; a parser holds the interpreter lock until it has read all of it."""

_MAX_SHOWN = 100


def integer(request: InferenceRequest, name: str, default: int, minimum: int, maximum: int) -> int:
    """An integer within its bounds; ``default`` if it was not sent."""
    if not request.has_tensor(name):
        return default
    value = int(request.get_tensor(name).reshape(-1)[0])
    if not minimum <= value <= maximum:
        raise InvalidRequest(
            f"'{request.sent_name(name)}' is {value}, outside {minimum}..{maximum}"
        )
    return value


def number(
    request: InferenceRequest, name: str, default: float, minimum: float, maximum: float
) -> float:
    """A finite number within its bounds; ``default`` if it was not sent.

    The bounds are rounded as the number was on its way: the FP32 nearest to 1e-6 is less than that.
    """
    if not request.has_tensor(name):
        return default
    value = float(request.get_tensor(name).reshape(-1)[0])
    if not np.isfinite(value) or not np.float32(minimum) <= value <= np.float32(maximum):
        raise InvalidRequest(
            f"'{name}' is {value:g}; it must be a finite number{_bounds(minimum, maximum)}"
        )
    return value


def check_vocabulary(name: str, ids: Iterable[int], vocab_size: int, *, minimum: int = 0) -> None:
    """`InvalidRequest` for an id that is not a token of the model (or at least ``minimum``)."""
    wrong = next((token for token in ids if not minimum <= token < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(f"'{name}' holds {wrong}, outside the vocabulary 0..{vocab_size - 1}")


def flag(request: InferenceRequest, name: str, default: bool) -> bool:
    """A truth value; ``default`` if it was not sent."""
    return bool(request.get_tensor(name).reshape(-1)[0]) if request.has_tensor(name) else default


def text_bytes(request: InferenceRequest, name: str) -> bytes:
    """The first text of a tensor in UTF-8 (or in whatever bytes were sent); b"" without the tensor
    or with an empty text."""
    if not request.has_tensor(name):
        return b""
    value = request.get_tensor(name).reshape(-1)[0]
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def read_json_object(
    field: str, text: bytes | str, max_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """The JSON object in ``text``; `InvalidRequest` names ``field``, also for a key given twice."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(data) > max_bytes:
        raise InvalidRequest(f"'{field}' has {len(data)} bytes, more than {max_bytes}")
    try:
        content = json.loads(data, object_pairs_hook=_unique)
    except _DoubledKey as doubled:
        raise InvalidRequest(f"'{field}' has the key {doubled} twice in one object") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"'{field}' is not valid JSON: {error}") from None
    except (ValueError, RecursionError):
        raise InvalidRequest(f"'{field}' is not valid JSON") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"'{field}' must be a JSON object")
    return content


class _DoubledKey(ValueError):
    """Parsers differ in which of the two values counts."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise _DoubledKey(repr(key[:_MAX_SHOWN]))
        content[key] = value
    return content


def _bounds(minimum: float, maximum: float) -> str:
    if minimum == -np.inf:
        return ""
    return f", at least {minimum:g}" if maximum == np.inf else f", {minimum:g}..{maximum:g}"
