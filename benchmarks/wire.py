"""gRPC's streams on one connection, by frames of HTTP/2 (RFC 9113), for a load generator.

Python's `grpc.aio` takes 100 us of the cores that it shares with the server to hand over a message,
five times as long as what is here. A stream is one request and messages until its end: no flow
control, as all windows are open from the start, and headers are sent but not read, since errors of
Triton's model come as messages; of a call that fails otherwise tokens are missing.
"""

from __future__ import annotations

import asyncio
import struct
import time

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GO_AWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM = _ACK = 0x1
_END_HEADERS = 0x4
_INITIAL_WINDOW_SIZE = 4
_WINDOW = 2**31 - 1
_HEAD_SIZE = 9
_PREFIX_SIZE = 5  # of a message: whether it is compressed, and its length

_METHOD = b"/inference.GRPCInferenceService/ModelStreamInfer"
# RFC 7541: the first two are in its table, the others are literal, three of them by a name in it.
_HEADER_BLOCK = (
    b"\x83\x86"  # :method POST, :scheme http
    + b"\x04"
    + bytes([len(_METHOD)])
    + _METHOD  # :path
    + b"\x01\x09localhost"  # :authority
    + b"\x0f\x10\x10application/grpc"  # content-type
    + b"\x00\x02te\x08trailers"
)


class GrpcStreams(asyncio.Protocol):
    """``num_streams`` calls of ``ModelStreamInfer``, each with the same request."""

    def __init__(self, num_streams: int) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done with the last stream; `ConnectionError` if the server ends one, or all, early."""
        self.received: dict[int, list[tuple[float, bytes]]] = {
            2 * index + 1: [] for index in range(num_streams)
        }
        """By number of the stream: when each message came (`time.perf_counter`), and itself."""
        self._open = set(self.received)
        self._parts = {stream: b"" for stream in self.received}  # of messages
        self._rest = b""  # of a frame

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        settings = _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WINDOW))
        window = _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW - 0xFFFF))
        transport.write(_PREFACE + settings + window)

    def send(self, message: bytes) -> None:
        """Send the request on every stream."""
        body = b"\0" + struct.pack(">I", len(message)) + message
        for stream in self.received:
            head = _frame(_HEADERS, _END_HEADERS, stream, _HEADER_BLOCK)
            self._transport.write(head + _frame(_DATA, _END_STREAM, stream, body))

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        now, data, start = time.perf_counter(), self._rest + data, 0
        while len(data) >= start + _HEAD_SIZE:
            end = start + _HEAD_SIZE + int.from_bytes(data[start : start + 3], "big")
            if len(data) < end:
                break
            kind, flags = data[start + 3], data[start + 4]
            stream = int.from_bytes(data[start + 5 : start + _HEAD_SIZE], "big")
            self._take(kind, flags, stream, data[start + _HEAD_SIZE : end], now)
            start = end
        self._rest = data[start:]

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._fail()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes, now: float) -> None:
        if kind == _DATA:
            content = self._parts[stream] + payload
            while len(content) >= _PREFIX_SIZE and len(content) >= (size := _size_of(content)):
                self.received[stream].append((now, content[_PREFIX_SIZE:size]))
                content = content[size:]
            self._parts[stream] = content
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            answer = payload if kind == _PING else b""
            self._transport.write(_frame(kind, _ACK, 0, answer))
        elif kind in (_RESET, _GO_AWAY):
            self._fail()
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            self._open.discard(stream)
            if not self._open:
                self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        self._transport.close()

    def _fail(self) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError("the server ended a stream early"))
        self._transport.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def _size_of(content: bytes) -> int:
    """Of the message that ``content`` begins with, and what stands before it."""
    return _PREFIX_SIZE + int.from_bytes(content[1:_PREFIX_SIZE], "big")
