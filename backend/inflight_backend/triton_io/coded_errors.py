"""Errors with their code in the message, for clients that ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inflight_backend.triton_io.stream import ResponseFactory


@dataclass(frozen=True, slots=True)
class CodedFactory(ResponseFactory):
    """Builds errors of the form ``[CODE] message``; everything else as its base does."""

    def error(self, message: str, code: str = "INTERNAL") -> Any:
        """See `ResponseFactory.error`."""
        return ResponseFactory.error(self, f"[{code}] {message}", code)
