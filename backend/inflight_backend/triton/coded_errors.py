"""Errors with their code in the message, for clients and relays that ask for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight_backend.small_tensors import OBJECT, scalar
from inflight_backend.triton.request_head import RequestHead
from inflight_backend.triton.stream import Array, ResponseFactory
from inflight_client.protocol import RELAY_ERROR_OUTPUT, RELAY_PARAMETER

_CODED = re.compile(
    r"\[(INTERNAL|INVALID_ARG|UNSUPPORTED|UNAVAILABLE|ALREADY_EXISTS)\] (.*)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class CodedFactory(ResponseFactory):
    """Builds errors of the form ``[CODE] message``; everything else as its base does."""

    def error(self, message: str, code: str = "INTERNAL") -> Any:
        """See `ResponseFactory.error`."""
        return ResponseFactory.error(self, f"[{code}] {message}", code)


@dataclass(frozen=True, slots=True)
class RelayedFactory(ResponseFactory):
    """Builds errors that are no errors to Triton, which would lose them (`RELAY_PARAMETER`)."""

    def error(self, message: str, code: str = "INTERNAL") -> Any:
        """See `ResponseFactory.error`; `read_relayed_error` reads it."""
        text = scalar(f"[{code}] {message}".encode(), OBJECT)[0]
        return self.tensors({RELAY_ERROR_OUTPUT: text})


def is_relayed(head: RequestHead) -> bool:
    """True for a request of one of our relays, whose errors `RelayedFactory` makes."""
    return head.settings.get(RELAY_PARAMETER) is True


def read_error(text: str) -> tuple[str, str]:
    """Message and code of an error; one without a code is not of ours."""
    coded = _CODED.fullmatch(text)
    return (coded[2], coded[1]) if coded else (text, "INTERNAL")


def read_relayed_error(tensors: Mapping[str, Array]) -> tuple[str, str] | None:
    """Message and code of an error of `RelayedFactory`; None for any other response."""
    text = tensors.get(RELAY_ERROR_OUTPUT)
    return None if text is None else read_error(text.item().decode())
