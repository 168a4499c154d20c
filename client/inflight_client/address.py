"""Where a server listens: the ``url`` of a client, parsed and checked."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

from inflight_client.errors import InvalidArgument, RequestTimeout, ServerUnreachable

Protocol = Literal["grpc", "http"]

DEFAULT_PORTS: dict[str, int] = {"grpc": 8001, "http": 8000, "https": 443}
"""Triton's usual ports, and the web's for a server behind TLS."""


@dataclass(frozen=True, slots=True)
class Address:
    """A server address; ``scheme`` is grpc, http or https. ``str()`` gives it for messages."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.scheme}://{self.target}"

    @property
    def target(self) -> str:
        """``host:port``, an IPv6 host in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True for this machine: a proxy from the environment must not be asked for it."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def unreachable(self, reason: str) -> ServerUnreachable:
        """The error for an address without an answer."""
        return ServerUnreachable(
            f"no server answers at {self} ({reason}). Start one with `inflight serve`, "
            "or name another address with url= (on the command line: --url)."
        )

    def timed_out(self, timeout: float | None) -> RequestTimeout:
        """The error for a call that took longer than its ``timeout`` in seconds."""
        return RequestTimeout(
            f"no final response from {self} within timeout = {timeout} s; "
            "the request was cancelled."
        )


def default_url(protocol: Protocol) -> str:
    """The address at which ``inflight serve`` listens unless told otherwise."""
    return f"127.0.0.1:{DEFAULT_PORTS[protocol]}"


def parse_address(url: str, protocol: Protocol) -> Address:
    """Read ``host``, ``host:port`` or ``scheme://host:port``; `InvalidArgument` names the fault."""
    if protocol not in ("grpc", "http"):
        raise InvalidArgument(f'protocol = {protocol!r}: give "grpc" or "http".')
    try:
        parts = urlsplit(url if "://" in url else f"{protocol}://{url}")
        port = parts.port
    except ValueError as error:
        raise InvalidArgument(f'url "{url}": {error}.') from None
    schemes = ("grpc",) if protocol == "grpc" else ("http", "https")
    if parts.scheme not in schemes:
        raise InvalidArgument(_scheme_message(url, parts.scheme, protocol))
    if not parts.hostname or parts.path.strip("/") or parts.query or parts.username:
        raise InvalidArgument(f'url "{url}": give host:port and nothing more.')
    return Address(parts.scheme, parts.hostname, port or DEFAULT_PORTS[parts.scheme])


def _scheme_message(url: str, scheme: str, protocol: Protocol) -> str:
    if protocol == "grpc" and scheme in ("http", "https"):
        return f'url "{url}" is HTTP: use protocol="http" (on the command line: --http).'
    if protocol == "http" and scheme == "grpc":
        return f'url "{url}" is gRPC: use protocol="grpc" (on the command line: leave out --http).'
    return f'url "{url}": the scheme {scheme} is not supported over {protocol}.'
