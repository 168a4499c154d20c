"""One Triton request on its way out: what to send, in which form, and that it ends exactly once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

_logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

_ABORT_SECONDS = 0.5  # a send takes 0.1 ms


class TritonSender(Protocol):
    """What we use of Triton's ``InferenceResponseSender``."""

    def send(self, response: Any = None, flags: int = 0) -> None:
        """Send one response; ``flags`` = 1 marks the last one."""

    def is_cancelled(self) -> bool:
        """True once the client has gone."""


@dataclass(frozen=True, slots=True)
class ResponseFactory:
    """Builds Triton responses; the one place that needs ``pb_utils`` to do so."""

    pb_utils: Any

    @property
    def final_flag(self) -> int:
        """The flag that marks the last response of a request."""
        return int(self.pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def tensors(self, tensors: dict[str, Array]) -> Any:
        """A response that carries ``tensors``."""
        return self.pb_utils.InferenceResponse(
            output_tensors=[self.pb_utils.Tensor(name, value) for name, value in tensors.items()]
        )

    def error(self, message: str, code: str = "INTERNAL") -> Any:
        """A response that carries an error; ``code`` names a constant of ``TritonError``."""
        error_class = self.pb_utils.TritonError
        return self.pb_utils.InferenceResponse(
            output_tensors=[], error=error_class(message, getattr(error_class, code))
        )


class Stream(Protocol):
    """What a generation needs of its way back; `ResponseStream` is one."""

    def send(self, tensors: dict[str, Array], *, is_final: bool) -> None:
        """Send one response with ``tensors``."""

    def send_error(self, message: str, code: str = "INTERNAL") -> None:
        """End the stream with an error."""

    def abandon(self, message: str) -> None:
        """After a send that raised: end the stream, and never raise."""


class ResponseStream:
    """Sends the responses of one Triton request, one at a time, and nothing after the last.

    The lock is there for the server's sake: `is_cancelled` at the moment of, or after, the final
    send kills Triton 24.10, and so do two threads that send at once.
    """

    def __init__(self, sender: TritonSender, factory: ResponseFactory) -> None:
        self._sender = sender
        self._factory = factory
        self._on_final: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def on_final(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called just before the final response leaves."""
        self._on_final = callback

    @property
    def is_closed(self) -> bool:
        """True once the final response was sent."""
        return self._is_closed

    def send(self, tensors: dict[str, Array], *, is_final: bool) -> None:
        """Send one response with ``tensors`` (none: only the news that this is the end)."""
        self._send(self._factory.tensors(tensors), is_final)

    def end(self) -> None:
        """End the stream without another response."""
        self._send(None, True)

    def send_error(self, message: str, code: str = "INTERNAL") -> None:
        """End the stream with an error."""
        self._send(self._factory.error(message, code), True)

    def fail(self, message: str, code: str = "INTERNAL") -> None:
        """End the stream with an error; never raise."""
        try:
            self.send_error(message, code)
        except Exception:
            _logger.exception("an error could not be sent")
            self.abandon(message)

    def abandon(self, message: str) -> None:
        """After a send that raised: try once more to end the stream, and never raise."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            if self._on_final is not None and not was_closed:
                self._on_final()
            try:
                self._sender.send(self._factory.error(message), flags=self._factory.final_flag)
            except Exception:
                _logger.warning("a stream could not be ended: its client or Triton has gone")

    def abort(self, message: str) -> None:
        """End the stream with an error from any thread, unless another one is stuck in a send."""
        if not self._lock.acquire(timeout=_ABORT_SECONDS):
            _logger.error("a stream could not be ended: a send on it does not return")
            return
        self._lock.release()
        self.send_error(message, "UNAVAILABLE")

    def is_cancelled(self) -> bool:
        """True when the client has gone and the stream is still open."""
        with self._lock:
            return not self._is_closed and self._sender.is_cancelled()

    def _send(self, response: Any, is_final: bool) -> None:
        with self._lock:
            if self._is_closed:
                return
            if is_final:
                self._is_closed = True
                if self._on_final is not None:
                    self._on_final()  # the id is free just before the last response leaves
            self._sender.send(response, flags=self._factory.final_flag if is_final else 0)
