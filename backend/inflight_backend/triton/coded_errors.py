"""Errors with their code in the message, for clients that ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inflight_backend.triton.stream import ResponseFactory
from inflight_client.protocol import ERROR_CODES_PARAMETER


@dataclass(frozen=True, slots=True)
class CodedFactory(ResponseFactory):
    """Builds errors of the form ``[CODE] message``; everything else as its base does."""

    def error(self, message: str, code: str = "INTERNAL") -> Any:
        """See `ResponseFactory.error`."""
        return ResponseFactory.error(self, f"[{code}] {message}", code)


def asks_for_codes(triton_request: Any) -> bool:
    """True if the request carries the parameter that asks for codes."""
    # The parameters arrive as JSON text; only a client that knows the name writes it there.
    return f'"{ERROR_CODES_PARAMETER}"' in triton_request.parameters()
