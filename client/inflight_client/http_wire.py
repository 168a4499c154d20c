"""Triton's HTTP generate extension: calls to JSON, events and status codes back.

Every call is a ``generate_stream``, which delivers server-sent events as they come, one in case of
a whole answer; only a stop uses ``generate`` (exactly one response). The end of the body is the
final response. A server that goes away in the middle leaves the chunked body unfinished.
"""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import quote

import httpx

from inflight_client.address import Address
from inflight_client.encoding import InferCall, Response
from inflight_client.errors import InflightError, RequestTimeout, ServerError, StreamInterrupted
from inflight_client.headers import Headers, denied

_DENIED = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)

CONNECT_TIMEOUT = 10.0
"""Seconds; a server that runs accepts a connection at once."""


def client_settings(address: Address, headers: Headers = ()) -> dict[str, Any]:
    """Keyword arguments for ``httpx.Client``: any number of streams, no proxy for this machine."""
    return {
        "headers": headers,
        "base_url": str(address),
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20),
        "trust_env": not address.is_loopback,
    }


def timeouts(timeout: float | None) -> httpx.Timeout:
    """Limits of one call; reading may take as long as the call may."""
    connect = CONNECT_TIMEOUT if timeout is None else min(CONNECT_TIMEOUT, timeout)
    return httpx.Timeout(timeout, connect=connect)


def model_path(model: str, action: str) -> str:
    """The path of a model's endpoint; the name is data and cannot leave its place in the path."""
    return f"/v2/models/{quote(model, safe='')}/{action}"


def encode_body(call: InferCall) -> dict[str, object]:
    """The JSON object of a call."""
    body: dict[str, object] = {"id": call.request_id} if call.request_id else {}
    body.update(call.values)
    return body


def decode_event(data: str) -> Response:
    """The tensors of one event; `ServerError` when it carries an error.

    Triton writes a tensor of one element as a plain value.
    """
    try:
        fields = json.loads(data)
    except json.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        raise ServerError(f"the server sent an event that is not a JSON object: {data[:200]!r}")
    if "error" in fields:
        raise ServerError(str(fields["error"]))
    return Response(
        {name: value if isinstance(value, list) else [value] for name, value in fields.items()}
    )


def is_ok(status: int, body: bytes) -> bool:
    """Whether the server says yes; `AccessDenied` if it wants a header first."""
    if status in _DENIED:
        raise error_of_status(status, body)
    return status == httpx.codes.OK


def error_of_status(status: int, body: bytes) -> InflightError:
    """The error of a response whose status is not 200: Triton's text, with or without framing."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        message = json.loads(text.removeprefix("data:"))["error"]
    except (json.JSONDecodeError, KeyError, TypeError):
        message = f"HTTP status {status}: {text[:200] or 'no explanation'}"
    return denied(str(message)) if status in _DENIED else ServerError(str(message))


def translate_error(
    error: httpx.HTTPError, address: Address, timeout: float | None, num_responses: int = 0
) -> InflightError:
    """The exception for a call that httpx could not carry out."""
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return address.unreachable(str(error) or "no connection")
    if isinstance(error, httpx.TimeoutException):
        return timed_out(address, timeout)
    if num_responses == 0 and isinstance(error, httpx.RemoteProtocolError):
        return address.unreachable(f"{error}; is this the gRPC port? Then leave out --http")
    return StreamInterrupted(
        f"the connection to {address} broke after {num_responses} responses, "
        f"before the end ({error}). Is the server still running?"
    )


def timed_out(address: Address, timeout: float | None) -> RequestTimeout:
    """The error for a call that took longer than its ``timeout``."""
    return RequestTimeout(
        f"no final response from {address} within timeout = {timeout} s; the request was cancelled."
    )


def cut_connection(response: httpx.Response) -> None:
    """End a response from any thread: whoever reads it sees the end of the connection.

    httpx may be used by one thread at a time, a socket may be shut down by another.
    """
    stream = response.extensions.get("network_stream")
    sock = None if stream is None else stream.get_extra_info("socket")
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the connection is gone already
