"""The load generator of the benchmarks: requests as streams over gRPC and HTTP, and what they took.

It is as thin as it can be, because it shares the cores with the server that is measured; `soak.py`
sends everything through it that clients may send, `serving.py` measures with it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

HOST = "127.0.0.1"
LLM_MODEL = "tensorrt_llm"
_DTYPES: dict[str, Any] = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32}
_PREFIX = b"data: "


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
    """The request with the id ``name``; a list of texts or numbers is one row of them."""
    request = service_pb2.ModelInferRequest(model_name=model, id=name)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for key, value in values.items():
        first = value[0] if isinstance(value, list) else value
        if isinstance(first, str | bytes):
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


class EventStream:
    """One request and what comes of it.

    `EOFError` or `OSError` where the connection ends before the answer does, `ValueError` for what
    is no HTTP or no JSON.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `send`."""
        self._reader = reader
        self._writer = writer
        self._headers: dict[str, str] = {}
        self.status = 0
        """Of HTTP, once `read_head` is done."""

    @classmethod
    async def send(cls, port: int, values: dict[str, Any]) -> EventStream:
        """Connect and send a request."""
        body = json.dumps(values)
        stream = cls(*await asyncio.open_connection(HOST, port))
        head = (
            f"POST /v2/models/{LLM_MODEL}/generate_stream HTTP/1.1\r\nHost: {HOST}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        stream._writer.write((head + body).encode())
        return stream

    async def read_head(self) -> None:
        """Wait for the status."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip().split("\r\n")
        self.status = int(first.split(" ")[1])
        fields = (line.partition(":") for line in lines)
        self._headers = {name.lower(): value.strip().lower() for name, _, value in fields}

    async def read_error(self) -> str:
        """What a refusal says; all of its body if that is not the JSON of an error."""
        body = b""
        if self._is_chunked:
            while piece := await self._read():
                body += piece
        else:
            body = await self._reader.readexactly(int(self._headers.get("content-length", "0")))
        with suppress(ValueError, KeyError, TypeError):
            return str(json.loads(body.removeprefix(_PREFIX))["error"])
        return repr(body)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """What was sent, until the answer ends."""
        received = b""
        while piece := await self._read():
            *whole, received = (received + piece).split(b"\n\n")
            for event in whole:
                if not event.startswith(_PREFIX):
                    raise ValueError(f"no event: {event!r:.200}")
                yield json.loads(event[len(_PREFIX) :])

    def reset(self) -> None:
        """Have the kernel tell the server that the client is gone."""
        raw: socket.socket = self._writer.get_extra_info("socket")
        with suppress(OSError):  # it is closed already
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    @property
    def _is_chunked(self) -> bool:
        return "chunked" in self._headers.get("transfer-encoding", "")

    async def _read(self) -> bytes:
        """What came next; nothing at the end."""
        if not self._is_chunked:
            return await self._reader.read(2**16)
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        return (await self._reader.readexactly(size + 2))[:-2]


@dataclass
class Trace:
    """When one stream produced what: (seconds since its request, number of tokens)."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    """One measured round of ``num_streams`` simultaneous requests."""

    num_streams: int
    seconds: float
    traces: list[Trace]

    def figures(self) -> dict[str, float]:
        """The figures of the table; times in milliseconds."""
        num_tokens = sum(sum(trace.counts) for trace in self.traces)
        num_responses = sum(len(trace.counts) for trace in self.traces)
        firsts = [trace.times[0] * 1e3 for trace in self.traces]
        gaps = [
            (later - earlier) * 1e3
            for trace in self.traces
            for earlier, later in zip(trace.times, trace.times[1:], strict=False)
        ]
        return {
            "tokens_per_second": num_tokens / self.seconds,
            "first_token_ms_p50": _quantile(firsts, 0.5),
            "first_token_ms_p99": _quantile(firsts, 0.99),
            "gap_ms_p50": _quantile(gaps, 0.5),
            "gap_ms_p99": _quantile(gaps, 0.99),
            "tokens_per_response": num_tokens / num_responses,
        }


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


async def run_streams(port: int, num_streams: int, values: dict[str, Any]) -> Round:
    """``num_streams`` requests at once, each on its own connection; `ValueError` if one is not
    answered with its ``request_output_len`` tokens."""
    started = time.perf_counter()
    traces = await asyncio.gather(*(_trace(port, values) for _ in range(num_streams)))
    return Round(num_streams, time.perf_counter() - started, list(traces))


async def _trace(port: int, values: dict[str, Any]) -> Trace:
    stream = await EventStream.send(port, values)
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
    if sum(trace.counts) != values["request_output_len"]:
        raise ValueError(f"{sum(trace.counts)} tokens arrived of {values['request_output_len']}")
    return trace
