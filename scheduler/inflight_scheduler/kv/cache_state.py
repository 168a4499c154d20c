"""What a `BlockManager` with block reuse has cached: taken at a moment, read later, rebuilt.

Taking it copies whole tables (some 20 bytes per block of the pool, and every block table) and looks
at nothing: about a millisecond for 50,000 blocks. Whoever wants to read it does the work.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress, islice
from typing import NamedTuple

from inflight_scheduler.kv.blocks import follow_links
from inflight_scheduler.request import LlmRequest


class CacheState(NamedTuple):
    """A copy of the books. Of block k, ``text_numbers[k]`` and ``places[k]`` tell the content.

    ``is_kept[k]`` says whether that is still kept. The order of ``beginnings`` means nothing.
    ``table_blocks`` are the block tables of ``holders`` one after another, ``table_lengths`` long.
    All are arrays: into lists and tuples, however plain, garbage collections look.
    """

    holders: array[int]
    table_lengths: array[int]
    table_blocks: array[int]
    is_kept: bytes
    text_numbers: array[int]
    places: array[int]
    idle_links: array[int]
    beginnings: array[int]

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

    def kept_texts(self) -> set[int]:
        """The texts of kept blocks; a fraction of the time that a look at each block takes."""
        return set(compress(self.text_numbers, self.is_kept))

    def kept(self) -> Iterator[tuple[int, int, int]]:
        """Block id, number of its text and place in it, of every kept block."""
        for block_id, is_kept in enumerate(self.is_kept):
            if is_kept:
                yield block_id, self.text_numbers[block_id], self.places[block_id]


def array_of(typecode: str, numbers: Collection[int]) -> array[int]:
    """In half the time that ``array(typecode, numbers)`` takes for thousands of them."""
    return array(typecode, struct.pack(f"{len(numbers)}{typecode}", *numbers))


class CacheContent(NamedTuple):
    """What is needed to rebuild it: as `CacheState`, with a request for each kept text."""

    tables: Mapping[int, Sequence[int]]
    kept: Iterable[tuple[int, LlmRequest, int]]
    idle: Sequence[int]
    beginnings: Sequence[int]
