"""The connection between our other models and ``tensorrt_llm`` in one tritonserver.

A Unix socket for each request, instead of Triton's own calls from model to model (BLS): where a
second response to a call comes while another call begins, Python backends up to that of June 2026,
if not later ones, deadlock: one thread waits for Python's lock, one for the table of calls, one for
the queue of the first. Before April 2025 an error behind a first response was lost as well, and
under many calls the calling process crashed now and then (24.10). A process that dies closes its
connection, so the other side always learns of it.

The sockets are abstract: there is no file, so nothing is left behind. Every process in the same
network namespace can reach them, so both sides check the credentials of the other.

The relay sends one `RelayedRequest`; `RelayedResponse`s come back until one is final. It may then
send the next, for the same client. A message
travels as its length and MessagePack.
"""

from __future__ import annotations

import hashlib
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import psutil

from inflight_backend.errors import CapacityExceeded
from inflight_backend.requests.inference_request import Array
from inflight_backend.triton_io.sender import ResponseFactory

Tensors = dict[str, Array]

_LENGTH = struct.Struct("!Q")
_OBJECT = "object"


class RelayedRequest(msgspec.Struct, frozen=True, tag="request"):
    """What is asked: the tensors by name, and the outputs that are wanted.

    ``begun``: it goes on with an answer that was begun then, on the clock of `time.monotonic`, so a
    server that drains or is full takes it, too, and deadlines are those of the beginning.
    """

    inputs: dict[str, np.ndarray[Any, Any]]
    requested: list[str]
    begun: float | None = None


class RelayedResponse(msgspec.Struct, frozen=True, tag="response", omit_defaults=True):
    """One response, as Triton's. ``tensors`` None: only the news that the answer is over.

    ``code`` names a constant of ``TritonError`` if this is the ``error`` that ends the answer.
    """

    tensors: dict[str, np.ndarray[Any, Any]] | None = None
    error: str = ""
    code: str = ""
    is_final: bool = False


Message = RelayedRequest | RelayedResponse


@dataclass(frozen=True, slots=True)
class RelayedResponseFactory(ResponseFactory):
    """Builds `RelayedResponse`s in place of Triton's responses."""

    @property
    def final_flag(self) -> int:
        """See `ResponseFactory.final_flag`."""
        return 1

    def tensors(self, tensors: Tensors) -> RelayedResponse:
        """See `ResponseFactory.tensors`."""
        return RelayedResponse(tensors)

    def error(self, message: str, code: str = "INTERNAL") -> RelayedResponse:
        """See `ResponseFactory.error`."""
        return RelayedResponse(None, str(message), code)  # an `ErrorText` cannot be packed


class _PackedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as it travels; ``content`` holds its bytes, or those of each of its texts."""

    dtype: str
    shape: list[int]
    content: bytes | list[bytes]


def pack(message: Message) -> bytes:
    """A message as it travels; `ValueError` if a tensor or text has 4 GiB or more."""
    content = _encoder.encode(message)
    return _LENGTH.pack(len(content)) + content


def read_message(connection: socket.socket) -> Message | None:
    """The next message, None if the other side closes before its end.

    `msgspec.DecodeError` or ``ValueError`` for what is no message.
    """
    with suppress(ConnectionError):
        if (length := _read(connection, _LENGTH.size)) is None:
            return None
        if (content := _read(connection, *_LENGTH.unpack(length))) is not None:
            message: Message = _decoder.decode(content)
            return message
    return None


def read_messages(connection: socket.socket) -> Iterator[Message]:
    """The messages that come, until the other side closes or is cut off in the midst of one."""
    while (message := read_message(connection)) is not None:
        yield message


def _read(connection: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = connection.recv(min(size, _MAX_READ))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _pack_tensor(tensor: object) -> _PackedTensor:
    assert isinstance(tensor, np.ndarray)
    if tensor.dtype.hasobject:
        texts = [each if isinstance(each, bytes) else str(each).encode() for each in tensor.flat]
        return _PackedTensor(_OBJECT, list(tensor.shape), texts)
    return _PackedTensor(tensor.dtype.str, list(tensor.shape), tensor.tobytes())


def _unpack_tensor(kind: type, packed: object) -> Array:
    dtype, shape, content = msgspec.convert(packed, tuple[str, list[int], bytes | list[bytes]])
    if isinstance(content, bytes):
        return np.frombuffer(content, dtype).reshape(shape)
    tensor = np.empty(len(content), np.object_)
    tensor[:] = content
    return tensor.reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_tensor)
_decoder = msgspec.msgpack.Decoder(Message, dec_hook=_unpack_tensor)

_MAX_READ = 2**20
_VERSION = "4"  # of the messages; others have other addresses
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_MIN_DESCRIPTORS = 2**13
_CONNECT_SECONDS = 1.0  # while a model is reloaded the address is closed for some 0.05 s
_QUEUE_SECONDS = 10.0  # where very many connect at once; by default Linux lets 4096 wait
_CONNECT_PAUSE = 0.02


def address_of(model: str) -> bytes:
    """Where the model ``model`` of this process's tritonserver listens."""
    parent = os.getppid()
    namespace = os.stat("/proc/self/ns/pid").st_ino  # two may have the same network
    identity = f"{_VERSION} {namespace} {parent} {model}"
    return b"\0inflight-relay-" + hashlib.sha256(identity.encode()).hexdigest()[:32].encode()


def is_sibling(connection: socket.socket) -> bool:
    """True if the other side is a process of the same user that the same tritonserver started."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    with suppress(psutil.Error):  # it has gone
        return user == os.geteuid() and psutil.Process(process).ppid() == os.getppid()
    return False


def connect(connection: socket.socket, model: str) -> None:
    """Connect to ``model``; `CapacityExceeded` if it is not there, or accepts no connection.

    Tries for a second: it may just be reloading. A blocking call would wait forever
    for a frozen process whose queue is full.
    """
    started, timeout = time.monotonic(), connection.gettimeout()
    address = address_of(model)
    connection.setblocking(False)
    while True:
        try:
            connection.connect(address)
            break
        except ConnectionRefusedError:
            limit, what = _CONNECT_SECONDS, "is not loaded, or the server is shutting down"
        except BlockingIOError:
            limit, what = _QUEUE_SECONDS, "takes no requests just now; try again later"
        if time.monotonic() > started + limit:
            raise CapacityExceeded(f"the model '{model}' {what}")
        time.sleep(_CONNECT_PAUSE)
    connection.settimeout(timeout)
    if not is_sibling(connection):
        raise CapacityExceeded(f"the model '{model}' has gone, or another process is in its place")


def allow_many_connections() -> None:
    """Raise this process's limit of open files, where the system allows it: each request that is
    relayed has one. Many systems begin at 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _MIN_DESCRIPTORS:
        limit = _MIN_DESCRIPTORS if hard < 0 else min(_MIN_DESCRIPTORS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
