"""The exceptions. A message names the field and its bound, and how to fix it."""

from __future__ import annotations

from typing import ClassVar


class ServingError(Exception):
    """Base of all errors this package raises on purpose. ``code`` names a constant of Triton's
    ``TritonError``."""

    code: ClassVar[str] = "INTERNAL"


class InvalidRequest(ServingError):
    """The request asks for something impossible or unsupported; it names the field."""

    code = "INVALID_ARG"


class UnsupportedRequest(InvalidRequest):
    """The request asks for a known feature that this server does not have."""

    code = "UNSUPPORTED"


class RequestInFlight(ServingError):
    """A request with this id is still being processed."""

    code = "ALREADY_EXISTS"


class CapacityExceeded(ServingError):
    """The server is full or draining; the same request may succeed later."""

    code = "UNAVAILABLE"


class ErrorText(str):
    """The message of an error that ends a request after it was accepted, with its ``code``."""

    __slots__ = ("code",)
    code: str

    @classmethod
    def of(cls, error: ServingError) -> ErrorText:
        """What the callback of a request is told of ``error``."""
        text = cls(error)
        text.code = error.code
        return text


class EngineLost(ServingError):
    """A rank of the engine has died or fallen silent: only a new process helps."""

    code = "UNAVAILABLE"

    def __init__(self) -> None:
        super().__init__("a worker of this model was lost; the server restarts")


class ConfigurationError(ServingError):
    """A setting is unknown, out of its bounds or contradicts another."""


class CheckpointError(ConfigurationError):
    """The checkpoint folder cannot be served; it names the file or tensor."""


class ServerKilled(ServingError):
    """A signal ended tritonserver, its own (an abort) or another process's."""
