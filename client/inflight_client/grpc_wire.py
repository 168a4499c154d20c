"""Triton's gRPC protocol: calls to protobuf messages, messages and status codes back.

A decoupled model answers only on ``ModelStreamInfer``. Every call gets a stream of its own with one
request; the channel is shared. An empty response with ``triton_final_response`` ends the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from inflight_client.address import Address
from inflight_client.encoding import InferCall, Response
from inflight_client.errors import (
    InflightError,
    RequestTimeout,
    ServerError,
    ServerUnreachable,
    StreamInterrupted,
)
from inflight_client.headers import Headers, denied, is_denied
from inflight_protocol import DTYPE_TO_NUMPY, ERROR_CODES_PARAMETER, INPUT_BY_NAME
from inflight_protocol.tensors import make_inputs

_CODED_MESSAGE = re.compile(r"\[([A-Z_]+)\] (.*)", re.DOTALL)
_DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_INT32_MAX = 2**31 - 1
_RECONNECT_MS = 1000
# A server ends connections that ask more than once in five minutes whether it lives, unless it is
# told otherwise (gRPC's guide on keepalive).
_KEEPALIVE_MS = 310_000
_KEEPALIVE_TIMEOUT_MS = 60_000

STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


def channel_options(address: Address) -> list[tuple[str, int]]:
    """Messages of any size; no proxy from the environment for this machine; a connection again soon
    after a server's restart, for which gRPC itself would wait up to two minutes; an end for who
    waits for a machine that is gone."""
    options = [
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),  # any number: who waits sends nothing
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
        ("grpc.max_send_message_length", _INT32_MAX),
        ("grpc.max_receive_message_length", _INT32_MAX),
    ]
    if address.is_loopback:
        options.append(("grpc.enable_http_proxy", 0))
    return options


def metadata_of(headers: Headers) -> Headers:
    """The same, as gRPC carries them."""
    return tuple((name.lower(), value) for name, value in headers)


def encode_request(call: InferCall) -> Any:
    """The ``ModelInferRequest`` of a call."""
    request = service_pb2.ModelInferRequest(model_name=call.model, id=call.request_id)
    for name, tensor in make_inputs(dict(call.values)).items():
        dtype = INPUT_BY_NAME[name].dtype
        if dtype == "STRING":
            datatype, raw = "BYTES", serialize_byte_tensor(tensor).item()
        else:
            datatype, raw = dtype, tensor.tobytes()
        request.inputs.add(name=name, datatype=datatype, shape=tensor.shape)
        request.raw_input_contents.append(raw)
    for name in call.outputs:
        request.outputs.add(name=name)
    request.parameters[ERROR_CODES_PARAMETER].bool_param = True
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def encode_bytes(call: InferCall) -> bytes:
    """The same, ready to travel."""
    message: bytes = encode_request(call).SerializeToString()
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
        return RequestTimeout(
            f"no final response from {address} within timeout = {timeout} s; "
            "the request was cancelled."
        )
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
    """The error for a stream that was cancelled, but not by who reads it."""
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
    if datatype == "BYTES":
        # Python models cannot send half a character; other models might, and get U+FFFD.
        return [item.decode("utf-8", errors="replace") for item in deserialize_bytes_tensor(raw)]
    values: list[Any] = np.frombuffer(raw, dtype=DTYPE_TO_NUMPY[datatype]).tolist()
    return values
