"""A local server for every test that talks to one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.local_server import GrpcServer, HttpServer, LocalTriton

from inflight_client.address import Protocol


@dataclass(frozen=True)
class Local:
    """A running local server and the client settings to reach it."""

    triton: LocalTriton
    protocol: Protocol
    url: str


def _start(protocol: Protocol) -> Iterator[Local]:
    triton = LocalTriton()
    server = GrpcServer(triton) if protocol == "grpc" else HttpServer(triton)
    try:
        yield Local(triton, protocol, server.url)
    finally:
        server.close()


@pytest.fixture(params=["grpc", "http"])
def local(request: pytest.FixtureRequest) -> Iterator[Local]:
    """A server of each protocol in turn."""
    yield from _start(request.param)


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port without a listener, which the system gives to no other process; it can be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        yield int(probe.getsockname()[1])


@pytest.fixture
def local_grpc() -> Iterator[Local]:
    """A gRPC server."""
    yield from _start("grpc")


@pytest.fixture
def local_http() -> Iterator[Local]:
    """An HTTP server."""
    yield from _start("http")
