"""Calls that run on another thread, which gives their results to the caller."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

_Result = TypeVar("_Result")


class LoopCalls:
    """Runs callables of any thread on the loop's thread, in order.

    After `close` the loop changes nothing any more, and calls run on the calling thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """``wake`` makes the loop call `run_pending`."""
        self._wake = wake
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_closed = False
        self._lock = threading.RLock()

    def call_soon(self, function: Callable[[], _Result]) -> Future[_Result]:
        """Run ``function`` on the loop's thread; the future gets its result or exception."""
        future: Future[_Result] = Future()
        with self._lock:
            if self._is_closed:
                settle(future, function)
            else:
                self._waiting.put(lambda: settle(future, function))
                self._wake()
        return future

    def run_pending(self) -> None:
        """Run all waiting calls; raises nothing."""
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()()

    def close(self) -> None:
        """Run all waiting calls, for the last time."""
        with self._lock:  # a call comes either before the last `run_pending` or after the close
            self._is_closed = True
            self.run_pending()


def settle(future: Future[_Result], function: Callable[[], _Result]) -> None:
    """Give ``future`` what ``function`` returns or raises, unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
