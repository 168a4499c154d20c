"""Sends the responses of one Triton request: their form, and that the request ends exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from inflight_backend.log import get_logger
from inflight_backend.requests.inference_request import Array
from inflight_backend.requests.tensors import is_constant

_logger = get_logger(__name__)


_CLOSE_SECONDS = 0.5  # a send takes 0.1 ms
_LARGE_BYTES = 2**18  # less has room in the 1 MiB of shared memory that a model begins with


class TritonSender(Protocol):
    """What we use of Triton's ``InferenceResponseSender``."""

    def send(self, response: Any = None, flags: int = 0) -> None:
        """Send one response; ``flags`` = 1 marks the last one."""

    def is_cancelled(self) -> bool:
        """True once the client has gone."""


@dataclass(frozen=True, slots=True)
class ResponseFactory:
    """Builds Triton responses; the one place that needs ``pb_utils`` to do so.

    ``is_decoupled`` False: Triton passes on one response only, which must be the last one.
    ``tells_codes``: errors have the form ``[CODE] message``.

    To make a tensor of Triton's takes longer than all the rest of a response. Those of constants
    are made once: the memory that they share with the server is kept as long as they are. So one
    thread at a time may call `tensors` with constants, and `forget` must come before Triton ends.
    """

    pb_utils: Any
    is_decoupled: bool = True
    tells_codes: bool = False
    made: dict[tuple[str, int], Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def final_flag(self) -> int:
        """The flag that marks the last response of a request."""
        return int(self.pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def tensors(self, tensors: dict[str, Array]) -> Any:
        """A response that carries ``tensors``."""
        return self.pb_utils.InferenceResponse(
            output_tensors=[self._tensor(name, value) for name, value in tensors.items()]
        )

    def _tensor(self, name: str, value: Array) -> Any:
        tensor = self.made.get((name, id(value)))
        if tensor is None:
            tensor = self.pb_utils.Tensor(name, value)
            if is_constant(value):
                self.made[name, id(value)] = tensor
        return tensor

    def forget(self) -> None:
        """Give up the tensors that are kept; nothing is sent any more."""
        self.made.clear()

    def error(self, message: str, code: str = "INTERNAL") -> Any:
        """A response that carries an error; ``code`` names a constant of ``TritonError``."""
        error_class = self.pb_utils.TritonError
        text = f"[{code}] {message}" if self.tells_codes else message
        return self.pb_utils.InferenceResponse(
            output_tensors=[], error=error_class(text, getattr(error_class, code))
        )


class ResponseSender:
    """Sends the responses of one Triton request, one at a time, and nothing after the last.

    The lock is there for the server's sake: `is_cancelled` at the moment of, or after, the final
    send kills Triton 24.10, and so do two threads that send at once. A send may never return, so
    other threads wait for the lock for a limited time; its holder checks, when it has
    released it, whether the stream was to be ended meanwhile.
    """

    def __init__(
        self,
        sender: TritonSender,
        factory: ResponseFactory,
        is_behind: Callable[[], bool] = lambda: False,
        count_error: Callable[[str], None] = lambda code: None,
    ) -> None:
        """``is_behind``: see the property. ``count_error``: called with the code of the error
        that ends the stream, if one does, before that is sent."""
        self._sender = sender
        self._is_behind = is_behind
        self._count_error = count_error
        self._factory = factory
        self._on_final: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._is_closed = self._has_ended = False
        self._is_to_be_closed = self._is_mute = self._is_counted = False
        self._last_error: tuple[str, str] | None = None  # message and code

    def on_final(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called just before the final response leaves."""
        self._on_final = callback

    @property
    def is_behind(self) -> bool:
        """True while its reader is slower than we are; Triton does not tell."""
        return self._is_behind()

    @property
    def is_closed(self) -> bool:
        """True from the first try to send the final response."""
        return self._is_closed

    @property
    def has_ended(self) -> bool:
        """True once a final response has been sent."""
        return self._has_ended

    def send(self, tensors: dict[str, Array], *, is_final: bool) -> None:
        """Send one response with ``tensors`` (none: only the news that this is the end)."""
        self._send(
            self._factory.tensors(tensors), is_final, is_large=is_final and _is_large(tensors)
        )

    def end(self) -> None:
        """End the stream without another response."""
        self._send(None, True)

    def send_error(self, message: str, code: str = "INTERNAL") -> None:
        """End the stream with an error."""
        self._send(self._factory.error(message, code), True, code=code)

    def end_with(self, message: str, code: str = "INTERNAL") -> None:
        """Send nothing more, and this error as the end, whenever that comes; the first one counts.

        For a request that cannot be served to its end, but still holds blocks: it is stopped, and
        its client gets the reason when they are free.
        """
        if self._last_error is None:
            self._last_error = (message, code)

    def fail(self, message: str, code: str = "INTERNAL") -> None:
        """End the stream with an error; never raise."""
        try:
            self.send_error(message, code)
        except Exception:
            _logger.exception("an error could not be sent")
            self.abandon(message)

    def abandon(self, message: str) -> None:
        """After a final send that raised: try once more to end the stream, and never raise.

        It stays as it is if it has been ended already.
        """
        with self._lock:
            self._abandon(message)

    def close(self) -> None:
        """End the stream from any thread; never raise. It gets an error if `end_with` left one.

        While another thread is stuck in a send on it, that one ends it when the send returns.
        """
        self._is_to_be_closed = True  # before the lock: its holder checks after releasing it
        if not self._lock.acquire(timeout=_CLOSE_SECONDS):
            _logger.error("a stream cannot be ended yet: a send on it does not return")
            return
        try:
            self._send_locked(self._factory.tensors({}), True)
        except Exception:
            _logger.exception("the end of a stream could not be sent")
            self._abandon("the end could not be sent")
        finally:
            self._lock.release()

    def abort(self, message: str) -> None:
        """`close` with an error."""
        self.end_with(message, "UNAVAILABLE")
        self.close()

    def is_cancelled(self) -> bool:
        """True when the client has gone and the stream is still open; False during a send.

        False also where Triton gives no answer, which is logged the first time: the streams behind
        this one must be asked as well.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return not self._is_closed and self._sender.is_cancelled()
        except Exception:
            if not self._is_mute:
                self._is_mute = True
                _logger.exception("Triton does not say whether a client has gone (said once)")
            return False
        finally:
            self._let_go()

    def _send(
        self, response: Any, is_final: bool, *, is_large: bool = False, code: str = ""
    ) -> None:
        self._lock.acquire()
        try:
            self._send_locked(response, is_final, is_large=is_large, code=code)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Release the lock, and end the stream if another thread has tried to meanwhile."""
        self._lock.release()
        if self._is_to_be_closed and not self._is_closed:
            self.close()

    def _send_locked(
        self, response: Any, is_final: bool, *, is_large: bool = False, code: str = ""
    ) -> None:
        """A large response leaves before the news that it was the last: where shared memory is full
        it cannot be sent, and after a try with that flag Triton takes nothing more, not even an
        error. ``code``: of the error that ``response`` is, else "".
        """
        if self._is_closed or (self._last_error is not None and not is_final):
            return
        if self._last_error is not None:
            response, is_large = self._factory.error(*self._last_error), False
            code = self._last_error[1]
        if is_final:
            self._close_for_good(code)
        if is_final and is_large and self._factory.is_decoupled:
            self._sender.send(response)
            response = None
        self._sender.send(response, flags=self._factory.final_flag if is_final else 0)
        self._has_ended = is_final

    def _abandon(self, message: str) -> None:
        if self._has_ended:
            return
        error = self._last_error or (message, "INTERNAL")
        self._close_for_good(error[1])
        try:
            self._sender.send(self._factory.error(*error), flags=self._factory.final_flag)
            self._has_ended = True
        except Exception:
            _logger.warning("a stream could not be ended: its client or Triton has gone")

    def _close_for_good(self, code: str) -> None:
        """``code``: of the error with which it ends, or ""."""
        was_closed, self._is_closed = self._is_closed, True
        if code and not self._is_counted:
            self._is_counted = True
            self._count_error(code)
        if self._on_final is not None and not was_closed:
            self._on_final()  # the id is free just before the last response leaves


def _is_large(tensors: Mapping[str, Array]) -> bool:
    """True for what may need more shared memory."""
    return sum(map(_num_bytes, tensors.values())) > _LARGE_BYTES


def _num_bytes(tensor: Array) -> int:
    """What it takes in shared memory, as good as."""
    return sum(map(len, tensor.flat)) if tensor.dtype.hasobject else tensor.nbytes
