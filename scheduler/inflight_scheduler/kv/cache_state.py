"""What a `BlockManager` with block reuse has cached: taken at a moment, read later, rebuilt.

Taking it copies whole tables (some 20 bytes per block of the pool, and every block table) and looks
at nothing: about a millisecond for 50,000 blocks. Whoever wants to read it does the work.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Mapping, Sequence
from itertools import compress, islice
from typing import NamedTuple

from inflight_scheduler.kv.blocks import follow_links


class CacheState(NamedTuple):
    """A copy of the books. ``hashes[k]`` are the first bytes of the key of what block k holds.

    ``is_kept[k]`` says whether that is still kept. ``table_blocks`` are the block tables of
    ``holders`` one after another, ``table_lengths`` long. All are arrays: into lists and tuples,
    however plain, garbage collections look.
    """

    holders: array[int]
    table_lengths: array[int]
    table_blocks: array[int]
    is_kept: bytes
    hashes: array[int]
    idle_links: array[int]

    @property
    def tables(self) -> dict[int, tuple[int, ...]]:
        """The block table of each request that holds blocks."""
        blocks = iter(self.table_blocks)
        lengths = zip(self.holders, self.table_lengths, strict=True)
        return {request_id: tuple(islice(blocks, length)) for request_id, length in lengths}

    @property
    def idle(self) -> list[int]:
        """Kept blocks that nobody holds, the one that is given up first in front."""
        return follow_links(self.idle_links)

    @property
    def kept(self) -> list[int]:
        """The kept blocks, in ascending order."""
        return list(compress(range(len(self.is_kept)), self.is_kept))


def array_of(typecode: str, numbers: Collection[int]) -> array[int]:
    """In half the time that ``array(typecode, numbers)`` takes for thousands of them."""
    return array(typecode, struct.pack(f"{len(numbers)}{typecode}", *numbers))


class CacheContent(NamedTuple):
    """What is needed to rebuild it: the tables, key by kept block, and the order of idleness."""

    tables: Mapping[int, Sequence[int]]
    kept: Mapping[int, bytes]
    idle: Sequence[int]
