"""How long the context chunk of each request is, when contexts may be cut.

The rules are those of TensorRT-LLM's ``setCtxRequestsChunkSize``; where its two published
generations differ, these are the newer one: tokens found in the reuse cache cost nothing, so all
lengths here count what must be computed, and a chunk costs its size. A last chunk takes draft
tokens along; of these, too, the newer rule: only those kept are charged (the older one charged the
whole rest of the unit), and requests without drafts are not looked at.

One departure: when generation leaves too little for a step of the first context, no context runs.
By the published rule shorter ones behind it would take what is left, one after another, and with
enough of them the first would wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import add


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
        """`chunks` of contexts without drafts."""
        return self.chunks(lengths, [0] * len(lengths), capacity)[0]

    def chunks(
        self, lengths: Sequence[int], num_drafts: Sequence[int], capacity: int | None
    ) -> tuple[list[int], list[int]]:
        """Prompt tokens of each context that run now, 0 for none, and drafts next to them.

        ``lengths`` are the prompt tokens each has left, in order, ``num_drafts`` the guesses that
        may follow its last chunk. What runs is at most ``capacity`` in all; None means unbounded.
        Contexts that all fit with their drafts run whole, except under FORCE_CHUNK, which always
        cuts. Otherwise a last chunk keeps the drafts that complete its unit, as far as there is
        room. Where the first gets nothing, nobody does.
        """
        if self.policy == ContextChunkingPolicy.FORCE_CHUNK:
            sizes = self._force(lengths, capacity)
        elif self._all_fit(list(map(add, lengths, num_drafts)), capacity):
            return list(lengths), list(num_drafts)
        elif self.policy == ContextChunkingPolicy.EQUAL_PROGRESS:
            sizes = self._equal_progress(lengths, capacity)
        else:
            sizes = self._first_come(lengths, capacity)
        if sizes[:1] == [0]:
            sizes = [0] * len(sizes)
        return sizes, self._fit_drafts(lengths, sizes, num_drafts, capacity)

    def _fit_drafts(
        self,
        lengths: Sequence[int],
        sizes: Sequence[int],
        num_drafts: Sequence[int],
        capacity: int | None,
    ) -> list[int]:
        """How many drafts run with each chunk; all before a prompt's end wait."""
        num_left = None if capacity is None else capacity - sum(sizes)
        kept = []
        for length, size, num_wanted in zip(lengths, sizes, num_drafts, strict=True):
            num_kept = 0
            if num_wanted > 0 and size == length:
                in_unit = -size % self.unit_size
                num_kept = _least(num_wanted, in_unit, self._room(size), num_left)
            if num_left is not None:
                num_left -= num_kept
            kept.append(num_kept)
        return kept

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
