"""Questions of other threads to the one that owns the loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from inflight_backend.private_log import get_logger

_logger = get_logger(__name__)

_Result = TypeVar("_Result")


class Questions:
    """Waiting questions; asked from any thread, answered on the owner's, in order.

    Once they are closed the owner changes nothing any more, and each is answered where it is asked.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """``wake`` has the owner come to `answer`."""
        self._wake = wake
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_closed = False
        self._lock = threading.RLock()

    def ask(self, question: Callable[[], _Result]) -> Future[_Result]:
        """Its answer, or what it raised, once the owner has come to it."""
        future: Future[_Result] = Future()
        with self._lock:
            if self._is_closed:
                _answer(future, question)
            else:
                self._waiting.put(lambda: _answer(future, question))
                self._wake()
        return future

    def answer(self) -> None:
        """Answer all that wait; nothing is raised."""
        while True:
            try:
                answer = self._waiting.get_nowait()
            except queue.Empty:
                return
            answer()

    def close(self) -> None:
        """Answer all that wait, for the last time."""
        with self._lock:  # who has it asks either before the last look or after it
            self._is_closed = True
            self.answer()


def _answer(future: Future[_Result], question: Callable[[], _Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return  # who has asked waits no more
    try:
        _settle(future, question)
    except BaseException:  # only from a callback of who has asked: the future is done by then
        _logger.exception("a callback of a question has failed")


def _settle(future: Future[_Result], question: Callable[[], _Result]) -> None:
    try:
        result = question()
    except BaseException as error:  # a question may fail, the loop goes on
        future.set_exception(error)
    else:
        future.set_result(result)
