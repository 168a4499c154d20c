"""Whether the queue before the batch manager still holds requests that nobody waits for.

Each would take one of the few places of the queue for ever, and only more refusals would tell of
it. But who waits there is told among how many.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from soak_parts.answers import is_cut, is_whole
from soak_parts.traffic import Traffic
from soak_parts.wire import Answer

_PROMPT = "1 2 3"
_NUM_TOKENS = 500  # as many requests as there are places must fit into the pool, and stay a while
_AT_ONCE = 4  # fewer than the queue has places
_SECONDS = 60.0


async def count_forgotten(traffic: Traffic, num_active: int) -> tuple[int, list[str]]:
    """How many wait that nobody sent, and the errors that came; -1 if that could not be told.

    A text that is no answer goes into the tally: it is wrong whatever a further look finds.
    Nothing else may be in flight. ``num_active`` requests take all the places there are, so that
    one more has to wait.
    """
    names = [f"place {index}" for index in range(num_active + 1)]
    waiting = names[-1]
    asked = {"text_input": _PROMPT, "max_tokens": _NUM_TOKENS, "stream": True}
    readers: list[asyncio.Task[Answer]] = []
    for begin in range(0, num_active, _AT_ONCE):
        group = names[begin : min(begin + _AT_ONCE, num_active)]
        events = [asyncio.Event() for _ in group]
        for name, event in zip(group, events, strict=True):
            readers.append(asyncio.create_task(_read(traffic, name, asked, event)))
        await asyncio.gather(*(event.wait() for event in events))
    readers.append(asyncio.create_task(_read(traffic, waiting, asked, asyncio.Event())))
    num_waiting = await _ask(traffic, waiting, readers)
    stops = await asyncio.gather(*(traffic.read(name, {"stop": True}) for name in names))
    answers = await asyncio.gather(*readers)
    for text in (answer.text for answer in answers):
        if not (is_cut(_PROMPT, text, _NUM_TOKENS) or is_whole(_PROMPT, text, _NUM_TOKENS)):
            traffic.tally.blame(f"all places taken: {text[-80:]!r} is no answer")
    errors = [error for answer in (*answers, *stops) for error in answer.errors]
    return num_waiting - 1 if num_waiting else -1, errors


async def _read(
    traffic: Traffic, name: str, values: dict[str, Any], has_begun: asyncio.Event
) -> Answer:
    """Read a stream to its end; ``has_begun`` once it was answered at all, or it has ended."""

    async def note(_: Answer) -> None:
        has_begun.set()

    try:
        return await traffic.read(name, values, note)
    finally:
        has_begun.set()


async def _ask(traffic: Traffic, name: str, readers: list[asyncio.Task[Answer]]) -> int:
    """How many wait while ``name`` does; 0 if it never did."""
    deadline = time.monotonic() + _SECONDS
    while not readers[-1].done() and time.monotonic() < deadline:
        told = await traffic.ask_json(name, "why", why=True)
        if told["state"] == "queued":
            return int(told["num_waiting"])
        await asyncio.sleep(0.005)
    return 0
