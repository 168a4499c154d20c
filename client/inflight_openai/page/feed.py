"""The events of the page: the server is asked again and again, by a viewer's own cursor.

How often depends on what an answer costs the server, so that all viewers together, and the map of
blocks that they share, take at most `MAX_SHARE` of its time, however many requests it runs.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from inflight_client.errors import InflightError, ServerError
from inflight_openai.errors import ApiError

Ask = Callable[..., Awaitable[dict[str, Any]]]
"""The server's live answer behind a cursor, with the blocks if ``blocks=True``; `InflightError`
without one."""

PERIOD_SECONDS = 0.25
MAX_SHARE = 0.01
MAX_VIEWERS = 16
_RETRY_SECONDS = 1.0
_MAP_SECONDS = 2.0  # a page with the map asks once a second


class LiveFeed:
    """The viewers of one front."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._num_viewers = 0
        self.cursor = ""
        """Of the last answer to anyone."""
        self._map: list[Any] | InflightError = []
        self._map_due = -math.inf  # to be asked for again from then on
        self._map_lock = asyncio.Lock()

    @contextmanager
    def place(self) -> Iterator[None]:
        """The place of a viewer, until the block ends; `ApiError` if too many look on already."""
        if self._num_viewers >= MAX_VIEWERS:
            raise ApiError(503, f"{MAX_VIEWERS} pages look on, which is the limit", code="busy")
        self._num_viewers += 1
        try:
            yield
        finally:
            self._num_viewers -= 1

    async def events(self, is_over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Events until ``is_over``: live answers, or ``{"down": reason}`` while there is none.

        For a viewer that has its `place`.
        """
        cursor = ""
        while not is_over():
            began = time.monotonic()
            try:
                answer = await self._ask(cursor)
            except InflightError as error:
                yield _event({"down": _reason(error)})
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            cursor = self.cursor = answer["cursor"]
            yield _event(answer)
            period = self.period(answer["cost_us"] / 1e6)
            await asyncio.sleep(max(began + period - time.monotonic(), 0.0))

    async def blocks(self) -> list[Any]:
        """The map of blocks (see `inflight_backend.triton.live`), one for all who ask; as old as
        its cost makes it. `InflightError` without one."""
        async with self._map_lock:
            began = time.monotonic()
            if began >= self._map_due:
                try:
                    answer = await self._ask(self.cursor, blocks=True)
                except InflightError as error:
                    self._map, period = error, _RETRY_SECONDS
                else:
                    self._map, self.cursor = answer["blocks"], answer["cursor"]
                    period = _period(answer["cost_us"] / 1e6, self._num_viewers + 1)
                self._map_due = began + period
        if isinstance(self._map, InflightError):
            raise self._map
        return self._map

    def period(self, cost_seconds: float) -> float:
        """Seconds between two questions of a viewer, of which one costs so much. The map counts as
        one more viewer while it is asked for."""
        has_map = time.monotonic() < self._map_due + _MAP_SECONDS
        return _period(cost_seconds, self._num_viewers + has_map)


def _period(cost_seconds: float, number: int) -> float:
    return max(PERIOD_SECONDS, cost_seconds * max(number, 1) / MAX_SHARE)


def _reason(error: InflightError) -> str:
    """Without the address of the server."""
    return str(error) if isinstance(error, ServerError) else "the server does not answer"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
