"""Reading the url of a server."""

from __future__ import annotations

import pytest

from inflight_client.address import Address, Protocol, default_url, parse_address
from inflight_client.errors import InvalidArgument


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
