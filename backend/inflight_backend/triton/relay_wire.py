"""The connection between our other models and ``tensorrt_llm`` in one tritonserver.

A Unix socket for each request, instead of Triton's own calls from model to model (BLS): where a
second response to a call comes while another call begins, Python backends up to that of June 2026,
if not later ones, deadlock: one thread waits for Python's lock, one for the table of calls, one for
the queue of the first. Before April 2025 an error behind a first response was lost as well, and
under many calls the calling process crashed now and then (24.10). A process that dies closes its
connection, so the other side always learns of it.

The sockets are abstract: there is no file, so nothing is left behind. Every process in the same
network namespace can reach them, so both sides check the credentials of the other.

The relay sends one message, the request; the parts of the answer and its end come back. A message
is its length and that of its head, the head in JSON, and the content of every tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from inflight_backend.errors import CapacityExceeded
from inflight_backend.triton_io.sender import ResponseFactory

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

LENGTHS = struct.Struct("!II")
"""What a message begins with: the bytes of its head, and those of its tensors."""

_MAX_CONTENT_BYTES = 2**32 - 1
_OBJECT = "object"


class LastTensors(Tensors):
    """Behind these comes nothing but the end."""


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    """What is asked: the tensors by name, and the outputs that are wanted."""

    inputs: Tensors
    requested: Sequence[str]


@dataclass(frozen=True, slots=True)
class RelayedError:
    """An error as the last part of an answer; ``code`` names a constant of ``TritonError``."""

    message: str
    code: str


@dataclass(frozen=True, slots=True)
class RelayedEnd:
    """Comes behind the last part of an answer."""


Part = Tensors | RelayedError
"""What would be one response."""

Message = RelayedRequest | Part | RelayedEnd


@dataclass(frozen=True, slots=True)
class PartFactory(ResponseFactory):
    """Builds parts in place of Triton's responses."""

    @property
    def final_flag(self) -> int:
        """See `ResponseFactory.final_flag`."""
        return 1

    def tensors(self, tensors: Tensors) -> Tensors:
        """See `ResponseFactory.tensors`."""
        return tensors

    def error(self, message: str, code: str = "INTERNAL") -> RelayedError:
        """See `ResponseFactory.error`."""
        return RelayedError(message, code)


def pack(message: Message) -> bytes:
    """A message as it travels; `ValueError` if its tensors have 4 GiB or more."""
    if isinstance(message, RelayedRequest):
        return _pack({"requested": list(message.requested)}, message.inputs)
    if isinstance(message, RelayedError):
        return _pack({"error": [message.message, message.code]})
    if isinstance(message, RelayedEnd):
        return _pack({"end": True})
    return _pack({"last": True} if isinstance(message, LastTensors) else {}, message)


def unpack(head: bytes, contents: bytes) -> Message:
    """The message that `pack` made of these two parts, whose lengths come before them."""
    described = json.loads(head)
    if "error" in described:
        return RelayedError(*described["error"])
    if "end" in described:
        return RelayedEnd()
    tensors = dict(_read_tensors(described["tensors"], memoryview(contents)))
    if "requested" in described:
        return RelayedRequest(tensors, described["requested"])
    return LastTensors(tensors) if "last" in described else tensors


def _pack(about: Mapping[str, Any], tensors: Mapping[str, Array] | None = None) -> bytes:
    contents: list[bytes] = []
    described: list[Any] = []
    for name, tensor in (tensors or {}).items():
        if tensor.dtype.hasobject:
            texts = [_to_bytes(text) for text in tensor.reshape(-1)]
            described.append([name, _OBJECT, tensor.shape, list(map(len, texts))])
            contents += texts
        else:
            described.append([name, tensor.dtype.str, tensor.shape, [tensor.nbytes]])
            contents.append(tensor.tobytes())
    head = json.dumps({**about, "tensors": described}).encode()
    size = sum(map(len, contents))
    if size > _MAX_CONTENT_BYTES:
        raise ValueError(f"tensors of {size} bytes are more than a message can hold")
    return b"".join([LENGTHS.pack(len(head), size), head, *contents])


def _to_bytes(text: Any) -> bytes:
    return text if isinstance(text, bytes) else str(text).encode()


def _read_tensors(described: Sequence[Any], contents: memoryview) -> Iterator[tuple[str, Array]]:
    start = 0
    for name, dtype, shape, lengths in described:
        pieces = []
        for length in lengths:
            pieces.append(contents[start : start + length])
            start += length
        if dtype == _OBJECT:
            tensor = np.empty(math.prod(shape), dtype=np.object_)
            tensor[:] = list(map(bytes, pieces))
        else:
            tensor = np.frombuffer(pieces[0], dtype=dtype)
        yield name, tensor.reshape(shape)


_VERSION = "1"  # of the messages; others have other addresses
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


def read_messages(connection: socket.socket) -> Iterator[Message]:
    """The messages that come, until the other side closes or is cut off in the midst of one."""
    with connection.makefile("rb") as file, suppress(ConnectionError):
        while len(lengths := file.read(LENGTHS.size)) == LENGTHS.size:
            head_size, contents_size = LENGTHS.unpack(lengths)
            head, contents = file.read(head_size), file.read(contents_size)
            if len(head) + len(contents) < head_size + contents_size:
                return
            yield unpack(head, contents)


def allow_many_connections() -> None:
    """Raise this process's limit of open files, where the system allows it: each request that is
    relayed has one. Many systems begin at 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _MIN_DESCRIPTORS:
        limit = _MIN_DESCRIPTORS if hard < 0 else min(_MIN_DESCRIPTORS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
