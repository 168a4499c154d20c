"""Block ids: which are free, and how many holders each of the others has.

::

    block id      0   1   2   3   4   5
    ref count     1   1   0   2   0   0        free stack: 5 4 2 (the next one taken is 2)

A block is on the free stack exactly when its reference count is 0. The last block freed is the
first one taken again.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Owner of the block ids ``0 .. num_blocks - 1``; taking and dropping one is O(1)."""

    __slots__ = ("_free", "_ref_counts", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        # Reversed, so that a fresh pool hands out 0, 1, 2, ...
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def take(self, num_blocks: int) -> list[int]:
        """Hand out ``num_blocks`` (at least 1, at most `num_free_blocks`) with one holder each."""
        assert 1 <= num_blocks <= len(self._free), (num_blocks, len(self._free))
        taken = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        taken.reverse()
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def drop(self, block_ids: Sequence[int]) -> int:
        """Take one holder away from each block; return how many became free."""
        ref_counts = self._ref_counts
        num_free_before = len(self._free)
        # Last first: the same request coming back gets the same ids in the same order.
        for block_id in reversed(block_ids):
            assert ref_counts[block_id] > 0, f"block {block_id} is dropped but nobody holds it"
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                self._free.append(block_id)
        return len(self._free) - num_free_before

    def check_integrity(self, holders: Sequence[Sequence[int]]) -> None:
        """Compare with everybody who holds blocks; O(num_blocks).

        Raises `AssertionError` with the reason unless free + referenced = total and every
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
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        unheld = {block_id for block_id, count in enumerate(counts) if count == 0}
        assert free == unheld, (
            f"blocks both free and held: {sorted(free - unheld)}; "
            f"blocks lost: {sorted(unheld - free)}"
        )
