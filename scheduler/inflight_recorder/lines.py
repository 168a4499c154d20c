"""Recordings as JSON lines: a header, the state at the start, then one line per iteration.

::

    {"inflight_recording": 1, "settings": {...}, "active": [[id, ...], ...], ...}
    {"i": 1, "t": 17, "d": 2150, "a": [[1, 9, 64]], "c": [1, 9], "f": 61}
    {"i": 2, "t": 2190, "d": 803, "g": [1], "f": 61}
    {"i": 3, "t": 3002, "d": 799, "f": 61, "e": [[1, "cancelled"]]}

``i`` number, ``t`` start and ``d`` duration of the step in microseconds, ``a`` arrivals, ``c``
context chunks (id, tokens, id, tokens ...), ``p`` paused ids, ``f`` free blocks, ``e`` ends. Who
generates is told when it changes: ``g`` the whole list, or ``-`` who left it and ``+`` who joined
(place, id, place, id ...). ``x`` 1: no decision. ``y`` 1: the step failed, ``z`` 1: the one before
it did. ``b`` 1: the user's scheduler was overruled by the default. ``l``: with block reuse, who
goes on like which text (id, text, tokens). ``n``: drafts (id, how many, kept, tokens gained,
id ...). ``s`` 1: overlapped, and no step ran on. ``w`` 1: the cache was emptied. ``m``: which row
each row of a search went on from (id, row, row ...). The header is described in `header`.

Everything read is checked for type and bounds here; whether it *can have happened* is checked by
whoever runs it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, filterfalse
from typing import Any

from inflight_recorder.beams import Moves
from inflight_recorder.errors import RecordingError
from inflight_recorder.header import Header, header_lines, read_header
from inflight_recorder.likeness import Likeness
from inflight_recorder.records import (
    END_REASONS,
    MAX_NUM_DRAFTS,
    MAX_NUM_REQUESTS,
    MAX_NUM_TOKENS,
    Arrival,
    Chunk,
    Decision,
    Drafts,
    End,
    Growth,
    Iteration,
)
from inflight_recorder.values import (
    MAX_ID,
    MAX_TIME,
    read_id,
    read_ids,
    read_integer,
    read_list,
    read_priority,
    read_row,
    shorten,
)

MAX_LINE_BYTES = 16 * 2**20

_ITERATION_KEYS = frozenset("itdacg-+pfexyzlbmnsw")
_DECISION_KEYS = frozenset("cg-+p")

MAX_NUM_ROWS = 1024
_NUM_NEEDED = 3
_OPTIONAL: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (0, lambda value: read_integer(value, "a", 0, MAX_TIME)),  # waited
    (0.5, read_priority),
    (1, lambda value: read_integer(value, "a", 1, MAX_NUM_ROWS)),  # beams
    (None, lambda value: None if value is None else read_integer(value, "a", 0, MAX_NUM_REQUESTS)),
    (0, lambda value: read_integer(value, "a")),  # likeness: text
    (0, lambda value: read_integer(value, "a", 0, MAX_NUM_TOKENS)),  # and length
)
"""Of an arrival behind id, prompt and output length: default and reader, in the order of `Arrival`.

Those at the end that have their defaults are not written, so a new field (at the end, with a
default that means what was true before) leaves old recordings readable.
"""


@dataclass(slots=True)
class LineWriter:
    """Turns records into lines; it remembers who generated, to write only what changed."""

    _generation: tuple[int, ...] = field(default=())
    _generation_set: frozenset[int] = field(default=frozenset())

    def header(self, header: Header) -> str:
        """The first line, and those that belong to it."""
        return "".join(map(_dump, header_lines(header)))

    def iteration(self, iteration: Iteration) -> str:
        """The line of one iteration."""
        content: dict[str, Any] = {
            "i": iteration.number,
            "t": iteration.start_us,
            "d": iteration.step_us,
        }
        if iteration.arrivals:
            content["a"] = [_arrival_fields(arrival) for arrival in iteration.arrivals]
        decision = iteration.decision
        if decision is None:
            content["x"] = 1
        else:
            if decision.context:
                content["c"] = [number for chunk in decision.context for number in chunk]
            if decision.generation != self._generation:
                before, old = self._generation, self._generation_set
                self._generation = decision.generation
                self._generation_set = frozenset(decision.generation)
                content.update(
                    _generation_fields(before, old, self._generation, self._generation_set)
                )
            if decision.paused:
                content["p"] = decision.paused
        content["f"] = iteration.num_free_blocks
        if iteration.ends:
            content["e"] = iteration.ends
        if iteration.growths:
            content["l"] = [[growth.request_id, *growth.likeness] for growth in iteration.growths]
        if iteration.moves:
            content["m"] = [[moves.request_id, *moves.parents] for moves in iteration.moves]
        if iteration.drafts:
            content["n"] = [number for drafts in iteration.drafts for number in drafts]
        flags = {
            "y": iteration.has_failed,
            "z": iteration.has_lost,
            "b": iteration.is_by_default,
            "s": iteration.is_settled,
            "w": iteration.has_forgotten,
        }
        content.update((key, 1) for key, is_set in flags.items() if is_set)
        return _dump(content)


class LineReader:
    """The way back; `RecordingError` says what is wrong, without the line number."""

    def __init__(self) -> None:
        self._generation: tuple[int, ...] = ()
        self._number = 0
        self._start_us = 0

    def header(self, line: str, next_line: Callable[[], str | None] = lambda: None) -> Header:
        """Read the first line, and with ``next_line`` those that belong to it, if there are any."""

        def next_content() -> dict[str, Any]:
            following = next_line()
            if following is None:
                raise RecordingError("the recording ends within what was cached")
            return _load(following)

        return read_header(_load(line), next_content)

    def iteration(self, line: str) -> Iteration:
        """Read one of the other lines; they must come in order."""
        content = _load(line)
        if not _ITERATION_KEYS.issuperset(content):
            unknown = shorten(sorted(set(content) - _ITERATION_KEYS)[0])
            raise RecordingError(
                f"the key {unknown} is unknown here; use the software that wrote it"
            )
        number = read_integer(content.get("i"), "i", 1, MAX_TIME)
        if self._number and number != self._number + 1:
            raise RecordingError(f"iteration {number} follows iteration {self._number}")
        start_us = read_integer(content.get("t"), "t", self._start_us, MAX_TIME)
        iteration = Iteration(
            number=number,
            start_us=start_us,
            step_us=read_integer(content.get("d"), "d", 0, MAX_TIME),
            arrivals=tuple(
                _arrival(fields) for fields in read_list(content, "a", MAX_NUM_REQUESTS)
            ),
            decision=None if "x" in content else self._decision(content),
            num_free_blocks=read_integer(content.get("f"), "f", 0, MAX_ID),
            ends=tuple(_end(fields) for fields in read_list(content, "e", 2 * MAX_NUM_REQUESTS)),
            has_failed="y" in content,
            growths=tuple(
                _growth(fields) for fields in read_list(content, "l", 2 * MAX_NUM_REQUESTS)
            ),
            is_by_default="b" in content,
            has_lost="z" in content,
            drafts=_drafts(read_list(content, "n", 4 * MAX_NUM_REQUESTS)),
            is_settled="s" in content,
            moves=tuple(_moves(fields) for fields in read_list(content, "m", MAX_NUM_REQUESTS)),
            has_forgotten="w" in content,
        )
        told = _DECISION_KEYS.intersection(content)
        if "x" in content and told:
            raise RecordingError(f"x: nothing was decided, but there is {', '.join(sorted(told))}")
        self._number, self._start_us = number, start_us
        return iteration

    def _decision(self, content: dict[str, Any]) -> Decision:
        flat = read_list(content, "c", 2 * MAX_NUM_REQUESTS)
        if len(flat) % 2:
            raise RecordingError("c must hold pairs of a request and its tokens")
        context = tuple(
            Chunk(read_id(flat[i], "c"), read_integer(flat[i + 1], "c", 1, MAX_NUM_TOKENS))
            for i in range(0, len(flat), 2)
        )
        if "g" in content:
            self._generation = read_ids(content, "g")
        elif "-" in content or "+" in content:
            self._generation = _changed(
                self._generation,
                read_ids(content, "-"),
                read_list(content, "+", 2 * MAX_NUM_REQUESTS),
            )
        return Decision(context, self._generation, read_ids(content, "p"))


def _generation_fields(
    before: Sequence[int], old: frozenset[int], after: Sequence[int], new: frozenset[int]
) -> dict[str, Any]:
    """The change if telling it is shorter than telling the list. ``old`` and ``new`` are the sets.

    Thousands of ids, of which few have changed: nothing here is done for each of them in Python.
    """
    stays, has_stayed = list(map(new.__contains__, before)), list(map(old.__contains__, after))
    left = [before[place] for place in _places_of_false(stays)]
    joined = [x for place in _places_of_false(has_stayed) for x in (place, after[place])]
    is_shorter = len(joined) + len(left) < len(after)
    if is_shorter and list(compress(before, stays)) == list(compress(after, has_stayed)):
        return {key: value for key, value in (("-", left), ("+", joined)) if value}
    return {"g": after}


def _places_of_false(flags: list[bool]) -> Iterator[int]:
    place = -1
    for _ in range(flags.count(False)):
        place = flags.index(False, place + 1)
        yield place


def _insert(ids: list[int], joined: Sequence[int]) -> list[int]:
    """``joined`` (place, id, ...) put into ``ids``; places ascend, so this is one merge."""
    result: list[int] = []
    rest = iter(ids)
    for index in range(0, len(joined), 2):
        while len(result) < joined[index]:
            try:
                result.append(next(rest))
            except StopIteration:
                raise RecordingError("+ names a place behind the end of the list") from None
        result.append(joined[index + 1])
    result.extend(rest)
    return result


def _changed(before: Sequence[int], left: Sequence[int], joined: list[Any]) -> tuple[int, ...]:
    stayed = list(filterfalse(frozenset(left).__contains__, before))
    if len(stayed) + len(left) != len(before):
        raise RecordingError("- must hold requests that generated before, each once")
    if len(joined) % 2:
        raise RecordingError("+ must hold pairs of a place and a request")
    pairs: list[int] = []
    for index in range(0, len(joined), 2):
        lowest = pairs[-2] + 1 if pairs else 0
        pairs.append(read_integer(joined[index], "+", lowest, MAX_NUM_REQUESTS))
        pairs.append(read_id(joined[index + 1], "+"))
    return tuple(_insert(stayed, pairs))


def _arrival_fields(arrival: Arrival) -> list[Any]:
    fields = [*arrival[:-1], *arrival.likeness]
    while len(fields) > _NUM_NEEDED and fields[-1] == _OPTIONAL[len(fields) - _NUM_NEEDED - 1][0]:
        fields.pop()
    return fields


def _arrival(fields: Any) -> Arrival:
    if isinstance(fields, list) and len(fields) > _NUM_NEEDED + len(_OPTIONAL):
        raise RecordingError(
            f"a: an arrival has {len(fields)} values, known here are "
            f"{_NUM_NEEDED + len(_OPTIONAL)}; use the software that wrote it"
        )
    values = read_row(fields, "a", _NUM_NEEDED, _NUM_NEEDED + len(_OPTIONAL))
    given = values[_NUM_NEEDED:]
    rest = [read(value) for value, (_, read) in zip(given, _OPTIONAL, strict=False)]
    rest += [default for default, _ in _OPTIONAL[len(given) :]]
    waited_us, priority, beam_width, place, text, length = rest
    return Arrival(
        read_id(values[0], "a"),
        read_integer(values[1], "a", 1, MAX_NUM_TOKENS),
        read_integer(values[2], "a", 1, MAX_NUM_TOKENS),
        waited_us,
        priority,
        beam_width,
        place,
        Likeness(text, length),
    )


def _drafts(flat: list[Any]) -> tuple[Drafts, ...]:
    if len(flat) % 4:
        raise RecordingError("n must hold a request, its drafts (all, kept) and its tokens in turn")
    return tuple(
        Drafts(
            read_id(flat[i], "n"),
            read_integer(flat[i + 1], "n", 1, MAX_NUM_DRAFTS),
            read_integer(flat[i + 2], "n", 0, flat[i + 1]),
            read_integer(flat[i + 3], "n", 0, MAX_NUM_DRAFTS + 1),
        )
        for i in range(0, len(flat), 4)
    )


def _growth(fields: Any) -> Growth:
    values = read_row(fields, "l", 3, 3)
    return Growth(read_id(values[0], "l"), _likeness(values[1], values[2], "l"))


def _moves(fields: Any) -> Moves:
    values = read_row(fields, "m", 2, 1 + MAX_NUM_ROWS)
    parents = [read_integer(value, "m", 0, MAX_NUM_ROWS - 1) for value in values[1:]]
    return Moves(read_id(values[0], "m"), tuple(parents))


def _likeness(number: Any, length: Any, name: str) -> Likeness:
    return Likeness(read_integer(number, name), read_integer(length, name, 0, MAX_NUM_TOKENS))


def _end(fields: Any) -> End:
    values = read_row(fields, "e", 2, 2)
    if not isinstance(values[1], str) or values[1] not in END_REASONS:
        raise RecordingError(f"e: unknown reason {shorten(values[1])}")
    return End(read_id(values[0], "e"), values[1])


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":")) + "\n"


def _load(line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        raise RecordingError("this is no JSON (damaged, or cut off)") from None
    if not isinstance(content, dict):
        raise RecordingError("a JSON object is expected")
    return content
