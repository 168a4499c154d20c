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
import math
import random
import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter

from inflight_recorder.cost_model import CostModel, Load
from inflight_recorder.recorder import FlightRecorder, RecordingSink
from inflight_recorder.schema import BeamTrace, Drafts, Iteration
from inflight_recorder.settings import RecordingError, Settings
from inflight_recorder.simulator import (
    MakeScheduler,
    Simulation,
    Step,
    default_scheduler,
    make_request,
    split_hashes,
)
from inflight_recorder.workload import Job, Latencies, Summary
from inflight_scheduler.kv.block_manager import ReuseStats
from inflight_scheduler.planning.active_requests import rank_at_arrival
from inflight_scheduler.policies.admission import refusal_reason
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import FinishReason, LlmRequestState

_GENERATION = LlmRequestState.GENERATION_IN_PROGRESS

MIN_STEPS = 2**19
"""Steps that any prediction may take, some ten seconds: iterations, and requests in each."""

STEPS_PER_STEP = 100
"""So many more it may take for each step of the recording."""

_MAX_TURNS_AHEAD = 1024  # priced before they are counted as steps


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
    make_scheduler: MakeScheduler = default_scheduler,
    sink: RecordingSink | None = None,
    num_recorded_steps: int | None = None,
) -> Summary:
    """Run ``jobs`` under ``settings``; with a ``sink`` the prediction is recorded there.

    ``num_recorded_steps`` bounds the work by that of the recording: a few lines can tell of a
    request that runs for hours. `RecordingError` if nothing can be predicted.
    """
    if not jobs:
        raise RecordingError("the recording holds no request that came")
    server = PredictedServer(
        Simulation(settings, make_scheduler), cost, sink=sink, num_recorded_steps=num_recorded_steps
    )
    for number, job in enumerate(jobs, start=1):
        server.submit(number, job)
    server.advance()
    return server.latencies.summary(server.num_refused, server.reuse)


_rank = attrgetter("rank")


class PredictedServer:
    """One server of a prediction, to which jobs are submitted in the order of their arrival.

    Turns of the loop in which all requests just generate are predicted together (`skips_turns`,
    unless they are recorded in ``sink``): the same turns, and much faster.
    """

    skips_turns = True

    def __init__(
        self,
        simulation: Simulation,
        cost: CostModel,
        *,
        sink: RecordingSink | None = None,
        num_recorded_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        self._simulation = simulation
        self._settings = simulation.settings
        self._cost = cost
        self._max_steps: int | None = None
        if num_recorded_steps is not None:
            self._max_steps = MIN_STEPS + STEPS_PER_STEP * num_recorded_steps
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
        self._coming: deque[tuple[int, Job]] = deque()
        self._queue: list[tuple[float, int, Job]] = []  # a heap: rank, number
        self._jobs: dict[int, Job] = {}  # of active requests
        self._recorded = _RecordedOutputs(simulation)
        self._patience: list[tuple[int, int]] = []  # a heap: until when, request
        self.latencies = Latencies()
        self.num_refused = 0
        self.ends_us: list[float] = []
        """When requests have left, in no order; the caller empties it."""
        self._num_steps = 0
        self._rng = random.Random(seed)  # the same for all settings, and each time
        self._noise: list[float] = []  # of the next turns, as far as it was drawn
        self._ahead: list[float] = []  # when the turns end that only generate, and come next

    @property
    def reuse(self) -> ReuseStats:
        """Blocks of prompts that were found in the cache, or not."""
        return self._simulation.block_manager.reuse_stats

    @property
    def next_us(self) -> float:
        """When it does what may end a request, at the earliest; infinite if it has no work."""
        if self._ahead:
            return self._ahead[-1]
        if self._is_busy or self._queue:
            return self._clock.time_us
        if self._coming:
            return max(self._clock.time_us, float(self._coming[0][1].arrival_us))
        return math.inf

    def submit(self, number: int, job: Job) -> None:
        """``job`` comes as request ``number``; it must not have been `advance`d beyond that."""
        if self._ahead:  # turns that begin when it has come are other ones
            self._skip(min(bisect_left(self._ahead, job.arrival_us) + 1, len(self._ahead)))
        self._coming.append((number, job))

    def advance(self, until_us: float = math.inf) -> None:
        """Do all that begins before that time; without one, until every job has ended."""
        while (next_us := self.next_us) < until_us:
            if self._ahead:
                self._skip(len(self._ahead))
                continue
            self._clock.time_us = next_us
            self._arrive()
            self._admit()
            self._give_up()
            if self._is_busy and not self._look_ahead():
                self._step()
            if self._recorder is not None:
                self._recorder.finish_iteration()

    def _look_ahead(self) -> bool:
        """Find the next turns in which all requests just generate; False if there is none."""
        if not self.skips_turns or self._recorder is not None or self._recorded.has_any:
            return False
        if self._queue and len(self._simulation.active) < self._settings.max_batch_size:
            return False
        num_turns = min(self._simulation.num_plain_turns, _MAX_TURNS_AHEAD)
        for request in self._simulation.active if num_turns > 0 else ():
            num_new_tokens = self._jobs[request.request_id].num_new_tokens
            num_turns = min(num_turns, num_new_tokens - request.num_generated_tokens - 1)
        if num_turns < 1:
            return False
        time_us = self._clock.time_us
        next_arrival_us = self._coming[0][1].arrival_us if self._coming else math.inf
        for turn, load in zip(range(num_turns), self._simulation.plain_loads(), strict=False):
            if time_us >= next_arrival_us:
                break
            if turn == len(self._noise):
                self._noise.append(self._cost.draw_noise(self._rng))
            time_us += self._cost.with_noise(load, self._noise[turn])
            self._ahead.append(time_us)
        return True

    def _skip(self, num_turns: int) -> None:
        """Do the first ``num_turns`` of the turns ahead, and forget the others."""
        request_ids = [request.request_id for request in self._simulation.active]
        times_us = self._ahead[:num_turns]
        self._count_steps(num_turns, num_turns * len(request_ids))
        self.latencies.advanced_together(request_ids, list(map(int, times_us)))
        self._simulation.skip_plain_turns(num_turns)
        self._clock.time_us = times_us[-1]
        self._ahead.clear()
        del self._noise[:num_turns]

    @property
    def _is_busy(self) -> bool:
        return bool(self._simulation.active) or self._simulation.is_running

    def _arrive(self) -> None:
        """Requests that have come by now join the queue, or are refused."""
        while self._coming and self._coming[0][1].arrival_us <= self._clock.time_us:
            number, job = self._coming.popleft()
            reason = refusal_reason(
                _request(number, job),
                block_manager=self._simulation.block_manager,
                max_num_tokens=self._settings.max_num_tokens,
                may_pause=self._settings.may_pause,
                may_chunk=self._settings.chunking is not None,
                resources=self._settings.resources(self._simulation.planner),
            )
            if reason is not None:
                self.num_refused += 1
                self.ends_us.append(self._clock.time_us)
                continue
            self.latencies.arrived(number, job.arrival_us)
            rank = rank_at_arrival(number, job.priority, self._settings.priority_span)
            heapq.heappush(self._queue, (rank, number, job))

    def _admit(self) -> None:
        """Make as many active as there are places, each at its place in the order."""
        simulation = self._simulation
        while self._queue and len(simulation.active) < self._settings.max_batch_size:
            rank, number, job = heapq.heappop(self._queue)
            if job.patience_us is not None:
                until_us = job.arrival_us + job.patience_us
                if until_us <= self._clock.time_us:
                    self.latencies.ended(number)
                    self.ends_us.append(self._clock.time_us)
                    continue
                heapq.heappush(self._patience, (until_us, number))
            request = _request(number, job)
            request.rank = rank, number
            request.block_keys = split_hashes(job.hashes)
            place = bisect_right(simulation.active, request.rank, key=_rank)
            simulation.arrive(request, place, job.partial_matches)
            self._jobs[number] = job
            self._recorded.add(request, job)
            if self._recorder is not None:
                self._recorder.arrived(request, job.arrival_us * 1000)

    def _give_up(self) -> None:
        """End the requests that had no token in time."""
        while self._patience and self._patience[0][0] <= self._clock.time_us:
            request = self._simulation.find(heapq.heappop(self._patience)[1])
            if request is not None and not self.latencies.has_token(request.request_id):
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
        lists = simulation.decide()
        if not lists[0] and not lists[1] and not simulation.is_running:
            raise RecordingError("no request can run under these settings, though some wait")
        if recorder is not None:
            if is_alone:
                recorder.settled(simulation.active)
            # Of a user's scheduler that is guarded; ours are never overruled.
            is_by_default = getattr(simulation.scheduler, "is_overruled", False)
            recorder.decided(simulation.active, *lists, is_by_default=is_by_default)
        self._count_steps(1, len(lists[0]) + len(lists[1]))
        plan = simulation.plan(lists, told)
        self.latencies.decided(lists)
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
        self._count_steps(1, 0)
        self._apply(self._simulation.settle(_told((), (), is_settled=True)))

    def _count_steps(self, num_iterations: int, num_requests: int) -> None:
        """So many iterations, in which so many requests run in all."""
        self._num_steps += num_iterations + num_requests
        if self._max_steps is not None and self._num_steps > self._max_steps:
            raise RecordingError(
                f"this prediction takes more than {self._max_steps:,} steps (iterations, and "
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
            self.latencies.advanced(request.request_id, now, num_generated)
            if num_generated >= self._jobs[request.request_id].num_new_tokens:
                self._end(request, FinishReason.END_ID)

    def _wait(self, load: Load | None) -> None:
        """For a step, if there is one."""
        if load is not None:
            noise = self._noise.pop(0) if self._noise else self._cost.draw_noise(self._rng)
            self._clock.time_us += self._cost.with_noise(load, noise)

    def _end(self, request: LlmRequest, reason: FinishReason) -> None:
        """End ``request``, for ``reason`` if it has none."""
        if not request.is_finished:
            request.finish(reason)
            self._simulation.forget([request])
        self.latencies.ended(request.request_id)
        self.ends_us.append(self._clock.time_us)
        del self._jobs[request.request_id]
        self._recorded.forget(request)
        if self._recorder is not None:
            self._recorder.ended(request)


def _request(number: int, job: Job) -> LlmRequest:
    return make_request(
        number,
        job.prompt_len,
        job.max_new_tokens,
        job.beam_width,
        job.priority,
        job.lora_task_id,
        job.lora_pages,
        job.encoder_length,
    )


def _told(beams: Sequence[BeamTrace], drafts: Sequence[Drafts], *, is_settled: bool) -> Iteration:
    """What a recording would say of an iteration that is only being predicted."""
    return Iteration(1, 0, 0, 0, drafts=tuple(drafts), beams=tuple(beams), is_settled=is_settled)


def _num_expected_tokens(request: LlmRequest) -> int:
    """Tokens generated, with those that a running step draws."""
    return request.num_tokens - request.orig_prompt_len


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
        self._budget = simulation.settings.max_num_tokens or sys.maxsize
        self._known: dict[int, tuple[LlmRequest, Job]] = {}  # active, with beams or drafts
        self._moved_at: dict[int, tuple[int, int]] = {}  # their pauses and tokens, at a move

    def add(self, request: LlmRequest, job: Job) -> None:
        """``request``, which is ``job``, is active now."""
        if job.beams or job.drafts:
            self._known[request.request_id] = request, job

    def forget(self, request: LlmRequest) -> None:
        """It is not active any more."""
        self._known.pop(request.request_id, None)
        self._moved_at.pop(request.request_id, None)

    @property
    def has_any(self) -> bool:
        """True if an active request has beams or drafts to come."""
        return bool(self._known)

    def take_beams(self) -> tuple[BeamTrace, ...]:
        """How beams continued before this decision."""
        beams = []
        for request_id, (request, job) in self._known.items():
            num_tokens = _num_expected_tokens(request)
            place = request.num_pauses, num_tokens
            if request.state is _GENERATION and place != self._moved_at.get(request_id):
                self._moved_at[request_id] = place
                if num_tokens in job.beams:
                    beams.append(BeamTrace(request_id, job.beams[num_tokens]))
        return tuple(beams)

    def drafts(self) -> tuple[Drafts, ...]:
        """The requests with drafts at the decision that comes now."""
        if not self._known:
            return ()
        return (*self._sent(), *(self._guessed() if self._is_guessing else ()))

    @property
    def wants_drafts(self) -> bool:
        """True when the next step may have drafts, so that it is awaited."""
        return (self._limit is not None and self._is_guessing) or bool(self.drafts())

    @property
    def _is_guessing(self) -> bool:
        active = self._simulation.active
        is_few = self._limit is None or len(active) <= self._limit
        return is_few and len(active) > 0 and all(r.state is _GENERATION for r in active)

    def _sent(self) -> Iterator[Drafts]:
        """Those that came with a request and run with the end of its context."""
        may_chunk = self._simulation.settings.chunking is not None
        for request, job in self._known.values():
            if request.is_context_init_state and not request.num_pauses and 0 in job.drafts:
                num_drafts, num_gained = job.drafts[0]
                num_spare = self._budget - (1 if may_chunk else request.prompt_len)
                num_drafts = min(num_drafts, num_spare)
                if num_drafts > 0:
                    yield Drafts(request.request_id, num_drafts, num_drafts, num_gained)

    def _guessed(self) -> Iterator[Drafts]:
        """Those of the requests that generate, as far as there are tokens and blocks to spare."""
        manager, active = self._simulation.block_manager, self._simulation.active
        tokens_per_block = manager.tokens_per_block
        num_spare_tokens = self._budget - sum(request.num_rows for request in active)
        num_spare_blocks = manager.num_free_blocks
        num_spare_blocks -= sum(map(manager.get_needed_blocks_one_step, active))
        for request, job in self._known.values():
            recorded = job.drafts.get(_num_expected_tokens(request))
            if recorded is None:
                continue
            num_drafts = min(recorded[0], request.num_remaining_tokens - 1, num_spare_tokens)
            num_tokens = request.num_cached_tokens + 1
            num_held = manager.num_blocks_of(request.request_id)
            num_blocks = -(-(num_tokens + num_drafts) // tokens_per_block)
            num_blocks -= max(-(-num_tokens // tokens_per_block), num_held)
            num_blocks *= len(manager.windows)  # at most: those with a window give some back
            if num_drafts > 0 and num_blocks <= num_spare_blocks:
                num_spare_blocks -= max(num_blocks, 0)
                num_spare_tokens -= num_drafts
                yield Drafts(request.request_id, num_drafts, num_drafts, recorded[1])
