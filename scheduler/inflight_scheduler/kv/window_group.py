"""The block tables of layers that see the last tokens only, and give back what lies behind them.

All groups of layers take their blocks from one pool. A table has an entry for each block of tokens,
whose index is that of the block in the text; those behind the window are `NO_BLOCK`::

    tokens of the text    0 .. 31   32 .. 63   64 .. 95   96 .. 127   128 ..
    table, window 40      -         -          block 7    block 2     (the next token comes here)

A context that is computed in chunks takes at its first one all that its longest chunk needs with
what that sees; later chunks take exactly what they give back. Blocks of such a table are never
shared (of what is found in the cache a request gets copies), so each that is given back is free.
"""

from __future__ import annotations

from inflight_scheduler.kv.block_pool import BlockPool

NO_BLOCK = -1
"""The entry of a block that was given back."""


class WindowGroup:
    """The tables of group ``number``, whose layers see the last ``window`` tokens."""

    __slots__ = ("_num_behind", "_pool", "_tokens_per_block", "number", "tables", "window")

    def __init__(self, number: int, window: int, tokens_per_block: int, pool: BlockPool) -> None:
        self.number, self.window = number, window
        self._tokens_per_block = tokens_per_block
        self._pool = pool
        self.tables: dict[int, list[int]] = {}
        self._num_behind: dict[int, int] = {}  # entries that are `NO_BLOCK`, the first ones

    def first_seen(self, position: int) -> int:
        """Index of the first block that a token at ``position`` sees."""
        return max(position - self.window + 1, 0) // self._tokens_per_block

    def span(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens of a step and all that they see, at most."""
        return (self.window + num_tokens - 3) // self._tokens_per_block + 2

    def num_held(self, request_id: int) -> int:
        """Blocks that the request holds."""
        table = self.tables.get(request_id)
        return len(table) - self._num_behind[request_id] if table else 0

    def held(self, request_id: int) -> tuple[int, list[int]]:
        """Index of the first block that the request holds, and all of them."""
        num_behind = self._num_behind.get(request_id, 0)
        return num_behind, self.tables.get(request_id, [])[num_behind:]

    def num_needed(
        self, request_id: int, position: int, num_blocks: int, num_before: int, num_most: int
    ) -> int:
        """Blocks that a table grows by, until it has ``num_blocks`` entries, beyond what it gives
        back for a step at ``position``; it has at least ``num_before`` now.

        ``num_most``: what a request that generates holds at any time; one that looks two steps
        ahead would count what the second one gives back.
        """
        num_entries = max(len(self.tables.get(request_id, ())), num_before)
        if num_blocks <= num_entries:
            return 0
        num_behind = self._num_behind.get(request_id)
        num_passed = 0 if num_behind is None else max(self.first_seen(position) - num_behind, 0)
        num_grown = num_blocks - num_entries - num_passed
        return max(min(num_grown, num_most - self.num_held(request_id)), 0)

    def drop_passed(self, request_id: int, position: int) -> int:
        """Give back the blocks that no token from ``position`` on sees; how many they were."""
        table = self.tables.get(request_id)
        if table is None:
            return 0
        start, end = self._num_behind[request_id], min(self.first_seen(position), len(table))
        if end <= start:
            return 0
        self._pool.drop(table[start:end])
        table[start:end] = [NO_BLOCK] * (end - start)
        self._num_behind[request_id] = end
        return end - start

    def extend(self, request_id: int, position: int, num_blocks: int) -> tuple[int, list[int]]:
        """Take blocks, for which there must be room, until the table has ``num_blocks`` entries.

        Index of the first one, and their ids. A table that begins here holds nothing that no token
        from ``position`` on sees.
        """
        table = self.tables.get(request_id)
        if table is None:
            num_behind = self._num_behind[request_id] = self.first_seen(position)
            table = self.tables[request_id] = [NO_BLOCK] * num_behind
        first_index = len(table)
        if num_blocks <= first_index:
            return first_index, []
        block_ids = self._pool.take(num_blocks - first_index)
        table += block_ids
        return first_index, block_ids

    def restore(self, request_id: int, num_behind: int, block_ids: list[int]) -> None:
        """The request holds ``block_ids``, behind ``num_behind`` that it has given back."""
        self.tables[request_id] = [NO_BLOCK] * num_behind + block_ids
        self._num_behind[request_id] = num_behind

    def free(self, request_id: int) -> tuple[int, int]:
        """Give back everything: how many blocks the request held, and how many are free now."""
        _, held = self.held(request_id)
        self.tables.pop(request_id, None)
        self._num_behind.pop(request_id, None)
        return len(held), self._pool.drop(held)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the tables are as they are said to be."""
        assert self.tables.keys() == self._num_behind.keys()
        for request_id, table in self.tables.items():
            num_behind = self._num_behind[request_id]
            assert table[:num_behind] == [NO_BLOCK] * num_behind, f"request {request_id}"
            assert NO_BLOCK not in table[num_behind:], f"request {request_id}"
