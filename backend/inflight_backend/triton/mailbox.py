"""The way back of a request that another model of ours relays: fetched piece by piece.

A call from model to model (BLS) must never get a second response. Python backends up to that of
June 2026, if not later ones, stand still for ever when one comes to a thread that has just been
woken by the one before it while another thread begins a call: one waits for Python's lock, one for
the table of calls, one for the queue of the first. Before April 2025 an error behind a first
response was lost as well. So what a relayed request is sent waits here, and each call of the relay
takes what there is, or waits for the next.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from inflight_backend.errors import CapacityExceeded, InvalidRequest
from inflight_backend.triton.stream import Array, ResponseFactory, ResponseStream
from inflight_client.protocol import RELAY_OUTPUT

PATIENCE_SECONDS = 60.0
"""A relay asks again within a second or two at most; one that does not for so long has gone."""

MAX_PARTS = 16
"""Of one call. A relay passes on each by itself before it asks again: if it is slower than the
engine, all there is would be more each time, and it would seem to have gone."""

_OBJECT = "object"

Tensors = dict[str, Array]


@dataclass(frozen=True, slots=True)
class RelayedError:
    """An error as a part of an answer; ``code`` names a constant of ``TritonError``."""

    message: str
    code: str


Part = Tensors | RelayedError
"""What would be one response."""


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


@dataclass(frozen=True, slots=True)
class PackedFactory(ResponseFactory):
    """Builds responses to a relay: its errors are none to Triton, which would mix them up."""

    def error(self, message: str, code: str = "INTERNAL") -> Any:
        """See `ResponseFactory.error`."""
        return self.tensors({RELAY_OUTPUT: pack([RelayedError(message, code)], is_over=True)})


class Mailbox:
    """What a `ResponseStream` takes for Triton's sender: keeps what is sent for who fetches it."""

    def __init__(self, reader: ResponseStream) -> None:
        """``reader``: of the call that brought the request; it waits for the first part."""
        self._lock = threading.Lock()
        self._parts: list[Part] = []
        self._is_over = self._is_told = False
        self._reader: ResponseStream | None = reader
        self._since = 0.0  # from when nobody has waited

    @property
    def is_done(self) -> bool:
        """True once the end was fetched, or nobody has come for it."""
        with self._lock:
            return self._is_told or (self._is_over and self._is_forsaken())

    def send(self, response: Part | None = None, flags: int = 0) -> None:
        """See `TritonSender.send`."""
        with self._lock:
            self._parts += [] if response is None else [response]
            self._is_over = self._is_over or bool(flags)
            reader, self._reader = self._reader, None
            if reader is None:
                return
            parts, is_over = self._take()
        self._deliver(reader, parts, is_over)

    def fetch(self, reader: ResponseStream) -> None:
        """Have ``reader`` get what there is, or what comes next.

        `InvalidRequest` if another one waits, `CapacityExceeded` for who comes too late: what is
        there may be the end of a request that was stopped because nobody came.
        """
        with self._lock:
            if self._reader is not None:
                raise InvalidRequest("another call waits for the answer of this request")
            if self._is_forsaken():
                raise CapacityExceeded(
                    f"nobody asked for more of this answer for {PATIENCE_SECONDS:g} s"
                )
            if not self._parts and not self._is_over:
                self._reader = reader
                return
            parts, is_over = self._take()
        self._deliver(reader, parts, is_over)

    def is_cancelled(self) -> bool:
        """See `TritonSender.is_cancelled`; true also when nobody fetches any more."""
        with self._lock:
            reader = self._reader
            if reader is None:
                return self._is_told or self._is_forsaken()
        return reader.is_cancelled()

    def _is_forsaken(self) -> bool:
        return self._reader is None and time.monotonic() - self._since > PATIENCE_SECONDS

    def _take(self) -> tuple[list[Part], bool]:
        """What a call gets, and whether it is the last."""
        parts, self._parts = self._parts[:MAX_PARTS], self._parts[MAX_PARTS:]
        self._since = time.monotonic()
        self._is_told = self._is_over and not self._parts
        return parts, self._is_told

    def _deliver(self, reader: ResponseStream, parts: list[Part], is_over: bool) -> None:
        try:
            reader.send({RELAY_OUTPUT: pack(parts, is_over=is_over)}, is_final=True)
        except BaseException:
            with self._lock:
                self._is_told = True  # the relay hears of an error, and asks no more
            reader.abandon("the response could not be sent")
            raise


def pack(parts: Iterable[Part], *, is_over: bool) -> Array:
    """Parts of an answer as one tensor of bytes: a description, then every tensor's content."""
    contents: list[bytes] = []
    described: list[Any] = []
    for part in parts:
        if isinstance(part, RelayedError):
            described.append([part.message, part.code])
            continue
        kinds = {}
        for name, tensor in part.items():
            is_object = tensor.dtype.hasobject
            kinds[name] = [_OBJECT if is_object else tensor.dtype.str, tensor.shape]
            contents.extend(tensor.reshape(-1) if is_object else [tensor.tobytes()])
        described.append(kinds)
    head = json.dumps({"parts": described, "is_over": is_over}).encode()
    packed = np.empty(1 + len(contents), dtype=np.object_)
    packed[:] = [head, *contents]
    return packed


def unpack(packed: Array) -> tuple[list[Part], bool]:
    """What `pack` packed: the parts, and whether they are the last."""
    elements = iter(packed.reshape(-1))
    head = json.loads(next(elements))
    return [_read(part, elements) for part in head["parts"]], head["is_over"]


def _read(described: Any, elements: Iterator[bytes]) -> Part:
    if isinstance(described, list):
        return RelayedError(*described)
    tensors: Tensors = {}
    for name, (dtype, shape) in described.items():
        if dtype == _OBJECT:
            tensor = np.empty(math.prod(shape), dtype=np.object_)
            tensor[:] = [next(elements) for _ in range(tensor.size)]
        else:
            tensor = np.frombuffer(next(elements), dtype=dtype)
        tensors[name] = tensor.reshape(shape)
    return tensors
