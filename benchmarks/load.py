"""The load generator of the benchmarks: requests as streams over gRPC and HTTP, and what they took.

Its HTTP side is that of `inflight bench`. It is as thin as it can be, because it shares the cores
with the server that is measured; `soak.py` sends everything through it that clients may send,
`serving.py` measures with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
)

from inflight_client.address import Address
from inflight_client.terminal.load import EventStream, Round, Trace
from wire import GrpcStreams

HOST = "127.0.0.1"
LLM_MODEL = "tensorrt_llm"
_DTYPES: dict[str, Any] = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32}


@dataclass
class Answer:
    """What came on one stream until now."""

    responses: list[dict[str, np.ndarray[Any, Any]]] = field(default_factory=list)
    """Tensors by name, of responses that hold any."""
    errors: list[str] = field(default_factory=list)
    num_finals: int = 0

    @property
    def text(self) -> str:
        """Of a stream of a single sequence: its pieces in one."""
        return "".join(self.texts)

    @property
    def texts(self) -> list[str]:
        """Text by sequence; a stream of a single one is number 0."""
        pieces: dict[int, list[str]] = {}
        for response in self.responses:
            if "text_output" in response:
                index = int(response["sequence_index"][0]) if "sequence_index" in response else 0
                pieces.setdefault(index, []).append(text_of(response))
        return ["".join(pieces[index]) for index in sorted(pieces)]

    def add(self, message: Any) -> None:
        """Take in one message of the stream; an error is the end of its request."""
        if message.error_message:
            self.errors.append(message.error_message)
            self.num_finals += 1
            return
        infer = message.infer_response
        tensors = {
            tensor.name: _decode(tensor.datatype, raw)
            for tensor, raw in zip(infer.outputs, infer.raw_output_contents, strict=True)
        }
        if tensors:
            self.responses.append(tensors)
        final = infer.parameters.get("triton_final_response")
        self.num_finals += final is not None and final.bool_param


def text_of(response: dict[str, np.ndarray[Any, Any]], beam: int = 0) -> str:
    """The text in one response."""
    return bytes(response["text_output"][beam]).decode(errors="replace")


def encode(name: str, values: dict[str, Any], model: str = LLM_MODEL) -> Any:
    """The request with the id ``name``; a list of texts or numbers is one row of them, and an
    array is without the dimension of the batch."""
    request = service_pb2.ModelInferRequest(model_name=model, id=name)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for key, value in values.items():
        first = value[0] if isinstance(value, list) else value
        if isinstance(value, np.ndarray):
            array = value.reshape(1, *(value.shape or (1,)))
            datatype, raw = np_to_triton_dtype(value.dtype), value.tobytes()
        elif isinstance(first, str | bytes):
            datatype, array = "BYTES", np.asarray([np.ravel(value)], dtype=np.object_)
            raw = serialize_byte_tensor(array).item()
        else:
            kind = {bool: ("BOOL", np.bool_), float: ("FP32", np.float32)}.get(type(first))
            datatype, dtype = kind or ("INT32", np.int32)
            array = np.asarray([np.ravel(value)], dtype=dtype)
            raw = array.tobytes()
        request.inputs.add(name=key, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(raw)
    return request


async def with_limit(call: Any, seconds: float) -> AsyncIterator[Any]:
    """The messages of a call; ``asyncio.TimeoutError`` if one takes longer than ``seconds``."""
    messages = call.__aiter__()
    while True:
        try:
            yield await asyncio.wait_for(messages.__anext__(), seconds)
        except StopAsyncIteration:
            return


def _decode(datatype: str, raw: bytes) -> np.ndarray[Any, Any]:
    """Flat; the shape is not needed."""
    if datatype == "BYTES":
        array: np.ndarray[Any, Any] = deserialize_bytes_tensor(raw)
        return array
    return np.frombuffer(raw, _DTYPES[datatype])


async def send(port: int, values: dict[str, Any]) -> EventStream:
    """Connect to a server on this machine and send a request."""
    address = Address("http", HOST, port)
    return await EventStream.send(address, f"/v2/models/{LLM_MODEL}/generate_stream", values)


async def run_streams(port: int, num_streams: int, values: dict[str, Any]) -> Round:
    """``num_streams`` requests at once, each on its own connection; `ValueError` if one is not
    answered with its ``request_output_len`` tokens."""
    started = time.perf_counter()
    traces = await asyncio.gather(*(_trace(port, values) for _ in range(num_streams)))
    return Round(num_streams, time.perf_counter() - started, list(traces))


async def run_grpc_streams(port: int, num_streams: int, values: dict[str, Any]) -> Round:
    """The same over gRPC, all on one connection, as an asynchronous client has it."""
    request = encode("", values)
    for name in ("text_output", "sequence_length"):
        request.outputs.add(name=name)
    loop = asyncio.get_running_loop()
    _, streams = await loop.create_connection(lambda: GrpcStreams(num_streams), HOST, port)
    started = time.perf_counter()
    streams.send(request.SerializeToString())
    await streams.ended
    ended = time.perf_counter()
    traces = [_read_trace(messages, started) for messages in streams.received.values()]
    for trace in traces:
        _checked(trace, values["request_output_len"])
    return Round(num_streams, ended - started, traces)


def _read_trace(messages: Sequence[tuple[float, bytes]], started: float) -> Trace:
    trace = Trace()
    for moment, raw in messages:
        message = service_pb2.ModelStreamInferResponse.FromString(raw)
        if message.error_message:
            raise ValueError(message.error_message)
        infer = message.infer_response
        for output, content in zip(infer.outputs, infer.raw_output_contents, strict=True):
            if output.name == "sequence_length":
                trace.times.append(moment - started)
                trace.counts.append(int.from_bytes(content, "little"))
    return trace


async def run_completions(port: int, num_streams: int, values: dict[str, Any]) -> Round:
    """The same through OpenAI's API, ``values`` of ``/v1/completions``; `ValueError` if one is not
    answered with its ``max_tokens``."""
    started = time.perf_counter()
    traces = await asyncio.gather(*(_trace_completion(port, values) for _ in range(num_streams)))
    return Round(num_streams, time.perf_counter() - started, list(traces))


async def _trace_completion(port: int, values: dict[str, Any]) -> Trace:
    """An event does not say how many tokens it has, the last one how many there were: those that
    are not one by one are counted with the last text."""
    wanted = {**values, "stream": True, "stream_options": {"include_usage": True}}
    stream = await EventStream.send(Address("http", HOST, port), "/v1/completions", wanted)
    started, trace, num_tokens = time.perf_counter(), Trace(), 0
    try:
        await stream.read_head()
        if stream.status != 200:
            raise ValueError(await stream.read_error())
        async for event in stream.events():
            if event["usage"]:
                num_tokens = event["usage"]["completion_tokens"]
            elif event["choices"][0]["text"]:
                trace.times.append(time.perf_counter() - started)
                trace.counts.append(1)
    finally:
        stream.reset()
    if num_tokens != values["max_tokens"] or not trace.counts:
        raise ValueError(f"{num_tokens} tokens arrived of {values['max_tokens']}")
    trace.counts[-1] += num_tokens - len(trace.counts)
    return trace


async def _trace(port: int, values: dict[str, Any]) -> Trace:
    stream = await send(port, values)
    started, trace = time.perf_counter(), Trace()
    try:
        await stream.read_head()
        if stream.status != 200:
            raise ValueError(await stream.read_error())
        async for event in stream.events():
            if num_tokens := event.get("sequence_length", 0):
                trace.times.append(time.perf_counter() - started)
                trace.counts.append(num_tokens)
    finally:
        stream.reset()
    return _checked(trace, values["request_output_len"])


def _checked(trace: Trace, num_tokens: int) -> Trace:
    if sum(trace.counts) != num_tokens:
        raise ValueError(f"{sum(trace.counts)} tokens arrived of {num_tokens}")
    return trace
