"""Whether all is free again once nobody asks anything, how soon, and whether it is forgotten."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from soak_parts.traffic import LONG, NotAnswered, Traffic

MAX_ITERATIONS = LONG // 4
"""More than run within the 0.1 s in which a cancel is noticed; 0 are usual, since the last who read
to their end take longer. Where none is noticed, 900 to 1,400 were measured: whole answers, that go
on though nobody wants them, however fast or busy the machine is."""


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
                num_kept = -1  # whoever cannot see this request sees no other
        except (asyncio.TimeoutError, grpc.RpcError, ValueError, LookupError) as error:
            told = f"{told[:200]} {error!r:.200}"
        await traffic.close()
        await asyncio.sleep(0.1)
    return num_kept, [f"{num_kept} objects of ended requests are kept: {told}"] if num_kept else []


_NAME = "kept"
_FIELD = "logits_post_processor_name"
_OF_THE_QUESTION = ("LlmRequest", "ResponseSender", "TokenStream")
_NUM_TOKENS = 300  # of which each is a byte
PROCESSOR = f"{_NAME}=kept:tell"
"""For the setting ``logits_processors``."""

_USED = "Used KV cache blocks"
_ITERATION = "Iteration Counter"
