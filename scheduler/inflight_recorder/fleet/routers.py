"""How a router chooses the server of a request.

A router knows what it has sent and which answers have ended, and nothing else of the servers: this
is what routers do that need no more than OpenAI's API (SGLang's router, proxies).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from inflight_recorder.simulator import split_hashes
from inflight_recorder.workload import Job

CACHE_THRESHOLD = 0.3
"""`CacheAware` follows a prefix that is a larger part of the prompt than this."""

BALANCE_DIFFERENCE, BALANCE_RATIO = 64, 1.5
"""`CacheAware` goes by load while the largest one is above the smallest by both of these."""


class Router(Protocol):
    """Chooses for one request after the other, in the order of their arrival."""

    def choose(self, job: Job, loads: Sequence[int]) -> int:
        """The index of the server for ``job``; ``loads``: requests in flight at each."""


class RoundRobin:
    """One server after the other."""

    def __init__(self, tokens_per_block: int) -> None:
        self._num_chosen = 0

    def choose(self, job: Job, loads: Sequence[int]) -> int:
        """Whatever the request is."""
        self._num_chosen += 1
        return (self._num_chosen - 1) % len(loads)


class LeastLoad:
    """The server with the fewest requests in flight; of equal ones that which waits longest."""

    def __init__(self, tokens_per_block: int) -> None:
        self._last_chosen: list[int] = []
        self._num_chosen = 0

    def choose(self, job: Job, loads: Sequence[int]) -> int:
        """O(servers)."""
        chosen = self.find(loads)
        self.note(chosen)
        return chosen

    def find(self, loads: Sequence[int]) -> int:
        """The server to choose."""
        if not self._last_chosen:
            self._last_chosen = list(range(-len(loads), 0))
        least = min(loads)
        equal = (index for index, load in enumerate(loads) if load == least)
        return min(equal, key=self._last_chosen.__getitem__)

    def note(self, chosen: int) -> None:
        """A request is sent there."""
        self._last_chosen[chosen] = self._num_chosen
        self._num_chosen += 1


class CacheAware:
    """The server that was sent the longest beginning of this prompt before.

    By the rules of SGLang's router and with its defaults: only if that is more than
    `CACHE_THRESHOLD` of the prompt, and while loads are balanced; else the least loaded one. It
    remembers all that it has sent; what servers have evicted it does not know.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._sent_to: dict[bytes, int] = {}  # by hash of a block: who was sent it last
        self._by_load = LeastLoad(tokens_per_block)

    def choose(self, job: Job, loads: Sequence[int]) -> int:
        """O(servers + blocks of the prompt)."""
        num_blocks = job.prompt_len // self._tokens_per_block
        hashes = split_hashes(job.hashes)[:num_blocks]
        chosen = self._by_load.find(loads)
        least, largest = loads[chosen], max(loads)
        is_balanced = largest - least <= BALANCE_DIFFERENCE or largest <= BALANCE_RATIO * least
        if is_balanced:
            num_found = 0
            while num_found < len(hashes) and hashes[num_found] in self._sent_to:
                num_found += 1
            if num_found * self._tokens_per_block > CACHE_THRESHOLD * job.prompt_len:
                chosen = self._sent_to[hashes[num_found - 1]]
        self._by_load.note(chosen)
        for block in hashes:
            self._sent_to[block] = chosen
        return chosen


ROUTERS: Mapping[str, Callable[[int], Router]] = {
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
    "cache_aware": CacheAware,
}
"""By name; made with the tokens of a block."""
