"""Questions of other threads to the one that owns the loop."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")


class Questions:
    """Waiting questions; asked from any thread, answered on the owner's, in order."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def ask(self, question: Callable[[], _Result]) -> Future[_Result]:
        """Its answer, or what it raised, once the owner has come to it."""
        future: Future[_Result] = Future()
        self._waiting.put(lambda: _answer(future, question))
        return future

    def answer(self) -> None:
        """Answer all that wait; nothing is raised."""
        while True:
            try:
                answer = self._waiting.get_nowait()
            except queue.Empty:
                return
            answer()


def _answer(future: Future[_Result], question: Callable[[], _Result]) -> None:
    try:
        future.set_result(question())
    except Exception as error:  # a question may fail, the loop goes on
        future.set_exception(error)
