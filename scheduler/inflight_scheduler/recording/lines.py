"""Recordings as JSON lines: a header, the state at the start, then one line per iteration.

::

    {"inflight_recording": 1, "software": "0.1.0", "started": "2026-01-31T12:00:00Z",
     "settings": {...}, "active": [[id, ...], ...]}
    {"i": 1, "t": 17, "d": 2150, "a": [[1, 9, 64]], "c": [1, 9], "f": 61}
    {"i": 2, "t": 2190, "d": 803, "g": [1], "f": 61}
    {"i": 3, "t": 3002, "d": 799, "f": 61, "e": [[1, "cancelled"]]}

``i`` number, ``t`` start and ``d`` duration of the step in microseconds, ``a`` arrivals, ``c``
context chunks (id, tokens, id, tokens ...), ``p`` paused ids, ``f`` free blocks, ``e`` ends. Who
generates is told when it changes: ``g`` the whole list, or ``-`` who left it and ``+`` who joined
(place, id, place, id ...). ``x`` 1: no decision. ``y`` 1: the step failed. ``l``: with
block reuse, who goes on like which text (id, text, tokens).

Everything read is checked for type and bounds here; whether it *can have happened* is checked by
whoever runs it again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from inflight_scheduler.chunking import ContextChunking, ContextChunkingPolicy
from inflight_scheduler.recording.errors import RecordingError
from inflight_scheduler.recording.likeness import Likeness
from inflight_scheduler.recording.records import (
    END_REASONS,
    MAX_NUM_BLOCKS,
    MAX_NUM_REQUESTS,
    MAX_NUM_TOKENS,
    Arrival,
    Chunk,
    Decision,
    End,
    Growth,
    Iteration,
    RequestState,
    Settings,
)
from inflight_scheduler.scheduler import CapacitySchedulerPolicy

_Enum = TypeVar("_Enum", bound=Enum)

FORMAT_VERSION = 1
MAX_LINE_BYTES = 16 * 2**20

_MAX_ID = 2**64 - 1
# Behind id, prompt and output length: waited, priority, beams, place, likeness (two numbers). The
# first value, which nothing equals, ends the search for defaults.
_ARRIVAL_DEFAULTS = (object(), 0, 0.5, 1, None, 0, 0)
_MAX_TIME = 2**53  # microseconds; what a JSON number holds exactly everywhere
_ITERATION_KEYS = frozenset("itdacg-+pfexyl")


@dataclass(frozen=True, slots=True)
class Header:
    """What the first line says. ``active``: who was in flight at the start, in order."""

    settings: Settings
    software: str = ""
    started: str = ""
    active: tuple[RequestState, ...] = ()


@dataclass(slots=True)
class LineWriter:
    """Turns records into lines; it remembers who generated, to write only what changed."""

    _generation: tuple[int, ...] = field(default=())

    def header(self, header: Header) -> str:
        """The first line."""
        content: dict[str, Any] = {
            "inflight_recording": FORMAT_VERSION,
            "software": header.software,
            "started": header.started,
            "settings": settings_fields(header.settings),
            "active": [list(state) for state in header.active],
        }
        return _dump(content)

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
                content.update(_generation_fields(self._generation, decision.generation))
                self._generation = decision.generation
            if decision.paused:
                content["p"] = decision.paused
        content["f"] = iteration.num_free_blocks
        if iteration.ends:
            content["e"] = iteration.ends
        if iteration.has_failed:
            content["y"] = 1
        if iteration.growths:
            content["l"] = [[growth.request_id, *growth.likeness] for growth in iteration.growths]
        return _dump(content)


class LineReader:
    """The way back; `RecordingError` says what is wrong, without the line number."""

    def __init__(self) -> None:
        self._generation: tuple[int, ...] = ()
        self._number = 0
        self._start_us = 0

    def header(self, line: str) -> Header:
        """Read the first line."""
        content = _load(line)
        if "inflight_recording" not in content:
            raise RecordingError("this is no recording of inflight: the first line is no header")
        version = content["inflight_recording"]
        if version != FORMAT_VERSION or isinstance(version, bool):
            software = _short(content.get("software"))
            raise RecordingError(
                f"the recording has format version {_short(version)}, this software reads "
                f"{FORMAT_VERSION}; use the software that wrote it ({software})"
            )
        active = tuple(_state(fields) for fields in _list(content, "active", MAX_NUM_REQUESTS))
        return Header(
            settings=_settings(content.get("settings")),
            software=_text(content.get("software", "")),
            started=_text(content.get("started", "")),
            active=active,
        )

    def iteration(self, line: str) -> Iteration:
        """Read one of the other lines; they must come in order."""
        content = _load(line)
        if not _ITERATION_KEYS.issuperset(content):
            unknown = _short(sorted(set(content) - _ITERATION_KEYS)[0])
            raise RecordingError(f"unknown key {unknown}")
        number = _integer(content.get("i"), "i", 1, _MAX_TIME)
        if self._number and number != self._number + 1:
            raise RecordingError(f"iteration {number} follows iteration {self._number}")
        start_us = _integer(content.get("t"), "t", self._start_us, _MAX_TIME)
        iteration = Iteration(
            number=number,
            start_us=start_us,
            step_us=_integer(content.get("d"), "d", 0, _MAX_TIME),
            arrivals=tuple(_arrival(fields) for fields in _list(content, "a", MAX_NUM_REQUESTS)),
            decision=None if "x" in content else self._decision(content),
            num_free_blocks=_integer(content.get("f"), "f", 0, _MAX_ID),
            ends=tuple(_end(fields) for fields in _list(content, "e", 2 * MAX_NUM_REQUESTS)),
            has_failed="y" in content,
            growths=tuple(_growth(fields) for fields in _list(content, "l", 2 * MAX_NUM_REQUESTS)),
        )
        self._number, self._start_us = number, start_us
        return iteration

    def _decision(self, content: dict[str, Any]) -> Decision:
        flat = _list(content, "c", 2 * MAX_NUM_REQUESTS)
        if len(flat) % 2:
            raise RecordingError("c must hold pairs of a request and its tokens")
        context = tuple(
            Chunk(_id(flat[i], "c"), _integer(flat[i + 1], "c", 1, MAX_NUM_TOKENS))
            for i in range(0, len(flat), 2)
        )
        if "g" in content:
            self._generation = _ids(content, "g")
        elif "-" in content or "+" in content:
            self._generation = _changed(
                self._generation,
                frozenset(_ids(content, "-")),
                _list(content, "+", 2 * MAX_NUM_REQUESTS),
            )
        return Decision(context, self._generation, _ids(content, "p"))


def settings_fields(settings: Settings) -> dict[str, Any]:
    """The settings as JSON values."""
    chunking = settings.chunking
    return {
        "policy": settings.policy.name.lower(),
        "num_blocks": settings.num_blocks,
        "tokens_per_block": settings.tokens_per_block,
        "max_batch_size": settings.max_batch_size,
        "max_num_tokens": settings.max_num_tokens,
        "chunking": None
        if chunking is None
        else [chunking.policy.name.lower(), chunking.unit_size, chunking.max_context_length],
        "enable_reuse": settings.enable_reuse,
        "may_copy_blocks": settings.may_copy_blocks,
        "scheduler_class": settings.scheduler_class,
    }


def _generation_fields(before: Sequence[int], after: Sequence[int]) -> dict[str, Any]:
    """The change if telling it is shorter than telling the list."""
    old, new = set(before), set(after)
    joined = [x for place, i in enumerate(after) if i not in old for x in (place, i)]
    left = [i for i in before if i not in new]
    if len(joined) + len(left) < len(after) and (
        _insert([i for i in before if i in new], joined) == list(after)
    ):
        return {key: value for key, value in (("-", left), ("+", joined)) if value}
    return {"g": after}


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


def _changed(before: Sequence[int], left: frozenset[int], joined: list[Any]) -> tuple[int, ...]:
    if len(joined) % 2:
        raise RecordingError("+ must hold pairs of a place and a request")
    pairs: list[int] = []
    for index in range(0, len(joined), 2):
        lowest = pairs[-2] + 1 if pairs else 0
        pairs.append(_integer(joined[index], "+", lowest, MAX_NUM_REQUESTS))
        pairs.append(_id(joined[index + 1], "+"))
    return tuple(_insert([i for i in before if i not in left], pairs))


def _arrival_fields(arrival: Arrival) -> list[Any]:
    fields = [*arrival[:-1], *arrival.likeness]
    while fields[-1] == _ARRIVAL_DEFAULTS[len(fields) - 4]:  # shorter without defaults
        fields.pop()
    return fields


def _arrival(fields: Any) -> Arrival:
    values = _row(fields, "a", 3, 9)
    rest = [*values[3:], *_ARRIVAL_DEFAULTS[len(values) - 2 :]]
    place = None if rest[3] is None else _integer(rest[3], "a", 0, MAX_NUM_REQUESTS)
    return Arrival(
        _id(values[0], "a"),
        _integer(values[1], "a", 1, MAX_NUM_TOKENS),
        _integer(values[2], "a", 1, MAX_NUM_TOKENS),
        _integer(rest[0], "a", 0, _MAX_TIME),
        _priority(rest[1]),
        _integer(rest[2], "a", 1, 1024),
        place,
        _likeness(rest[4], rest[5], "a"),
    )


def _state(fields: Any) -> RequestState:
    values = _row(fields, "active", 9, 9)
    numbers = [_integer(value, "active", 0, MAX_NUM_TOKENS) for value in values[1:7]]
    orig_prompt_len, prompt_len, num_tokens, max_new_tokens, num_computed, num_pauses = numbers
    if not 1 <= orig_prompt_len <= prompt_len <= num_tokens:
        raise RecordingError("active: the lengths of a request contradict one another")
    num_left = max_new_tokens - (num_tokens - prompt_len)
    if num_left < 1 or num_computed > prompt_len:
        raise RecordingError("active: a request has nothing left to generate, or too much computed")
    if (num_tokens > prompt_len) != (num_computed == prompt_len):
        raise RecordingError("active: a request generates before its context is computed")
    return RequestState(
        _id(values[0], "active"),
        orig_prompt_len,
        prompt_len,
        num_tokens,
        max_new_tokens,
        num_computed,
        num_pauses,
        _priority(values[7]),
        _integer(values[8], "active", 1, 1024),
    )


def _growth(fields: Any) -> Growth:
    values = _row(fields, "l", 3, 3)
    return Growth(_id(values[0], "l"), _likeness(values[1], values[2], "l"))


def _likeness(number: Any, length: Any, name: str) -> Likeness:
    return Likeness(_integer(number, name), _integer(length, name, 0, MAX_NUM_TOKENS))


def _end(fields: Any) -> End:
    values = _row(fields, "e", 2, 2)
    if not isinstance(values[1], str) or values[1] not in END_REASONS:
        raise RecordingError(f"e: unknown reason {_short(values[1])}")
    return End(_id(values[0], "e"), values[1])


def _settings(content: Any) -> Settings:
    if not isinstance(content, dict):
        raise RecordingError("the header has no settings")
    unknown = sorted(set(content) - set(Settings.__slots__))
    if unknown:
        raise RecordingError(
            f"the setting {_short(unknown[0])} is unknown here; use the software that wrote it"
        )
    scheduler_class = content.get("scheduler_class")

    def integer(name: str, maximum: int) -> int:
        return _integer(content.get(name), name, 1, maximum)

    return Settings(
        policy=_member(CapacitySchedulerPolicy, "policy", content.get("policy")),
        num_blocks=integer("num_blocks", MAX_NUM_BLOCKS),
        tokens_per_block=integer("tokens_per_block", 2**16),
        max_batch_size=integer("max_batch_size", MAX_NUM_REQUESTS),
        max_num_tokens=None
        if content.get("max_num_tokens") is None
        else integer("max_num_tokens", MAX_NUM_TOKENS),
        chunking=_chunking(content.get("chunking")),
        enable_reuse=_flag(content, "enable_reuse"),
        may_copy_blocks=_flag(content, "may_copy_blocks"),
        scheduler_class=None if scheduler_class is None else _text(scheduler_class),
    )


def check_settings(settings: Settings) -> Settings:
    """``settings`` itself; `RecordingError` for numbers that no recording may have."""
    return _settings(settings_fields(settings))


def _chunking(fields: Any) -> ContextChunking | None:
    if fields is None:
        return None
    policy, unit_size, longest = _row(fields, "chunking", 3, 3)
    try:
        return ContextChunking(
            _member(ContextChunkingPolicy, "chunking", policy),
            _integer(unit_size, "chunking", 1, MAX_NUM_TOKENS),
            None if longest is None else _integer(longest, "chunking", 1, MAX_NUM_TOKENS),
        )
    except ValueError as error:
        raise RecordingError(f"chunking: {error}") from None


def _member(enum: type[_Enum], name: str, value: Any) -> _Enum:
    members = {member.name.lower(): member for member in enum}
    if not isinstance(value, str) or value not in members:
        raise RecordingError(f"{name} is {_short(value)}: it must be one of {', '.join(members)}")
    return members[value]


def _flag(content: dict[str, Any], name: str) -> bool:
    value = content.get(name, False)
    if not isinstance(value, bool):
        raise RecordingError(f"{name}: true or false is expected, not {_short(value)}")
    return value


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


def _row(fields: Any, name: str, minimum: int, maximum: int) -> list[Any]:
    if not isinstance(fields, list) or not minimum <= len(fields) <= maximum:
        raise RecordingError(f"{name}: lists of {minimum} to {maximum} values are expected")
    return fields


def _list(content: dict[str, Any], key: str, max_length: int) -> list[Any]:
    value = content.get(key, [])
    if not isinstance(value, list) or len(value) > max_length:
        raise RecordingError(f"{key} must be a list of at most {max_length} values")
    return value


def _ids(content: dict[str, Any], key: str) -> tuple[int, ...]:
    return tuple([_id(value, key) for value in _list(content, key, MAX_NUM_REQUESTS)])


def _id(value: Any, name: str) -> int:
    return _integer(value, name, 0, _MAX_ID)


def _integer(value: Any, name: str, minimum: int = 0, maximum: int = _MAX_ID) -> int:
    if type(value) is not int:
        raise RecordingError(f"{name}: a whole number is expected, not {_short(value)}")
    if not minimum <= value <= maximum:
        raise RecordingError(f"{name} is {value}: it must be between {minimum} and {maximum}")
    return value


def _priority(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise RecordingError(f"a priority is {_short(value)}: it must be between 0 and 1")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise RecordingError(f"a text is expected, not {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
