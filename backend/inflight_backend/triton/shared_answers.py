"""Answers of many requests on one of Triton's streams.

A response for each token of each request costs more than the token: a round trip between model and
server, a message on a stream, a client that wakes up. A client with many requests at a time opens
one stream for what they answer (input ``shared``), and names it in each (`SHARED_PARAMETER`): all
that a round of the dispatcher has for them is one response then. Each of them is a request of
Triton's like any other, with an end, an error and a client that may leave.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inflight_backend.errors import CapacityExceeded, InvalidRequest
from inflight_backend.log import get_logger
from inflight_backend.requests.inference_request import Array
from inflight_backend.triton_io.sender import ResponseFactory, ResponseSender, TritonSender
from inflight_protocol.shared import SharedPart, pack_parts

_logger = get_logger(__name__)

_MAX_STREAMS = 64  # one of each client
_CHECK_SECONDS = 1.0


class SharedResponseFactory(ResponseFactory):
    """Builds errors as Triton has them, and leaves tensors as they are."""

    def tensors(self, tensors: dict[str, Array]) -> dict[str, Array]:
        """See `ResponseFactory.tensors`."""
        return tensors


@dataclass(slots=True, eq=False)
class _SharedStream:
    """``parts`` are not sent yet."""

    stream: ResponseSender
    parts: list[SharedPart] = field(default_factory=list)


@dataclass(slots=True)
class SharedSender:
    """In place of Triton's sender for a request: what it answers goes to the shared stream, its end
    to both."""

    answers: SharedAnswers
    shared: _SharedStream
    tag: str
    sender: TritonSender
    next_check: float = 0.0

    def send(self, response: Any = None, flags: int = 0) -> None:
        """See `TritonSender.send`; ``response`` is of `SharedResponseFactory`."""
        error = None if isinstance(response, dict) else response
        if error is None and response:
            values = {name: tensor.ravel().tolist() for name, tensor in response.items()}
            self.answers.add(self.shared, SharedPart(self.tag, values))
        if flags:
            self.answers.add(self.shared, SharedPart(self.tag, None))
            self.sender.send(error, flags=flags)

    def is_cancelled(self) -> bool:
        """See `TritonSender.is_cancelled`; Triton is asked now and then: for each of many requests
        it would take longer than to send their tokens."""
        if (now := time.monotonic()) < self.next_check:
            return False
        self.next_check = now + _CHECK_SECONDS
        return self.sender.is_cancelled()


class SharedAnswers:
    """Owner of the shared streams. Any thread adds to them; that of the dispatcher sends."""

    def __init__(self, send_soon: Callable[[Callable[[], None]], None]) -> None:
        """``send_soon`` has the thread of the dispatcher call something."""
        self._send_soon = send_soon
        self._streams: dict[str, _SharedStream] = {}
        self._lock = threading.Lock()
        self._is_due = False

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, name: str, stream: ResponseSender) -> None:
        """From now on requests may name this stream; its first response says so, with no parts.

        `InvalidRequest` without a name of its own, `CapacityExceeded` while too many are open.
        """
        with self._lock:
            if not name or name in self._streams:
                raise InvalidRequest("'shared' needs a request id that no other stream has")
            if len(self._streams) >= _MAX_STREAMS:
                raise CapacityExceeded(
                    f"{_MAX_STREAMS} shared streams are open, which is the limit; "
                    "send requests without one, or try again later"
                )
            self._streams[name] = _SharedStream(stream)
        _send(stream, [])

    def sender(self, place: str, sender: TritonSender) -> SharedSender | None:
        """For a request whose own is ``sender``; None where ``place``, of `SHARED_PARAMETER`, names
        no open stream."""
        name, _, tag = place.partition(" ")
        shared = self._streams.get(name)
        return None if shared is None else SharedSender(self, shared, tag, sender)

    def add(self, shared: _SharedStream, part: SharedPart) -> None:
        """Have ``part`` sent with what comes until the dispatcher has time."""
        with self._lock:
            shared.parts.append(part)
            was_due, self._is_due = self._is_due, True
        if not was_due:
            self._send_soon(self._send)

    def check_cancelled(self) -> None:
        """End the streams whose clients have gone."""
        for name, shared in list(self._streams.items()):
            if shared.stream.is_closed or shared.stream.is_cancelled():
                self._close(name)

    def close(self) -> None:
        """End all of them with what waits to be sent; never raises."""
        self._send()
        for name in list(self._streams):
            self._close(name)

    def _close(self, name: str) -> None:
        with self._lock:
            shared = self._streams.pop(name, None)
        if shared is not None:
            shared.stream.close()

    def _send(self) -> None:
        with self._lock:
            self._is_due = False
            waiting = [(name, each, each.parts) for name, each in self._streams.items()]
            for each in self._streams.values():
                each.parts = []
        for name, shared, parts in waiting:
            try:
                if parts:
                    _send(shared.stream, parts)
            except BaseException:  # the requests end by themselves, and their client hears of it
                _logger.exception("sending what requests share failed; their stream ends")
                shared.stream.end_with("the answers could not be sent")
                self._close(name)


def _send(stream: ResponseSender, parts: list[SharedPart]) -> None:
    content = np.frombuffer(pack_parts(parts), np.uint8)
    stream.send({"shared": content[None]}, is_final=False)
