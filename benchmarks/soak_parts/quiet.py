"""What the soak asks beside and behind its traffic: statistics all the time; and once no request is
sent, whether everything is free again, how soon, and whether the server still holds a request.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from load import Answer
from soak_parts.answers import is_cut, is_whole
from soak_parts.traffic import LONG, NotAnswered, Traffic

_NAME = "kept"
_FIELD = "logits_post_processor_name"
_OF_THE_QUESTION = ("LlmRequest", "ResponseSender", "TokenStream")
_NUM_TOKENS = 300  # of which each is a byte
PROCESSOR = f"{_NAME}=kept:tell"
"""For the setting ``logits_processors``."""

_USED = "Used KV cache blocks"
_ITERATION = "Iteration Counter"
_PROMPT = "1 2 3"
_QUEUED_TOKENS = 500  # long enough to stay, short enough that all places fit into the pool
_AT_ONCE = 4  # fewer than the queue has places
_QUEUED_SECONDS = 60.0
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


MAX_ITERATIONS = LONG // 4
"""More than run within the 0.1 s in which a cancel is noticed; 0 are usual, since the last who read
to their end take longer. Where none is noticed, 900 to 1,400 were measured: whole answers, that go
on though no client wants them, however fast or busy the machine is."""


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


async def count_kept(connect: Callable[[], Traffic], seconds: float) -> tuple[int, list[str]]:
    """How much the model process keeps of requests that have ended, -1 if it does not tell, and
    what is wrong; what a thread still has in hand gets ``seconds`` to be gone.

    The server needs `PROCESSOR`.
    """
    num_kept, told = -1, ""
    deadline = time.monotonic() + seconds
    while num_kept and time.monotonic() < deadline:
        traffic = connect()
        values = {"input_ids": [1], "max_tokens": _NUM_TOKENS, "stream": True, _FIELD: _NAME}
        try:
            answer = await traffic.read("", values)
            ids = [each["output_ids"] for each in answer.responses if "output_ids" in each]
            told = (
                "; ".join(answer.errors) or bytes(int(i) for piece in ids for i in piece).decode()
            )
            counts: dict[str, int] = json.loads(told)
            num_kept = sum(counts.values()) - len(_OF_THE_QUESTION)
            told = str({name: count for name, count in counts.items() if count})
            if any(counts[name] < 1 for name in _OF_THE_QUESTION):
                num_kept = -1  # if it cannot see this request, it sees no other
        except (asyncio.TimeoutError, grpc.RpcError, ValueError, LookupError) as error:
            told = f"{told[:200]} {error!r:.200}"
        await traffic.close()
        await asyncio.sleep(0.1)
    return num_kept, [f"{num_kept} objects of ended requests are kept: {told}"] if num_kept else []


async def count_forgotten(traffic: Traffic, num_active: int) -> tuple[int, list[str]]:
    """How many wait that were not sent here, and the errors that came; -1 if that is not known.

    A text that is no answer goes into the tally: it is wrong whatever a further look finds.
    Nothing else may be in flight. ``num_active`` requests take all the places there are, so that
    one more has to wait.
    """
    names = [f"place {index}" for index in range(num_active + 1)]
    waiting = names[-1]
    asked = {"text_input": _PROMPT, "max_tokens": _QUEUED_TOKENS, "stream": True}
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
        if not (is_cut(_PROMPT, text, _QUEUED_TOKENS) or is_whole(_PROMPT, text, _QUEUED_TOKENS)):
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
    deadline = time.monotonic() + _QUEUED_SECONDS
    while not readers[-1].done() and time.monotonic() < deadline:
        told = await traffic.ask_json(name, "why", why=True)
        if told["state"] == "queued":
            return int(told["num_waiting"])
        await asyncio.sleep(0.005)
    return 0
