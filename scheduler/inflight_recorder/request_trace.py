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
import re
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from inflight_recorder.errors import RecordingError
from inflight_recorder.likeness import NO_LIKENESS, TOKEN_BYTES, Likeness, TextIndex
from inflight_recorder.text_book import TextBook
from inflight_recorder.values import MAX_TIME, shorten
from inflight_recorder.workload import MAX_NUM_JOBS, Job

MAX_ROW_BYTES = 2**22
"""A million tokens have 65,536 ids where a block has 16; an id has up to 20 digits."""

MAX_TOKENS = 2**20
"""Of a prompt, and of what is generated."""

MAX_NEW_TOKENS = 10**9
"""Of all requests together: some hours of prediction."""

MAX_HASH_TOKENS = 2**16
UNITS = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
"""Microseconds in each unit of time."""

_ID_BYTES = 8
_MIN_ID, _MAX_ID = -(2**63), 2**64 - 1
# A prompt is compared with a million texts before it, or eight million ids, and up to twice as
# many. Of larger traces the oldest are forgotten, which bounds the memory.
_INDEX_BLOCKS, _INDEX_BLOCK_TOKENS = 2**18, 16
_HASH_IDS = "hash_ids"


class Kind(NamedTuple):
    """One kind of trace: the columns of arrival, prompt and output, and what they count in.

    ``mark``: a column more that tells it from another kind with the same ones.
    """

    columns: tuple[str, str, str]
    unit: str = "s"
    hash_tokens: int = 512
    mark: str | None = None


KINDS = {
    "Bailian": Kind(("timestamp", "input_length", "output_length"), "s", 16, "chat_id"),
    "Mooncake": Kind(("timestamp", "input_length", "output_length"), "ms"),
    "Azure": Kind(("TIMESTAMP", "ContextTokens", "GeneratedTokens")),
    "BurstGPT": Kind(("Timestamp", "Request tokens", "Response tokens")),
    "Vidur": Kind(("arrived_at", "num_prefill_tokens", "num_decode_tokens")),
    "Splitwise": Kind(("arrival_timestamp", "prompt_size", "token_size")),
}


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What a file does not say itself; None: as its kind has it.

    ``columns``: of arrival, prompt and output. ``hash_tokens``: tokens of the block that an id
    stands for. ``rate``: requests a second that come at random (``seed``), instead of when the file
    says, which then need not say it. ``speed``: so many times as fast as the file says.
    """

    columns: Sequence[str] | None = None
    unit: str | None = None
    hash_tokens: int | None = None
    num_requests: int | None = None
    rate: float | None = None
    speed: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TracedRequests:
    """Jobs in order of arrival, the book of their texts, and how many had no tokens to run."""

    jobs: list[Job]
    book: TextBook | None
    num_left_out: int


def read_trace(path: Path, options: TraceOptions | None = None) -> TracedRequests:
    """Read a trace once, from its beginning.

    `RecordingError` names the line and the field of what cannot be. A row is in memory at a time,
    and some 300 bytes for each request (1 KB, and 8 for each id, where ids tell what prompts are).
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
    with file:
        lines = _Lines(file)
        collector = _Collector(options or TraceOptions())
        try:
            for row in _rows(lines):
                if not collector.add(row):
                    break
        except RecordingError as error:
            raise RecordingError(f"{path.name}, line {lines.number}: {error}") from None
    if not collector.prompts:
        raise RecordingError(f"{path.name} holds no request")
    return collector.finish()


class _Lines:
    """The lines of a file as text; ``number`` is that of the last one.

    A row of a CSV has several where its texts have line ends; `end_row` is told of each row.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._row_bytes = 0
        self.number = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._file.readline(MAX_ROW_BYTES + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self._row_bytes += len(line)
        if self._row_bytes > MAX_ROW_BYTES:
            raise RecordingError(f"the row is longer than {MAX_ROW_BYTES} bytes")
        try:
            return line.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise RecordingError(
                "this is no text: unpack a compressed file, as in --trace <(zcat FILE)"
            ) from None

    def end_row(self) -> None:
        """What comes next belongs to another row."""
        self._row_bytes = 0


def _rows(lines: _Lines) -> Iterator[Mapping[str, Any]]:
    """The columns of each request by name."""
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith(("{", "[")):
        for line in chain([first], lines):
            lines.end_row()
            if line.strip():
                yield _object(line)
        return
    csv.field_size_limit(MAX_ROW_BYTES)  # texts beside the lengths may have more than 131,072
    reader = csv.reader(chain([first], lines), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        for cells in reader:
            lines.end_row()
            if cells:
                yield dict(zip(header, cells, strict=False))
    except csv.Error as error:
        raise RecordingError(f"this is no CSV: {error}") from None


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
        arrival, prompt, output = options.columns
        kind = Kind((arrival, prompt, output))
    else:
        fitting = (
            kind
            for kind in KINDS.values()  # some are published without arrivals
            if all(name in row for name in (*kind.columns[1:], kind.mark) if name is not None)
        )
        found = next(fitting, None)
        if found is None:
            raise RecordingError(
                f"of no known trace are the columns {shorten(', '.join(row))}: name those of "
                "arrival, prompt tokens and generated tokens with --trace-columns"
            )
        kind = found
    return kind._replace(
        unit=options.unit or kind.unit, hash_tokens=options.hash_tokens or kind.hash_tokens
    )


@dataclass(slots=True)
class _Collector:
    """Takes the rows one by one."""

    options: TraceOptions
    kind: Kind | None = None
    times_us: array[int] = field(default_factory=lambda: array("q"))
    prompts: array[int] = field(default_factory=lambda: array("i"))
    outputs: array[int] = field(default_factory=lambda: array("i"))
    text_numbers: array[int] = field(default_factory=lambda: array("i"))  # -1: like no other
    num_left_out: int = 0
    num_new_tokens: int = 0
    texts: _Texts | None = None

    def add(self, row: Mapping[str, Any]) -> bool:
        """One request more; False when there are enough."""
        if self.kind is None:
            self.kind = _kind_of(row, self.options)
        arrival, prompt_column, output_column = self.kind.columns
        time_us = 0 if self.options.rate else _time_us(row, arrival, UNITS[self.kind.unit])
        prompt, output = _length(row, prompt_column), _length(row, output_column)
        if not prompt or not output:
            self.num_left_out += 1
            return True
        self.num_new_tokens += output
        if len(self.prompts) >= MAX_NUM_JOBS or self.num_new_tokens > MAX_NEW_TOKENS:
            raise RecordingError(
                f"more than {MAX_NUM_JOBS:,} requests, or {MAX_NEW_TOKENS:,} tokens to generate: "
                "take the first ones with --num-requests"
            )
        self.text_numbers.append(self._text_number(row, prompt, self.kind.hash_tokens))
        self.times_us.append(time_us)
        self.prompts.append(prompt)
        self.outputs.append(output)
        return len(self.prompts) != self.options.num_requests

    def _text_number(self, row: Mapping[str, Any], prompt_len: int, hash_tokens: int) -> int:
        ids = row.get(_HASH_IDS)
        if ids is None or ids == []:  # AIPerf takes both for a prompt like no other
            return -1
        if self.texts is None:
            self.texts = _Texts()
        return self.texts.add(_packed(ids, prompt_len, hash_tokens), prompt_len, hash_tokens)

    def finish(self) -> TracedRequests:
        """Everything that was read; the first one comes at 0."""
        places, times = range(len(self.prompts)), self.times_us
        if self.options.rate is not None:
            times = _random_times(self.options.rate, len(places), self.options.seed)
        first_us = 0 if self.options.rate is not None else min(times)
        jobs = []
        for place in sorted(places, key=times.__getitem__):
            output, number = self.outputs[place], self.text_numbers[place]
            jobs.append(
                Job(
                    int((times[place] - first_us) / self.options.speed),
                    self.prompts[place],
                    output,
                    output,
                    text_number=None if number < 0 else number,
                )
            )
        book = None if self.texts is None else self.texts.book
        return TracedRequests(jobs, book, self.num_left_out)


class _Texts:
    """The book of prompts that are told by the ids of their blocks."""

    def __init__(self) -> None:
        self.book = TextBook()
        self._index = TextIndex(_INDEX_BLOCKS, _INDEX_BLOCK_TOKENS)
        self._lengths = array("i")

    def add(self, packed: bytes, prompt_len: int, hash_tokens: int) -> int:
        """The number of a prompt: it begins as the longest one before it with the same ids."""
        number = len(self._lengths)
        self._lengths.append(prompt_len)
        found = self._index.add(b"", packed, number)
        num_ids = found.length * TOKEN_BYTES // _ID_BYTES
        if num_ids == 0:
            return self.book.add(NO_LIKENESS)
        length = min(num_ids * hash_tokens, prompt_len, self._lengths[found.number])
        return self.book.add(Likeness(found.number, length))


def _packed(ids: object, prompt_len: int, hash_tokens: int) -> bytes:
    """The ids of a prompt's blocks, the last of which may be a part of one."""
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise RecordingError(f"{_HASH_IDS}: a list of whole numbers is expected")
    if ids and not _MIN_ID <= min(ids) <= max(ids) <= _MAX_ID:
        raise RecordingError(f"{_HASH_IDS}: numbers of 64 bits are expected")
    if len(ids) != -(-prompt_len // hash_tokens):
        raise RecordingError(
            f"{_HASH_IDS} has {len(ids):,} ids for {prompt_len:,} tokens, which are "
            f"{-(-prompt_len // hash_tokens):,} blocks of {hash_tokens}: give the size of a block "
            "with --trace-block"
        )
    return struct.pack(f"{len(ids)}Q", *(each & _MAX_ID for each in ids))


def _value(row: Mapping[str, Any], name: str, what_then: str = "") -> Any:
    if row.get(name) is None:
        raise RecordingError(f"{shorten(name)} is missing{what_then}")
    return row[name]


def _length(row: Mapping[str, Any], name: str) -> int:
    """A number of tokens; also 374.0, as a table with gaps is written."""
    value = _value(row, name)
    try:
        number = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not 0 <= number <= MAX_TOKENS or number != int(number):
        raise RecordingError(
            f"{name} is {shorten(value)}: it must be a number of tokens from 0 to {MAX_TOKENS:,}"
        )
    return int(number)


def _time_us(row: Mapping[str, Any], name: str, unit_us: float) -> int:
    """A number in the unit of the trace, or a date (UTC, if it does not say)."""
    value = _value(row, name, ": name another with --trace-columns, or let them come at a --rate")
    time_us = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            time_us = float(value) * unit_us
        except (ValueError, OverflowError):
            time_us = _date_us(value)
    if not -MAX_TIME <= time_us <= MAX_TIME:  # also NaN
        raise RecordingError(f"{name} is {shorten(value)}: a time is expected, or a date")
    return int(time_us)


_DATE = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,12}))?(?:(Z)|([+-]\d\d:\d\d))?", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)


def _date_us(value: object) -> float:
    """Microseconds since 1970, NaN for what is no date."""
    match = _DATE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return math.nan
    day, clock, fraction, _, offset = match.groups()
    try:
        date = datetime.fromisoformat(f"{day}T{clock}{offset or '+00:00'}")
    except ValueError:
        return math.nan
    return (date - _EPOCH) // _MICROSECOND + int((fraction or "0").ljust(6, "0")[:6])


def _random_times(rate: float, count: int, seed: int) -> array[int]:
    """Arrivals at random (Poisson), ``rate`` a second, in microseconds."""
    rng, time_us, times = random.Random(seed), 0.0, array("q")
    for _ in range(count):
        time_us += rng.expovariate(rate) * 1e6
        times.append(int(time_us))
    return times
