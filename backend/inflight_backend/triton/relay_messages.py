"""What models of this package that relay requests and ``tensorrt_llm`` tell one another.

The relay sends one message, the request; then come the parts of its answer, and its end. A message
is its length and that of its head, the head in JSON, and the content of every tensor.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight_backend.triton_io.stream import ResponseFactory

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
