"""How calls reach a server from an event loop; see `inflight_client.transport` for the promise.

The two modules stand side by side, function by function.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Protocol

import grpc
import grpc.aio
import httpx
from tritonclient.grpc import service_pb2, service_pb2_grpc

from inflight_client import grpc_wire, http_wire
from inflight_client.address import Address
from inflight_client.encoding import InferCall, Response, is_unknown_question, ready_call, stop_call
from inflight_client.errors import InflightError, ServerError
from inflight_client.headers import Headers
from inflight_client.sse import SseParser
from inflight_client.transport import FIRST_STOP_PAUSE, RELAYING_MODELS, STOP_TIMEOUT
from inflight_protocol import LLM_MODEL_NAME


class AsyncResponses(Protocol):
    """The responses of one call, to be iterated once."""

    def receive(self) -> AsyncGenerator[Response, None]:
        """Send the request and give its responses; close the generator to cancel."""

    async def cancel(self) -> None:
        """Cancel the request, from any task; the iteration ends without an error."""


class AsyncTransport(Protocol):
    """A connection to one server; belongs to the event loop it was first used in."""

    def infer(self, call: InferCall, timeout: float | None) -> AsyncResponses:
        """The responses to ``call``; ``timeout`` in seconds for all of them together."""

    async def is_loaded(self, model: str, timeout: float) -> bool:
        """What Triton says of ``model``; `ServerUnreachable` when nobody answers."""

    async def close(self) -> None:
        """Give the connection back; calls still running are cancelled."""


async def takes_requests(transport: AsyncTransport, model: str, timeout: float) -> bool:
    """See `inflight_client.transport.takes_requests`."""
    asked = LLM_MODEL_NAME if model in RELAYING_MODELS else model
    try:
        async with aclosing(transport.infer(ready_call(asked), timeout).receive()) as responses:
            async for _ in responses:
                pass
    except ServerError as error:
        return is_unknown_question(error) and await transport.is_loaded(model, timeout)
    return asked == model or await transport.is_loaded(model, timeout)


class AsyncGrpcTransport:
    """gRPC: one stream per call over one channel."""

    def __init__(self, address: Address, headers: Headers = ()) -> None:
        self.address = address
        self.metadata = grpc_wire.metadata_of(headers)
        self.is_closed = False
        self._channel = grpc.aio.insecure_channel(
            address.target, options=grpc_wire.channel_options(address)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # One request on a stream: as a stream of requests, grpc.aio puts an error of its own in the
        # place of the server's when a refusal overtakes it.
        self.open_stream = self._channel.unary_stream(
            grpc_wire.STREAM_METHOD,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )

    def infer(self, call: InferCall, timeout: float | None) -> AsyncResponses:
        """See `AsyncTransport`."""
        return self.infer_encoded(grpc_wire.encode_bytes(call), timeout)

    def infer_encoded(self, request: bytes, timeout: float | None) -> AsyncResponses:
        """`infer` for a call that `encode_bytes` encoded, which may take long, in a thread."""
        return _GrpcResponses(self, request, timeout)

    async def is_loaded(self, model: str, timeout: float) -> bool:
        """See `AsyncTransport`."""
        request = service_pb2.ModelReadyRequest(name=model)
        try:
            ready = self._stub.ModelReady(request, timeout=timeout, metadata=self.metadata)
            return bool((await ready).ready)
        except grpc.RpcError as error:
            raise grpc_wire.translate_error(error, self.address, timeout) from None

    async def close(self) -> None:
        """See `AsyncTransport`."""
        self.is_closed = True
        await self._channel.close()


class _GrpcResponses:
    def __init__(
        self, transport: AsyncGrpcTransport, request: bytes, timeout: float | None
    ) -> None:
        self._transport = transport
        self._address = transport.address
        self._request = request
        self._timeout = timeout
        self._stream: Any = None
        self._is_cancelled = False

    async def cancel(self) -> None:
        self._is_cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    async def receive(self) -> AsyncGenerator[Response, None]:
        if self._is_cancelled:
            return
        stream = self._transport.open_stream(
            self._request, timeout=self._timeout, metadata=self._transport.metadata
        )
        self._stream = stream
        num_responses = 0
        try:
            async for message in stream:
                response, is_final = await _decode_or_drain(message, stream)
                num_responses += 1
                if is_final:
                    await _drain(stream)
                if response.tensors or not is_final:
                    yield response
                if is_final:
                    return
            raise grpc_wire.interrupted(self._address, num_responses)
        except grpc.RpcError as error:
            raise grpc_wire.translate_error(
                error, self._address, self._timeout, num_responses
            ) from None
        except asyncio.CancelledError:
            # A stream cancelled by `cancel`, or by `close`, says so with the same exception as a
            # cancelled task.
            if _is_task_cancelled() or not (self._is_cancelled or self._transport.is_closed):
                raise
            if not self._is_cancelled:
                raise grpc_wire.cancelled(self._address, num_responses) from None
        finally:
            stream.cancel()  # does nothing once the stream has ended


def _is_task_cancelled() -> bool:
    task = asyncio.current_task()
    # Task.cancelling() is new in Python 3.11; before, the two cases cannot be told apart.
    return task is not None and hasattr(task, "cancelling") and task.cancelling() > 0


async def _decode_or_drain(message: Any, stream: Any) -> tuple[Response, bool]:
    try:
        return grpc_wire.decode_response(message)
    except ServerError:
        await _drain(stream)
        raise


async def _drain(stream: Any) -> None:
    """Read the end of the stream, for the reason given in `inflight_client.transport`."""
    with suppress(grpc.RpcError):
        async for _ in stream:
            pass


class AsyncHttpTransport:
    """HTTP: server-sent events from ``generate_stream``."""

    def __init__(self, address: Address, headers: Headers = ()) -> None:
        self._address = address
        self._client = httpx.AsyncClient(**http_wire.client_settings(address, headers))

    def infer(self, call: InferCall, timeout: float | None) -> AsyncResponses:
        """See `AsyncTransport`. The server is given up after ``timeout`` seconds of silence."""
        return _HttpResponses(self._client, call, self._address, timeout)

    async def is_loaded(self, model: str, timeout: float) -> bool:
        """See `AsyncTransport`."""
        try:
            path = http_wire.model_path(model, "ready")
            response = await self._client.get(path, timeout=timeout)
            return http_wire.is_ok(response.status_code, response.content)
        except httpx.HTTPError as error:
            raise http_wire.translate_error(error, self._address, timeout) from None

    async def close(self) -> None:
        """See `AsyncTransport`."""
        await self._client.aclose()


class _HttpResponses:
    """A generation has an id, and is stopped by it when given up before its first response."""

    def __init__(
        self, client: httpx.AsyncClient, call: InferCall, address: Address, timeout: float | None
    ) -> None:
        if call.is_generation and not call.request_id:
            call = replace(call, request_id=uuid.uuid4().hex)
        self._client = client
        self._call = call
        self._address = address
        self._timeout = timeout
        self._response: httpx.Response | None = None
        self._is_sent = False
        self._is_cancelled = False
        self._is_answered = asyncio.Event()

    async def cancel(self) -> None:
        self._is_cancelled = True
        if self._response is not None:
            http_wire.cut_connection(self._response)
        elif self._is_sent:
            await self._stop_until_answered()

    async def receive(self) -> AsyncGenerator[Response, None]:
        if self._is_cancelled:
            return
        num_responses = 0
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        try:
            async with aclosing(self._receive()) as responses:
                async for response in responses:
                    if self._is_cancelled:
                        return
                    num_responses += 1
                    yield response
                    if deadline is not None and time.monotonic() > deadline:
                        raise http_wire.timed_out(self._address, self._timeout)
        except httpx.HTTPError as error:
            if not self._is_cancelled:
                raise http_wire.translate_error(
                    error, self._address, self._timeout, num_responses
                ) from None
        finally:
            self._is_answered.set()
            if self._is_sent and self._response is None and not self._is_cancelled:
                await self._stop()

    async def _receive(self) -> AsyncGenerator[Response, None]:
        self._is_sent = True
        path = http_wire.model_path(self._call.model, "generate_stream")
        body = http_wire.encode_body(self._call)
        limits = http_wire.timeouts(self._timeout)
        try:
            async with self._client.stream("POST", path, json=body, timeout=limits) as response:
                self._response = response
                self._is_answered.set()
                if response.status_code != httpx.codes.OK:
                    raise http_wire.error_of_status(response.status_code, await response.aread())
                parser = SseParser()
                async for received in response.aiter_bytes():
                    for data in parser.feed(received):
                        yield http_wire.decode_event(data)
        except httpx.ConnectError:
            self._is_sent = False  # there is nothing to stop
            raise

    async def _stop_until_answered(self) -> None:
        """See `inflight_client.transport`."""
        pause, deadline = FIRST_STOP_PAUSE, time.monotonic() + STOP_TIMEOUT
        await self._stop()
        while time.monotonic() < deadline:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_answered.wait(), pause)
                return
            await self._stop()
            pause *= 2

    async def _stop(self) -> None:
        if not self._call.is_generation:
            return
        call = stop_call(self._call.model, self._call.request_id)
        with suppress(InflightError):  # best effort: the caller has other news already
            async for _ in _HttpResponses(
                self._client, call, self._address, STOP_TIMEOUT
            ).receive():
                pass
