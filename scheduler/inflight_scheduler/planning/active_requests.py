"""The active requests in order, with the sums that a scheduler would otherwise build each time.

Most requests do in an iteration what they did in the one before: one more token, no new block. So
the work of deciding should grow with what changed. `ActiveRequests` hears of every change of phase
(fresh context, started context, generation) from the request itself and keeps

- each phase as a list in order,
- the blocks that all started requests take until their last token,
- a calendar of block borders: which requests open a block in the coming step. One in
  ``tokens_per_block`` does, and the others need not be looked at,
- a calendar of last tokens: which requests reach their ``max_new_tokens`` in the coming step.

A calendar may be early, never late: a running request gains at most one token per plan, so an
entry is a lower bound, looked at again when its time has come. A request that gets or loses draft
tokens, which can bring it several at once, is looked at in the next step.

**Order and waiting.** The rank of a request is its number of arrival minus ``priority_span`` times
its priority; the lowest rank comes first. So among requests that arrive close together priority
decides, and with equal priorities arrival does; but no request starves: one of priority ``p`` is
passed by fewer than ``priority_span * (1 - p)`` later ones, whatever arrives. Ranks never change,
so ageing costs nothing. Arrivals are counted here, or by the queue before this one, which then has
given the request its number: one order from the first queue to the last.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain
from operator import attrgetter
from typing import cast, overload

from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.planning.pending_tokens import SharedStep, with_end_id
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import FinishReason, LlmRequestState


class DueSteps:
    """At most one entry for each request; ``clock`` counts the steps, and its owner moves it on.

    Before that the owner takes or postpones the entries of the step: those of the past are never
    looked at.
    """

    __slots__ = ("_entries", "_step_of", "clock")

    def __init__(self) -> None:
        self.clock = 0
        self._entries: dict[int, dict[int, LlmRequest]] = {}  # step -> id -> request
        self._step_of: dict[int, int] = {}  # id -> step

    def enter(self, request: LlmRequest, num_steps: int) -> None:
        """Look at ``request`` in ``num_steps`` steps from now, and not before."""
        self.forget(request)
        step = self.clock + num_steps
        self._step_of[request.request_id] = step
        self._entries.setdefault(step, {})[request.request_id] = request

    def forget(self, request: LlmRequest) -> None:
        """Do not look at ``request``, whether it had an entry or not."""
        step = self._step_of.pop(request.request_id, None)
        if step is not None:
            entries = self._entries[step]
            del entries[request.request_id]
            if not entries:
                del self._entries[step]

    def take(self) -> list[LlmRequest]:
        """The requests due at this step, which are removed."""
        taken = self._entries.pop(self.clock, {})
        for request_id in taken:
            del self._step_of[request_id]
        return list(taken.values())

    def due(self) -> list[LlmRequest]:
        """The requests due at this step, which stay."""
        return list(self._entries.get(self.clock, {}).values())

    @property
    def last_step(self) -> int:
        """The latest step that has entries; ``clock`` if none has."""
        return max(self._entries, default=self.clock)

    def postpone(self, num_steps: int) -> None:
        """Look at those with an entry for this step in ``num_steps``, at least 1, from now."""
        postponed = self._entries.pop(self.clock, {})
        if postponed:
            step = self.clock + num_steps
            self._step_of.update(dict.fromkeys(postponed, step))
            self._entries.setdefault(step, {}).update(postponed)

    def num_steps_to(self, request: LlmRequest) -> int:
        """Steps until the entry of ``request``; `KeyError` if it has none."""
        return self._step_of[request.request_id] - self.clock


MAX_CHANGES = 2**10
"""Bound on the recorded changes of a list of requests, which may never be read."""


class RankedRequests:
    """Requests by rank. `view` is a copy that is made only when something has changed."""

    __slots__ = ("_ranks", "_view", "requests")

    def __init__(self) -> None:
        self.requests: list[LlmRequest] = []
        # The first half of each rank, side by side: a search looks at no request far from its end.
        self._ranks = array("d")
        self._view: list[LlmRequest] | None = None

    def insert(self, request: LlmRequest) -> int:
        """Put it in its place, and return that."""
        index = bisect_right(self._ranks, request.rank[0])
        while index > 0 and self.requests[index - 1].rank > request.rank:
            index -= 1
        self.requests.insert(index, request)
        self._ranks.insert(index, request.rank[0])
        self._view = None
        return index

    def remove(self, request: LlmRequest) -> int:
        """Take it out, and return where it was."""
        index = bisect_left(self._ranks, request.rank[0])
        while self.requests[index] is not request:
            is_near = self._ranks[index] == request.rank[0]
            assert is_near, f"request {request.request_id} is not in its place"
            index += 1
        del self.requests[index], self._ranks[index]
        self._view = None
        return index

    def view(self) -> list[LlmRequest]:
        """All of them; the same list object until something changes, and never altered."""
        if self._view is None:
            self._view = list(self.requests)
        return self._view


class RankedGenerations(RankedRequests):
    """Generation requests with the values that each step needs of all of them, as parallel lists.

    A request lies scattered over many cache lines. A step that gives a token to each of some
    thousand requests takes a third of the time if it need not go there.
    """

    __slots__ = (
        "_base",
        "_changes",
        "_end_ids",
        "_num_without_slot",
        "_running",
        "_slots",
        "_texts",
    )

    def __init__(self) -> None:
        super().__init__()
        self._slots: list[int | None] = []
        self._num_without_slot = 0
        self._texts: list[list[int]] = []
        self._end_ids: Counter[int] = Counter()  # how many of them each token ends
        self._base: list[LlmRequest] | None = None  # an earlier view, and what came after it
        self._changes: list[int] = []
        self._running: list[SharedStep] = []

    def insert(self, request: LlmRequest) -> int:
        """As `RankedRequests.insert`; slot, token list and end ids stay those it has now."""
        index = super().insert(request)
        self._slots.insert(index, request.seq_slot)
        self._num_without_slot += request.seq_slot is None
        self._texts.insert(index, request.tokens)
        for token in request.end_ids:
            self._end_ids[token] += 1
        request.share_steps(self._running)
        for step in self._running:
            step.join(request)
        if len(self._changes) < MAX_CHANGES:
            self._changes += (index, request.request_id)
        return index

    def remove(self, request: LlmRequest) -> int:
        """As `RankedRequests.remove`."""
        index = super().remove(request)
        self._num_without_slot -= self._slots[index] is None
        del self._slots[index], self._texts[index]
        for token in request.end_ids:
            self._end_ids[token] -= 1
            if not self._end_ids[token]:
                del self._end_ids[token]
        request.share_steps(())
        for step in self._running:
            step.leave(request)
        if len(self._changes) < MAX_CHANGES:
            self._changes.append(~index)
        return index

    def changes_since(self, before: Sequence[LlmRequest]) -> tuple[int, ...] | None:
        """What has made `view` of ``before``, which was that when this was asked last.

        None if it was not, or if too much has changed. In turn: a place and the id that was put
        there, or the complement (below 0) of the place that was taken out.
        """
        is_short = before is self._base and len(self._changes) < MAX_CHANGES
        changes = tuple(self._changes) if is_short else None
        self._base, self._changes = self.view(), []
        return changes

    def slots(self) -> tuple[int, ...]:
        """The slot of each; `AssertionError` if one has none."""
        assert not self._num_without_slot, "a request generates without a slot"
        return cast("tuple[int, ...]", tuple(self._slots))

    def append(self, tokens: Sequence[int]) -> list[LlmRequest]:
        """Append a token to each text; returns those that it ends.

        `ValueError` if there are not as many.
        """
        for text, token in zip(self._texts, tokens, strict=True):
            text.append(token)
        return with_end_id(self.requests, frozenset(self._end_ids), tokens)

    def start_step(self) -> SharedStep:
        """A step has been started that gives each of them a token."""
        texts = self._texts.copy()
        return SharedStep(self._running, self.view(), texts, frozenset(self._end_ids))

    def drop_pending(self, request: LlmRequest) -> None:
        """``request``, one of them, wants no token of the steps that run."""
        for step in self._running:
            step.drop(request)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the requests say the same; O(requests)."""
        for request, slot, text in zip(self.requests, self._slots, self._texts, strict=True):
            assert request.seq_slot in (None, slot), f"{request} has another slot"
            assert request.tokens is text, f"{request} has another text"
            assert request.shared_steps is self._running, f"{request} counts other steps"
            assert request.num_pending_tokens >= 0, f"{request} has got too many tokens"
        assert self._num_without_slot == self._slots.count(None), "requests without a slot"
        end_ids = chain.from_iterable(request.end_ids for request in self.requests)
        assert self._end_ids == Counter(end_ids), "the end ids have drifted"


DEFAULT_PRIORITY_SPAN = 1000
"""How many later arrivals of priority 1 may pass a request of priority 0."""

_rank = attrgetter("rank")


def rank_at_arrival(arrival: int, priority: float, priority_span: float) -> float:
    """Where request number ``arrival`` stands among the others; the lowest comes first."""
    return arrival - priority * priority_span


class RequestPhase(IntEnum):
    """What schedulers tell apart; OTHER is everything they do not (finished, encoder, ...).

    COMPLETING: the last token is being computed by a running step.
    """

    FRESH = 0
    STARTED = 1
    GENERATION = 2
    COMPLETING = 3
    OTHER = 4


# A member that is read off its enum takes several times as long in Python before 3.12.
_FRESH, _STARTED, _GENERATION, _COMPLETING, _OTHER = RequestPhase
_HOLDING = (_STARTED, _GENERATION, _COMPLETING)
_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT
_GENERATION_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS
_GENERATION_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE


class ActiveRequests(Sequence[LlmRequest]):
    """Owner of the order of the requests in flight.

    Requests tell it about their phase while they are in it. For the calendar the tokens of its
    requests must come through one `BatchPlanner` that knows it.
    """

    __slots__ = (
        "_borders",
        "_by_id",
        "_early_until",
        "_ends",
        "_generation",
        "_num_arrivals",
        "_order",
        "_phase_of",
        "_phases",
        "_unseen",
        "block_manager",
        "num_blocks_at_completion",
        "num_streaming",
        "num_with_beams_or_adapter",
        "num_with_drafts",
        "priority_span",
    )

    def __init__(
        self, block_manager: BlockManager, priority_span: float = DEFAULT_PRIORITY_SPAN
    ) -> None:
        if not priority_span >= 0:
            raise ValueError(f"priority_span must be at least 0, not {priority_span}")
        self.block_manager = block_manager
        self.priority_span = priority_span
        self.num_blocks_at_completion = 0  # of all requests that hold blocks
        self.num_with_beams_or_adapter = 0
        self.num_with_drafts = 0
        self.num_streaming = 0
        self._num_arrivals = 0
        self._by_id: dict[int, LlmRequest] = {}
        self._order: list[LlmRequest] | None = []  # made anew when it is asked for
        self._generation = RankedGenerations()
        self._phases = tuple(
            self._generation if phase is _GENERATION else RankedRequests() for phase in RequestPhase
        )
        self._phase_of: dict[int, RequestPhase] = {}
        self._borders = DueSteps()  # requests that open a block
        self._early_until = -1  # the last step whose entries there may be early
        self._unseen: dict[int, LlmRequest] = {}  # generating, and have no entry there yet
        self._ends = DueSteps()  # that may have had their last token

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LlmRequest]:
        return iter(self._in_order())

    @overload
    def __getitem__(self, index: int) -> LlmRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[LlmRequest]: ...
    def __getitem__(self, index: int | slice) -> LlmRequest | list[LlmRequest]:
        return self._in_order()[index]

    def get(self, request_id: int) -> LlmRequest | None:
        """The active request with this id."""
        return self._by_id.get(request_id)

    def add(self, request: LlmRequest) -> None:
        """Give ``request`` its place.

        `ValueError` if its id is taken or no unsigned 64-bit number, or its priority not 0..1.
        """
        if not 0 <= request.request_id < 2**64:
            raise ValueError(f"request id {request.request_id} is no unsigned 64-bit number")
        if request.request_id in self._by_id:
            raise ValueError(f"request {request.request_id} is active already")
        if not 0.0 <= request.priority <= 1.0:
            raise ValueError(
                f"request {request.request_id}: priority is {request.priority}, outside 0..1"
            )
        self._num_arrivals += 1
        arrival = self._num_arrivals if request.arrival is None else request.arrival
        rank = rank_at_arrival(arrival, request.priority, self.priority_span)
        request.rank = (rank, self._num_arrivals)
        request.tracker = self
        self._by_id[request.request_id] = request
        self._order = None
        self.num_with_beams_or_adapter += _has_beams_or_adapter(request)
        self.num_with_drafts += request.num_draft_tokens > 0
        self.num_streaming += request.is_streaming
        self._move(request, None, _phase_of(request))

    def remove(self, request: LlmRequest) -> bool:
        """Forget ``request``; False if it was not here."""
        if self._by_id.get(request.request_id) is not request:
            return False
        self._move(request, self._phase_of[request.request_id], None)
        self._order = None
        self.num_with_beams_or_adapter -= _has_beams_or_adapter(request)
        self.num_with_drafts -= request.num_draft_tokens > 0
        self.num_streaming -= request.is_streaming
        del self._by_id[request.request_id]  # last: one that could not be removed is still known
        request.tracker = None
        return True

    def phase_changed(self, request: LlmRequest) -> None:
        """What a request calls when its state or its place in the context has changed."""
        before, phase = self._phase_of[request.request_id], _phase_of(request)
        if phase is not before:
            self._move(request, before, phase)

    def drafts_changed(self, request: LlmRequest, num_before: int) -> None:
        """What a request calls when it has other draft tokens."""
        self.num_with_drafts += (request.num_draft_tokens > 0) - (num_before > 0)
        if self._phase_of[request.request_id] is _GENERATION:
            self._look_at(request)

    def pending_dropped(self, request: LlmRequest) -> None:
        """What a request calls when it wants no token of the steps that run."""
        if self._phase_of[request.request_id] is _GENERATION:
            self._generation.drop_pending(request)

    @property
    def fresh(self) -> Sequence[LlmRequest]:
        """Contexts of which nothing has run, in order. As all views: valid until a change."""
        return self._phases[_FRESH].requests

    @property
    def started(self) -> Sequence[LlmRequest]:
        """Contexts past their first chunk, in order."""
        return self._phases[_STARTED].requests

    @property
    def generation(self) -> list[LlmRequest]:
        """The requests that generate, in order: one list until that changes, and never altered."""
        return self._generation.view()

    def view_of(self, requests: Sequence[LlmRequest]) -> Sequence[LlmRequest]:
        """`generation` itself where ``requests`` is a list of the same, else ``requests``.

        So a plan after a pause costs what changed, too.
        """
        view = self.generation
        return view if view == requests else requests

    @property
    def generation_slots(self) -> tuple[int, ...]:
        """The slots of `generation`, in that order; a slot does not change while one generates."""
        return self._generation.slots()

    @property
    def generation_ids(self) -> bytes:
        """The request ids of `generation`, in that order, eight bytes each (an ``array("Q")``)."""
        return array("Q", [request.request_id for request in self.generation]).tobytes()

    def generation_changes(self, before: Sequence[LlmRequest]) -> tuple[int, ...] | None:
        """What has made `generation` of ``before``: see `RankedGenerations.changes_since`."""
        return self._generation.changes_since(before)

    @property
    def completing(self) -> Sequence[LlmRequest]:
        """Whose last token is being computed, in order."""
        return self._phases[_COMPLETING].requests

    @property
    def finished(self) -> list[LlmRequest]:
        """Those that have ended and were not removed yet, in order; O(these)."""
        others = self._phases[_OTHER].requests
        return [request for request in others if request.is_finished]

    @property
    def num_others(self) -> int:
        """Requests in none of those phases."""
        return len(self._phases[_OTHER].requests)

    def due_requests(self) -> list[LlmRequest]:
        """Generating requests whose next token opens a block, in no special order."""
        unsure = list(self._unseen.values())
        if self._borders.clock <= self._early_until:
            unsure += self._borders.due()
        self._unseen.clear()
        for request in unsure:
            self._borders.enter(request, self.block_manager.num_places_left(request))
        return self._borders.due()

    def tick(self, have_all_run: bool) -> None:
        """A plan was made; the next one is another step.

        ``have_all_run``: it gives each generation request one token.
        """
        # A request that fills the first place of a new block needs no other one for a while.
        num_steps = self.block_manager.tokens_per_block if have_all_run else 1
        self._borders.postpone(num_steps)
        if not have_all_run or self.block_manager.window_groups:
            self._early_until = self._borders.last_step
        for request in self._ends.take():  # early: it has not got a token in each step
            self._ends.enter(request, request.num_remaining_tokens)
        self._borders.clock += 1
        self._ends.clock += 1

    def add_tokens(self, tokens: Sequence[int]) -> None:
        """`LlmRequest.add_new_token` for each of `generation`, in that order.

        Apply a step to all of them: O(1) for each, without visiting the request.
        """
        for request in self._generation.append(tokens):
            request.finish(FinishReason.END_ID)
        for request in self._take_full():
            request.finish(FinishReason.LENGTH)

    def expect_tokens(self) -> SharedStep:
        """`LlmRequest.expect_token` for each of `generation`; O(those that may be at their end)."""
        step = self._generation.start_step()
        for request in self._take_full():
            request.await_last_token()
        return step

    def check_integrity(self) -> None:
        """Compare everything with what the requests say; O(requests).

        Raises `AssertionError` with the reason.
        """
        requests = self._in_order()
        assert requests == sorted(self._by_id.values(), key=_rank), "the order has drifted"
        for phase, line in zip(RequestPhase, self._phases, strict=True):
            expected = [request for request in requests if _phase_of(request) is phase]
            assert line.requests == expected, f"phase {phase.name} has drifted"
        manager = self.block_manager
        running = [*self.started, *self.generation, *self.completing]
        num_blocks = sum(
            manager.get_blocks_at_completion(request, has_context=_phase_of(request) is _STARTED)
            for request in running
        )
        assert num_blocks == self.num_blocks_at_completion, "the reservation has drifted"
        assert self.num_with_beams_or_adapter == sum(map(_has_beams_or_adapter, requests))
        assert self.num_with_drafts == sum(request.num_draft_tokens > 0 for request in requests)
        assert self.num_streaming == sum(request.is_streaming for request in requests)
        self._generation.check_integrity()
        for request in self.generation:
            num_steps = self._ends.num_steps_to(request)
            is_in_time = 0 <= num_steps <= request.num_remaining_tokens
            assert is_in_time, f"{request} would end late"
        due = {request.request_id for request in self.due_requests()}
        at_border = [r.request_id for r in self.generation if manager.num_places_left(r) == 0]
        assert due == set(at_border), f"due: {sorted(due)}, at a border: {sorted(at_border)}"

    def _take_full(self) -> list[LlmRequest]:
        """The requests that have reached their maximum length with the token just given."""
        full = []
        for request in self._ends.take():
            if request.num_remaining_tokens == 0:
                full.append(request)
            else:
                self._ends.enter(request, request.num_remaining_tokens)
        return full

    def _in_order(self) -> list[LlmRequest]:
        """All of them; never altered. The usual decision needs the phases only."""
        if self._order is None:
            self._order = sorted(self._by_id.values(), key=_rank)
        return self._order

    def _move(
        self, request: LlmRequest, before: RequestPhase | None, after: RequestPhase | None
    ) -> None:
        """From one phase to another one; None: it is not active."""
        if before is not None:
            self._phases[before].remove(request)
            del self._phase_of[request.request_id]
        if before is _GENERATION:
            if self._unseen.pop(request.request_id, None) is None:
                self._borders.forget(request)
            self._ends.forget(request)
        if after is not None:
            self._phase_of[request.request_id] = after
            self._phases[after].insert(request)
        if after is _GENERATION:
            self._look_at(request)
        was_holding, is_holding = before in _HOLDING, after in _HOLDING
        if was_holding != is_holding or (is_holding and self.block_manager.window_groups):
            num_blocks = self._at_completion(request, after) - self._at_completion(request, before)
            self.num_blocks_at_completion += num_blocks

    def _at_completion(self, request: LlmRequest, phase: RequestPhase | None) -> int:
        """Blocks that ``request``, if it has started, holds at its last token."""
        if phase not in _HOLDING:
            return 0
        return self.block_manager.get_blocks_at_completion(request, has_context=phase is _STARTED)

    def _look_at(self, request: LlmRequest) -> None:
        """In the next plan, whatever it holds and however many tokens are left for it now."""
        self._borders.forget(request)
        self._unseen[request.request_id] = request
        self._ends.enter(request, 0)


def _has_beams_or_adapter(request: LlmRequest) -> bool:
    return request.beam_width != 1 or request.lora_task_id is not None


def _phase_of(request: LlmRequest) -> RequestPhase:
    state = request.state
    if state is _GENERATION_IN_PROGRESS:
        return _GENERATION
    if state is _CONTEXT_INIT:
        return _FRESH if request.context_current_position == 0 else _STARTED
    if state is _GENERATION_TO_COMPLETE:
        return _COMPLETING
    return _OTHER
