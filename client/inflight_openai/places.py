"""The places for requests: how many there are, how long each is held, and how a request is ended.

A request is ended by cancelling its task; its client has a second to read why, then it is hung up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aiohttp import web

from inflight_openai.errors import ApiError

_LAST_SECONDS = 1.0  # for the client of a request that was ended


class Place:
    """Where one request runs, from its head to the last byte of its answer."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._task = asyncio.current_task()
        self._reason: ApiError | None = None
        self._hanging_up: asyncio.TimerHandle | None = None

    def end(self, reason: ApiError) -> None:
        """End the request with ``reason``; from the event loop only, the first time counts."""
        if self._hanging_up is None and self._task is not None:
            self._reason = reason
            self._task.cancel()
            loop = asyncio.get_running_loop()
            self._hanging_up = loop.call_later(_LAST_SECONDS, self._hang_up)

    @contextmanager
    def limit(self, seconds: float, reason: ApiError) -> Iterator[None]:
        """End the request with ``reason`` if the block takes longer than ``seconds``."""
        deadline = asyncio.get_running_loop().call_later(seconds, self.end, reason)
        try:
            yield
        finally:
            deadline.cancel()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Raise why the request was ended where its task is cancelled for it."""
        try:
            yield
        except asyncio.CancelledError:
            reason, self._reason = self._reason, None
            if reason is None:  # the client has gone
                raise
            if self._task is not None and hasattr(self._task, "uncancel"):
                self._task.uncancel()  # new in Python 3.11
            raise reason from None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hang up if an answer cannot be written to its end: a second head would garble it."""
        try:
            yield
        except BaseException:
            self._hang_up()
            raise

    def leave(self) -> None:
        """The request is over."""
        if self._hanging_up is not None:
            self._hanging_up.cancel()

    def _hang_up(self) -> None:
        """Close the connection; aiohttp would keep it until the client has read what is left."""
        if self._request.transport is not None:
            self._request.transport.abort()


class Places:
    """All places; they bound the bodies and the answers in memory as well."""

    def __init__(self, num_places: int, seconds: float) -> None:
        """``seconds``: how long a place may be held."""
        self._num_places = num_places
        self._seconds = seconds
        self._taken: set[Place] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.is_closed = False

    @contextmanager
    def take(self, request: web.Request) -> Iterator[Place]:
        """A place for ``request`` until the block ends; `ApiError` if there is none or it ends."""
        if self.is_closed:
            raise ApiError(503, "the server is shutting down")
        if len(self._taken) >= self._num_places:
            raise ApiError(
                429, f"{len(self._taken)} requests are running; try again later", None, "busy"
            )
        if request.transport is not None:
            # An answer counts as written when the kernel has all of it, and not but for 64 KB.
            request.transport.set_write_buffer_limits(0)
        place = Place(request)
        self._taken.add(place)
        self._is_empty.clear()
        too_long = ApiError(504, "the answer took too long and was given up", code="timeout")
        try:
            with place.limit(self._seconds, too_long), place.telling():
                yield place
        finally:
            place.leave()
            self._taken.discard(place)
            if not self._taken:
                self._is_empty.set()

    async def close(self, seconds: float) -> None:
        """Give no more places; end what still runs after ``seconds``."""
        self.is_closed = True
        await self._wait_until_empty(seconds)
        for place in self._taken:
            place.end(ApiError(503, "the server is shutting down: the answer was given up"))
        await self._wait_until_empty(2 * _LAST_SECONDS)

    async def _wait_until_empty(self, seconds: float) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), seconds)
