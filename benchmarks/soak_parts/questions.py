"""Questions beside the traffic: is each answered, and how long does that take?"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc

from soak_parts.traffic import NotAnswered, Traffic

_PERIOD_SECONDS = 1.0


class Asker:
    """Asks for the statistics once a second, on a connection of its own."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._seconds: list[float] = []
        self._is_over = False
        self._task: asyncio.Task[None] | None = None
        self.wrong: list[str] = []
        self.num_iterations = 0
        """Of the batch manager, as told last."""

    def start(self) -> None:
        """Begin; belongs to the running event loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Let the last question be answered."""
        self._is_over = True
        if self._task is not None:
            await self._task
        await self._traffic.close()

    def to_json(self) -> dict[str, Any]:
        """Number of questions, and of seconds until the answer the median and the most."""
        seconds = sorted(self._seconds)
        return {
            "asked": len(seconds) + len(self.wrong),
            "not_answered": len(self.wrong),
            "seconds_p50": round(seconds[len(seconds) // 2], 3) if seconds else None,
            "seconds_max": round(seconds[-1], 3) if seconds else None,
        }

    async def _run(self) -> None:
        while not self._is_over:
            began = time.monotonic()
            try:
                stats = await self._traffic.ask_json("", "stats", stats=True, streaming=False)
            except (asyncio.TimeoutError, grpc.RpcError, NotAnswered) as error:
                self.wrong.append(f"a question was not answered: {error!r:.200}")
            else:
                self._seconds.append(time.monotonic() - began)
                self.num_iterations = stats["Iteration Counter"]
            await asyncio.sleep(_PERIOD_SECONDS)
