"""Triton's gRPC protocol: requests to protobuf messages, messages and status codes back.

A decoupled model answers only on ``ModelStreamInfer``. Every request gets a stream of its own; the
channel is shared, and what many requests answer may come on one more stream (`SharedStream`). An
empty response with ``triton_final_response`` ends the answer.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import struct
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from enum import Enum
from typing import Any, Literal

import grpc
import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from inflight_client.address import Address
from inflight_client.errors import (
    InflightError,
    ServerError,
    ServerUnreachable,
    StreamInterrupted,
)
from inflight_client.headers import Headers, denied, is_denied
from inflight_client.options import Request, Response
from inflight_protocol import (
    DTYPE_TO_NUMPY,
    ERROR_CODES_PARAMETER,
    INPUT_BY_NAME,
    SHARED_PARAMETER,
)
from inflight_protocol.shared import SharedPart, decode_texts, unpack_parts
from inflight_protocol.tensors import make_inputs

_CODED_MESSAGE = re.compile(r"\[([A-Z_]+)\] (.*)", re.DOTALL)
_DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_INT32_MAX = 2**31 - 1
_RECONNECT_MS = 1000
# A server ends connections that ask more than once in five minutes whether it lives, unless it is
# told otherwise (gRPC's guide on keepalive).
_KEEPALIVE_MS = 310_000
_KEEPALIVE_TIMEOUT_MS = 60_000

_LAST_SECONDS = 1.0  # for the end of a request whose shared stream has ended

_SIZE = struct.Struct("<I")  # of a text
_FORMATS: Mapping[str, Literal["i", "q", "Q", "f", "?"]] = {
    "INT32": "i",
    "INT64": "q",
    "UINT64": "Q",
    "FP32": "f",
    "BOOL": "?",
}
"""Of a little-endian machine, as the wire is and all that gRPC's wheels are built for."""

_STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


class GrpcTransport:
    """A `Transport` over gRPC: one channel, one stream per request."""

    def __init__(self, address: Address, headers: Headers = ()) -> None:
        self.address = address
        self.metadata = tuple((name.lower(), value) for name, value in headers)
        self.is_closed = False
        self._channel: Any = None  # belongs to the event loop in which it is first used
        self._stream_method: Any = None

    def connect(self) -> Any:
        """The channel, opened if it is not."""
        if self._channel is None:
            if self.is_closed:
                raise RuntimeError("this client is closed.")
            options = channel_options(self.address)
            self._channel = grpc.aio.insecure_channel(self.address.target, options=options)
        return self._channel

    def open_stream(self, request: bytes, timeout: float | None) -> Any:
        """The call of ``ModelStreamInfer`` for one request.

        As a stream of requests, grpc.aio puts an error of its own in the place of the server's when
        a refusal overtakes the request.
        """
        if self._stream_method is None:
            self._stream_method = self.connect().unary_stream(
                _STREAM_METHOD,
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )
        return self._stream_method(request, timeout=timeout, metadata=self.metadata)

    def infer(self, request: Request, timeout: float | None) -> GrpcResponses:
        """See `Transport`."""
        return self.infer_encoded(encode_bytes(request), timeout)

    def infer_encoded(self, request: bytes, timeout: float | None) -> GrpcResponses:
        """`infer` for a request that `encode_bytes` encoded: that may take long, in a thread."""
        return GrpcResponses(self, request, timeout)

    async def is_loaded(self, model: str, timeout: float) -> bool:
        """See `Transport`."""
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self.connect())
        request = service_pb2.ModelReadyRequest(name=model)
        try:
            response = await stub.ModelReady(request, timeout=timeout, metadata=self.metadata)
        except grpc.RpcError as error:
            raise translate_error(error, self.address, timeout) from None
        return bool(response.ready)

    async def close(self) -> None:
        """See `Transport`."""
        self.is_closed = True
        # gRPC's own thread ends with the last reference to a channel.
        channel, self._channel, self._stream_method = self._channel, None, None
        if channel is not None:
            await channel.close()


class GrpcResponses:
    """The `Responses` to one gRPC request."""

    def __init__(self, transport: GrpcTransport, request: bytes, timeout: float | None) -> None:
        self._transport = transport
        self._request = request
        self._timeout = timeout
        self._stream: Any = None
        self._is_cancelled = False

    async def cancel(self) -> None:
        """See `Responses`."""
        self._is_cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    async def receive(self) -> AsyncGenerator[Response, None]:
        """See `Responses`."""
        if self._is_cancelled:
            return
        address = self._transport.address
        stream = self._transport.open_stream(self._request, self._timeout)
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
            raise interrupted(address, num_responses)
        except grpc.RpcError as error:
            raise translate_error(error, address, self._timeout, num_responses) from None
        except asyncio.CancelledError:
            # A stream cancelled by `cancel`, or by `close`, says so with the same exception as a
            # cancelled task.
            if _is_task_cancelled() or not (self._is_cancelled or self._transport.is_closed):
                raise
            if not self._is_cancelled:
                raise cancelled(address, num_responses) from None
        finally:
            stream.cancel()  # does nothing once the stream has ended


class _End(Enum):
    OF_REQUEST = 1
    """Its own stream has ended in good order."""
    OF_SHARED = 2


_Arrival = SharedPart | Response | Exception | _End


class SharedStream:
    """One stream for what many requests answer: to read a message for each of their tokens takes
    longer than all else that is done with it. Each request still has a stream of its own, on which
    it ends. Belongs to the event loop in which it is made.
    """

    def __init__(self, transport: GrpcTransport) -> None:
        """Begins to open it."""
        self._transport = transport
        self._name = uuid.uuid4().hex
        self._tags = itertools.count()
        self._arrived: dict[str, asyncio.Queue[_Arrival]] = {}
        self._is_opened = asyncio.Event()  # or has ended
        self._has_ended = False
        self.failed_at = -math.inf
        """By `time.monotonic`: when it ended, or turned out to be of no use, unless by `close`."""
        self._reading = asyncio.create_task(self._read())

    async def is_open(self, seconds: float) -> bool:
        """Whether requests may use it, at the latest after ``seconds``."""
        try:
            await asyncio.wait_for(self._is_opened.wait(), seconds)
        except asyncio.TimeoutError:
            self.failed_at = time.monotonic()
            self.close()
        return self.is_usable

    @property
    def is_usable(self) -> bool:
        """False once it has ended or is of no use for new requests."""
        return not self._has_ended and self.failed_at == -math.inf

    def is_over(self, pause: float) -> bool:
        """Whether another may be opened in its place: ``pause`` seconds after it failed."""
        return not self.is_usable and time.monotonic() > self.failed_at + pause

    def close(self) -> None:
        """No request uses it any more."""
        self._has_ended = True
        self._reading.cancel()

    async def receive(
        self, request: bytes, timeout: float | None
    ) -> AsyncGenerator[Response, None]:
        """The responses to a request that `encode_bytes` encoded, as `GrpcResponses.receive`; close
        the generator to cancel it. Only while `is_usable`."""
        address = self._transport.address
        tag = str(next(self._tags))
        arrived = self._arrived[tag] = asyncio.Queue()
        own = asyncio.create_task(self._receive_own(request + self._place(tag), timeout, arrived))
        has_all = has_ended = False
        num_responses = 0
        try:
            while not (has_all and has_ended):
                item = await arrived.get()
                match item:
                    case _End.OF_REQUEST:
                        has_ended = True
                    case _End.OF_SHARED:
                        raise interrupted(address, num_responses)
                    case SharedPart(tensors=None):
                        has_all = True
                    case SharedPart(tensors=dict(tensors)):
                        num_responses += 1
                        yield Response(decode_texts(tensors))
                    case Response():  # the model was loaded again, and knows no such stream
                        has_all, self.failed_at = True, time.monotonic()
                        num_responses += 1
                        yield item
                    case ServerUnreachable() if num_responses:
                        raise interrupted(address, num_responses)
                    case Exception():
                        raise item
        finally:
            del self._arrived[tag]
            own.cancel()
            if not self._arrived:
                self.close()

    async def _receive_own(
        self, request: bytes, timeout: float | None, arrived: asyncio.Queue[_Arrival]
    ) -> None:
        try:
            responses = self._transport.infer_encoded(request, timeout).receive()
            async with aclosing(responses) as received:
                async for response in received:
                    arrived.put_nowait(response)
            arrived.put_nowait(_End.OF_REQUEST)
        except Exception as error:  # for the one who waits
            arrived.put_nowait(error)

    async def _read(self) -> None:
        request = Request({"shared": True}, ("shared",), self._name)
        try:
            responses = self._transport.infer(request, None).receive()
            async with aclosing(responses) as received:
                async for response in received:
                    self._is_opened.set()
                    for part in unpack_parts(bytes(response.tensors["shared"])):
                        if (arrived := self._arrived.get(part.tag)) is not None:
                            arrived.put_nowait(part)
        except InflightError:
            pass  # requests have streams of their own then
        finally:
            if not self._has_ended:
                self._has_ended, self.failed_at = True, time.monotonic()
            self._is_opened.set()
            loop = asyncio.get_running_loop()
            for arrived in self._arrived.values():  # whose own streams may say why
                loop.call_later(_LAST_SECONDS, arrived.put_nowait, _End.OF_SHARED)

    def _place(self, tag: str) -> bytes:
        """What makes a request one of this stream: of two messages in a row the maps are joined."""
        message = service_pb2.ModelInferRequest()
        message.parameters[SHARED_PARAMETER].string_param = f"{self._name} {tag}"
        place: bytes = message.SerializeToString()
        return place


def _is_task_cancelled() -> bool:
    task = asyncio.current_task()
    # Task.cancelling() is new in Python 3.11; before, the two cases cannot be told apart.
    return task is not None and hasattr(task, "cancelling") and task.cancelling() > 0


async def _decode_or_drain(message: Any, stream: Any) -> tuple[Response, bool]:
    try:
        return decode_response(message)
    except ServerError:
        await _drain(stream)
        raise


async def _drain(stream: Any) -> None:
    """Read the end of the stream: a server whose client hangs up right before it leaks the model
    (measured on Triton 24.10, about one run in three)."""
    with suppress(grpc.RpcError):
        async for _ in stream:
            pass


def channel_options(address: Address) -> list[tuple[str, int]]:
    """Messages of any size; no proxy from the environment for this machine; a connection again soon
    after a server's restart, for which gRPC itself would wait up to two minutes; an error when the
    machine of the server is gone."""
    options = [
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),  # any number: a waiting client sends nothing
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
        ("grpc.max_send_message_length", _INT32_MAX),
        ("grpc.max_receive_message_length", _INT32_MAX),
    ]
    if address.is_loopback:
        options.append(("grpc.enable_http_proxy", 0))
    return options


def encode_request(request: Request) -> Any:
    """The ``ModelInferRequest`` of a request."""
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.request_id)
    for name, tensor in make_inputs(dict(request.values)).items():
        dtype = INPUT_BY_NAME[name].dtype
        if dtype == "STRING":
            datatype, raw = "BYTES", serialize_byte_tensor(tensor).item()
        else:
            datatype, raw = dtype, tensor.tobytes()
        message.inputs.add(name=name, datatype=datatype, shape=tensor.shape)
        message.raw_input_contents.append(raw)
    for name in request.outputs:
        message.outputs.add(name=name)
    message.parameters[ERROR_CODES_PARAMETER].bool_param = True
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def encode_bytes(request: Request) -> bytes:
    """`encode_request`, serialized."""
    message: bytes = encode_request(request).SerializeToString()
    return message


def decode_response(message: Any) -> tuple[Response, bool]:
    """The tensors of a ``ModelStreamInferResponse``, and whether it is the final one.

    `ServerError` when the message carries an error.
    """
    if message.error_message:
        raise _server_error(message.error_message)
    infer = message.infer_response
    tensors = {
        output.name: _values(output.datatype, raw)
        for output, raw in zip(infer.outputs, infer.raw_output_contents, strict=True)
    }
    is_final = "triton_final_response" in infer.parameters and bool(
        infer.parameters["triton_final_response"].bool_param
    )
    return Response(tensors), is_final


def _server_error(message: str) -> ServerError:
    found = _CODED_MESSAGE.fullmatch(message)
    return ServerError(found[2], found[1]) if found else ServerError(message)


def translate_error(
    error: grpc.RpcError, address: Address, timeout: float | None, num_responses: int = 0
) -> InflightError:
    """The exception for a call whose status is not OK after ``num_responses`` responses."""
    status, details = error.code(), error.details() or ""
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return address.timed_out(timeout)
    if status in _DENIED or is_denied(details):
        return denied(details)
    if status is grpc.StatusCode.UNAVAILABLE:
        if num_responses:
            return StreamInterrupted(
                f"the connection to {address} broke after {num_responses} responses, "
                f"before the final one ({details}). Is the server still running?"
            )
        return _unreachable(address, details)
    if status is grpc.StatusCode.CANCELLED:
        return cancelled(address, num_responses)
    return ServerError(f"{details} ({status.name})")


def cancelled(address: Address, num_responses: int) -> StreamInterrupted:
    """The error for a stream that was cancelled, but not by its reader."""
    return StreamInterrupted(
        f"the stream from {address} was cancelled after {num_responses} responses, before the "
        "final one. Was the client closed?"
    )


def interrupted(address: Address, num_responses: int) -> StreamInterrupted:
    """The error for a stream that the server closed in good order, but too early."""
    return StreamInterrupted(
        f"{address} closed the stream after {num_responses} responses without a final one. "
        "Is the server shutting down?"
    )


def _unreachable(address: Address, details: str) -> ServerUnreachable:
    # "failed to connect to all addresses; last error: UNKNOWN: ...: Connection refused"
    reason = details.rpartition(": ")[2].rstrip("])") or "no connection"
    if "Socket closed" in details or "HTTP/2" in details:
        reason += "; is this the HTTP port? Then use --http"
    return address.unreachable(reason)


def _values(datatype: str, raw: bytes) -> Sequence[Any]:
    """The numbers or texts of a tensor. numpy takes ten times as long for a few of them, and a
    stream has three tensors with each token."""
    if datatype == "BYTES":
        return _texts(raw)
    if (kind := _FORMATS.get(datatype)) is not None:
        return memoryview(raw).cast(kind).tolist()
    values: list[Any] = np.frombuffer(raw, dtype=DTYPE_TO_NUMPY[datatype]).tolist()
    return values


def _texts(raw: bytes) -> list[str]:
    """Each has its length before it."""
    texts, start = [], 0
    while start < len(raw):
        (size,) = _SIZE.unpack_from(raw, start)
        start += _SIZE.size + size
        # Python models cannot send half a character; other models might, and get U+FFFD.
        texts.append(raw[start - size : start].decode("utf-8", errors="replace"))
    return texts
