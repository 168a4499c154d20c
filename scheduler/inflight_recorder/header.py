"""The first line of a recording: settings, who was active, and what was cached.

::

    {"inflight_recording": 1, "software": "0.1.0", "started": "2026-01-31T12:00:00Z",
     "settings": {...}, "active": [[id, ...], ...], "running": true, "cache": {...}}

A large cache has lines of its own behind it (`cache_lines`). Everything there can change decisions,
so what is not known here is refused, not passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from inflight_recorder.cache_lines import join_cache, split_cache
from inflight_recorder.errors import RecordingError
from inflight_recorder.records import (
    MAX_NUM_BLOCKS,
    MAX_NUM_REQUESTS,
    MAX_NUM_TEXTS,
    MAX_NUM_TOKENS,
    CacheStart,
    KeptBlock,
    RequestState,
    Settings,
    TextPart,
)
from inflight_recorder.values import (
    read_flag,
    read_id,
    read_integer,
    read_list,
    read_member,
    read_number,
    read_priority,
    read_row,
    read_text,
    shorten,
)
from inflight_scheduler.planning.active_requests import DEFAULT_PRIORITY_SPAN
from inflight_scheduler.policies.micro_batch import ContextChunking, ContextChunkingPolicy
from inflight_scheduler.policies.scheduler import CapacitySchedulerPolicy

FORMAT_VERSION = 1
_HEADER_KEYS = frozenset(
    ("inflight_recording", "software", "started", "settings", "active", "running", "cache")
)
_CACHE_KEYS = frozenset(("texts", "parts", "of", "tables", "kept", "idle", "starts"))


@dataclass(frozen=True, slots=True)
class Header:
    """What the first line says. ``active``: who was in flight at the start, in order.

    ``is_running``: then a step ran whose tokens, if it drew any, had not come (overlapped loop).
    ``cache``: with block reuse, what was cached then; None if the recording begins with the server.
    """

    settings: Settings
    software: str = ""
    started: str = ""
    active: tuple[RequestState, ...] = ()
    is_running: bool = False
    cache: CacheStart | None = None


def header_fields(header: Header) -> dict[str, Any]:
    """The header as JSON values."""
    content: dict[str, Any] = {
        "inflight_recording": FORMAT_VERSION,
        "software": header.software,
        "started": header.started,
        "settings": settings_fields(header.settings),
        "active": [list(state) for state in header.active],
    }
    if header.is_running:
        content["running"] = True
    if header.cache is not None:
        content["cache"] = _cache_fields(header.cache)
    return content


def header_lines(header: Header) -> Iterator[dict[str, Any]]:
    """The first line, and those that belong to it."""
    return split_cache(header_fields(header))


def read_header(content: dict[str, Any], next_content: Callable[[], dict[str, Any]]) -> Header:
    """The way back; ``next_content`` reads a further line."""
    if "inflight_recording" not in content:
        raise RecordingError("this is no recording of inflight: the first line is no header")
    version = content["inflight_recording"]
    if version != FORMAT_VERSION or type(version) is not int:
        software = shorten(content.get("software"))
        raise RecordingError(
            f"the recording has format version {shorten(version)}, this software reads "
            f"{FORMAT_VERSION}; use the software that wrote it ({software})"
        )
    _refuse_unknown(content, _HEADER_KEYS, "key of the header")
    states = read_list(content, "active", MAX_NUM_REQUESTS)
    active = tuple(_read_state(fields) for fields in states)
    settings = _read_settings(content.get("settings"))
    is_running = read_flag(content, "running")
    if is_running and not settings.is_overlapped:
        raise RecordingError("running: only in an overlapped loop does a step run at the start")
    cache: CacheStart | None = None
    if "cache" in content:
        fields = join_cache(content["cache"], next_content, settings.num_blocks)
        cache = _read_cache(fields, settings, active)
    return Header(
        settings=settings,
        software=read_text(content.get("software", "")),
        started=read_text(content.get("started", "")),
        active=active,
        is_running=is_running,
        cache=cache,
    )


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
        "is_overlapped": settings.is_overlapped,
        "priority_span": settings.priority_span,
        "max_drafting_batch": settings.max_drafting_batch,
    }


def _read_settings(content: Any) -> Settings:
    if not isinstance(content, dict):
        raise RecordingError("the header has no settings")
    _refuse_unknown(content, frozenset(Settings.__slots__), "setting")
    scheduler_class = content.get("scheduler_class")

    def integer(name: str, maximum: int) -> int:
        return read_integer(content.get(name), name, 1, maximum)

    return Settings(
        policy=read_member(CapacitySchedulerPolicy, "policy", content.get("policy")),
        num_blocks=integer("num_blocks", MAX_NUM_BLOCKS),
        tokens_per_block=integer("tokens_per_block", 2**16),
        max_batch_size=integer("max_batch_size", MAX_NUM_REQUESTS),
        max_num_tokens=None
        if content.get("max_num_tokens") is None
        else integer("max_num_tokens", MAX_NUM_TOKENS),
        chunking=_read_chunking(content.get("chunking")),
        enable_reuse=read_flag(content, "enable_reuse"),
        may_copy_blocks=read_flag(content, "may_copy_blocks"),
        scheduler_class=None if scheduler_class is None else read_text(scheduler_class),
        is_overlapped=read_flag(content, "is_overlapped"),
        priority_span=read_number(
            content.get("priority_span", DEFAULT_PRIORITY_SPAN), "priority_span"
        ),
        max_drafting_batch=None
        if content.get("max_drafting_batch") is None
        else read_integer(content["max_drafting_batch"], "max_drafting_batch"),
    )


def check_settings(settings: Settings) -> Settings:
    """``settings`` itself; `RecordingError` for numbers that no recording may have."""
    return _read_settings(settings_fields(settings))


def _read_chunking(fields: Any) -> ContextChunking | None:
    if fields is None:
        return None
    policy, unit_size, longest = read_row(fields, "chunking", 3, 3)
    try:
        return ContextChunking(
            read_member(ContextChunkingPolicy, "chunking", policy),
            read_integer(unit_size, "chunking", 1, MAX_NUM_TOKENS),
            None if longest is None else read_integer(longest, "chunking", 1, MAX_NUM_TOKENS),
        )
    except ValueError as error:
        raise RecordingError(f"chunking: {error}") from None


def _read_state(fields: Any) -> RequestState:
    values = [*read_row(fields, "active", 9, 11), 0, 0]
    pending_place = read_integer(values[9], "active", 0, MAX_NUM_REQUESTS)
    numbers = [read_integer(value, "active", 0, MAX_NUM_TOKENS) for value in values[1:7]]
    orig_prompt_len, prompt_len, num_tokens, max_new_tokens, num_computed, num_pauses = numbers
    if not 1 <= orig_prompt_len <= prompt_len <= num_tokens:
        raise RecordingError("active: the lengths of a request contradict one another")
    num_left = max_new_tokens - (num_tokens - prompt_len)
    if num_left < (0 if pending_place else 1) or num_computed > prompt_len:
        raise RecordingError("active: a request has nothing left to generate, or too much computed")
    if (num_tokens > prompt_len) != (num_computed == prompt_len):
        raise RecordingError("active: a request generates before its context is computed")
    return RequestState(
        read_id(values[0], "active"),
        orig_prompt_len,
        prompt_len,
        num_tokens,
        max_new_tokens,
        num_computed,
        num_pauses,
        read_priority(values[7]),
        read_integer(values[8], "active", 1, 1024),
        pending_place,
        read_integer(values[10], "active", 0, MAX_NUM_BLOCKS),
    )


def _cache_fields(cache: CacheStart) -> dict[str, Any]:
    return {
        "texts": cache.num_texts,
        "parts": [number for part in cache.parts for number in part],
        "of": cache.text_numbers,
        "tables": cache.tables,
        "kept": [number for block in cache.kept for number in block],
        "idle": cache.idle,
        "starts": cache.beginnings,
    }


def _read_cache(content: Any, settings: Settings, active: tuple[RequestState, ...]) -> CacheStart:
    """Numbers within their bounds; whether they fit together is checked when it is rebuilt."""
    if not isinstance(content, dict) or not settings.enable_reuse:
        raise RecordingError("cache: an object is expected, and block reuse in the settings")
    _refuse_unknown(content, _CACHE_KEYS, "key of cache")
    num_blocks = settings.num_blocks
    num_texts = read_integer(content.get("texts"), "texts", 0, MAX_NUM_TEXTS)

    def flat(key: str, *bounds: int) -> list[tuple[int, ...]]:
        """A list of rows written without brackets; each column has its bound."""
        width = len(bounds)
        values = read_list(content, key, width * MAX_NUM_TEXTS)
        if len(values) % width:
            raise RecordingError(f"{key} must hold rows of {width} numbers")
        return [
            tuple(
                read_integer(value, key, 0, bound)
                for value, bound in zip(values[k : k + width], bounds, strict=True)
            )
            for k in range(0, len(values), width)
        ]

    def blocks(values: Any, key: str) -> tuple[int, ...]:
        return tuple(
            read_integer(value, key, 0, num_blocks - 1)
            for value in read_row(values, key, 0, num_blocks)
        )

    last_text = max(num_texts - 1, 0)
    cache = CacheStart(
        num_texts=num_texts,
        parts=tuple(
            TextPart(*row)
            for row in flat("parts", last_text, last_text, MAX_NUM_TOKENS, MAX_NUM_TOKENS)
        ),
        text_numbers=tuple(number for (number,) in flat("of", last_text)),
        tables=tuple(
            blocks(table, "tables") for table in read_list(content, "tables", MAX_NUM_REQUESTS)
        ),
        kept=tuple(KeptBlock(*row) for row in flat("kept", num_blocks - 1, last_text, num_blocks)),
        idle=blocks(content.get("idle", []), "idle"),
        beginnings=blocks(content.get("starts", []), "starts"),
    )
    if not len(active) == len(cache.tables) == len(cache.text_numbers):
        raise RecordingError("cache: tables and of must have an entry for each active request")
    return cache


def _refuse_unknown(content: dict[str, Any], known: frozenset[str], what: str) -> None:
    unknown = sorted(set(content) - known)
    if unknown:
        raise RecordingError(
            f"the {what} {shorten(unknown[0])} is unknown here; use the software that wrote it"
        )
