"""A cache too large for the first line of a recording has lines of its own behind it.

::

    {"inflight_recording": 1, ..., "cache": {"texts": 70000, "lines": 3}}
    {"kept": [block, text, place, block, ...]}
    {"kept": [...]}
    {"idle": [block, ...]}

Each holds at most `LINE_NUMBERS` of one list, which may go on in the next line. The tables are two
lists: ``lengths`` of each, and the ``blocks`` of all of them. So no line is longer than any other
of a recording may be, and what is read is bounded by the blocks of the pool (see `_bounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from inflight_recorder.errors import RecordingError
from inflight_recorder.records import MAX_NUM_REQUESTS, MAX_NUM_TEXTS
from inflight_recorder.values import read_integer, read_list, shorten

LINE_NUMBERS = 2**19
"""Numbers in one line, each of at most 12 digits; with so many of its cache the first line has room
for as many requests as there may be (16 MiB in all)."""

MAX_TABLE_BLOCKS = 2**24
"""Blocks of all tables together; one that many share counts for each."""

_MAX_LINES = 2**20
_RING_TEXTS = 2**20  # that the requests of the recording are like, cached or not


def _bounds(num_blocks: int) -> dict[str, int]:
    """The lists of a cache, with the most numbers that each may have."""
    return {
        "parts": 4 * 2 * (num_blocks + _RING_TEXTS),  # a prompt, and what was generated
        "of": MAX_NUM_REQUESTS,
        "lengths": MAX_NUM_REQUESTS,
        "blocks": MAX_TABLE_BLOCKS,
        "kept": 3 * num_blocks,
        "idle": num_blocks,
        "starts": num_blocks,
    }


def split_cache(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The header ``content`` as it is, or, with a large cache, as several lines."""
    cache = content.get("cache")
    if cache is None:
        yield content
        return
    lists = {
        **cache,
        "lengths": [len(table) for table in cache["tables"]],
        "blocks": list(chain.from_iterable(cache["tables"])),
    }
    keys = _bounds(0)
    if sum(len(lists[key]) for key in keys) <= LINE_NUMBERS:
        yield content
        return
    pieces = [
        {key: lists[key][start : start + LINE_NUMBERS]}
        for key in keys
        for start in range(0, len(lists[key]), LINE_NUMBERS)
    ]
    yield content | {"cache": {"texts": cache["texts"], "lines": len(pieces)}}
    yield from pieces


def join_cache(cache: Any, next_content: Callable[[], dict[str, Any]], num_blocks: int) -> Any:
    """``cache`` as it would stand in the first line, with what the lines behind it hold.

    `RecordingError` unless these are lists of numbers, within the bounds.
    """
    if not isinstance(cache, dict) or "lines" not in cache:
        return cache
    if cache.keys() != {"texts", "lines"}:
        raise RecordingError("cache: with lines it holds nothing else but texts")
    bounds = _bounds(num_blocks)
    lists: dict[str, list[int]] = {key: [] for key in bounds}
    for _ in range(read_integer(cache["lines"], "lines", 1, _MAX_LINES)):
        piece = next_content()
        key = next(iter(piece), None)
        if key not in lists or len(piece) > 1:
            raise RecordingError(f"a line of the cache is expected, with one of {', '.join(lists)}")
        values = read_list(piece, key, bounds[key] - len(lists[key]))
        if not {int}.issuperset(map(type, values)):  # before more of them are read
            wrong = next(value for value in values if type(value) is not int)
            raise RecordingError(f"{key}: a whole number is expected, not {shorten(wrong)}")
        for value in (min(values, default=0), max(values, default=0)):
            read_integer(value, key, 0, MAX_NUM_TEXTS)
        lists[key] += values
    lengths, blocks = lists.pop("lengths"), lists.pop("blocks")
    if sum(lengths) != len(blocks):
        raise RecordingError("cache: blocks must be as many as the lengths say")
    rest = iter(blocks)
    tables = [list(islice(rest, length)) for length in lengths]
    return {"texts": cache["texts"], **lists, "tables": tables}
