"""Request traces as people publish them: when requests came, and how long they were.

One request a line, JSON objects or CSV with a header; which column says what is known for the
traces of `KINDS`. Where prompts are told by ids of their blocks (``hash_ids``), as Mooncake does,
they share what the ids say. Nothing else in a file is looked at.
"""

from __future__ import annotations

import csv
import json
import math
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec

from inflight_recorder.schema import MAX_TIME
from inflight_recorder.settings import RecordingError
from inflight_recorder.workload import MAX_NUM_JOBS, Job, Workload, random_arrivals

MAX_ROW_BYTES = 2**22
"""A million tokens have 65,536 ids where a block has 16; an id has up to 20 digits."""

MAX_TOKENS = 2**20
"""Of a prompt, and of what is generated."""

MAX_NEW_TOKENS = 10**9
"""Of all requests together: some hours of prediction."""

_Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)

UNITS = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
"""Microseconds in each unit of time."""

_MIN_ID, _MAX_ID = -(2**63), 2**64 - 1
_HASH_IDS = "hash_ids"


class Kind(NamedTuple):
    """One kind of trace: the columns of arrival, prompt and output, and what they count in."""

    columns: Sequence[str]
    unit: str = "s"
    hash_tokens: int = 512


KINDS = (
    Kind(("timestamp", "input_length", "output_length"), "ms"),  # Mooncake
    Kind(("TIMESTAMP", "ContextTokens", "GeneratedTokens")),  # Azure
)


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What a file does not say itself; None: as its kind has it.

    ``columns``: of arrival, prompt and output. ``hash_tokens``: tokens of the block that an id
    stands for. ``rate``: requests a second that come at random (``seed``), instead of when the file
    says, which then need not say it. ``speed``: so many times as fast as the file says.
    ``tokens_per_block``: those of the blocks that the jobs tell.
    """

    columns: Sequence[str] | None = None
    unit: str | None = None
    hash_tokens: int | None = None
    num_requests: int | None = None
    rate: float | None = None
    speed: float = 1.0
    seed: int = 0
    tokens_per_block: int = 64


def read_trace(path: Path, options: TraceOptions) -> Workload:
    """Read a trace once, from its beginning.

    `RecordingError` names the line and the field of what cannot be. A row is in memory at a time,
    and some 300 bytes for each request (and 8 for each block, where ids tell what prompts are).
    """
    collector = _Collector(options)
    try:
        file = path.open("rb")
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
    with file:
        rows = _Rows(file)
        try:
            for row in rows:
                if not collector.add(row):
                    break
        except RecordingError as error:
            raise RecordingError(f"{path.name}, line {rows.line_number}: {error}") from None
    if not collector.jobs:
        raise RecordingError(f"{path.name} holds no request")
    return collector.finish()


class _Rows:
    """The columns of each request by name, from JSON lines or CSV."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.line_number = 0

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        csv.field_size_limit(MAX_ROW_BYTES)  # texts beside the lengths may have more than 131,072
        lines = self._lines()
        first = list(islice(lines, 1))
        if first and first[0].lstrip().startswith(("{", "[")):
            yield from map(_object, chain(first, lines))
            return
        try:
            for row in csv.DictReader(chain(first, lines), strict=True, skipinitialspace=True):
                # Without cells that have no column; a column without a cell is None.
                yield {name.strip(): value and value.strip() for name, value in row.items() if name}
        except csv.Error as error:
            raise RecordingError(f"this is no CSV: {error}") from None

    def _lines(self) -> Iterator[str]:
        """Those that are not empty."""
        while line := self._file.readline(MAX_ROW_BYTES + 1):
            self.line_number += 1
            if len(line) > MAX_ROW_BYTES:
                raise RecordingError(f"the row is longer than {MAX_ROW_BYTES} bytes")
            try:
                text = line.decode("utf-8-sig" if self.line_number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise RecordingError(
                    "this is no text: unpack a compressed file, as in --trace <(zcat FILE)"
                ) from None
            if text.strip():
                yield text


def _object(line: str) -> Mapping[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise RecordingError("one JSON object a line is expected, as `jq -c '.[]'` writes them")
    return content


def _kind_of(row: Mapping[str, Any], options: TraceOptions) -> Kind:
    """How to read the rows that are like ``row``, the first one."""
    if options.columns is not None:
        kind = Kind(options.columns)
    else:  # some are published without arrivals
        known = [kind for kind in KINDS if all(name in row for name in kind.columns[1:])]
        if not known:
            raise RecordingError(
                f"of no known trace are the columns {_shorten(', '.join(row))}: name those of "
                "arrival, prompt tokens and generated tokens with --trace-columns"
            )
        kind = known[0]
    return kind._replace(
        unit=options.unit or kind.unit, hash_tokens=options.hash_tokens or kind.hash_tokens
    )


@dataclass(slots=True)
class _Collector:
    """Takes the rows one by one; ``jobs`` arrive when the file says."""

    options: TraceOptions
    kind: Kind | None = None
    jobs: list[Job] = field(default_factory=list)
    num_left_out: int = 0
    num_new_tokens: int = 0

    def add(self, row: Mapping[str, Any]) -> bool:
        """One request more; False when there are enough."""
        if self.kind is None:
            self.kind = _kind_of(row, self.options)
        arrival, prompt_column, output_column = self.kind.columns
        time_us = 0 if self.options.rate else _time_us(row, arrival, UNITS[self.kind.unit])
        prompt_len, output_len = _length(row, prompt_column), _length(row, output_column)
        if not prompt_len or not output_len:
            self.num_left_out += 1
            return True
        self.num_new_tokens += output_len
        if len(self.jobs) >= MAX_NUM_JOBS or self.num_new_tokens > MAX_NEW_TOKENS:
            raise RecordingError(
                f"more than {MAX_NUM_JOBS:,} requests, or {MAX_NEW_TOKENS:,} tokens to generate: "
                "take the first ones with --num-requests"
            )
        hashes = self._hashes(row, prompt_len, self.kind.hash_tokens)
        self.jobs.append(Job(time_us, prompt_len, output_len, output_len, hashes=hashes))
        return len(self.jobs) != self.options.num_requests

    def _hashes(self, row: Mapping[str, Any], prompt_len: int, hash_tokens: int) -> bytes:
        ids = row.get(_HASH_IDS)
        if ids is None or ids == []:  # AIPerf takes both for a prompt like no other
            return b""
        _check_ids(ids, prompt_len, hash_tokens)
        return hash_blocks(ids, prompt_len, hash_tokens, self.options.tokens_per_block)

    def finish(self) -> Workload:
        """Everything that was read; the first one comes at 0."""
        options, jobs = self.options, self.jobs
        first_us = 0
        if options.rate is not None:
            times = random_arrivals(random.Random(options.seed), options.rate, len(jobs))
            for job, time_us in zip(jobs, times, strict=True):
                job.arrival_us = time_us
        else:
            first_us = min(job.arrival_us for job in jobs)
        for job in jobs:
            job.arrival_us = int((job.arrival_us - first_us) / options.speed)
        jobs.sort(key=lambda job: job.arrival_us)
        return Workload(jobs, num_left_out=self.num_left_out)


def _check_ids(ids: object, prompt_len: int, hash_tokens: int) -> None:
    """`RecordingError` unless these are the ids of a prompt's blocks.

    The last of them may be of a part of a block.
    """
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise RecordingError(f"{_HASH_IDS}: a list of whole numbers is expected")
    if not _MIN_ID <= min(ids) <= max(ids) <= _MAX_ID:
        raise RecordingError(f"{_HASH_IDS}: numbers of 64 bits are expected")
    if len(ids) != -(-prompt_len // hash_tokens):
        raise RecordingError(
            f"{_HASH_IDS} has {len(ids):,} ids for {prompt_len:,} tokens, which are "
            f"{-(-prompt_len // hash_tokens):,} blocks of {hash_tokens}: give the size of a block "
            "with --trace-block"
        )


def hash_blocks(
    ids: Sequence[int], prompt_len: int, hash_tokens: int, tokens_per_block: int
) -> bytes:
    """The hashes (8 bytes each) of the full blocks of a prompt with these ``ids``.

    Those of two prompts are equal where both have the same ids up to the end of the block.
    """
    hashes = []
    parent, last = b"", -1
    for end in range(tokens_per_block, prompt_len + 1, tokens_per_block):
        while last < (end - 1) // hash_tokens:
            last += 1
            id_bytes = (ids[last] & _MAX_ID).to_bytes(8, "little")
            parent = blake2b(parent + id_bytes, digest_size=8).digest()
            number = int.from_bytes(parent, "little")
        hashes.append((number + end) & _MAX_ID)
    return array("Q", hashes).tobytes()


def _value(row: Mapping[str, Any], name: str, what_then: str = "") -> Any:
    if row.get(name) is None:
        raise RecordingError(f"{_shorten(name)} is missing{what_then}")
    return row[name]


def _length(row: Mapping[str, Any], name: str) -> int:
    """A number of tokens; also 374.0, as a table with gaps is written."""
    value = _value(row, name)
    try:
        return msgspec.convert(value, _Length, strict=False)
    except msgspec.ValidationError:
        raise RecordingError(
            f"{name} is {_shorten(value)}: it must be a number of tokens from 0 to {MAX_TOKENS:,}"
        ) from None


def _time_us(row: Mapping[str, Any], name: str, unit_us: float) -> int:
    """A number in the unit of the trace, or a date (UTC, if it does not say)."""
    value = _value(row, name, ": name another with --trace-columns, or let them come at a --rate")
    try:
        time = msgspec.convert(value, float | datetime, strict=False)
    except msgspec.ValidationError:
        time = math.nan
    if isinstance(time, datetime):
        date = time if time.tzinfo is not None else time.replace(tzinfo=timezone.utc)
        time_us: float = (date - _EPOCH) // _MICROSECOND
    else:
        time_us = time * unit_us
    if not -MAX_TIME <= time_us <= MAX_TIME:  # also NaN
        raise RecordingError(f"{name} is {_shorten(value)}: a time is expected, or a date")
    return int(time_us)


def _shorten(value: Any) -> str:
    """``value`` as an error shows it: some 40 characters."""
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
