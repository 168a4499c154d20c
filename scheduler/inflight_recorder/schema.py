"""The format of a recording: facts of scheduling as JSON lines, with no token and no text.

Scheduling is a pure function of its recorded inputs, so a recording holds the inputs (arrivals,
ends) and the decisions; reasons, blocks and states are derived by running the same rules again.
The first line is a `Header`, every other one an `Iteration`::

    {"inflight_recording": 2, "settings": {...}, "active": [{"request_id": 1, ...}], ...}
    {"i": 1, "t": 17, "d": 2150, "a": [{"request_id": 1, ...}], "s": {"c": [[1, 9]]}, "f": 61}
    {"i": 2, "t": 2190, "d": 803, "s": {"g": [1]}, "f": 61}
    {"i": 3, "t": 3002, "d": 799, "s": {"+": []}, "f": 61, "e": [[1, "cancelled"]]}

Which texts share blocks is told by hashes: for each full block the first 8 bytes of its key in the
prefix cache, a hash of all tokens up to its end under a random key of the server, which is not
recorded. Equal hashes are equal texts from the very beginning, and nothing else can be learnt.

Reading checks types and bounds; `Simulation` checks whether the recording *can have happened*.
"""

from __future__ import annotations

import marshal
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from inflight_recorder.settings import (
    ERROR,
    NOT_FINITE,
    RecordingError,
    Settings,
    StartState,
)
from inflight_scheduler.kv.prefix_cache import HASH_SIZE
from inflight_scheduler.planning.active_requests import DEFAULT_PRIORITY_SPAN
from inflight_scheduler.policies.micro_batch import ContextChunking, ContextChunkingPolicy
from inflight_scheduler.policies.scheduler import find_policy

FORMAT_VERSION: Final = 2

MAX_NUM_BLOCKS = 2**22
"""Blocks of a pool that can be rebuilt; a larger number in a recording is refused."""

MAX_NUM_REQUESTS = 2**16
"""Requests in flight at once, at most (the bound of ``max_batch_size``)."""

MAX_NUM_TOKENS = 2**24
"""Tokens of one request, at most (the bound of ``max_seq_len``)."""

MAX_NUM_GROUPS = 64
"""Groups of layers with block tables of their own, at most."""

_STATE_FIELDS, _ARRIVAL_FIELDS = 15, 10  # in a chunk, of `RequestState` and `Arrival`

MAX_TIME = 2**53
"""Microseconds; what a JSON number holds exactly everywhere."""

TOKEN_ENDS = frozenset({NOT_FINITE, "end_id", "stop_words"})
"""Ends that a token brings, in the order of the tokens; the others come after all tokens."""

BAD_ENDS = frozenset({NOT_FINITE, ERROR, "timed_out", "cancelled"})
"""Ends without the whole answer."""

Id = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0, le=MAX_NUM_TOKENS)]
Size = Annotated[int, Meta(ge=1, le=MAX_NUM_TOKENS)]
Time = Annotated[int, Meta(ge=0, le=MAX_TIME)]
TaskId = int  # unsigned, 64 bits; below 0 for adapters that have names
Pages = Annotated[int, Meta(ge=1, le=2**20)]
Priority = Annotated[float, Meta(ge=0, le=1)]
BeamWidth = Annotated[int, Meta(ge=1, le=1024)]
NumDrafts = Annotated[int, Meta(ge=0, le=2**12)]
BlockId = Annotated[int, Meta(ge=0, lt=MAX_NUM_BLOCKS)]
Text = Annotated[str, Meta(max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]
Reason = Literal["end_id", "stop_words", "not_finite", "error", "timed_out", "cancelled"]
Blocks = Annotated[tuple[BlockId, ...], Meta(max_length=MAX_NUM_BLOCKS)]
_Rows = Meta(max_length=MAX_NUM_REQUESTS)
_Ends = Meta(max_length=2 * MAX_NUM_REQUESTS)


class Chunk(NamedTuple):
    """At most ``num_tokens`` of the context of a request run: what is cached of them does not."""

    request_id: Id
    num_tokens: Size


class End(NamedTuple):
    """A request ended for another reason than its length, which needs no telling."""

    request_id: Id
    reason: Reason


class Growth(NamedTuple):
    """With block reuse: ``hashes`` of full blocks of a request, behind those told before, as soon
    as the prefix cache has looked for them or keeps them."""

    request_id: Id
    hashes: bytes


class BlocksBefore(NamedTuple):
    """``num_blocks`` of the text of a request are before something."""

    request_id: Id
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_NUM_TOKENS)]


class PartialMatch(NamedTuple):
    """So many tokens of the first block of a prompt that is not cached are cached in another."""

    request_id: Id
    num_tokens: Count


class Drafts(NamedTuple):
    """A request had ``num_drafts`` when it was decided, of which ``num_kept`` had room.

    ``num_gained`` tokens came of its step; 0 if it did not run, or not to the end of its context.
    """

    request_id: Id
    num_drafts: NumDrafts
    num_kept: NumDrafts
    num_gained: Annotated[int, Meta(ge=0, le=2**12 + 1)]


class BeamTrace(NamedTuple):
    """Since the decision before, the rows of a beam search went on from those of ``parents``."""

    request_id: Id
    parents: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1024)], ...], Meta(max_length=1024)]


class _Record(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What all objects of a recording share; a field that is not known may change decisions."""


class Arrival(_Record):
    """A request that was accepted.

    ``waited_us``: how long before the decision it had come. ``place`` is its index among the
    active ones, None for last. ``lora_task_id``: of its adapter, which takes ``lora_pages``.
    ``encoder_length``: tokens that an encoder reads for it.
    """

    request_id: Id
    prompt_len: Size
    max_new_tokens: Size
    waited_us: Time = 0
    priority: Priority = 0.5
    beam_width: BeamWidth = 1
    place: Annotated[int, Meta(ge=0, le=MAX_NUM_REQUESTS)] | None = None
    lora_task_id: TaskId | None = None
    lora_pages: Pages = 1
    encoder_length: Count = 0


class WindowTable(NamedTuple):
    """Of a group of layers with a window: how many blocks a request has given back, and those it
    held, in token order."""

    num_behind: Annotated[int, Meta(ge=0, le=MAX_NUM_TOKENS)]
    blocks: Blocks


class RequestState(_Record):
    """Where an active request stood when the recording began.

    ``prompt_len`` includes what a pause has turned into prompt and ``max_new_tokens`` counts from
    there, as in `LlmRequest`. ``num_computed`` are the tokens of the context that were computed.
    ``pending_place``: the last token is that of a step which ran, at that place among its
    tokens, from 1; 0 if no step ran for the request. ``num_blocks`` it held, where drafts had taken
    more than its tokens need; else 0. ``is_encoded``: its encoder had run. ``hashes``: with block
    reuse, those told of it before, and ``table`` the blocks that it held, in token order.
    ``windows``: what it held in groups with a window.
    """

    request_id: Id
    orig_prompt_len: Size
    prompt_len: Size
    num_tokens: Size
    max_new_tokens: Count
    num_computed: Count
    num_pauses: Count
    priority: Priority = 0.5
    beam_width: BeamWidth = 1
    lora_task_id: TaskId | None = None
    lora_pages: Pages = 1
    encoder_length: Count = 0
    is_encoded: bool = False
    pending_place: Annotated[int, Meta(ge=0, le=MAX_NUM_REQUESTS)] = 0
    num_blocks: Annotated[int, Meta(ge=0, le=MAX_NUM_BLOCKS)] = 0
    hashes: bytes = b""
    table: Blocks = ()
    windows: Annotated[tuple[WindowTable, ...], Meta(max_length=MAX_NUM_GROUPS)] = ()

    def __post_init__(self) -> None:
        if not self.orig_prompt_len <= self.prompt_len <= self.num_tokens:
            raise ValueError("the lengths of a request contradict one another")
        num_left = self.max_new_tokens - (self.num_tokens - self.prompt_len)
        if num_left < (0 if self.pending_place else 1) or self.num_computed > self.prompt_len:
            raise ValueError("a request has nothing left to generate, or too much computed")
        if (self.num_computed > 0 or self.is_encoded) and (
            self.is_encoded != (self.encoder_length > 0)
        ):
            raise ValueError("a request has started, and its encoder has not")
        if (self.num_tokens > self.prompt_len) != (self.num_computed == self.prompt_len):
            raise ValueError("a request generates before its context is computed")


class CacheStart(_Record):
    """With block reuse: what was cached when the recording began.

    ``kept`` are the blocks whose content is kept, with the ``hashes`` of that, and ``idle`` those
    of them that no request held, the one to be given up first in front. ``groups`` are those of the
    kept blocks, if there are several. ``snapshots`` (hashes), ``held`` and ``partings``: see
    `StateSnapshots`.
    """

    kept: Blocks = ()
    hashes: bytes = b""
    idle: Blocks = ()
    groups: Annotated[
        tuple[Annotated[int, Meta(ge=0, lt=MAX_NUM_GROUPS)], ...], Meta(max_length=MAX_NUM_BLOCKS)
    ] = ()
    snapshots: bytes = b""
    held: Annotated[tuple[BlocksBefore, ...], _Rows] = ()
    partings: Annotated[tuple[BlocksBefore, ...], _Rows] = ()


class ChunkingRecord(_Record):
    """`ContextChunking` as a recording has it."""

    policy: Literal["first_come_first_served", "equal_progress", "force_chunk", "pipeline_aware"]
    unit_size: Size
    max_context_length: Size | None = None
    num_stages: Size = 1


class SettingsRecord(_Record):
    """`Settings` as a recording has them, with their bounds."""

    policy: Text
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_NUM_BLOCKS)]
    tokens_per_block: Annotated[int, Meta(ge=1, le=2**16)]
    max_batch_size: Annotated[int, Meta(ge=1, le=MAX_NUM_REQUESTS)]
    max_num_tokens: Size | None = None
    chunking: ChunkingRecord | None = None
    enable_reuse: bool = False
    may_copy_blocks: bool = False
    scheduler_class: Text | None = None
    is_overlapped: bool = False
    priority_span: Annotated[float, Meta(ge=0)] = DEFAULT_PRIORITY_SPAN
    max_drafting_batch: Annotated[int, Meta(ge=0)] | None = None
    num_adapter_pages: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    windows: Annotated[tuple[Size | None, ...], Meta(min_length=1, max_length=MAX_NUM_GROUPS)] = (
        None,
    )
    max_drafts: Count = 0
    num_cross_blocks: Annotated[int, Meta(ge=0, le=MAX_NUM_BLOCKS)] = 0
    num_snapshots: Annotated[int, Meta(ge=1, le=2**16)] | None = None

    def __post_init__(self) -> None:
        find_policy(self.policy)  # an error if the recording server had one of its own
        if None in self.windows[1:]:
            raise ValueError("windows: only the first group of layers may see all")

    @classmethod
    def of(cls, settings: Settings) -> SettingsRecord:
        """The record of ``settings``; `RecordingError` for numbers that no recording may have."""
        content = asdict(settings)
        content["policy"] = settings.policy_name
        if settings.chunking is not None:
            content["chunking"]["policy"] = settings.chunking.policy.name.lower()
        return convert(content, cls)

    def settings(self) -> Settings:
        """The way back; `RecordingError` for a chunking that contradicts itself."""
        content = msgspec.structs.asdict(self)
        content["policy"] = find_policy(self.policy)
        chunking = self.chunking
        if chunking is not None:
            policy = ContextChunkingPolicy[chunking.policy.upper()]
            try:
                content["chunking"] = ContextChunking(
                    policy,
                    chunking.unit_size,
                    chunking.max_context_length,
                    chunking.num_stages,
                )
            except ValueError as error:
                raise RecordingError(f"chunking: {error}") from None
        return Settings(**content)


class HeaderVersion(Struct):
    """What the first line of any version says; an older or newer one may have any other fields."""

    inflight_recording: Any = None
    software: Any = None


class Header(_Record):
    """What the first line says. ``active``: the requests in flight at the start, in order.

    ``is_running``: then a step ran whose tokens, if it drew any, had not come (overlapped loop).
    ``cache``: with block reuse, what was cached then; None if the recording begins with the server.
    """

    version: Literal[2] = field(name="inflight_recording")
    settings: SettingsRecord
    software: Text = ""
    started: Text = ""
    active: Annotated[tuple[RequestState, ...], _Rows] = ()
    is_running: bool = False
    cache: CacheStart | None = None

    def __post_init__(self) -> None:
        if self.is_running and not self.settings.is_overlapped:
            raise ValueError("only in an overlapped loop a step runs at the start")
        if self.cache is not None and not self.settings.enable_reuse:
            raise ValueError("what was cached is told without block reuse")


class Decision(_Record):
    """Which requests ran, in order, and which were paused.

    In a line ``generation`` is told when it changes: the whole list, or the ``changes`` of the one
    before (see `apply_changes`). A reader puts the whole list there in any case.
    """

    context: Annotated[tuple[Chunk, ...], _Rows] = field(default=(), name="c")
    generation: Annotated[tuple[Id, ...], _Rows] = field(default=(), name="g")
    changes: Annotated[tuple[int, ...], _Ends] | None = field(default=None, name="+")
    paused: Annotated[tuple[Id, ...], _Rows] = field(default=(), name="p")

    @property
    def num_requests(self) -> int:
        """Requests that ran."""
        return len(self.context) + len(self.generation)


class Iteration(_Record):
    """One pass of the loop: arrivals, then the decision, the step, then the ends.

    ``decision`` is None when there was none (deciding failed, or requests ended beside it), and
    ``has_failed`` tells of a step that brought no tokens, ``has_lost`` (overlapped) of the step
    before, which took this one with it. ``is_by_default``: the decision of the user's scheduler was
    refused, and the default made this one. ``drafts`` are of all requests with drafts, and
    ``is_settled`` (overlapped) says that no step ran on after this iteration. ``beams``: how rows
    went on before the decision. ``has_forgotten`` (overlapped): a request had left whose logits
    were not finite in the step before, so nothing stayed cached. ``growths`` hold for all of
    the iteration. ``partial_matches`` are those that deciding found,
    where they are not what they were, and ``late_matches`` those that planning found instead.
    Times are microseconds, ``start_us`` since the recording was started; ``num_free_blocks`` is
    after the decision was carried out.
    """

    number: Annotated[int, Meta(ge=1, le=MAX_TIME)] = field(name="i")
    start_us: Time = field(name="t")
    step_us: Time = field(name="d")
    num_free_blocks: Id = field(name="f")
    arrivals: Annotated[tuple[Arrival, ...], _Rows] = field(default=(), name="a")
    decision: Decision | None = field(default=None, name="s")
    ends: Annotated[tuple[End, ...], _Ends] = field(default=(), name="e")
    growths: Annotated[tuple[Growth, ...], _Ends] = field(default=(), name="l")
    partial_matches: Annotated[tuple[PartialMatch, ...], _Rows] = field(default=(), name="h")
    late_matches: Annotated[tuple[PartialMatch, ...], _Rows] = field(default=(), name="k")
    drafts: Annotated[tuple[Drafts, ...], _Rows] = field(default=(), name="n")
    beams: Annotated[tuple[BeamTrace, ...], _Rows] = field(default=(), name="m")
    has_failed: bool = field(default=False, name="y")
    has_lost: bool = field(default=False, name="z")
    is_by_default: bool = field(default=False, name="b")
    is_settled: bool = field(default=False, name="u")
    has_forgotten: bool = field(default=False, name="w")

    @property
    def reasons(self) -> dict[int, str]:
        """Why requests ended, by their ids."""
        return dict(self.ends)


_T = TypeVar("_T")


def convert(content: object, kind: type[_T]) -> _T:
    """``content`` checked as a ``kind``; `RecordingError` names field and bound."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise RecordingError(_explain(error)) from None


def decode_header(line: bytes) -> Header:
    """The first line; `RecordingError` for another format, and for what cannot be."""
    found = _decode(line, _decode_version)
    if found.inflight_recording is None:
        raise RecordingError("this is no recording of inflight: the first line is no header")
    if found.inflight_recording != FORMAT_VERSION:
        raise RecordingError(
            f"the recording has format version {found.inflight_recording!r:.40}, this inflight "
            f"reads {FORMAT_VERSION}; use the release that wrote it ({found.software!r:.40})"
        )
    return _decode(line, _decode_header)


def decode_iteration(line: bytes) -> Iteration:
    """Any other line; `RecordingError` names the field and what it must be."""
    return _decode(line, _decode_iteration)


_decode_version = msgspec.json.Decoder(HeaderVersion).decode
_decode_header = msgspec.json.Decoder(Header).decode
_decode_iteration = msgspec.json.Decoder(Iteration).decode


def _decode(line: bytes, decode: Callable[[bytes], _T]) -> _T:
    try:
        return decode(line)
    except msgspec.MsgspecError as error:
        raise RecordingError(_explain(error)) from None
    except UnicodeDecodeError:
        raise RecordingError("this is no JSON: some bytes are no text (damaged?)") from None
    except RecursionError:
        raise RecordingError("this is no recording: it is nested too deeply") from None


def _explain(error: msgspec.MsgspecError) -> str:
    """The message of msgspec, with the field in front."""
    message, _, path = str(error).partition(" - at `$")
    if "unknown field" in message:
        message += ", which this inflight does not know: use the one that wrote the recording"
    if not isinstance(error, msgspec.ValidationError):
        message = f"this is no JSON (damaged, or cut off): {message}"
    return f"{path[:-1].lstrip('.')}: {message}" if path else message


def format_recording(
    settings: Settings,
    software: str,
    started: str,
    start: StartState | None,
    packed: Sequence[bytes],
) -> Iterator[str]:
    """A recording, line by line; ``start`` None: from the start of the server."""
    yield format_header(settings, software, started, start)
    yield from map(format_iteration, packed)


def format_header(
    settings: Settings, software: str, started: str, start: StartState | None = None
) -> str:
    """The first line."""
    cache, tables = None, dict[int, tuple[int, ...]]()
    if start is not None and start.cache is not None:
        kept, tables = start.cache.kept, start.cache.tables
        hashes = array("Q", [start.cache.hashes[block] for block in kept]).tobytes()
        pairs = iter(array("i", start.cache.groups))
        groups = dict(zip(pairs, pairs, strict=True))
        kept_groups = tuple([groups.get(block, 0) for block in kept]) if groups else ()
        known = start.cache.snapshots
        cache = CacheStart(
            tuple(kept),
            hashes,
            tuple(start.cache.idle),
            kept_groups,
            b"".join([key[:HASH_SIZE] for key in known.keys]),
            tuple(BlocksBefore(*each) for each in known.held),
            tuple(BlocksBefore(*each) for each in known.partings),
        )
    active: list[RequestState] = []
    if start is not None:
        states = zip(_rows(marshal.loads(start.requests), _STATE_FIELDS), start.hashes, strict=True)
        windows = dict(marshal.loads(start.windows))
        active = [
            RequestState(
                *(*row, own, tables.get(row[0], ()), _window_tables(windows.get(row[0], ())))
            )
            for row, own in states
        ]
    header = Header(
        FORMAT_VERSION,
        SettingsRecord.of(settings),
        software,
        started,
        tuple(active),
        start is not None and start.is_running,
        cache,
    )
    return msgspec.json.encode(header).decode() + "\n"


def _window_tables(parts: Sequence[tuple[int, list[int]]]) -> tuple[WindowTable, ...]:
    return tuple(WindowTable(num_behind, tuple(blocks)) for num_behind, blocks in parts)


def format_iteration(packed: bytes) -> str:
    """The line of one iteration, which `recorder.pack_iteration` has packed."""
    return msgspec.json.encode(unpack_iteration(packed)).decode() + "\n"


def apply_changes(ids: tuple[int, ...], changes: Iterable[int]) -> tuple[int, ...]:
    """``changes`` hold in turn a place and the id that was put there, or the complement (below 0)
    of the place that was taken out."""
    result = list(ids)
    rest = iter(changes)
    try:
        for place in rest:
            if place < 0:
                del result[~place]
            elif place > len(result):
                raise IndexError
            else:
                result.insert(place, next(rest))
    except (IndexError, StopIteration):
        raise RecordingError("+: a place behind the end of the list, or without an id") from None
    return tuple(result)


def unpack_iteration(packed: bytes) -> Iteration:
    """What `recorder.pack_iteration` was given, with names."""
    number, start_us, step_us, num_free, arrivals, decided, *rest = marshal.loads(packed)
    decision = None
    if decided is not None:
        context, told, paused = decided
        is_whole = isinstance(told, bytes)
        generation = tuple(array("Q", told)) if is_whole else ()
        changes = None if is_whole else told or ()
        decision = Decision(_named(Chunk, context), generation, changes, paused)
    kinds = (End, Growth, PartialMatch, PartialMatch, Drafts, BeamTrace)
    return Iteration(
        number,
        start_us,
        step_us,
        num_free,
        tuple([Arrival(*row) for row in _rows(arrivals, _ARRIVAL_FIELDS)]),
        decision,
        *[*map(_named, kinds, rest), *rest[len(kinds) :]],
    )


def summarise(packed: Iterable[bytes]) -> list[dict[str, Any]]:
    """Iterations for who looks on: plain values under the keys of their lines, without blocks.

    Arrivals ``a`` are ``[id, prompt_len, max_new_tokens, waited_us, priority]``, and ``x`` counts
    the tokens that drafts brought beyond one for each step. Those of iterations in which nothing
    changed, one behind the other, are one: ``i`` is the number of the last, ``n`` how many they
    are and ``d`` the time from the start of the first, ``t``, to the end of the last.
    """
    found: list[dict[str, Any]] = []
    for each in packed:
        number, start_us, step_us, num_free, *rest = marshal.loads(each)
        changes, has_decided = _changes(*rest), rest[1] is not None
        last = found[-1] if found else {}
        if has_decided and not changes and "n" in last:
            span = start_us + step_us - last["t"]
            last |= {"i": number, "d": span, "f": num_free, "n": last["n"] + 1}
            continue
        row = {"i": number, "t": start_us, "d": step_us, "f": num_free}
        found.append({**row, **(changes or {"n": 1})})
    return found


def _changes(arrivals: Any, decided: Any, ends: Any, *rest: Any) -> dict[str, Any]:
    """What was another thing than one more token for each request."""
    context, told, paused = decided or ((), (), ())
    is_whole = isinstance(told, bytes)
    changes = {
        "a": [list(own[:5]) for own in _rows(arrivals, _ARRIVAL_FIELDS)],
        "e": [list(own) for own in _rows(ends, 2)],
        "c": [list(own) for own in _rows(context, 2)],
        "+": [] if is_whole else list(told or ()),
        "p": list(paused),
        "x": sum(max(own[3] - 1, 0) for own in _rows(rest[3], 4)),
    }
    changes = {key: value for key, value in changes.items() if value}
    return {**changes, "g": list(array("Q", told))} if is_whole else changes


def standing_requests(start: StartState) -> list[list[int]]:
    """``[id, prompt_len, tokens so far, tokens at most]`` of each request in flight then."""
    rows = _rows(marshal.loads(start.requests), _STATE_FIELDS)
    return [[row[0], row[1], row[3], row[2] + row[4]] for row in rows]


def _named(kind: Any, fields: tuple[Any, ...]) -> Any:
    """A ``kind`` for each of the rows."""
    return tuple(map(kind._make, _rows(fields, len(kind._fields))))


def _rows(fields: tuple[Any, ...], width: int) -> Iterator[tuple[Any, ...]]:
    """``fields``, so many for each row."""
    return zip(*[iter(fields)] * width, strict=True)
