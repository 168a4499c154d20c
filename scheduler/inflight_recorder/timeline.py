"""What happened to each request, iteration by iteration, to be drawn (`exporters`).

A recording is followed from its start. Each request becomes a lane of intervals; an interval lasts
while the request does the same thing, and knows the reason of its first and its last iteration.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from inflight_recorder.schema import BAD_ENDS, Header, Iteration
from inflight_recorder.settings import (
    Lists,
    RecordingError,
    Settings,
    fallback_scheduler,
    scheduler_of,
)
from inflight_recorder.simulator import NO_PLAN, Simulation
from inflight_recorder.storage import RecordingReader
from inflight_scheduler.batch import ScheduledBatch
from inflight_scheduler.planning.planner import BatchPlanner
from inflight_scheduler.policies.explain import WaitReason, explain, explain_left_out
from inflight_scheduler.policies.scheduler import RequestScheduler
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import LlmRequestState

_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE

MAX_NUM_INTERVALS = 4_000_000
"""Intervals of one timeline, about 1 GB; a longer recording must be cut."""


class Activity(IntEnum):
    """What a request does in an iteration."""

    WAITING = 0
    CONTEXT = 1
    GENERATION = 2
    PAUSED = 3
    RESUMED = 4
    IDLE = 5


_WAITS = (Activity.WAITING, Activity.PAUSED, Activity.IDLE)

ACTIVITY_NAMES = {
    Activity.WAITING: "waiting",
    Activity.CONTEXT: "context",
    Activity.GENERATION: "generation",
    Activity.PAUSED: "paused",
    Activity.RESUMED: "resumed (context computed again)",
    Activity.IDLE: "holds cache, does not run",
}

# Grey for requests that wait, blue for contexts, green for generation; amber and violet for the
# cost of a pause. The five can be told apart with each of the common colour deficiencies.
COLOURS = {
    Activity.WAITING: "#d5dae1",
    Activity.CONTEXT: "#2f7fd1",
    Activity.GENERATION: "#46a876",
    Activity.PAUSED: "#f0a83a",
    Activity.RESUMED: "#8656c7",
    Activity.IDLE: "#93a1b0",
}
ERROR_COLOUR = "#d64545"


@dataclass(slots=True)
class Interval:
    """Iterations ``start .. end - 1`` (indices into the timeline) of one activity."""

    activity: Activity
    start: int
    end: int
    first_reason: str = ""
    last_reason: str = ""
    num_tokens: int = 0


@dataclass(slots=True)
class Lane:
    """The life of one request. ``end`` is None while it is in flight at the end."""

    request_id: int
    prompt_len: int
    max_new_tokens: int
    start: int
    intervals: list[Interval] = field(default_factory=list)
    end: int | None = None
    end_reason: str = ""
    num_pauses: int = 0
    num_generated: int = 0


@dataclass(slots=True)
class Timeline:
    """Lanes in order of arrival, and one number per iteration in each of the arrays."""

    settings: Settings
    lanes: list[Lane] = field(default_factory=list)
    numbers: array[int] = field(default_factory=lambda: array("q"))
    start_us: array[int] = field(default_factory=lambda: array("q"))
    step_us: array[int] = field(default_factory=lambda: array("q"))
    num_context: array[int] = field(default_factory=lambda: array("i"))
    num_generation: array[int] = field(default_factory=lambda: array("i"))
    num_context_tokens: array[int] = field(default_factory=lambda: array("q"))
    num_generation_tokens: array[int] = field(default_factory=lambda: array("q"))
    """The others that were computed: of each beam one, and all drafts."""
    num_free_blocks: array[int] = field(default_factory=lambda: array("q"))
    is_last_busy: array[int] = field(default_factory=lambda: array("b"))
    """1 for an iteration after which no request was in flight: time passes before the next one."""

    def end_us(self, index: int) -> int:
        """When iteration ``index`` was over: at once the next one begins, or nothing happens."""
        if index + 1 < self.num_iterations and not self.is_last_busy[index]:
            return self.start_us[index + 1]
        return self.start_us[index] + self.step_us[index]

    @property
    def num_iterations(self) -> int:
        """Iterations of the recording."""
        return len(self.numbers)


def build_timeline(reader: RecordingReader, max_lanes_with_reasons: int | None = None) -> Timeline:
    """Follow a recording to its end.

    The recorded decisions are carried out, whatever a scheduler would decide now. Of those of a
    user's scheduler the reasons are numbers only; it is not needed here. Reasons cost as much as
    all the rest: above ``max_lanes_with_reasons`` lanes there are no more of them.
    `RecordingError` for a recording that cannot be read or tells of something impossible.
    """
    timeline = Timeline(reader.settings)
    with reader.named_place():
        follower = _Follower(timeline, reader.header, max_lanes_with_reasons)
    for iteration in reader:
        with reader.named_place():
            follower.follow(iteration)
    if timeline.num_iterations == 0 or not timeline.lanes:
        raise RecordingError("the recording holds no request: nothing was scheduled yet")
    follower.finish()
    return timeline


class _Follower:
    """Writes a timeline while a simulation carries the recorded decisions out."""

    def __init__(
        self, timeline: Timeline, header: Header, max_lanes_with_reasons: int | None
    ) -> None:
        self._history = timeline
        self._max_lanes_with_reasons = max_lanes_with_reasons
        self._simulation = Simulation(timeline.settings, _explained_scheduler, header)
        self._lanes: dict[int, Lane] = {}
        self._num_intervals = 0
        for request in self._simulation.active:
            self._add_lane(request, 0)
            self._lanes[request.request_id].num_pauses = request.num_pauses

    def follow(self, iteration: Iteration) -> None:
        """One iteration more."""
        index, simulation = self._history.num_iterations, self._simulation
        for request in simulation.arrivals(iteration):
            self._add_lane(request, index)
        before = {request.request_id: request for request in simulation.active}
        if iteration.decision is not None:
            simulation.begin(iteration)
            lists = simulation.follow(iteration.decision)
            reasons = self._reasons(lists, iteration)
            plan = simulation.plan(lists, iteration)
            self._measure(iteration, plan.batch)
            self._note(index, lists, reasons, plan.batch)
            simulation.run(plan, iteration)
        else:
            self._measure(iteration, NO_PLAN.batch)
            self._wait_on(index)
            if iteration.is_settled:
                simulation.settle(iteration)
        simulation.end(iteration)
        self._history.is_last_busy.append(not simulation.active)
        if len(simulation.active) < len(before):
            reasons_of_ends = iteration.reasons
            for request_id in before.keys() - {request.request_id for request in simulation.active}:
                reason = reasons_of_ends.get(request_id, "length")
                self._end_lane(before[request_id], index, reason)

    def finish(self) -> None:
        """The recording is over; lanes of those still in flight stay open."""
        for request in self._simulation.active:
            lane = self._lanes[request.request_id]
            lane.num_generated = request.num_generated_tokens

    def _measure(self, iteration: Iteration, batch: ScheduledBatch) -> None:
        timeline, decision = self._history, iteration.decision
        timeline.numbers.append(iteration.number)
        timeline.start_us.append(iteration.start_us)
        timeline.step_us.append(iteration.step_us)
        timeline.num_context.append(len(decision.context) if decision else 0)
        timeline.num_generation.append(len(decision.generation) if decision else 0)
        timeline.num_context_tokens.append(batch.num_context_tokens + batch.num_encoder_tokens)
        timeline.num_generation_tokens.append(batch.num_tokens - batch.num_context_tokens)
        timeline.num_free_blocks.append(min(iteration.num_free_blocks, 2**62))

    def _note(
        self, index: int, lists: Lists, reasons: dict[int, WaitReason], batch: ScheduledBatch
    ) -> None:
        """An interval, or one iteration more of the last one, for each active request.

        ``batch`` is the decision, planned: sizes of chunks are what is computed.
        """
        context, generation, paused = lists
        num_drafts: dict[int | None, int]
        num_drafts = {run.slot: len(run.drafts) for run in batch.runs if run.drafts}
        for request in generation:  # all have as many beams, or drafts and one
            num_tokens = batch.num_beams + num_drafts.get(request.seq_slot, 0)
            self._extend(request, Activity.GENERATION, index, num_tokens=num_tokens)
        for request in context:
            activity = Activity.RESUMED if request.num_pauses else Activity.CONTEXT
            num_tokens = request.context_chunk_size + num_drafts.get(request.seq_slot, 0)
            self._extend(request, activity, index, _chunk_note(request), num_tokens)
        # A request whose last token is being computed waits for nothing.
        idle = [r for r in self._simulation.active if r.state is not _TO_COMPLETE]
        if len(context) + len(generation) == len(idle):
            return
        running = {id(request) for request in (*context, *generation)}
        is_paused = {id(request) for request in paused}
        for request in idle:
            if id(request) not in running:
                activity = _idle_activity(request, id(request) in is_paused)
                reason = reasons.get(request.request_id)
                self._extend(request, activity, index, reason)
        for request in paused:
            self._lanes[request.request_id].num_pauses += 1

    def _wait_on(self, index: int) -> None:
        """Without a decision, as when a request expires: the idle ones still wait."""
        for request in self._simulation.active:
            intervals = self._lanes[request.request_id].intervals
            if intervals and intervals[-1].end == index and intervals[-1].activity in _WAITS:
                intervals[-1].end = index + 1

    def _reasons(self, lists: Lists, iteration: Iteration) -> dict[int, WaitReason]:
        """Why requests that wait do not run; to be asked before anything is carried out."""
        simulation, settings = self._simulation, self._history.settings
        do_all_run = len(lists[0]) + len(lists[1]) == len(simulation.active)
        is_large = (
            self._max_lanes_with_reasons is not None
            and len(self._history.lanes) > self._max_lanes_with_reasons
        )
        if is_large or simulation.scheduler is None or do_all_run:
            return {}
        if settings.scheduler_class is None or iteration.is_by_default:
            return explain(simulation.scheduler, simulation.active)
        return explain_left_out(
            settings.scheduler_class.rpartition(":")[2],
            simulation.active,
            lists,
            block_manager=simulation.block_manager,
            max_batch_size=settings.max_batch_size,
            max_num_tokens=settings.max_num_tokens,
            num_free_blocks=iteration.num_free_blocks,
        )

    def _extend(
        self,
        request: LlmRequest,
        activity: Activity,
        index: int,
        reason: WaitReason | str | None = None,
        num_tokens: int = 0,
    ) -> None:
        intervals = self._lanes[request.request_id].intervals
        text = "" if reason is None else str(reason)
        if intervals:
            last = intervals[-1]
            if last.activity is activity and last.end == index:
                last.end = index + 1
                last.last_reason = text
                last.num_tokens += num_tokens
                return
        self._num_intervals += 1
        if self._num_intervals > MAX_NUM_INTERVALS:
            raise RecordingError(
                f"more than {MAX_NUM_INTERVALS} intervals: cut the recording into pieces"
            )
        intervals.append(Interval(activity, index, index + 1, text, text, num_tokens))

    def _add_lane(self, request: LlmRequest, index: int) -> None:
        lane = Lane(request.request_id, request.orig_prompt_len, request.max_new_tokens, index)
        self._lanes[request.request_id] = lane
        self._history.lanes.append(lane)

    def _end_lane(self, request: LlmRequest, index: int, reason: str) -> None:
        lane = self._lanes.pop(request.request_id)
        lane.end, lane.end_reason = index + 1, reason
        lane.num_generated = request.num_generated_tokens


def _explained_scheduler(settings: Settings, planner: BatchPlanner) -> RequestScheduler:
    """A scheduler that can explain its decisions: ours, or the fallback of a user's."""
    if settings.scheduler_class is None:
        return scheduler_of(settings.policy, settings, planner)
    return fallback_scheduler(settings, planner)


def _idle_activity(request: LlmRequest, is_paused_now: bool) -> Activity:
    if is_paused_now:
        return Activity.PAUSED
    if request.seq_slot is not None:
        return Activity.IDLE
    return Activity.PAUSED if request.num_pauses else Activity.WAITING


def _chunk_note(request: LlmRequest) -> str:
    if request.context_chunk_size == request.context_remaining_length:
        return ""
    left = request.context_remaining_length
    return f"chunked to {request.context_chunk_size} of {left} tokens"


def assign_tracks(lanes: Sequence[Lane]) -> list[int]:
    """A track for each lane, the lowest that is free; lanes come in the order of their start.

    A track is used again once its request has ended, so there are as many tracks as requests were
    in flight at once.
    """
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    tracks: list[int] = []
    num_tracks = 0
    for lane in lanes:
        while busy and busy[0][0] <= lane.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            track = heapq.heappop(free)
        else:
            track = num_tracks
            num_tracks += 1
        if lane.end is not None:
            heapq.heappush(busy, (lane.end, track))
        tracks.append(track)
    return tracks


def title(timeline: Timeline) -> str:
    """One line that says what is shown."""
    settings = timeline.settings
    scheduler = settings.scheduler_class or settings.policy_name
    budget = "" if settings.max_num_tokens is None else f", {settings.max_num_tokens:,} tokens"
    return (
        f"{scheduler}: {count(len(timeline.lanes), 'request')}, "
        f"{count(timeline.num_iterations, 'iteration')}, "
        f"{settings.num_blocks:,} blocks of {settings.tokens_per_block} tokens, "
        f"batch of {settings.max_batch_size}{budget}"
    )


def shown_activities(timeline: Timeline) -> list[Activity]:
    """Activities that occur, in the order of the legend."""
    present = {interval.activity for lane in timeline.lanes for interval in lane.intervals}
    return [activity for activity in ACTIVITY_NAMES if activity in present]


def crosses(timeline: Timeline) -> str:
    """What a cross means, for the legend; "" where there is none."""
    is_any = any(lane.end_reason in BAD_ENDS for lane in timeline.lanes)
    return "stopped, failed or expired" if is_any else ""


def count(number: int, what: str) -> str:
    """``3 requests``, with a separator for thousands."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def seconds(microseconds: int) -> str:
    """A duration for people."""
    if microseconds < 1000:
        return f"{microseconds} µs"
    if microseconds < 1_000_000:
        return f"{microseconds / 1000:.3g} ms"
    if microseconds < 180_000_000:
        return f"{microseconds / 1_000_000:.3g} s"
    return f"{microseconds / 60_000_000:,.0f} min"
