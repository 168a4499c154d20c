"""How long the context chunk of each request is, when contexts may be cut.

The rules are those of TensorRT-LLM's ``setCtxRequestsChunkSize``; where its two published
generations differ, these are the newer one: tokens found in the reuse cache cost nothing, so all
lengths here count what must be computed, and a chunk costs its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class ContextChunkingPolicy(IntEnum):
    """Who gets the tokens when not all contexts fit (values of the Executor API)."""

    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1
    FORCE_CHUNK = 2


@dataclass(frozen=True, slots=True)
class ContextChunking:
    """Cut contexts by ``policy``: a chunk is a multiple of ``unit_size`` tokens, or the rest.

    ``max_context_length`` bounds every chunk; None leaves that to the token budget.
    """

    policy: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    unit_size: int = 32
    max_context_length: int | None = None

    def __post_init__(self) -> None:
        if self.unit_size < 1:
            raise ValueError(f"unit_size must be at least 1, not {self.unit_size}")
        if self.max_context_length is not None and self.unit_size > self.max_context_length:
            raise ValueError(
                f"unit_size {self.unit_size} exceeds max_context_length={self.max_context_length}"
            )

    def chunk_sizes(self, lengths: Sequence[int], capacity: int | None) -> list[int]:
        """Tokens of each context that run now, 0 for none; their sum is at most ``capacity``.

        ``lengths`` are the tokens each has left, in order. ``capacity`` None means unbounded.
        Contexts that all fit run whole, except under FORCE_CHUNK, which always cuts.
        """
        if self.policy == ContextChunkingPolicy.FORCE_CHUNK:
            return self._force(lengths, capacity)
        if self._all_fit(lengths, capacity):
            return list(lengths)
        if self.policy == ContextChunkingPolicy.EQUAL_PROGRESS:
            return self._equal_progress(lengths, capacity)
        return self._first_come(lengths, capacity)

    def _all_fit(self, lengths: Sequence[int], capacity: int | None) -> bool:
        longest = self.max_context_length
        if longest is not None and any(length > longest for length in lengths):
            return False
        return capacity is None or sum(lengths) <= capacity

    def _first_come(self, lengths: Sequence[int], capacity: int | None) -> list[int]:
        """The rest of each in turn; who is cut is cut at a whole unit."""
        sizes = []
        for length in lengths:
            size = _least(length, self.max_context_length, capacity)
            if size < length:
                size -= size % self.unit_size
            if capacity is not None:
                capacity -= size
            sizes.append(size)
        return sizes

    def _equal_progress(self, lengths: Sequence[int], capacity: int | None) -> list[int]:
        """One unit each per round. Who is passed over once is so for good: room only shrinks."""
        sizes = [0] * len(lengths)
        growing = list(range(len(lengths)))
        while growing:
            still_growing = []
            for index in growing:
                size = sizes[index]
                step = min(self.unit_size, lengths[index] - size)
                if step == 0 or step > _least(step, capacity, self._room(size)):
                    continue
                sizes[index] += step
                if capacity is not None:
                    capacity -= step
                still_growing.append(index)
            growing = still_growing
        return sizes

    def _room(self, size: int) -> int | None:
        return None if self.max_context_length is None else self.max_context_length - size

    def _force(self, lengths: Sequence[int], capacity: int | None) -> list[int]:
        """One unit of each, none for whom it does not fit."""
        sizes = []
        for length in lengths:
            size = min(length, self.unit_size)
            if capacity is not None:
                size = size if size <= capacity else 0
                capacity -= size
            sizes.append(size)
        return sizes


def _least(number: int, *bounds: int | None) -> int:
    return min(number, *(bound for bound in bounds if bound is not None), number)
