"""A large cache stands in several lines; no line that is written is too long to be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from scheduler.recording.recorded import MAX_UTILIZATION, play, read, tiny_ring

from inflight_recorder import cache_lines
from inflight_recorder.cache_lines import LINE_NUMBERS
from inflight_recorder.errors import RecordingError
from inflight_recorder.header import Header
from inflight_recorder.likeness import Likeness
from inflight_recorder.lines import MAX_LINE_BYTES, LineWriter
from inflight_recorder.records import (
    MAX_NUM_BLOCKS,
    MAX_NUM_REQUESTS,
    MAX_NUM_TEXTS,
    MAX_NUM_TOKENS,
    Arrival,
    CacheStart,
    KeptBlock,
    RequestState,
    Settings,
    TextPart,
)
from inflight_recorder.replay import replay
from inflight_recorder.simulation import Simulation

SETTINGS = Settings(MAX_UTILIZATION, 12, 2, 6, 40, None, True, True)


def ring(line_numbers: int) -> str:
    """The recording of a ring that has dropped its beginning, while many are active."""
    with pytest.MonkeyPatch.context() as patch, tiny_ring():
        patch.setattr(cache_lines, "LINE_NUMBERS", line_numbers)
        return play(SETTINGS, seed=4, max_iterations=40).text


@pytest.mark.parametrize("line_numbers", [1, 5, 12])
def test_a_cache_in_several_lines_is_the_same_cache(line_numbers: int) -> None:
    """Lists that end in the middle of a row, and of a table."""
    whole, split = ring(LINE_NUMBERS), ring(line_numbers)
    assert len(split.splitlines()) > len(whole.splitlines()) + 40 / line_numbers
    header = read(whole).header
    assert header.cache is not None
    assert header.cache.parts
    assert any(header.cache.tables)
    assert read(split).header.cache == header.cache
    assert replay(read(split)) == replay(read(whole))
    assert replay(read(split)).divergence is None


def large_cache(num_blocks: int) -> CacheStart:
    """All blocks hold a text of their own."""
    last = MAX_NUM_TEXTS - 1
    return CacheStart(
        MAX_NUM_TEXTS,
        tuple(TextPart(last, last - k, MAX_NUM_TOKENS, 0) for k in range(1, num_blocks, 7)),
        (),
        (),
        tuple(KeptBlock(block, last - block, block % 1000) for block in range(num_blocks)),
        tuple(range(num_blocks)),
        tuple(range(0, num_blocks, 3)),
    )


@pytest.mark.slow
def test_what_is_cached_in_a_very_large_pool_can_be_read() -> None:
    """In one line it was 23 MB long, and every command refused it."""
    num_blocks = 600_000
    settings = Settings(MAX_UTILIZATION, num_blocks, 16, 4, enable_reuse=True)
    header = Header(settings, cache=large_cache(num_blocks))
    text = LineWriter().header(header)
    assert len(text) > 1.3 * MAX_LINE_BYTES
    assert max(map(len, text.splitlines())) < MAX_LINE_BYTES
    assert read(text).header == header


def test_the_longest_lines_there_can_be_are_short_enough() -> None:
    """As many requests as there may be, and as much beside them as the first line takes."""
    state = RequestState._make(
        [2**64 - 1, *[MAX_NUM_TOKENS] * 6, 1 / 3, 1024, MAX_NUM_REQUESTS, MAX_NUM_BLOCKS]
    )
    settings = Settings(MAX_UTILIZATION, MAX_NUM_BLOCKS, 2**16, 2**16, enable_reuse=True)
    num_left = LINE_NUMBERS - MAX_NUM_REQUESTS
    for num_more in (0, 1):
        cache = CacheStart(
            MAX_NUM_TEXTS,
            (),
            (MAX_NUM_TEXTS - 1,) * num_left,
            ((),) * MAX_NUM_REQUESTS,
            (),
            (1,) * num_more,
            (),
        )
        header = Header(settings, "0" * 1000, "0" * 1000, (state,) * MAX_NUM_REQUESTS, cache=cache)
        lines = LineWriter().header(header).splitlines()
        assert (len(lines) > 1) == (num_more > 0), "it is as much as the first line takes"
        assert max(map(len, lines)) < MAX_LINE_BYTES
    assert LINE_NUMBERS * len(f"{MAX_NUM_TEXTS}, ") < MAX_LINE_BYTES // 2


def test_a_beginning_that_very_many_cached_texts_share_counts_once() -> None:
    """Each from its beginning they are 200 million tokens; a system prompt makes such a cache."""
    num_shared, num_texts = 1024, 3001
    settings = Settings(MAX_UTILIZATION, 5000, 64, 4, enable_reuse=True)
    length = num_shared * 64
    blocks = [*((block, 0, block) for block in range(num_shared))]
    blocks += [(num_shared + number, number, num_shared) for number in range(1, num_texts)]
    unknown = num_texts  # is cached no more, and all but the first are like it
    cache = CacheStart(
        num_texts + 1,
        (
            TextPart(unknown, 0, length, 0),
            *(TextPart(number, unknown, length, 0) for number in range(1, num_texts)),
        ),
        (),
        (),
        tuple(KeptBlock(*block) for block in blocks),
        tuple(block for block, _, _ in blocks),
        (),
    )
    simulation = Simulation(settings, cache=cache)
    simulation.block_manager.check_integrity()
    for number in (1, num_texts - 1):
        arrival = Arrival(number, length + 65, 1, likeness=Likeness(number, length + 64))
        match = simulation.block_manager.match_prefix(simulation.arrive(arrival))
        assert match.block_ids == (*range(num_shared), num_shared + number)


Lines = list[dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[0]["cache"].update(lines=0), "line 1: lines is 0"),
        (lambda lines: lines[0]["cache"].update(kept=[]), "line 1: cache: with lines it holds"),
        (lambda lines: lines[0]["cache"].update(lines=10**4), r"line \d+: a line of the cache is"),
        (lambda lines: lines[2].update(idle=[]), "line 3: a line of the cache is expected"),
        (lambda lines: lines[2].clear(), "line 3: a line of the cache is expected, with one of"),
        (lambda lines: lines[2].update(more=lines[2].popitem()[1]), "line 3: a line of the cache"),
        (lambda lines: change_list(lines[2], [[1]]), r"line 3: .*expected, not \[1\]"),
        (lambda lines: change_list(lines[2], [True]), "line 3: .*expected, not True"),
        (lambda lines: change_list(lines[2], [-1]), "line 3: .*must be between 0 and"),
        (lambda lines: change_list(lines[2], [2**62]), "line 3: .*must be between 0 and"),
        (lambda lines: change_list(lines[2], "abc"), "line 3: .*must be a list"),
        (
            lambda lines: one(lines, "kept")["kept"].extend(range(99)),
            r"line \d+: kept must be a list",
        ),
        (lambda lines: one(lines, "lengths")["lengths"].append(1), r"line \d+: cache: blocks must"),
        (lambda lines: one(lines, "blocks")["blocks"].append(12), r"line \d+: cache: blocks must"),
    ],
)
def test_lines_that_are_no_cache_are_refused(
    change: Callable[[Lines], object], message: str
) -> None:
    lines = [json.loads(line) for line in ring(5).splitlines()]
    change(lines)
    with pytest.raises(RecordingError, match=f"^test.jsonl, {message}"):
        read("".join(json.dumps(line) + "\n" for line in lines))


def test_a_recording_that_ends_within_its_cache() -> None:
    first, second, *_ = ring(5).splitlines(keepends=True)
    with pytest.raises(RecordingError, match=r"^test.jsonl, line 3: the recording ends within"):
        read(first + second)


def change_list(line: dict[str, Any], values: object) -> None:
    """Another one in the place of its list."""
    [key] = line
    line[key] = values


def one(lines: Lines, key: str) -> dict[str, Any]:
    """The first line with this list."""
    return next(line for line in lines[1:] if key in line)
