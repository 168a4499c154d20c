"""The block tables of beams: what they share, and what each has of its own.

::

    prompt 0 1 2 3 4 5   tokens_per_block 4, three beams, two tokens generated

    row 0   [7, 2]         7 is full and shared by all, so it has three holders
    row 1   [7, 5]         the last block of a row is its own while there is room in it,
    row 2   [7, 3]         since each row writes another token there

Row 0 is the table of the request in the `BlockManager`; the others are here. When the beams of a
step go on from other rows than before, no KV moves but that of the last, partial block: a row that
follows another one shares its full blocks and keeps its own last block, which gets a copy of the
other's. So following never takes a block, and all tables are as long as row 0's.

A row that dies frees what only it held. Two tables are equal up to a block and differ in every one
behind it, so what differs is found from the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inflight_scheduler.kv.blocks import BlockPool


class BeamTables:
    """Owner of the tables of rows 1 and up, over the blocks of ``pool``."""

    __slots__ = ("_pool", "_rows")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._rows: dict[int, list[list[int]]] = {}

    def open(self, request_id: int, first: Sequence[int], width: int, num_full: int) -> None:
        """Rows 1 to ``width - 1`` beside ``first``: its ``num_full`` first blocks shared, as many
        blocks as there are behind these for each row."""
        rows = []
        for _ in range(1, width):
            for block_id in first[:num_full]:
                self._pool.share(block_id)
            num_own = len(first) - num_full
            rows.append([*first[:num_full], *(self._pool.take(num_own) if num_own else ())])
        self._rows[request_id] = rows

    def append_blocks(self, request_id: int) -> list[int]:
        """A new block at the end of every row but the first; their ids."""
        rows = self._rows[request_id]
        block_ids = self._pool.take(len(rows))
        for row, block_id in zip(rows, block_ids, strict=True):
            row.append(block_id)
        return block_ids

    def follow(
        self, request_id: int, first: list[int], parents: Sequence[int], *, is_last_full: bool
    ) -> None:
        """Make the table of each row that of its parent; parents are their own parents.

        Unless ``is_last_full``, a row keeps its own last block, for a copy of its parent's.
        ``first`` is row 0, changed in place.
        """
        rows = [first, *self._rows[request_id]]
        for row, parent in zip(rows, parents, strict=True):
            if rows[parent] is row:
                continue
            place = len(row) - (0 if is_last_full else 1)
            while place > 0 and row[place - 1] != rows[parent][place - 1]:
                place -= 1
                self._pool.share(rows[parent][place])
                self._pool.drop((row[place],))
                row[place] = rows[parent][place]

    def free(self, request_id: int) -> int:
        """Give back every row but the first; how many blocks became free."""
        rows = self._rows.pop(request_id, ())
        return sum(self._pool.drop(row) for row in rows)

    def rows_of(self, request_id: int) -> Sequence[Sequence[int]]:
        """Every row but the first; none for a request without beams."""
        return self._rows.get(request_id, ())

    def all_rows(self) -> Iterator[Sequence[int]]:
        """Every table here."""
        for rows in self._rows.values():
            yield from rows

    def check_integrity(self, tables: dict[int, list[int]]) -> None:
        """Raise `AssertionError` unless the rows of a request are as long as its first one, in
        ``tables``, and share a beginning and nothing else."""
        for request_id, rows in self._rows.items():
            first = tables[request_id]
            assert all(len(row) == len(first) for row in rows), f"request {request_id}"
            every_row = [first, *rows]
            for index, row in enumerate(every_row):
                for other in every_row[:index]:
                    num_equal = sum(a == b for a, b in zip(row, other, strict=True))
                    assert row[:num_equal] == other[:num_equal], f"rows of request {request_id}"
                    shared = set(row[num_equal:]) & set(other[num_equal:])
                    assert not shared, f"request {request_id}: {sorted(shared)} in two places"
