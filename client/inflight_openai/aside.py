"""Threads for what may take long, beside the event loop, on which every stream depends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from inflight_openai.errors import ApiError
from inflight_openai.places import Place
from inflight_openai.private_log import get_logger

_logger = get_logger(__name__)

_Result = TypeVar("_Result")


class Aside:
    """A pool of threads; each that works delays the event loop by 5 ms, a turn at the lock."""

    def __init__(self, num_threads: int, wait_seconds: float) -> None:
        """``wait_seconds``: how long work may wait for a thread."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="Aside")
        self._wait_seconds = wait_seconds

    async def run(self, place: Place, work: Callable[[], _Result]) -> _Result:
        """What ``work`` gives; ends the request of ``place`` if no thread is free in time."""
        held = _Work(work)
        future = self._threads.submit(held.run)
        future.add_done_callback(held.drop)

        def give_up() -> None:
            if future.cancel():  # not once it runs
                place.end(ApiError(503, "too many requests are being read; try again later"))

        waiting = asyncio.get_running_loop().call_later(self._wait_seconds, give_up)
        try:
            return await asyncio.wrap_future(future)
        finally:
            waiting.cancel()


class _Work(Generic[_Result]):
    """Work, and with it the body of a request, until it is done or its client has gone: the pool
    keeps what was cancelled until a thread comes to it."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work: Callable[[], _Result] | None = work

    def drop(self, future: Future[_Result]) -> None:
        self._work = None

    def run(self) -> _Result:
        work = self._work
        assert work is not None, "what runs cannot be cancelled any more"
        try:
            return work()
        except Exception:
            raise
        except BaseException as error:  # a panic of the tokenizer: nobody above handles such
            _logger.error("a library gave up a request", exc_info=error)
            raise ApiError(500, "the request failed") from None
