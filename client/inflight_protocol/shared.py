"""What travels on a stream that several requests share: a list of `SharedPart`, as MessagePack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class SharedPart(msgspec.Struct, frozen=True, array_like=True):
    """One response of the request ``tag``: the values of each tensor in row-major order, texts as
    their UTF-8. ``tensors`` None: the last one has come."""

    tag: str
    tensors: dict[str, list[Any]] | None


def pack_parts(parts: Sequence[SharedPart]) -> bytes:
    """The content of output ``shared``."""
    return _encoder.encode(parts)


def unpack_parts(content: bytes) -> list[SharedPart]:
    """The parts in order; ``msgspec.DecodeError`` for what is none."""
    return _decoder.decode(content)


def decode_texts(tensors: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """``tensors`` with texts as ``str``."""
    return {
        name: [each.decode(errors="replace") for each in values]
        if values and isinstance(values[0], bytes)
        else values
        for name, values in tensors.items()
    }


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[SharedPart])
