"""Client of an inflight server, and the table of the wire (`inflight_protocol`).

The names below are loaded when first used, because a machine that runs the engine imports the
table and needs neither tritonclient nor httpx for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight_client.aio import AsyncGenerateStream, AsyncInflightClient
    from inflight_client.client import GenerateStream, InflightClient
    from inflight_client.errors import (
        AccessDenied,
        InflightError,
        InvalidArgument,
        RequestTimeout,
        ServerError,
        ServerUnreachable,
        StreamInterrupted,
    )
    from inflight_client.options import GenerateChunk, GenerateResult

__all__ = [
    "AccessDenied",
    "AsyncGenerateStream",
    "AsyncInflightClient",
    "GenerateChunk",
    "GenerateResult",
    "GenerateStream",
    "InflightClient",
    "InflightError",
    "InvalidArgument",
    "RequestTimeout",
    "ServerError",
    "ServerUnreachable",
    "StreamInterrupted",
]

_NAME_TO_MODULE = {
    "AsyncGenerateStream": "aio",
    "AsyncInflightClient": "aio",
    "GenerateChunk": "options",
    "GenerateResult": "options",
    "GenerateStream": "client",
    "InflightClient": "client",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_NAME_TO_MODULE.get(name, 'errors')}")
    return getattr(module, name)
