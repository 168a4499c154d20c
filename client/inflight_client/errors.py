"""What a call can raise. Every message says what happened, where, and what to do about it."""

from __future__ import annotations


class InflightError(Exception):
    """Base of all errors this package raises on purpose."""


class InvalidArgument(InflightError, ValueError):
    """An argument cannot be sent; nothing has left this machine. It names the argument."""


class ServerUnreachable(InflightError):
    """Nothing that speaks the protocol answers at the address; the message names it."""


class AccessDenied(InflightError):
    """The server, or a gateway before it, requires a header whose value is missing or wrong."""


class ServerError(InflightError):
    """The server answered with an error; the message is the server's own.

    ``status`` is what the server calls the error (``INVALID_ARG``, ``UNSUPPORTED``,
    ``UNAVAILABLE``, ``ALREADY_EXISTS``, ``INTERNAL``), None when it does not say.
    """

    def __init__(self, message: str, status: str | None = None) -> None:
        super().__init__(message)
        self.status = status


class StreamInterrupted(InflightError):
    """The answer broke off: the connection ended before the final response."""


class RequestTimeout(InflightError, TimeoutError):
    """``timeout`` seconds passed before the final response; the request was cancelled."""
