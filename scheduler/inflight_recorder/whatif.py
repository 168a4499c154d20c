"""The same requests under other settings: the scheduler runs for real, the clock is a cost model.

Requests arrive when they arrived and generate as many tokens as they did, independent of how fast
they are answered (an open loop). They wait and run in the order of the server: that of arrival,
moved forward by priority. A request that no iteration could ever run under the new settings is
refused, as the server would.

What depends on the text is as recorded: the rows of a search continue as behind the same token,
and where there were drafts there are as many again, and as many come true. A request that ended
without a token ends so again, unless it has its first one by then; if it has, it generates all it
may.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from inflight_recorder.cost_model import CostModel, Load
from inflight_recorder.recorder import FlightRecorder, RecordingSink
from inflight_recorder.schema import Arrival, BeamTrace, Drafts, Iteration
from inflight_recorder.settings import RecordingError, Settings
from inflight_recorder.simulator import (
    MakeScheduler,
    Simulation,
    Step,
    default_scheduler,
    make_request,
)
from inflight_recorder.workload import Job, Latencies, Summary, block_keys, check_jobs
from inflight_scheduler.planning.active_requests import rank_at_arrival
from inflight_scheduler.policies.admission import refusal_reason
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import FinishReason, LlmRequestState

_GENERATION = LlmRequestState.GENERATION_IN_PROGRESS

MIN_STEPS = 2**19
"""Steps that any prediction may take, some ten seconds: iterations, and requests in each."""

STEPS_PER_STEP = 100
"""So many more it may take for each step of the recording."""


class Clock:
    """Time that stands still unless told; nanoseconds, as `time.monotonic_ns`."""

    def __init__(self) -> None:
        self.time_us = 0.0

    def __call__(self) -> int:
        return int(self.time_us * 1000)


def predict(
    settings: Settings,
    jobs: Sequence[Job],
    cost: CostModel,
    *,
    hash_tokens: int = 1,
    make_scheduler: MakeScheduler = default_scheduler,
    sink: RecordingSink | None = None,
    num_recorded_steps: int | None = None,
) -> Summary:
    """Run ``jobs`` under ``settings``; with a ``sink`` the prediction is recorded there.

    ``hash_tokens``: tokens that each of the hashes of the jobs stands for (block reuse), from where
    the jobs are. ``num_recorded_steps`` bounds the work by that of the recording: a few lines can
    tell of a request that runs for hours. `RecordingError` if nothing can be predicted.
    """
    check_jobs(jobs, hash_tokens, settings.tokens_per_block)
    simulation = Simulation(settings, (), make_scheduler)
    run = _Run(simulation, jobs, cost, hash_tokens, sink)
    if num_recorded_steps is not None:
        run.max_steps = MIN_STEPS + STEPS_PER_STEP * num_recorded_steps
    return run.run()


_rank = attrgetter("rank")


class _Run:
    """One prediction."""

    max_steps: int | None = None

    def __init__(
        self,
        simulation: Simulation,
        jobs: Sequence[Job],
        cost: CostModel,
        hash_tokens: int,
        sink: RecordingSink | None,
    ) -> None:
        self._simulation = simulation
        self._settings = simulation.settings
        self._cost = cost
        self._hash_tokens = hash_tokens
        self._clock = Clock()
        self._recorder: FlightRecorder | None = None
        if sink is not None:
            self._recorder = FlightRecorder(
                simulation.settings,
                simulation.block_manager,
                software="whatif",
                sink=sink,
                clock=self._clock,
            )
        self._coming = deque(enumerate(jobs, start=1))
        self._queue: list[tuple[float, int, Job]] = []  # a heap: rank, number
        self._jobs: dict[int, Job] = {}  # of active requests
        self._recorded = _RecordedOutputs(simulation)
        self._patience: list[tuple[int, int]] = []  # a heap: until when, request
        self._latencies = Latencies()
        self._num_refused = 0
        self._num_steps = 0
        self._rng = random.Random(0)  # the same for all settings, and each time

    def run(self) -> Summary:
        """Until every job has ended."""
        while self._coming or self._queue or self._is_busy:
            if not self._is_busy and not self._queue:
                next_us = self._coming[0][1].arrival_us
                self._clock.time_us = max(self._clock.time_us, float(next_us))
            self._arrive()
            self._admit()
            self._give_up()
            if self._is_busy:
                self._step()
            if self._recorder is not None:
                self._recorder.finish_iteration()
        return self._latencies.summary(self._num_refused)

    @property
    def _is_busy(self) -> bool:
        return bool(self._simulation.active) or self._simulation.is_running

    def _arrive(self) -> None:
        """Requests that have come by now join the queue, or are refused."""
        while self._coming and self._coming[0][1].arrival_us <= self._clock.time_us:
            number, job = self._coming.popleft()
            if self._is_refused(_arrival(number, job)):
                self._num_refused += 1
                continue
            self._latencies.arrived(number, job.arrival_us)
            rank = rank_at_arrival(number, job.priority, self._settings.priority_span)
            heapq.heappush(self._queue, (rank, number, job))

    def _is_refused(self, arrival: Arrival) -> bool:
        reason = refusal_reason(
            make_request(arrival, arrival.prompt_len, arrival.max_new_tokens),
            block_manager=self._simulation.block_manager,
            max_num_tokens=self._settings.max_num_tokens,
            may_pause=self._settings.may_pause,
            may_chunk=self._settings.chunking is not None,
        )
        return reason is not None

    def _admit(self) -> None:
        """Make as many active as there are places, each at its place in the order."""
        simulation = self._simulation
        while self._queue and len(simulation.active) < self._settings.max_batch_size:
            rank, number, job = heapq.heappop(self._queue)
            if job.patience_us is not None:
                until_us = job.arrival_us + job.patience_us
                if until_us <= self._clock.time_us:
                    self._latencies.ended(number)
                    continue
                heapq.heappush(self._patience, (until_us, number))
            place = bisect_right(simulation.active, (rank, number), key=_rank)
            tokens_per_block = self._settings.tokens_per_block
            keys = block_keys(job, self._hash_tokens, tokens_per_block)
            matches = job.partial_matches if tokens_per_block == self._hash_tokens else {}
            request = simulation.arrive(_arrival(number, job, place), keys, matches)
            request.rank = rank, number
            self._jobs[number] = job
            self._recorded.add(request, job)
            if self._recorder is not None:
                self._recorder.arrived(request, job.arrival_us * 1000)

    def _give_up(self) -> None:
        """End the requests that had no token in time."""
        while self._patience and self._patience[0][0] <= self._clock.time_us:
            request = self._simulation.find(heapq.heappop(self._patience)[1])
            if request is not None and not self._latencies.has_token(request.request_id):
                self._end(request, FinishReason.TIMED_OUT)

    def _step(self) -> None:
        """One turn of the server's loop."""
        simulation, recorder = self._simulation, self._recorder
        self._wait(simulation.load_before)
        is_alone = self._settings.is_overlapped and self._recorded.wants_drafts
        if simulation.is_running and (is_alone or self._has_search_ended):
            self._settle()
            return
        told = _told(self._recorded.take_beams(), self._recorded.drafts(), is_settled=is_alone)
        simulation.begin(told)
        simulation.draft(told)
        lists = simulation.decide()
        if not lists[0] and not lists[1] and not simulation.is_running:
            raise RecordingError("no request can run under these settings, though some wait")
        if recorder is not None:
            if is_alone:
                recorder.settled(simulation.active)
            # Of a user's scheduler that is guarded; ours are never overruled.
            is_by_default = getattr(simulation.scheduler, "is_overruled", False)
            recorder.decided(simulation.active, *lists, is_by_default=is_by_default)
        self._count_steps(len(lists[0]) + len(lists[1]))
        plan = simulation.plan(lists, told)
        self._latencies.decided(lists)
        if recorder is not None:
            recorder.carried_out(simulation.block_manager.num_free_blocks)
        self._apply(simulation.run(plan, told))

    @property
    def _has_search_ended(self) -> bool:
        """True where tokens that come before the decision end a request, which leaves first."""
        active = self._simulation.active if self._simulation.must_settle else ()
        return any(
            _num_expected_tokens(request) >= self._jobs[request.request_id].num_new_tokens
            for request in active
            if request.num_pending_tokens
        )

    def _settle(self) -> None:
        """A turn in which the tokens of the step that runs come, and nothing is decided."""
        if self._recorder is not None:
            self._recorder.settled(self._simulation.active)
        self._count_steps(0)
        self._apply(self._simulation.settle(_told((), (), is_settled=True)))

    def _count_steps(self, num_requests: int) -> None:
        """An iteration in which so many run."""
        self._num_steps += 1 + num_requests
        if self.max_steps is not None and self._num_steps > self.max_steps:
            raise RecordingError(
                f"this prediction takes more than {self.max_steps:,} steps (iterations, and "
                f"requests in each), which is {MIN_STEPS:,} and {STEPS_PER_STEP} for each of the "
                "recording; requests that had not ended are taken to use all their tokens: record "
                "for longer, or make up requests (--rate)"
            )

    def _apply(self, step: Step) -> None:
        """What a step has brought, after the time that it took."""
        self._wait(step.load)
        now = int(self._clock.time_us)
        for request in step.advanced:
            num_generated = request.num_generated_tokens
            self._latencies.advanced(request.request_id, now, num_generated)
            if num_generated >= self._jobs[request.request_id].num_new_tokens:
                self._end(request, FinishReason.END_ID)

    def _wait(self, load: Load | None) -> None:
        """For a step, if there is one."""
        if load is not None:
            self._clock.time_us += self._cost.draw(load, self._rng)

    def _end(self, request: LlmRequest, reason: FinishReason) -> None:
        """End ``request``, for ``reason`` if it has none."""
        if not request.is_finished:
            request.finish(reason)
            self._simulation.forget([request])
        self._latencies.ended(request.request_id)
        del self._jobs[request.request_id]
        self._recorded.forget(request)
        if self._recorder is not None:
            self._recorder.ended(request)


def _arrival(number: int, job: Job, place: int | None = None) -> Arrival:
    return Arrival(
        number,
        job.prompt_len,
        job.max_new_tokens,
        priority=job.priority,
        beam_width=job.beam_width,
        place=place,
    )


def _told(beams: Sequence[BeamTrace], drafts: Sequence[Drafts], *, is_settled: bool) -> Iteration:
    """What a recording would say of an iteration that is only being predicted."""
    return Iteration(1, 0, 0, 0, drafts=tuple(drafts), beams=tuple(beams), is_settled=is_settled)


def _num_expected_tokens(request: LlmRequest) -> int:
    """Tokens generated, with those that a running step draws."""
    return request.num_tokens - request.orig_prompt_len


@dataclass(slots=True)
class _Known:
    """An active request of which something was recorded.

    ``moved_at``: the pauses and tokens it had when its beams moved last.
    """

    request: LlmRequest
    job: Job
    moved_at: tuple[int, int] = (0, 0)


class _RecordedOutputs:
    """What a prediction takes from the recording, since only the text could tell it.

    Behind the same token the rows of a beam search continue as they did, and where a request had
    drafts it has as many, and as many come true. Whether drafts are guessed at all, and whether
    there is room for them, depends on the other requests: that follows the rules of the server
    (`Drafter` in the backend).
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._limit = simulation.settings.max_drafting_batch
        self._known: dict[int, _Known] = {}

    def add(self, request: LlmRequest, job: Job) -> None:
        """``request``, which is ``job``, is active now."""
        if job.beams or job.drafts:
            self._known[request.request_id] = _Known(request, job)

    def forget(self, request: LlmRequest) -> None:
        """It is not active any more."""
        self._known.pop(request.request_id, None)

    def take_beams(self) -> tuple[BeamTrace, ...]:
        """How beams continued before this decision."""
        beams = []
        for known in self._known.values():
            request, num_tokens = known.request, _num_expected_tokens(known.request)
            place = request.num_pauses, num_tokens
            if request.state is not _GENERATION or place == known.moved_at:
                continue
            known.moved_at = place
            if num_tokens in known.job.beams:
                beams.append(BeamTrace(request.request_id, known.job.beams[num_tokens]))
        return tuple(beams)

    def drafts(self) -> tuple[Drafts, ...]:
        """The requests with drafts at the decision that comes now."""
        if not self._known:
            return ()
        contexts = [k for k in self._known.values() if k.request.is_context_init_state]
        found = [drafts for known in contexts if (drafts := self._sent(known))]
        return (*found, *(self._guessed() if self._is_guessing else ()))

    @property
    def wants_drafts(self) -> bool:
        """True when the next step may have drafts, so that it is awaited."""
        return (self._limit is not None and self._is_guessing) or bool(self.drafts())

    @property
    def _is_guessing(self) -> bool:
        active = self._simulation.active
        is_few = self._limit is None or len(active) <= self._limit
        return is_few and len(active) > 0 and all(r.state is _GENERATION for r in active)

    def _sent(self, known: _Known) -> Drafts | None:
        """Those that came with a request and run with the end of its context."""
        request, budget = known.request, self._simulation.settings.max_num_tokens
        if request.num_pauses or 0 not in known.job.drafts:
            return None
        num_drafts, num_gained = known.job.drafts[0]
        if budget is not None:
            may_chunk = self._simulation.settings.chunking is not None
            num_drafts = min(num_drafts, budget - (1 if may_chunk else request.prompt_len))
        if num_drafts <= 0:
            return None
        return Drafts(request.request_id, num_drafts, num_drafts, num_gained)

    def _guessed(self) -> list[Drafts]:
        """Those of the requests that generate, as far as there are tokens and blocks to spare."""
        manager, active = self._simulation.block_manager, self._simulation.active
        budget = self._simulation.settings.max_num_tokens
        num_spare_tokens = None if budget is None else budget - sum(r.num_rows for r in active)
        num_spare_blocks = manager.num_free_blocks - self._num_blocks(active)
        found = []
        for known in self._known.values():
            request = known.request
            told = known.job.drafts.get(_num_expected_tokens(request))
            if told is None:
                continue
            num_drafts = min(told[0], request.num_remaining_tokens - 1)
            if num_spare_tokens is not None:
                num_drafts = min(num_drafts, num_spare_tokens)
            num_tokens = request.num_cached_tokens + 1
            num_blocks = self._num_holding(num_tokens + num_drafts) - max(
                self._num_holding(num_tokens), manager.num_blocks_of(request.request_id)
            )
            if num_drafts > 0 and num_blocks <= num_spare_blocks:
                found.append(Drafts(request.request_id, num_drafts, num_drafts, told[1]))
                num_spare_blocks -= max(num_blocks, 0)
                if num_spare_tokens is not None:
                    num_spare_tokens -= num_drafts
        return found

    def _num_blocks(self, requests: Sequence[LlmRequest]) -> int:
        """Blocks that a step without drafts takes."""
        return sum(map(self._simulation.block_manager.get_needed_blocks_one_step, requests))

    def _num_holding(self, num_tokens: int) -> int:
        return -(-num_tokens // self._simulation.settings.tokens_per_block)
