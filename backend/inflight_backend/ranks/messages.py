"""What the first rank tells the others, and their answers, as MessagePack over a stream socket.

Each message is its length (8 bytes, big-endian) and its bytes. Nothing is unpickled: whatever
arrives can only become one of the types below.
"""

from __future__ import annotations

import socket
import struct
from typing import TypeAlias

import msgspec

from inflight_backend.engine.config import EngineConfig
from inflight_scheduler import ScheduledBatch

_LENGTH = struct.Struct(">Q")
_MAX_BYTES = 2**36


class Begin(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """First of all: which part of which checkpoint the rank runs, and where the ranks meet
    (`torch.distributed`)."""

    checkpoint: str
    config: EngineConfig
    rank: int
    local_rank: int
    host: str
    port: int
    backend: str
    timeout_seconds: float
    num_threads: int


class Step(msgspec.Struct, tag=True, frozen=True):
    """A plan to run."""

    batch: ScheduledBatch


class TensorBytes(msgspec.Struct, frozen=True):
    """A tensor."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


class PartBytes(msgspec.Struct, frozen=True):
    """An `AdapterPart`."""

    linear: str
    start: int
    a: TensorBytes
    b: TensorBytes
    scales: TensorBytes | None = None


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """From now on an adapter, or nothing, lies in ``place``."""

    place: int
    parts: tuple[PartBytes, ...] | None = None


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """`StepEngine.prepare_thread`."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End."""


class Join(msgspec.Struct, tag=True, frozen=True):
    """From a rank on another machine: which one it is."""

    rank: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """From a rank: it is about to meet the others."""


class Beat(msgspec.Struct, tag=True, frozen=True):
    """From a rank: it lives."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """From a rank: it ends because of an error; ``is_expected``: one that the user can mend."""

    error: str
    is_expected: bool = False


ToRank: TypeAlias = Begin | Step | LoadAdapter | Prepare | Stop
FromRank: TypeAlias = Join | Ready | Beat | Failed

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def pack(message: ToRank | FromRank) -> bytes:
    """The bytes of a message, with its length."""
    content = _encoder.encode(message)
    return _LENGTH.pack(len(content)) + content


def receive_order(connection: socket.socket) -> ToRank:
    """The next message for a rank; `EOFError` when the first rank has gone."""
    return _to_rank.decode(_receive(connection))


def receive_answer(connection: socket.socket) -> FromRank:
    """The next message of a rank; `EOFError` when it has gone."""
    return _from_rank.decode(_receive(connection))


def receive_rank(connection: socket.socket) -> int:
    """The number of a rank that joins; `ValueError` for anything else."""
    answer = receive_answer(connection)
    if not isinstance(answer, Join):
        raise ValueError("a rank says first which one it is")
    return answer.rank


def _receive(connection: socket.socket) -> bytearray:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > _MAX_BYTES:
        raise EOFError(f"a message of {length} bytes")
    return _read(connection, length)


def _read(connection: socket.socket, length: int) -> bytearray:
    found = bytearray(length)
    view, start = memoryview(found), 0
    while start < length:
        try:
            count = connection.recv_into(view[start:])
        except ConnectionError:
            count = 0
        if not count:
            raise EOFError("the connection is closed")
        start += count
    return found
