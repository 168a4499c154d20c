"""How calls reach a server from threads: one class per protocol, the same promise.

A transport is thread-safe and may carry any number of calls at once. A request is sent when the
iteration over its responses starts; an iteration that is left early, fails or is cancelled cancels
the request on the server.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, Protocol

import grpc
import httpx
from tritonclient.grpc import service_pb2, service_pb2_grpc

from inflight_client import grpc_wire, http_wire
from inflight_client.address import Address
from inflight_client.encoding import InferCall, Response, is_unknown_question, ready_call, stop_call
from inflight_client.errors import InflightError, ServerError
from inflight_client.headers import Headers
from inflight_client.main_thread import iterate_beside_main_thread
from inflight_client.sse import SseParser
from inflight_protocol import LLM_MODEL_NAME

RELAYING_MODELS = frozenset({"ensemble", "tensorrt_llm_bls", "vllm_model"})
"""Models of ours that pass requests on to `LLM_MODEL_NAME`, which is asked in their place."""

FIRST_STOP_PAUSE = 0.05
STOP_TIMEOUT = 5.0
"""Seconds that a stop on behalf of an abandoned request may take."""


class Responses(Protocol):
    """The responses of one call, to be iterated once."""

    def receive(self) -> Generator[Response, None, None]:
        """Send the request and give its responses; close the generator to cancel."""

    def cancel(self) -> None:
        """Cancel the request, from any thread; the iteration ends without an error."""


class Transport(Protocol):
    """A connection to one server."""

    def infer(self, call: InferCall, timeout: float | None) -> Responses:
        """The responses to ``call``; ``timeout`` in seconds for all of them together."""

    def is_loaded(self, model: str, timeout: float) -> bool:
        """What Triton says of ``model``; `ServerUnreachable` when nobody answers."""

    def close(self) -> None:
        """Give the connection back; calls still running are cancelled."""


def takes_requests(transport: Transport, model: str, timeout: float) -> bool:
    """Whether ``model`` says that it will serve a request sent now, within ``timeout`` seconds.

    Triton's own word alone counts only where nobody knows the question: Triton 24.10 says that a
    model is ready while it refuses every request. Raises what `Responses.receive` raises when
    nobody answers.
    """
    asked = LLM_MODEL_NAME if model in RELAYING_MODELS else model
    try:
        with closing(transport.infer(ready_call(asked), timeout).receive()) as responses:
            for _ in responses:
                pass
    except ServerError as error:
        return is_unknown_question(error) and transport.is_loaded(model, timeout)
    return asked == model or transport.is_loaded(model, timeout)


class GrpcTransport:
    """gRPC: one stream per call over one channel."""

    def __init__(self, address: Address, headers: Headers = ()) -> None:
        self._address = address
        self._metadata = grpc_wire.metadata_of(headers)
        self._channel = grpc.insecure_channel(
            address.target, options=grpc_wire.channel_options(address)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def infer(self, call: InferCall, timeout: float | None) -> Responses:
        """See `Transport`."""
        return _GrpcResponses(self._stub, call, self._address, timeout, self._metadata)

    def is_loaded(self, model: str, timeout: float) -> bool:
        """See `Transport`."""
        request = service_pb2.ModelReadyRequest(name=model)
        try:
            ready = self._stub.ModelReady(request, timeout=timeout, metadata=self._metadata)
            return bool(ready.ready)
        except grpc.RpcError as error:
            raise grpc_wire.translate_error(error, self._address, timeout) from None

    def close(self) -> None:
        """See `Transport`."""
        self._channel.close()


class _GrpcResponses:
    def __init__(
        self,
        stub: Any,
        call: InferCall,
        address: Address,
        timeout: float | None,
        metadata: Headers,
    ) -> None:
        self._stub = stub
        self._metadata = metadata
        self._request = grpc_wire.encode_request(call)
        self._address = address
        self._timeout = timeout
        self._stream: Any = None
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def receive(self) -> Generator[Response, None, None]:
        return iterate_beside_main_thread(self._receive(), self.cancel)

    def _receive(self) -> Generator[Response, None, None]:
        if self._is_cancelled:
            return
        # The request iterator ends after one request, so the server closes the stream when the
        # answer is complete.
        stream = self._stub.ModelStreamInfer(
            iter((self._request,)), timeout=self._timeout, metadata=self._metadata
        )
        self._stream = stream
        if self._is_cancelled:  # by another thread, between the check and now
            stream.cancel()
        num_responses = 0
        try:
            for message in stream:
                response, is_final = _decode_or_drain(message, stream)
                num_responses += 1
                if is_final:
                    _drain(stream)
                if response.tensors or not is_final:
                    yield response
                if is_final:
                    return
            raise grpc_wire.interrupted(self._address, num_responses)
        except grpc.RpcError as error:
            if not self._is_cancelled:
                raise grpc_wire.translate_error(
                    error, self._address, self._timeout, num_responses
                ) from None
        finally:
            stream.cancel()  # does nothing once the stream has ended


def _decode_or_drain(message: Any, stream: Any) -> tuple[Response, bool]:
    try:
        return grpc_wire.decode_response(message)
    except ServerError:
        _drain(stream)
        raise


def _drain(stream: Any) -> None:
    """Read the end of the stream: a server whose client hangs up right before it leaks the model
    (measured on Triton 24.10, about one run in three)."""
    with suppress(grpc.RpcError):
        for _ in stream:
            pass


class HttpTransport:
    """HTTP: server-sent events from ``generate_stream``."""

    def __init__(self, address: Address, headers: Headers = ()) -> None:
        self._address = address
        self._client = httpx.Client(**http_wire.client_settings(address, headers))

    def infer(self, call: InferCall, timeout: float | None) -> Responses:
        """See `Transport`. The server is given up after at most ``timeout`` seconds of silence."""
        return _HttpResponses(self._client, call, self._address, timeout)

    def is_loaded(self, model: str, timeout: float) -> bool:
        """See `Transport`."""
        try:
            path = http_wire.model_path(model, "ready")
            response = self._client.get(path, timeout=timeout)
            return http_wire.is_ok(response.status_code, response.content)
        except httpx.HTTPError as error:
            raise http_wire.translate_error(error, self._address, timeout) from None

    def close(self) -> None:
        """See `Transport`."""
        self._client.close()


class _HttpResponses:
    """Triton does not notice that an HTTP client has gone before the first response of its request.

    So every generation has an id, and one that is given up before its first response is stopped
    by that id.
    """

    def __init__(
        self, client: httpx.Client, call: InferCall, address: Address, timeout: float | None
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
        self._is_answered = threading.Event()

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._response is not None:
            http_wire.cut_connection(self._response)
        elif self._is_sent:
            self._stop_until_answered()

    def receive(self) -> Generator[Response, None, None]:
        if self._is_cancelled:
            return
        num_responses = 0
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        try:
            with closing(self._receive()) as responses:
                for response in responses:
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
                self._stop()

    def _receive(self) -> Generator[Response, None, None]:
        self._is_sent = True
        path = http_wire.model_path(self._call.model, "generate_stream")
        body = http_wire.encode_body(self._call)
        limits = http_wire.timeouts(self._timeout)
        try:
            with self._client.stream("POST", path, json=body, timeout=limits) as response:
                self._response = response
                self._is_answered.set()
                if response.status_code != httpx.codes.OK:
                    raise http_wire.error_of_status(response.status_code, response.read())
                parser = SseParser()
                for received in response.iter_bytes():
                    for data in parser.feed(received):
                        yield http_wire.decode_event(data)
        except httpx.ConnectError:
            self._is_sent = False  # there is nothing to stop
            raise

    def _stop_until_answered(self) -> None:
        """A stop that overtakes its request on the way is forgotten by the server."""
        pause, deadline = FIRST_STOP_PAUSE, time.monotonic() + STOP_TIMEOUT
        self._stop()
        while not self._is_answered.wait(pause) and time.monotonic() < deadline:
            self._stop()
            pause *= 2

    def _stop(self) -> None:
        if not self._call.is_generation:
            return
        call = stop_call(self._call.model, self._call.request_id)
        with suppress(InflightError):  # best effort: the caller has other news already
            for _ in _HttpResponses(self._client, call, self._address, STOP_TIMEOUT).receive():
                pass
