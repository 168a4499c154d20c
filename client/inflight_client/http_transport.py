"""Triton's HTTP generate extension: requests to JSON, events and status codes back.

Every request is a ``generate_stream``, which delivers server-sent events as they come, one in case
of a whole answer. The end of the body is the final response. A server that goes away in the middle
leaves the chunked body unfinished.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import httpx

from inflight_client.address import Address
from inflight_client.errors import InflightError, ServerError, StreamInterrupted
from inflight_client.headers import Headers, denied
from inflight_client.options import Request, Response, question

_DENIED = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)

CONNECT_TIMEOUT = 10.0
"""Seconds; a server that runs accepts a connection at once."""

STOP_TIMEOUT = 5.0
"""Seconds that a stop on behalf of an abandoned request may take."""

_FIRST_STOP_PAUSE = 0.05


class HttpTransport:
    """A `Transport` over HTTP: server-sent events from ``generate_stream``."""

    def __init__(self, address: Address, headers: Headers = ()) -> None:
        self.address = address
        self.client = httpx.AsyncClient(**client_settings(address, headers))

    def infer(self, request: Request, timeout: float | None) -> HttpResponses:
        """See `Transport`. The server is given up after ``timeout`` seconds of silence."""
        return HttpResponses(self, request, timeout)

    async def is_loaded(self, model: str, timeout: float) -> bool:
        """See `Transport`."""
        try:
            response = await self.client.get(model_path(model, "ready"), timeout=timeout)
        except httpx.HTTPError as error:
            raise translate_error(error, self.address, timeout) from None
        if response.status_code in _DENIED:
            raise error_of_status(response.status_code, response.content)
        return response.status_code == httpx.codes.OK

    async def close(self) -> None:
        """See `Transport`."""
        await self.client.aclose()


class HttpResponses:
    """The `Responses` to one HTTP request.

    Triton does not notice that an HTTP client has gone before the first response of its request.
    So every generation has an id, and one that is given up before then is stopped by that id.
    """

    def __init__(self, transport: HttpTransport, request: Request, timeout: float | None) -> None:
        if request.is_generation and not request.request_id:
            request = replace(request, request_id=uuid.uuid4().hex)
        self._transport = transport
        self._request = request
        self._timeout = timeout
        self._response: httpx.Response | None = None
        self._is_sent = False
        self._is_cancelled = False
        self._is_answered = asyncio.Event()

    async def cancel(self) -> None:
        """See `Responses`."""
        self._is_cancelled = True
        if self._response is not None:
            _cut_connection(self._response)
        elif self._is_sent:
            await self._stop_until_answered()

    async def receive(self) -> AsyncGenerator[Response, None]:
        """See `Responses`."""
        if self._is_cancelled:
            return
        address, num_responses = self._transport.address, 0
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        try:
            async with aclosing(self._receive()) as responses:
                async for response in responses:
                    if self._is_cancelled:
                        return
                    num_responses += 1
                    yield response
                    if deadline is not None and time.monotonic() > deadline:
                        raise address.timed_out(self._timeout)
        except httpx.HTTPError as error:
            if not self._is_cancelled:
                raise translate_error(error, address, self._timeout, num_responses) from None
        finally:
            self._is_answered.set()
            if self._is_sent and self._response is None and not self._is_cancelled:
                await self._stop()

    async def _receive(self) -> AsyncGenerator[Response, None]:
        self._is_sent = True
        path = model_path(self._request.model, "generate_stream")
        body = encode_body(self._request)
        limits = timeouts(self._timeout)
        try:
            async with self._transport.client.stream(
                "POST", path, json=body, timeout=limits
            ) as response:
                self._response = response
                self._is_answered.set()
                if response.status_code != httpx.codes.OK:
                    raise error_of_status(response.status_code, await response.aread())
                rest = b""
                async for received in response.aiter_bytes():
                    *lines, rest = (rest + received).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data:"):
                            yield decode_event(line.removeprefix(b"data:"))
        except httpx.ConnectError:
            self._is_sent = False  # there is nothing to stop
            raise

    async def _stop_until_answered(self) -> None:
        """A stop that overtakes its request on the way is forgotten by the server."""
        pause, deadline = _FIRST_STOP_PAUSE, time.monotonic() + STOP_TIMEOUT
        await self._stop()
        while time.monotonic() < deadline:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_answered.wait(), pause)
                return
            await self._stop()
            pause *= 2

    async def _stop(self) -> None:
        if not self._request.is_generation:
            return
        request = question(self._request.model, "stop", self._request.request_id)
        with suppress(InflightError):  # best effort: the caller has another error already
            async for _ in HttpResponses(self._transport, request, STOP_TIMEOUT).receive():
                pass


def client_settings(address: Address, headers: Headers = ()) -> dict[str, Any]:
    """Arguments for ``httpx.AsyncClient``: any number of streams, no proxy for this machine."""
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


def encode_body(request: Request) -> dict[str, object]:
    """The JSON object of a request."""
    body: dict[str, object] = {"id": request.request_id} if request.request_id else {}
    body.update(request.values)
    return body


def decode_event(data: bytes) -> Response:
    """The tensors of one event; `ServerError` when it carries an error.

    Triton writes an event as one line of JSON, and a tensor of one element as a plain value.
    """
    text = data.decode("utf-8", errors="replace").strip()
    try:
        fields = json.loads(text)
    except json.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        raise ServerError(f"the server sent an event that is not a JSON object: {text[:200]!r}")
    if "error" in fields:
        raise ServerError(str(fields["error"]))
    return Response(
        {name: value if isinstance(value, list) else [value] for name, value in fields.items()}
    )


def error_of_status(status: int, body: bytes) -> InflightError:
    """The error of a response whose status is not 200: Triton's text, with or without framing."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        message = json.loads(text.removeprefix("data:"))["error"]
    except (json.JSONDecodeError, KeyError, TypeError):
        message = f"HTTP status {status}: {text[:200] or 'no explanation'}"
    if isinstance(message, dict):  # in OpenAI's shape
        message = f"{message.get('message')} (OpenAI's API is there; Triton's has another port)"
    return denied(str(message)) if status in _DENIED else ServerError(str(message))


def translate_error(
    error: httpx.HTTPError, address: Address, timeout: float | None, num_responses: int = 0
) -> InflightError:
    """The exception for a call that httpx could not carry out."""
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return address.unreachable(str(error) or "no connection")
    if isinstance(error, httpx.TimeoutException):
        return address.timed_out(timeout)
    if num_responses == 0 and isinstance(error, httpx.RemoteProtocolError):
        return address.unreachable(f"{error}; is this the gRPC port? Then leave out --http")
    return StreamInterrupted(
        f"the connection to {address} broke after {num_responses} responses, "
        f"before the end ({error}). Is the server still running?"
    )


def _cut_connection(response: httpx.Response) -> None:
    """End a response from any task: the one that reads it sees the end of the connection."""
    stream = response.extensions.get("network_stream")
    sock = None if stream is None else stream.get_extra_info("socket")
    if sock is not None:
        with suppress(OSError):  # the connection is gone already
            sock.shutdown(socket.SHUT_RDWR)
