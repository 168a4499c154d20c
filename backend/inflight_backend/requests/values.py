"""Reads single values of a request, each checked against its bounds by name."""

from __future__ import annotations

import numpy as np

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import InferenceRequest


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


def flag(request: InferenceRequest, name: str, default: bool) -> bool:
    """A truth value; ``default`` if it was not sent."""
    return bool(request.get_tensor(name).reshape(-1)[0]) if request.has_tensor(name) else default


def _bounds(minimum: float, maximum: float) -> str:
    if minimum == -np.inf:
        return ""
    return f", at least {minimum:g}" if maximum == np.inf else f", {minimum:g}..{maximum:g}"
