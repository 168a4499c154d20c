"""Whether all is free again once nobody asks anything, and how soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from soak_parts.traffic import LONG, NotAnswered, Traffic

MAX_ITERATIONS = LONG // 2
"""A cancel takes effect within 0.1 s, which is far fewer iterations; an answer that goes on though
nobody wants it any more takes twice as many, however fast or busy the machine is."""


@dataclass
class Rest:
    """What was found."""

    active: int = -1  # not known
    used_blocks: int = -1
    iterations: int = -1
    """That ran from the first question on until all was free."""
    failures: list[str] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        """True if nothing is held."""
        return self.active == 0 and self.used_blocks == 0


async def wait_until_free(connect: Callable[[], Traffic], seconds: float) -> Rest:
    """Ask until nothing is held, for ``seconds`` at most; each time on a connection of its own."""
    rest, first = Rest(), -1
    deadline = time.monotonic() + seconds
    while not rest.is_free and time.monotonic() < deadline:
        traffic = connect()
        try:
            stats = await traffic.ask_json("", "stats", stats=True, streaming=False)
            rest.active, rest.used_blocks = stats["Active Request Count"], stats[_USED]
            first = stats[_ITERATION] if first < 0 else first
            rest.iterations = stats[_ITERATION] - first
        except (asyncio.TimeoutError, grpc.RpcError, NotAnswered, KeyError) as error:
            rest.failures.append(f"a question was not answered: {error!r:.200}")
        await traffic.close()
        await asyncio.sleep(0.1)
    if not rest.is_free:
        rest.failures.append(f"{rest.active} active, {rest.used_blocks} blocks in use")
    elif rest.iterations > MAX_ITERATIONS:
        rest.failures.append(
            f"{rest.iterations} iterations more until all was free: a cancel did not cancel"
        )
    return rest


_USED = "Used KV cache blocks"
_ITERATION = "Iteration Counter"
