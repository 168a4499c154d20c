"""Reading the url of a server."""

from __future__ import annotations

import pytest

from inflight_client.address import Address, Protocol, default_url, parse_address
from inflight_client.errors import InvalidArgument
from inflight_client.grpc_transport import channel_options
from inflight_client.http_transport import client_settings


@pytest.mark.parametrize(
    ("url", "protocol", "address"),
    [
        ("127.0.0.1:9", "grpc", Address("grpc", "127.0.0.1", 9)),
        ("grpc://host:9", "grpc", Address("grpc", "host", 9)),
        ("host", "grpc", Address("grpc", "host", 8001)),
        ("host", "http", Address("http", "host", 8000)),
        ("http://host:9/", "http", Address("http", "host", 9)),
        ("https://host", "http", Address("https", "host", 443)),
        ("[::1]:9", "grpc", Address("grpc", "::1", 9)),
        (default_url("grpc"), "grpc", Address("grpc", "127.0.0.1", 8001)),
        (default_url("http"), "http", Address("http", "127.0.0.1", 8000)),
    ],
)
def test_good_urls(url: str, protocol: Protocol, address: Address) -> None:
    assert parse_address(url, protocol) == address


@pytest.mark.parametrize(
    ("url", "protocol", "message"),
    [
        ("http://host:9", "grpc", 'is HTTP: use protocol="http" .*--http'),
        ("grpc://host:9", "http", 'is gRPC: use protocol="grpc"'),
        ("ftp://host", "http", "the scheme ftp is not supported over http"),
        ("host:port", "grpc", 'url "host:port"'),
        ("host:99999", "grpc", 'url "host:99999"'),
        ("", "grpc", "give host:port and nothing more"),
        ("host:9/v2", "http", "give host:port and nothing more"),
        ("me:secret@host", "http", "give host:port and nothing more"),
        ("host", "tcp", "protocol = 'tcp'"),
    ],
)
def test_bad_urls(url: str, protocol: Protocol, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse_address(url, protocol)


def test_ipv6_is_written_in_brackets() -> None:
    assert str(Address("grpc", "::1", 9)) == "grpc://[::1]:9"


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("localhost", True), ("127.0.0.2", True), ("::1", True), ("10.0.0.1", False), ("box", False)],
)
def test_no_proxy_for_this_machine(host: str, is_local: bool) -> None:
    address = Address("http", host, 9)

    assert (("grpc.enable_http_proxy", 0) in channel_options(address)) is is_local
    assert client_settings(address)["trust_env"] is not is_local


def test_a_server_that_is_back_is_found_soon() -> None:
    """gRPC's own patience grows to two minutes while a server is away."""
    options = dict(channel_options(Address("grpc", "box", 9)))
    assert options["grpc.initial_reconnect_backoff_ms"] <= 1000
    assert options["grpc.max_reconnect_backoff_ms"] <= 1000
