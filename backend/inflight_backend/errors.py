"""The exceptions. A message names the field and its bound, and how to fix it."""

from __future__ import annotations


class ServingError(Exception):
    """Base of all errors this package raises on purpose."""


class InvalidRequest(ServingError):
    """The request asks for something impossible or unsupported; it names the field."""


class UnsupportedRequest(InvalidRequest):
    """The request asks for a known feature that this server does not have."""


class RefusalText(str):
    """The message of an `InvalidRequest` that was raised after the request was accepted."""

    __slots__ = ()


class CapacityText(str):
    """The message of a `CapacityExceeded` that was raised after the request was accepted."""

    __slots__ = ()


class RequestInFlight(ServingError):
    """A request with this id is still being processed."""


class CapacityExceeded(ServingError):
    """The server is full or draining; the same request may succeed later."""


class ConfigurationError(ServingError):
    """A setting is unknown, out of its bounds or contradicts another."""


class CheckpointError(ConfigurationError):
    """The checkpoint folder cannot be served; it names the file or tensor."""


class ServerKilled(ServingError):
    """A signal ended tritonserver, its own (an abort) or another process's."""
