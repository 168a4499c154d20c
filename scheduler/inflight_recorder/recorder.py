"""The flight recorder: notes every decision as it is made, in memory and, if asked, in a file.

It runs on the thread of the scheduler and must not cost: what did not change is not looked at, and
nothing is formatted or written here. The calls of one iteration, in order::

    arrived(request) ...                     requests that were accepted
    withdrawn(request)                       behind its arrival, if it was not after all
    decided(active, context, ...)            between deciding and carrying out
    carried_out(num_free_blocks)             after carrying out
    settled(active)                          if no step runs on (overlapped loop); before ended()
    failed()                                 if the step brought no tokens
    lost()                                   if the step before brought none (overlapped loop)
    forgot()                                 if what that one wrote emptied the cache
    ended(request, error) ...                requests that ended, for whatever reason
    finish_iteration()                       the record is complete

The last iterations are kept in a ring of chunks. A chunk begins with the state of all active
requests and, with block reuse, of the cache (some 15 bytes per block of the pool), so it can be
replayed without those before it; the oldest is dropped when there are too many. However many
chunks that are, their iterations take at most 16 x 2 MiB, or 16 x 576 bytes for each active
request where that is more (see `CHUNK_BYTES`), and the states some 60 bytes for each request and
chunk.

With block reuse decisions depend on which texts share blocks. The recorder notes the first bytes of
the keys that the prefix cache computes for full blocks anyway, never a token (see `schema`). What
is cached of a part of a block cannot be told so: it is noted as it was found.
"""

from __future__ import annotations

import marshal
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

from inflight_recorder.settings import ERROR, NOT_FINITE, Settings, StartState
from inflight_scheduler.beam_search import BeamStep
from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.kv.prefix_cache import HASH_SIZE
from inflight_scheduler.planning.active_requests import ActiveRequests
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import FinishReason

CHUNK_ITERATIONS = 512
CHUNK_BYTES = 2**21
REQUEST_BYTES = 576
"""A chunk ends at either: so many iterations, or so many bytes of them, or so many bytes for each
active request where that is more."""

NUM_CHUNKS = 16
"""The ring holds so many chunks. From `MANY_REQUESTS` on it holds four, each as long as a quarter
of these: noting where each request stands takes more than a microsecond, and is held as long as the
chunk."""

MANY_REQUESTS = 1024

_OBJECT_BYTES = 48  # of the object that holds an iteration
_MARSHAL_VERSION = 2  # the last one that does not look for objects it has seen before

_Step: TypeAlias = tuple[tuple[int, ...], Sequence[LlmRequest]]
"""Its contexts (id, tokens, id, ...), and the requests that generate."""


@dataclass(slots=True)
class RingChunk:
    """A part of the ring, which can be replayed without those before it.

    Everything is held as bytes: they are small, their size is known, and the garbage collector, a
    pause of which stops every request, does not look into them. ``size``: it is as long as so many
    of the shortest.
    """

    start: StartState
    size: int
    max_iterations: int
    max_bytes: int
    num_bytes: int = 0
    packed: list[bytes] = field(default_factory=list)

    def add(self, iteration: bytes) -> None:
        """One more, which `pack_iteration` has made; the first one must tell all that generate."""
        self.num_bytes += len(iteration) + _OBJECT_BYTES
        self.packed.append(iteration)

    @property
    def is_full(self) -> bool:
        """True when the next iteration needs another chunk."""
        return len(self.packed) >= self.max_iterations or self.num_bytes >= self.max_bytes


def pack_iteration(fields: tuple[Any, ...]) -> bytes:
    """``fields`` are those of an `Iteration`, in its order.

    Of each list the fields of all entries, one after another. The decision, if there is one, is its
    context chunks in such a list, the requests that generate (None for those before, packed ids, or
    changes as `RankedGenerations.changes_since` tells them), and the paused ids.
    """
    return marshal.dumps(fields, _MARSHAL_VERSION)


class RecordingSink(Protocol):
    """Where iterations go besides the ring (`RecordingFile`). Called on the scheduler's thread."""

    def begin(self, settings: Settings, software: str, started: str) -> None:
        """The recording starts, with no request active."""

    def add(self, iteration: bytes) -> None:
        """One more, packed (see `pack_iteration`); returns at once."""

    def close(self) -> None:
        """No more will come."""


class FlightRecorder:
    """Records the decisions of one scheduler; see the module for the order of calls."""

    def __init__(
        self,
        settings: Settings,
        block_manager: BlockManager,
        *,
        software: str = "",
        sink: RecordingSink | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``clock`` counts nanoseconds."""
        self.settings = settings
        self._block_manager = block_manager
        self._software = software
        self._sink = sink
        self._clock = clock
        self._start_ns = clock()
        self._started = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._ring: deque[RingChunk] = deque()
        self._number = 0
        self._arrivals: list[LlmRequest] = []
        self._came_ns: dict[int, int] = {}
        self._ends: list[tuple[int, str]] = []
        self._hashes: dict[int, bytes] = {}  # of active requests, as told (block reuse)
        self._growths: list[tuple[int, bytes]] = []
        self._told_matches: dict[int, int] = {}  # partial ones, of active requests; else 0
        self._matches: tuple[int, ...] = ()
        self._late_matches: tuple[int, ...] = ()
        self._starting: Sequence[LlmRequest] = ()
        self._contexts: list[LlmRequest] = []  # with block reuse: those that may learn their keys
        self._context: tuple[int, ...] | None = None  # id, tokens, id, ... if there is a decision
        self._paused: tuple[int, ...] = ()
        self._places: dict[int, int] = {}
        self._generation: Sequence[LlmRequest] = ()
        self._told: bytes | tuple[int, ...] | None = None  # generating requests; None: as before
        self._must_tell_all = True  # of them, in the next iteration with a decision
        self._num_free_blocks = settings.num_blocks
        self._decided_ns = 0
        self._has_failed = self._has_lost = self._is_settled = self._has_forgotten = False
        self._drafting: list[tuple[LlmRequest, int, int, int]] = []  # (see `_with_drafts`)
        self._has_drafted = False  # some request, ever: blocks do not follow from tokens any more
        self._is_by_default = False
        self._searches: dict[int, tuple[LlmRequest, BeamStep | None]] = {}  # and the step told last
        self._beams: tuple[Any, ...] = ()
        self._running: _Step | None = None  # overlapped: the step whose tokens come next
        self._is_searching = False  # its tokens come before the next decision
        if sink is not None:
            sink.begin(settings, software, self._started)

    def arrived(self, request: LlmRequest, came_ns: int | None = None) -> None:
        """``request`` is active from now on; it came at ``came_ns`` on the recorder's clock."""
        self._arrivals.append(request)
        if request.beams is not None:
            self._searches[request.request_id] = request, request.beams.step
        if came_ns is not None:
            self._came_ns[request.request_id] = came_ns

    def withdrawn(self, request: LlmRequest) -> None:
        """Nothing is recorded of ``request``: it has just arrived, or was about to."""
        self._arrivals = [each for each in self._arrivals if each is not request]
        self._searches.pop(request.request_id, None)
        self._came_ns.pop(request.request_id, None)

    def decided(
        self,
        active_requests: Sequence[LlmRequest],
        context_requests: Sequence[LlmRequest],
        generation_requests: Sequence[LlmRequest],
        paused_requests: Sequence[LlmRequest],
        *,
        is_by_default: bool = False,
    ) -> None:
        """A decision, before it is carried out.

        ``is_by_default``: that of the user's scheduler was refused.
        """
        self._decided_ns = self._clock()
        self._is_by_default = is_by_default
        if self._ends:
            self._note_early_ends()
        self._beams = self._take_beams() if self._searches else ()
        if self._is_searching:
            self._running = None
        heads = (*context_requests, *generation_requests[:1])  # all generate with as many beams
        self._is_searching = any(request.beams is not None for request in heads)
        if not self._ring or self._ring[-1].is_full:
            self._open_chunk(active_requests)
        if self._arrivals:
            self._note_places(active_requests)
        if self.settings.enable_reuse:
            self._note_blocks(active_requests, context_requests, paused_requests)
        if self._must_tell_all or self._generation is not generation_requests:
            self._note_generation(active_requests, generation_requests)
        if not isinstance(active_requests, ActiveRequests) or active_requests.num_with_drafts:
            self._drafting = _with_drafts(active_requests)
            self._has_drafted = self._has_drafted or bool(self._drafting)
        self._context = flat([(r.request_id, r.context_chunk_size) for r in context_requests])
        self._paused = tuple([request.request_id for request in paused_requests])

    def carried_out(self, num_free_blocks: int) -> None:
        """What the decision has left of the free blocks."""
        self._num_free_blocks = num_free_blocks
        if self._starting:  # pauses may have changed what they found
            self._late_matches = self._take_matches(self._starting)
            self._starting = ()

    def settled(self, active_requests: Sequence[LlmRequest]) -> None:
        """No step runs on: all tokens are there when this iteration ends.

        Requests that those end are still among ``active_requests``, as they are in a replay.
        """
        if self._ends:
            self._decided_ns = self._clock()
            self._note_early_ends()
        if self._arrivals:  # maybe nothing is decided in this iteration
            self._note_places(active_requests)
        self._is_settled = True

    def failed(self) -> None:
        """The step that was decided brought no tokens."""
        self._has_failed = True

    def lost(self) -> None:
        """The step before the one that was decided brought no tokens, and took this one with it."""
        self._has_lost = True

    def forgot(self) -> None:
        """Logits of the step before were not finite, of a request that had left: nothing stays
        cached."""
        self._has_forgotten = True

    def ended(self, request: LlmRequest, error: str = "") -> None:
        """``request`` is not active any more, and has given its blocks back.

        The text of an error is not recorded.
        """
        request_id = request.request_id
        self._searches.pop(request_id, None)
        if request_id in self._hashes:
            # Also of a prompt that was not computed to its end: it may be, under other settings.
            num_blocks = request.prompt_len // self.settings.tokens_per_block
            self._tell_blocks(request, max(num_blocks, len(request.block_keys)))
            del self._hashes[request_id]
            self._told_matches.pop(request_id, None)
        if error:
            is_number = request.tokens[-1] >= 0
            self._ends.append((request_id, ERROR if is_number else NOT_FINITE))
        elif request.finish_reason is not FinishReason.LENGTH:
            self._ends.append((request_id, request.finish_reason.name.lower()))

    def finish_iteration(self) -> None:
        """Close the record; nothing happens if nothing happened."""
        has_run = self._running is not None and any(self._running)
        if has_run and self._context is None and not self._is_settled:
            self.settled(())  # no request was left to decide about
        is_silent = self._context is None and not self._arrivals and not self._ends
        if is_silent and not self._is_settled:
            self._running = None
            return
        decided_ns = self._decided_ns
        if self._context is None:
            decided_ns = self._clock()
            if self.settings.enable_reuse:
                self._register()
        for request in self._contexts:  # the cache has computed some of their keys by now
            if request.request_id in self._hashes:
                self._tell_blocks(request, len(request.block_keys))
        self._contexts = []
        has_ended = self._has_failed or self._has_lost or self._is_settled
        is_running = self.settings.is_overlapped and not has_ended and self._context is not None
        self._append(decided_ns)
        self._running = (self._context or (), self._generation) if is_running else None
        self._context, self._paused = None, ()

    def lines(self) -> Iterator[str]:
        """The ring as a recording, line by line; needs msgspec.

        Call it on the thread that records; the lines may be taken on another one.
        """
        from inflight_recorder.schema import format_recording

        packed = [iteration for chunk in self._ring for iteration in chunk.packed]
        start = None if self._number == len(packed) else self._ring[0].start
        return format_recording(self.settings, self._software, self._started, start, packed)

    @property
    def identity(self) -> str:
        """A new one for each recorder, since each counts its iterations from the start."""
        return f"{self._start_ns:x}"

    @property
    def now_us(self) -> int:
        """Microseconds since the recording was started, as its iterations tell them."""
        return (self._clock() - self._start_ns) // 1000

    @property
    def num_iterations(self) -> int:
        """The number of the last iteration."""
        return self._number

    def recent(self, number: int | None, most: int) -> tuple[StartState | None, list[bytes]]:
        """The iterations behind ``number``, packed, with None before them.

        If it is None, or too many came since: the last chunks that hold at most ``most`` of them
        (at least one chunk), with the state that they start from. Call it on the thread that
        records.
        """
        chunks: list[RingChunk] = []
        for chunk in reversed(self._ring):
            if chunks and sum(len(each.packed) for each in chunks) + len(chunk.packed) > most:
                break
            chunks.insert(0, chunk)
        packed = [iteration for chunk in chunks for iteration in chunk.packed]
        if number is not None and 0 <= self._number - number <= len(packed):
            return None, packed[len(packed) - (self._number - number) :]
        return chunks[0].start if chunks else None, packed

    def close(self) -> None:
        """Close the sink."""
        if self._sink is not None:
            self._sink.close()

    def _note_places(self, active_requests: Sequence[LlmRequest]) -> None:
        """Where the arrivals stand, if not all at the end; they are recorded in that order."""
        arrivals = self._arrivals
        tail = active_requests[len(active_requests) - len(arrivals) :]
        if all(one is other for one, other in zip(tail, arrivals, strict=False)):
            self._places = {}
            return
        new_ids = {request.request_id for request in arrivals}
        self._places = {
            request.request_id: place
            for place, request in enumerate(active_requests)
            if request.request_id in new_ids
        }
        # Each is inserted behind those before it.
        arrivals.sort(key=lambda request: self._places[request.request_id])

    def _note_generation(
        self, active_requests: Sequence[LlmRequest], generation: Sequence[LlmRequest]
    ) -> None:
        """The requests that generate, if those are others than before."""
        if isinstance(active_requests, ActiveRequests) and generation is active_requests.generation:
            changes = active_requests.generation_changes(self._generation)
            must_tell_all = self._must_tell_all or self._told is not None  # if that was not noted
            is_known = changes is not None and not must_tell_all
            self._told = changes if is_known else active_requests.generation_ids
        # Comparing two lists of the same objects is some nanoseconds per entry; ids are not.
        elif self._must_tell_all or list(self._generation) != list(generation):
            self._told = array("Q", [request.request_id for request in generation]).tobytes()
        self._generation = generation
        self._must_tell_all = False

    def _note_blocks(
        self,
        active_requests: Sequence[LlmRequest],
        context_requests: Sequence[LlmRequest],
        paused_requests: Sequence[LlmRequest],
    ) -> None:
        """With block reuse: what the texts are, and what was found of parts of blocks."""
        self._register()
        for request in paused_requests:
            self._tell_blocks(request, request.num_tokens // self.settings.tokens_per_block)
        fresh = active_requests
        if isinstance(active_requests, ActiveRequests):
            fresh = active_requests.fresh
        self._contexts = [*fresh, *context_requests]
        if self.settings.may_copy_blocks:
            self._matches = self._take_matches(fresh) if fresh else ()
            self._starting = [r for r in context_requests if r.is_first_context_chunk]

    def _register(self) -> None:
        """The arrivals are active from now on, but for those that have ended already."""
        ended_ids = {request_id for request_id, _ in self._ends}
        for request in self._arrivals:
            if request.request_id not in ended_ids:
                self._hashes.setdefault(request.request_id, b"")

    def _tell_blocks(self, request: LlmRequest, num_blocks: int) -> None:
        """What the first blocks of a text are, where that is not told yet.

        Only blocks of which the cache has computed the keys, or computes them next.
        """
        told = self._hashes[request.request_id]
        num_told = len(told) // HASH_SIZE
        if num_blocks > num_told:
            hashes = self._block_manager.block_hashes(request, num_told, num_blocks)
            self._growths.append((request.request_id, hashes))
            self._hashes[request.request_id] = told + hashes

    def _take_matches(self, requests: Sequence[LlmRequest]) -> tuple[int, ...]:
        """Partial matches that are not what was told: id, tokens, id, ..."""
        told, tokens_per_block = self._told_matches, self.settings.tokens_per_block
        found: list[int] = []
        for request in requests:
            if request.prefix_match is not None:
                num_tokens = request.prefix_match[1].num_tokens % tokens_per_block
                if num_tokens != told.get(request.request_id, 0):
                    told[request.request_id] = num_tokens
                    found += (request.request_id, num_tokens)
        return tuple(found)

    def _take_beams(self) -> tuple[Any, ...]:
        """How beam searches have gone on since this was asked last, of those that hold rows."""
        moved: list[Any] = []
        for request_id, (request, seen) in self._searches.items():
            assert request.beams is not None
            step = request.beams.step
            if step is not None and step is not seen and not request.is_finished:
                moved += (request_id, step.parents)
            self._searches[request_id] = request, step
        return tuple(moved)

    def _note_early_ends(self) -> None:
        """Requests that ended between two decisions: a record of its own, without a decision."""
        ended_ids = {request_id for request_id, _ in self._ends}
        arrivals = self._arrivals
        self._arrivals = [r for r in arrivals if r.request_id in ended_ids]
        comes_later = self._has_lost, self._has_forgotten  # they ended before that
        self._has_lost = self._has_forgotten = False
        self._append(self._decided_ns)
        self._has_lost, self._has_forgotten = comes_later
        self._arrivals = [r for r in arrivals if r.request_id not in ended_ids]

    def _append(self, decided_ns: int) -> None:
        if not self._ring:
            self._open_chunk(())
        self._number += 1
        has_decision = self._context is not None
        iteration = pack_iteration(
            (
                self._number,
                (decided_ns - self._start_ns) // 1000,
                (self._clock() - decided_ns) // 1000,
                self._num_free_blocks,
                flat([self._arrival(request, decided_ns) for request in self._arrivals]),
                (self._context, self._told, self._paused) if has_decision else None,
                flat(self._ends),
                flat(self._growths),
                self._matches,
                self._late_matches,
                flat(
                    [
                        (request.request_id, num, num_kept, request.num_tokens - num_before)
                        for request, num, num_kept, num_before in self._drafting
                    ]
                ),
                self._beams,
                self._has_failed,
                self._has_lost,
                self._is_by_default and has_decision,
                self._is_settled,
                self._has_forgotten,
            )
        )
        self._told = None
        self._arrivals, self._ends, self._places, self._drafting = [], [], {}, []
        self._growths, self._matches, self._late_matches, self._beams = [], (), (), ()
        self._has_failed = self._has_lost = self._is_settled = self._has_forgotten = False
        self._ring[-1].add(iteration)
        if self._sink is not None:
            self._sink.add(iteration)

    def _arrival(self, request: LlmRequest, decided_ns: int) -> tuple[Any, ...]:
        """The fields of an `Arrival`, in its order."""
        request_id = request.request_id
        return (
            request_id,
            request.orig_prompt_len,
            request.max_new_tokens,
            max(decided_ns - self._came_ns.pop(request_id, decided_ns), 0) // 1000,
            float(request.priority),
            request.beam_width,
            self._places.get(request_id),
            request.lora_task_id,
            request.lora_pages,
            request.encoder_length,
        )

    def _open_chunk(self, active_requests: Sequence[LlmRequest]) -> None:
        self._must_tell_all = True
        self._told_matches = dict.fromkeys(self._told_matches, -1)  # all are told again
        new_ids = {request.request_id for request in self._arrivals}
        requests = [r for r in active_requests if r.request_id not in new_ids]
        places = _token_places(self._running)
        num_blocks_of = self._block_manager.num_blocks_of
        states = (  # one at a time: thousands of rows at once would bring about collections
            (
                *_standing(request),
                places[request.request_id] if places and request.num_pending_tokens else 0,
                num_blocks_of(request.request_id) if self._has_drafted else 0,
            )
            for request in requests
        )
        start = StartState(
            marshal.dumps(flat(states), _MARSHAL_VERSION),
            tuple([self._hashes.get(request.request_id, b"") for request in requests]),
            self._running is not None and any(self._running),
            self._block_manager.cache_state(),
            marshal.dumps(self._block_manager.window_tables(), _MARSHAL_VERSION),
        )
        size = max(NUM_CHUNKS // 4, 1) if len(requests) >= MANY_REQUESTS else 1
        max_bytes = size * max(CHUNK_BYTES, REQUEST_BYTES * len(requests))
        self._ring.append(RingChunk(start, size, size * CHUNK_ITERATIONS, max_bytes))
        while sum(chunk.size for chunk in self._ring) > NUM_CHUNKS:
            self._ring.popleft()


_standing = attrgetter(  # half the time that one after another takes, of thousands at once
    "request_id",
    "orig_prompt_len",
    "prompt_len",
    "num_tokens",
    "max_new_tokens",
    "context_current_position",
    "num_pauses",
    "priority",
    "beam_width",
    "lora_task_id",
    "lora_pages",
    "encoder_length",
    "is_encoded",
)
"""The first fields of a `RequestState`, of a request now."""


def flat(rows: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The fields of all ``rows``, one after another."""
    return tuple(chain.from_iterable(rows))


def _with_drafts(requests: Sequence[LlmRequest]) -> list[tuple[LlmRequest, int, int, int]]:
    """Requests with drafts: how many, how many of them run, and the tokens there are before."""
    return [
        (request, request.num_draft_tokens, request.num_chunk_drafts, request.num_tokens)
        for request in requests
        if request.draft_tokens
    ]


def _token_places(step: _Step | None) -> dict[int, int]:
    """Where the tokens of a running step will come, from 1: contexts, then generations."""
    if step is None:
        return {}
    context, generation = step
    ids = [*context[::2], *(request.request_id for request in generation)]
    return {request_id: place for place, request_id in enumerate(ids, start=1)}
