"""Block ids: which are free, which are kept for reuse, and how many holders the others have.

::

    block id      0   1   2   3   4   5
    ref count     1   1   0   2   0   0        free stack: 5 4 (the next one taken is 4)
    kept          -   -   yes yes -   -        idle list, oldest first: 2

A block without a holder is on the free stack, or on the idle list if its content is kept for reuse.
Both can be taken: the free stack first (the last block freed is the first one taken again), then
the block that has been idle longest, whose content is given up.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Owner of the block ids ``0 .. num_blocks - 1``; every operation is O(1) per block.

    ``on_evict`` hears of the kept blocks whose content is given up to make room.
    """

    __slots__ = ("_free", "_idle", "_is_kept", "_on_evict", "_ref_counts", "num_blocks")

    def __init__(
        self, num_blocks: int, on_evict: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        # Reversed, so that a fresh pool hands out 0, 1, 2, ...
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks
        self._is_kept = bytearray(num_blocks)
        self._idle = _IdleList(num_blocks)
        self._on_evict = on_evict

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a holder: all that can be allocated."""
        return len(self._free) + self._idle.size

    @property
    def num_idle_blocks(self) -> int:
        """Blocks without a holder, whose content is kept."""
        return self._idle.size

    def ref_count(self, block_id: int) -> int:
        """How many hold ``block_id``."""
        return self._ref_counts[block_id]

    def kept_blocks(self) -> frozenset[int]:
        """All blocks whose content is kept, held or idle; O(num_blocks)."""
        return frozenset(block_id for block_id, kept in enumerate(self._is_kept) if kept)

    def kept_flags(self) -> bytes:
        """For each block 1 if its content is kept, else 0."""
        return bytes(self._is_kept)

    def idle_links(self) -> array[int]:
        """A copy of the order of the idle blocks, to be read by `follow_links`."""
        return self._idle.links()

    def restore(
        self, tables: Iterable[Sequence[int]], kept: Iterable[int], idle: Sequence[int]
    ) -> None:
        """Become the pool of these holders and kept blocks; ``idle`` oldest first.

        For a pool that has handed out nothing. ``ValueError`` if they contradict one another.
        """
        for table in tables:
            for block_id in table:
                self._ref_counts[block_id] += 1
        for block_id in kept:
            self._is_kept[block_id] = 1
        expected = {k for k, is_kept in enumerate(self._is_kept) if is_kept}
        expected -= {k for k, count in enumerate(self._ref_counts) if count}
        if len(idle) != len(expected) or set(idle) != expected:
            raise ValueError("the idle blocks are not those that are kept and have no holder")
        self._idle.extend(idle)
        taken = expected.union(k for k, count in enumerate(self._ref_counts) if count)
        self._free = [block_id for block_id in self._free if block_id not in taken]

    def take(self, num_blocks: int) -> list[int]:
        """Hand out ``num_blocks`` (at least 1, at most `num_free_blocks`) with one holder each."""
        assert 1 <= num_blocks <= self.num_free_blocks, (num_blocks, self.num_free_blocks)
        num_from_free = min(num_blocks, len(self._free))
        first_taken = len(self._free) - num_from_free
        taken = self._free[first_taken:]
        del self._free[first_taken:]
        taken.reverse()
        if num_from_free < num_blocks:
            taken += self._evict(num_blocks - num_from_free)
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def share(self, block_id: int) -> None:
        """Add a holder to a block that is held or kept."""
        assert self._is_kept[block_id] or self._ref_counts[block_id] > 0, f"block {block_id}"
        if self._ref_counts[block_id] == 0:
            self._idle.remove(block_id)
        self._ref_counts[block_id] += 1

    def keep(self, block_ids: Iterable[int]) -> None:
        """Keep the content of held blocks after their last holders have gone."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is kept but has no holder"
            self._is_kept[block_id] = 1

    def unkeep(self, block_id: int) -> bool:
        """Give up the content of a block, held or idle; False if it was not kept."""
        if not self._is_kept[block_id]:
            return False
        self._is_kept[block_id] = 0
        if self._ref_counts[block_id] == 0:
            self._idle.remove(block_id)
            self._free.append(block_id)
        return True

    def drop(self, block_ids: Sequence[int]) -> int:
        """Take one holder away from each block; return how many have no holder now."""
        ref_counts, is_kept, free = self._ref_counts, self._is_kept, self._free
        num_free_before = self.num_free_blocks
        idle: list[int] = []
        # Last first: the same request coming back gets the same ids in the same order, and of a
        # text that is kept the end is given up before the beginning.
        for block_id in reversed(block_ids):
            num_holders = ref_counts[block_id] - 1
            assert num_holders >= 0, f"block {block_id} is dropped but has no holder"
            ref_counts[block_id] = num_holders
            if num_holders == 0:
                (idle if is_kept[block_id] else free).append(block_id)
        self._idle.extend(idle)
        return self.num_free_blocks - num_free_before

    def check_integrity(self, holders: Sequence[Sequence[int]]) -> None:
        """Compare with all holders of blocks; O(num_blocks).

        Raises `AssertionError` with the reason unless free + idle + referenced = total and every
        reference count equals the number of holders.
        """
        counts = [0] * self.num_blocks
        for held in holders:
            assert len(set(held)) == len(held), f"one holder has a block twice: {list(held)}"
            for block_id in held:
                counts[block_id] += 1
        for block_id, (expected, count) in enumerate(zip(counts, self._ref_counts, strict=True)):
            assert expected == count, (
                f"block {block_id} has {expected} holders but its reference count is {count}"
            )
        idle = self._idle.ids()
        available = [*self._free, *idle]
        free = set(available)
        assert len(free) == len(available), "a block is free twice"
        assert all(self._is_kept[block_id] for block_id in idle), "an idle block is not kept"
        assert not any(self._is_kept[block_id] for block_id in self._free), "a free block is kept"
        unheld = {block_id for block_id, count in enumerate(counts) if count == 0}
        assert free == unheld, (
            f"blocks both free and held: {sorted(free - unheld)}; "
            f"blocks lost: {sorted(unheld - free)}"
        )

    def _evict(self, num_blocks: int) -> list[int]:
        evicted = self._idle.pop_oldest(num_blocks)
        for block_id in evicted:
            self._is_kept[block_id] = 0
        if self._on_evict is not None:
            self._on_evict(evicted)
        return evicted


class _IdleList:
    """Block ids in the order of their last use: a ring of links, with ``num_blocks`` as its knot.

    ::

        knot -> oldest -> ... -> newest -> knot
    """

    __slots__ = ("_knot", "_newer", "_older", "size")

    def __init__(self, num_blocks: int) -> None:
        self._knot = num_blocks
        self._newer = array("i", [num_blocks]) * (num_blocks + 1)
        self._older = array("i", [num_blocks]) * (num_blocks + 1)
        self.size = 0

    def extend(self, block_ids: Sequence[int]) -> None:
        """``block_ids``, none of them in the list, are the newest now, the last one most of all."""
        older, newer = self._older, self._newer
        newest = older[self._knot]
        for block_id in block_ids:
            older[block_id], newer[newest] = newest, block_id
            newest = block_id
        newer[newest], older[self._knot] = self._knot, newest
        self.size += len(block_ids)

    def remove(self, block_id: int) -> None:
        """Take ``block_id`` out, wherever it is."""
        older, newer = self._older[block_id], self._newer[block_id]
        self._newer[older], self._older[newer] = newer, older
        self.size -= 1

    def pop_oldest(self, num_blocks: int) -> list[int]:
        """Take out those that were used longest ago, oldest first; there must be as many."""
        oldest, block_id = [], self._newer[self._knot]
        for _ in range(num_blocks):
            oldest.append(block_id)
            block_id = self._newer[block_id]
        self._newer[self._knot], self._older[block_id] = block_id, self._knot
        self.size -= num_blocks
        return oldest

    def ids(self) -> list[int]:
        """All of them, oldest first; both directions are compared (`AssertionError`)."""
        forward, backward = follow_links(self._newer), follow_links(self._older)
        assert forward == backward[::-1], "the links of the idle list disagree"
        assert len(forward) == self.size, "the idle list has lost count"
        return forward

    def links(self) -> array[int]:
        """A copy of the links from older to newer."""
        return self._newer[:]


def follow_links(links: Sequence[int]) -> list[int]:
    """The blocks of a ring of links, from its knot, the last index, on."""
    found: list[int] = []
    knot = len(links) - 1
    block_id = links[knot]
    while block_id != knot and len(found) < knot:
        found.append(block_id)
        block_id = links[block_id]
    return found
