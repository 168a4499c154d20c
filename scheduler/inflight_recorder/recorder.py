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

The last iterations are kept in a ring of segments. A segment begins with the state of all active
requests and, with block reuse, of the cache (some 20 bytes per block of the pool), so it can be
replayed without those before it; the oldest is dropped when there are too many. However many
segments that are, their iterations take at most 16 x 2 MiB, or 16 x 576 bytes for each active
request where that is more (see `SEGMENT_BYTES`), and the states some 60 bytes for each request and
segment.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, Protocol, TypeAlias

from inflight_recorder.beams import Moves, MoveWatch
from inflight_recorder.header import Header
from inflight_recorder.likeness import NO_LIKENESS
from inflight_recorder.lines import LineWriter
from inflight_recorder.records import ERROR, NOT_FINITE, End, Settings, standing
from inflight_recorder.segment import Segment, Unpacker, flat, pack_ids, pack_iteration, pack_states
from inflight_recorder.texts import CacheMark, RecordedTexts
from inflight_scheduler.kv.prefix_cache import CacheState
from inflight_scheduler.planning.active_requests import ActiveRequests
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import FinishReason

SEGMENT_ITERATIONS = 512
SEGMENT_BYTES = 2**21
REQUEST_BYTES = 576
"""A segment ends at either: so many iterations, or so many bytes of them, or so many bytes for each
active request where that is more."""

NUM_SEGMENTS = 16
"""The ring holds so many segments. From `MANY_REQUESTS` on it holds four, each as long as a quarter
of these: noting where each request stands takes more than a microsecond, and is held as long as the
segment."""

MANY_REQUESTS = 1024

_Step: TypeAlias = tuple[tuple[int, ...], Sequence[LlmRequest]]
"""Its contexts (id, tokens, id, ...), and who generates."""


class RecordingSink(Protocol):
    """Where iterations go besides the ring (`RecordingFile`). Called on the scheduler's thread."""

    def begin(self, header: Header) -> None:
        """The recording starts: who is active, and under which settings."""

    def add(self, iteration: bytes) -> None:
        """One more, packed (see `segment`); returns at once."""

    def close(self) -> None:
        """No more will come."""


class FlightRecorder:
    """Records the decisions of one scheduler; see the module for the order of calls."""

    def __init__(
        self,
        settings: Settings,
        *,
        software: str = "",
        sink: RecordingSink | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        cache_state: Callable[[], CacheState | None] | None = None,
        num_blocks_of: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """``clock`` counts nanoseconds.

        ``cache_state`` and ``num_blocks_of`` are those of the `BlockManager`: without them a ring
        that has dropped its beginning cannot be replayed after block reuse, or after drafts.
        """
        self.settings = settings
        self._software = software
        self._sink = sink
        self._clock = clock
        self._start_ns = clock()
        self._started = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._segments: deque[Segment] = deque()
        self._number = 0
        self._arrivals: list[LlmRequest] = []
        self._came_ns: dict[int, int] = {}
        self._ends: list[End] = []
        self._cache_state = cache_state
        self._num_blocks_of = num_blocks_of
        self._texts: RecordedTexts | None = None
        if settings.enable_reuse:
            self._texts = RecordedTexts(settings.num_blocks, settings.tokens_per_block, cache_state)
        self._context: tuple[int, ...] | None = None  # id, tokens, id, ... if there is a decision
        self._paused: tuple[int, ...] = ()
        self._places: dict[int, int] = {}
        self._generation: Sequence[LlmRequest] = ()
        self._told: bytes | tuple[int, ...] | None = None  # of who generates; None: as before
        self._must_tell_all = True  # of them, in the next iteration with a decision
        self._num_free_blocks = settings.num_blocks
        self._decided_ns = 0
        self._has_failed = self._has_lost = self._is_settled = self._has_forgotten = False
        self._drafting: list[tuple[LlmRequest, int, int, int]] = []  # (see `_with_drafts`)
        self._has_drafted = False  # somebody, ever: from then on blocks do not follow from tokens
        self._is_by_default = False
        self._move_watch = MoveWatch()
        self._moves: tuple[Moves, ...] = ()
        self._running: _Step | None = None  # overlapped: the step whose tokens come next
        self._is_searching = False  # its tokens come before the next decision
        if sink is not None:
            sink.begin(Header(settings, software, self._started))

    def arrived(self, request: LlmRequest, came_ns: int | None = None) -> None:
        """``request`` is active from now on; it came at ``came_ns`` on the recorder's clock."""
        self._arrivals.append(request)
        self._move_watch.add(request)
        if came_ns is not None:
            self._came_ns[request.request_id] = came_ns

    def withdrawn(self, request: LlmRequest) -> None:
        """Nothing is recorded of ``request``: it has just arrived, or was about to."""
        self._arrivals = [each for each in self._arrivals if each is not request]
        self._move_watch.forget(request)
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
        self._moves = self._move_watch.take()
        if self._is_searching:
            self._running = None
        heads = (*context_requests, *generation_requests[:1])  # all generate with as many beams
        self._is_searching = any(request.beams is not None for request in heads)
        if not self._segments or self._segments[-1].is_full:
            self._open_segment(active_requests)
        if self._arrivals:
            self._note_places(active_requests)
            self._register_texts()
        if self._texts is not None:
            for request in paused_requests:
                self._texts.grow(request)
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

    def settled(self, active_requests: Sequence[LlmRequest]) -> None:
        """No step runs on: all tokens are there when this iteration ends.

        Those whom they end are still among ``active_requests``, as they are in a replay.
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
        """Numbers of the step before have failed, of one who had left: nothing stays cached."""
        self._has_forgotten = True

    def ended(self, request: LlmRequest, error: str = "") -> None:
        """``request`` is not active any more; the text of an error is not recorded."""
        self._move_watch.forget(request)
        if self._texts is not None:
            self._texts.grow(request, is_last=True)
        if error:
            is_number = request.tokens[-1] >= 0
            self._ends.append(End(request.request_id, ERROR if is_number else NOT_FINITE))
        elif request.finish_reason is not FinishReason.LENGTH:
            self._ends.append(End(request.request_id, request.finish_reason.name.lower()))

    def finish_iteration(self) -> None:
        """Close the record; nothing happens if nothing happened."""
        has_run = self._running is not None and any(self._running)
        if has_run and self._context is None and not self._is_settled:
            self.settled(())  # nobody was left to decide about
        is_silent = self._context is None and not self._arrivals and not self._ends
        if is_silent and not self._is_settled:
            self._running = None
            return
        decided_ns = self._decided_ns
        if self._context is None:
            decided_ns = self._clock()
            self._register_texts()
        has_ended = self._has_failed or self._has_lost or self._is_settled
        is_running = self.settings.is_overlapped and not has_ended and self._context is not None
        self._append(decided_ns)
        self._running = (self._context or (), self._generation) if is_running else None
        self._context, self._paused = None, ()

    def lines(self) -> Iterator[str]:
        """The ring as a recording, line by line.

        Call it on the thread that records; the lines may be taken on another one.
        """
        iterations = [packed for segment in self._segments for packed in segment.packed]
        return self._format(self._segments[0] if self._segments else None, iterations)

    def close(self) -> None:
        """Close the sink."""
        if self._sink is not None:
            self._sink.close()

    def _note_places(self, active_requests: Sequence[LlmRequest]) -> None:
        """Where the arrivals stand, who are recorded in that order."""
        self._places = _places(active_requests, self._arrivals)
        if self._places:  # each is inserted behind those before it
            self._arrivals.sort(key=lambda request: self._places[request.request_id])

    def _note_generation(
        self, active_requests: Sequence[LlmRequest], generation: Sequence[LlmRequest]
    ) -> None:
        """Who generates, if those are others than before."""
        if isinstance(active_requests, ActiveRequests) and generation is active_requests.generation:
            changes = active_requests.generation_changes(self._generation)
            must_tell_all = self._must_tell_all or self._told is not None  # if that was not noted
            is_known = changes is not None and not must_tell_all
            self._told = changes if is_known else active_requests.generation_ids
        # Comparing two lists of the same objects is some nanoseconds per entry; ids are not.
        elif self._must_tell_all or list(self._generation) != list(generation):
            self._told = pack_ids([request.request_id for request in generation])
        self._generation = generation
        self._must_tell_all = False

    def _note_early_ends(self) -> None:
        """Requests that ended between two decisions: a record of its own, without a decision."""
        ended_ids = {end.request_id for end in self._ends}
        arrivals = self._arrivals
        self._arrivals = [r for r in arrivals if r.request_id in ended_ids]
        self._register_texts()
        if self._texts is not None:
            self._texts.forget(ended_ids)
        comes_later = self._has_lost, self._has_forgotten  # they ended before that
        self._has_lost = self._has_forgotten = False
        self._append(self._decided_ns)
        self._has_lost, self._has_forgotten = comes_later
        self._arrivals = [r for r in arrivals if r.request_id not in ended_ids]

    def _append(self, decided_ns: int) -> None:
        if not self._segments:
            self._open_segment(())
        self._number += 1
        fields = (
            self._number,
            (decided_ns - self._start_ns) // 1000,
            (self._clock() - decided_ns) // 1000,
            flat([self._arrival(request, decided_ns) for request in self._arrivals]),
            self._context,
            self._told,
            self._paused,
            self._num_free_blocks,
            flat(self._ends),
            self._has_failed,
            () if self._texts is None else self._texts.take_growths(),
            self._is_by_default and self._context is not None,
            self._has_lost,
            flat(
                [
                    (request.request_id, num, num_kept, request.num_tokens - num_before)
                    for request, num, num_kept, num_before in self._drafting
                ]
            ),
            self._is_settled,
            flat(self._moves),
            self._has_forgotten,
        )
        iteration = pack_iteration(fields)
        self._told = None
        self._arrivals, self._ends, self._places, self._drafting = [], [], {}, []
        self._has_failed = self._has_lost = self._is_settled = self._has_forgotten = False
        self._moves = ()
        self._segments[-1].add(iteration)
        if self._sink is not None:
            self._sink.add(iteration)

    def _arrival(self, request: LlmRequest, decided_ns: int) -> tuple[Any, ...]:
        """The fields of an `Arrival`, in its order."""
        request_id = request.request_id
        likeness = NO_LIKENESS if self._texts is None else self._texts.likeness(request)
        return (
            request_id,
            request.orig_prompt_len,
            request.max_new_tokens,
            max(decided_ns - self._came_ns.pop(request_id, decided_ns), 0) // 1000,
            float(request.priority),
            request.beam_width,
            self._places.get(request_id),
            *likeness,
        )

    def _register_texts(self) -> None:
        """Number the texts of the arrivals, in the order in which they are recorded."""
        if self._texts is not None:
            for request in self._arrivals:
                self._texts.add(request)

    def _format(self, first: Segment | None, packed: list[bytes]) -> Iterator[str]:
        writer, unpacker = LineWriter(), Unpacker()
        header = Header(self.settings, self._software, self._started)
        if first is not None and packed and unpacker.iteration(packed[0]).number > 1:
            iterations = map(unpacker.iteration, packed)
            cache = None if first.cache is None else first.cache.start(iterations)
            header = replace(header, active=first.active, is_running=first.is_running, cache=cache)
        yield writer.header(header)
        for iteration in map(unpacker.iteration, packed):
            yield writer.iteration(iteration)

    def _open_segment(self, active_requests: Sequence[LlmRequest]) -> None:
        self._must_tell_all = True
        new_ids = {request.request_id for request in self._arrivals}
        requests = [r for r in active_requests if r.request_id not in new_ids]
        mark: CacheMark | None = None
        state = None if self._cache_state is None else self._cache_state()
        if self._texts is not None and state is not None:
            mark = self._texts.mark(requests, state)
        places = _token_places(self._running)
        states = (  # one at a time: thousands of rows at once would bring about collections
            (
                *standing(request),
                places[request.request_id] if places and request.num_pending_tokens else 0,
                self._num_blocks_of(request.request_id) if self._has_drafted else 0,
            )
            for request in requests
        )
        is_running = self._running is not None and any(self._running)
        size = max(NUM_SEGMENTS // 4, 1) if len(requests) >= MANY_REQUESTS else 1
        max_bytes = size * max(SEGMENT_BYTES, REQUEST_BYTES * len(requests))
        self._segments.append(
            Segment(
                pack_states(states), is_running, mark, size, size * SEGMENT_ITERATIONS, max_bytes
            )
        )
        while sum(segment.size for segment in self._segments) > NUM_SEGMENTS:
            self._segments.popleft()


def _with_drafts(requests: Sequence[LlmRequest]) -> list[tuple[LlmRequest, int, int, int]]:
    """Who has drafts: how many, how many of them run, and how many tokens there are before."""
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


def _places(
    active_requests: Sequence[LlmRequest], arrivals: Sequence[LlmRequest]
) -> dict[int, int]:
    """Where each new request stands; empty when all stand at the end, in their order."""
    tail = active_requests[len(active_requests) - len(arrivals) :]
    if all(one is other for one, other in zip(tail, arrivals, strict=False)):
        return {}
    new_ids = {request.request_id for request in arrivals}
    return {
        request.request_id: place
        for place, request in enumerate(active_requests)
        if request.request_id in new_ids
    }
