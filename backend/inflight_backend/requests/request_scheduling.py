"""What a request says about its turn and its cache: deadlines, and with whom it shares."""

from __future__ import annotations

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import InferenceRequest

MAX_SALT_BYTES = 256
"""Longest ``cache_salt``: room for any tenant's name or secret, and a bound for memory."""


def read_cache_salt(request: InferenceRequest) -> bytes:
    """The salt of ``request``, b"" for none; `InvalidRequest` if it is empty or too long.

    An empty one is refused, since whoever sends it believes to be alone.
    """
    if not request.has_tensor("cache_salt"):
        return b""
    value = request.get_tensor("cache_salt").reshape(-1)[0]
    salt = value if isinstance(value, bytes) else str(value).encode()
    if not 0 < len(salt) <= MAX_SALT_BYTES:
        raise InvalidRequest(
            f"'cache_salt' has {len(salt)} bytes, outside 1..{MAX_SALT_BYTES}; "
            "leave it out to share cached text with everybody who sends none"
        )
    return salt


def deadline_of(
    request: InferenceRequest, own_milliseconds: int, max_seconds: float | None
) -> float | None:
    """When the time of ``request`` is up, on the clock of `time.monotonic`; None for never.

    It counts from the arrival, and the server's ``max_seconds`` bounds what the request asks for
    (0: it asks for nothing).
    """
    limits = [own_milliseconds / 1000] if own_milliseconds else []
    if max_seconds is not None:
        limits.append(max_seconds)
    return request.created_ns / 1e9 + min(limits) if limits else None
