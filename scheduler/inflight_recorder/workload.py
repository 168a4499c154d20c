"""What a what-if takes from a recording: requests, costs of iterations, and latencies."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeVar

from inflight_recorder.cost_model import Load, Sample
from inflight_recorder.schema import Arrival, Iteration
from inflight_recorder.settings import RecordingError
from inflight_recorder.simulator import Simulation, Step
from inflight_recorder.storage import RecordingReader
from inflight_scheduler.kv.block_manager import ReuseStats
from inflight_scheduler.request import LlmRequest

MAX_NUM_JOBS = 1_000_000

_WHOLE = 2**62
"""A context that was complete once: from then on all of a text has been computed."""

_NOTHING: Mapping[int, Any] = MappingProxyType({})

_NO_REUSE = ReuseStats()

_T = TypeVar("_T")


def _nothing() -> Mapping[int, Any]:
    """The same for all jobs, of which there may be a million."""
    return _NOTHING


@dataclass(slots=True)
class Job:
    """A request to come: when, how long, and how many tokens it generates in the end.

    ``hashes`` tell which full blocks of its text are those of others (block reuse), as far as that
    is known; behind them it is like no other. ``partial_matches``: tokens that were found cached of
    blocks of its prompt, by their index. ``patience_us``: it ends so long after its arrival if it
    has no token by then. By the number of tokens generated before: ``beams`` says how the rows
    of its beams go on then, ``drafts`` how many drafts it has and how many tokens come of them.
    """

    arrival_us: int
    prompt_len: int
    max_new_tokens: int
    num_new_tokens: int
    priority: float = 0.5
    beam_width: int = 1
    lora_task_id: int | None = None
    lora_pages: int = 1
    encoder_length: int = 0
    hashes: bytes = b""
    partial_matches: Mapping[int, int] = field(default_factory=_nothing)
    patience_us: int | None = None
    beams: Mapping[int, tuple[int, ...]] = field(default_factory=_nothing)
    drafts: Mapping[int, tuple[int, int]] = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in milliseconds; 0 where nothing was measured.

    ``max_batch``: requests in the largest iteration. ``num_unanswered`` of ``num_requests`` ended
    without a token. ``hit_rate``: the share of the blocks of prompts that were found in the cache.
    """

    num_requests: int
    num_tokens: int
    seconds: float
    tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    num_pauses: int
    num_recomputed_tokens: int
    num_refused: int = 0
    max_batch: int = 0
    num_unanswered: int = 0
    hit_rate: float = 0.0


@dataclass(slots=True)
class _Progress:
    """Of a request in flight. ``arrival_us`` None: it was before the run began.

    ``num_computed`` tokens of its context at most have been computed before.
    """

    arrival_us: int | None = None
    num_tokens: int = 0
    last_token_us: int | None = None
    num_computed: int = 0


class Latencies:
    """Collects the times of one run, in microseconds of its clock."""

    def __init__(self) -> None:
        self._in_flight: dict[int, _Progress] = {}
        self._first = array("q")  # times to the first token
        self._gaps = array("q")  # times between tokens
        self._first_us: int | None = None
        self._last_us = 0
        self._num_tokens = self._num_ended = self._num_unanswered = 0
        self._num_pauses = self._num_recomputed = self._max_batch = 0

    def arrived(self, request_id: int, time_us: int) -> None:
        """A request came."""
        self._in_flight[request_id] = _Progress(time_us)
        if self._first_us is None:
            self._first_us = time_us

    def found(self, request: LlmRequest, time_us: int) -> None:
        """``request`` was in flight when the run began; all before a pause had been computed."""
        computed = request.context_current_position
        is_whole = request.num_pauses > 0 or computed == request.prompt_len
        self._in_flight[request.request_id] = _Progress(
            num_tokens=request.num_generated_tokens,
            num_computed=_WHOLE if is_whole else computed,
        )
        if self._first_us is None:
            self._first_us = time_us

    def decided(
        self, lists: tuple[Sequence[LlmRequest], Sequence[LlmRequest], Sequence[LlmRequest]]
    ) -> None:
        """A decision that is planned: which requests are paused, what is computed once more.

        Of a context that was paused in the middle that is no more than what it had computed.
        """
        context, generation, paused = lists
        self._max_batch = max(self._max_batch, len(context) + len(generation))
        self._num_pauses += len(paused)
        for request in context:
            progress = self._in_flight[request.request_id]
            start = request.context_current_position
            end = start + request.context_chunk_size
            if request.num_pauses:
                self._num_recomputed += max(min(end, progress.num_computed) - start, 0)
            now = _WHOLE if end == request.prompt_len else end
            progress.num_computed = max(progress.num_computed, now)

    def advanced(self, request_id: int, time_us: int, num_generated: int) -> None:
        """A request has got tokens, so that it has ``num_generated``.

        Those that come at once share the time since the last one. What beams generate again after
        a pause is no news.
        """
        progress = self._in_flight[request_id]
        num_new = num_generated - progress.num_tokens
        if num_new <= 0:
            return
        self._last_us = time_us
        self._num_tokens += num_new
        progress.num_tokens = num_generated
        if progress.last_token_us is not None:
            since_last = time_us - progress.last_token_us
            if num_new == 1:  # as nearly always
                self._gaps.append(since_last)
            else:
                gap, rest = divmod(since_last, num_new)
                self._gaps.extend([gap + (place < rest) for place in range(num_new)])
        elif progress.arrival_us is not None:
            self._first.append(time_us - progress.arrival_us)
            self._gaps.extend([0] * (num_new - 1))
        progress.last_token_us = time_us

    def advanced_together(self, request_ids: Sequence[int], times_us: Sequence[int]) -> None:
        """Each of these requests, which have tokens, has got one more at each of these times."""
        gaps = array("q", [late - early for early, late in pairwise(times_us)])
        for request_id in request_ids:
            progress = self._in_flight[request_id]
            if progress.last_token_us is not None:
                self._gaps.append(times_us[0] - progress.last_token_us)
            progress.num_tokens += len(times_us)
            progress.last_token_us = times_us[-1]
        self._gaps.extend(gaps * len(request_ids))
        self._num_tokens += len(times_us) * len(request_ids)
        self._max_batch = max(self._max_batch, len(request_ids))
        self._last_us = times_us[-1]

    def add(self, other: Latencies) -> None:
        """Those of another server in the same time, of which no request is in flight."""
        self._first += other._first
        self._gaps += other._gaps
        firsts = [each for each in (self._first_us, other._first_us) if each is not None]
        self._first_us = min(firsts, default=None)
        self._last_us = max(self._last_us, other._last_us)
        self._num_tokens += other._num_tokens
        self._num_ended += other._num_ended
        self._num_unanswered += other._num_unanswered
        self._num_pauses += other._num_pauses
        self._num_recomputed += other._num_recomputed
        self._max_batch = max(self._max_batch, other._max_batch)

    def has_token(self, request_id: int) -> bool:
        """Whether a request in flight got one."""
        return self._in_flight[request_id].last_token_us is not None

    def ended(self, request_id: int) -> int:
        """A request ended; how many tokens it had. `RecordingError` if it had ended before."""
        progress = self._in_flight.pop(request_id, None)
        if progress is None:
            raise RecordingError(f"request {request_id} ends twice")
        num_tokens = progress.num_tokens
        self._num_ended += 1
        self._num_unanswered += num_tokens == 0
        return num_tokens

    def summary(self, num_refused: int = 0, reuse: ReuseStats = _NO_REUSE) -> Summary:
        """The numbers of the whole run."""
        seconds = max(self._last_us - (self._first_us or 0), 0) / 1e6
        return Summary(
            num_requests=self._num_ended,
            num_tokens=self._num_tokens,
            seconds=seconds,
            tokens_per_second=self._num_tokens / seconds if seconds > 0 else 0.0,
            ttft_p50=_percentile(self._first, 50),
            ttft_p99=_percentile(self._first, 99),
            itl_p50=_percentile(self._gaps, 50),
            itl_p99=_percentile(self._gaps, 99),
            num_pauses=self._num_pauses,
            num_recomputed_tokens=self._num_recomputed,
            num_refused=num_refused,
            max_batch=self._max_batch,
            num_unanswered=self._num_unanswered,
            hit_rate=reuse.hit_rate,
        )


@dataclass(slots=True)
class Workload:
    """Jobs in order of arrival, and what is known of them.

    Of a recording: ``samples`` are the iterations that measured a full turn, ``num_found`` requests
    were in flight when it began and are no jobs, and ``num_unended`` jobs had not ended with it.
    ``num_steps`` were run (iterations, and requests in each of them); None: nothing was recorded.
    ``num_left_out`` requests of a trace had no tokens to run. ``reuse``: the blocks of prompts.
    """

    jobs: list[Job] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    latencies: Latencies = field(default_factory=Latencies)
    num_found: int = 0
    num_unended: int = 0
    num_left_out: int = 0
    num_steps: int | None = None
    reuse: ReuseStats = _NO_REUSE


def read_workload(reader: RecordingReader) -> Workload:
    """Follow a recording and collect its jobs, costs and latencies.

    A job ends where the recorded one did, whatever ended it; one that ended without a token has
    patience until then, and one still running at the end of the recording is taken to use all its
    tokens.
    """
    with reader.named_place():
        collector = _Collector(reader)
    for iteration in reader:
        with reader.named_place():
            collector.add(iteration)
    return collector.finish()


def make_workload(
    rate: float,
    prompt_lens: tuple[int, int],
    output_lens: tuple[int, int],
    num_requests: int,
    seed: int = 0,
) -> list[Job]:
    """Requests that arrive at random (Poisson), ``rate`` a second, lengths uniform in a range."""
    rng = random.Random(seed)
    jobs = []
    for time_us in random_arrivals(rng, rate, num_requests):
        length = rng.randint(*output_lens)
        jobs.append(Job(time_us, rng.randint(*prompt_lens), length, length))
    return jobs


def random_arrivals(rng: random.Random, rate: float, count: int) -> Iterator[int]:
    """Microseconds of arrivals at random (Poisson), ``rate`` a second."""
    time_us = 0.0
    for _ in range(count):
        time_us += rng.expovariate(rate) * 1e6
        yield int(time_us)


class _Collector:
    """Follows the iterations of a recording."""

    def __init__(self, reader: RecordingReader) -> None:
        self._tokens_per_block = reader.settings.tokens_per_block
        self._simulation = Simulation(reader.settings, None, reader.header)
        self._found = list(self._simulation.active)
        self._workload = Workload(num_found=len(self._found))
        self._num_steps = 0
        self._unended: dict[int, Job] = {}
        self._jobs: list[tuple[int, Job]] = []
        self._last: tuple[int, Load | None] | None = None

    def add(self, iteration: Iteration) -> None:
        """One iteration more."""
        simulation, latencies = self._simulation, self._workload.latencies
        start_us, end_us = iteration.start_us, iteration.start_us + iteration.step_us
        for request in self._found:  # the first iteration says when that was
            latencies.found(request, start_us)
        self._found = []
        self._num_steps += 1
        is_alone = iteration.decision is None and iteration.is_settled
        if self._last is not None and (not is_alone or simulation.must_settle):
            self._measure(*self._last, start_us)
        self._last = None
        simulation.arrivals(iteration)
        for arrival in iteration.arrivals:
            self._arrive(arrival, max(start_us - arrival.waited_us, 0))
        for request_id, hashes in iteration.growths:
            if (job := self._unended.get(request_id)) is not None:
                job.hashes += hashes
        if iteration.decision is not None:
            self._num_steps += iteration.decision.num_requests
            simulation.begin(iteration)
            self._note(iteration)
            lists = simulation.follow(iteration.decision)
            plan = simulation.plan(lists, iteration)
            latencies.decided(lists)
            self._note_matches(lists[0])
            step = simulation.run(plan, iteration)
            self._apply(step, end_us)
            if simulation.active:
                self._last = (start_us, step.load)
        elif iteration.is_settled:
            self._apply(simulation.settle(iteration), end_us)
        for request in simulation.end(iteration):
            self._end(request, end_us)

    def _arrive(self, arrival: Arrival, came_us: int) -> None:
        if len(self._jobs) + len(self._unended) >= MAX_NUM_JOBS:
            raise RecordingError(f"more than {MAX_NUM_JOBS} requests: cut the recording")
        self._workload.latencies.arrived(arrival.request_id, came_us)
        self._unended[arrival.request_id] = Job(
            came_us,
            arrival.prompt_len,
            arrival.max_new_tokens,
            arrival.max_new_tokens,
            arrival.priority,
            arrival.beam_width,
            arrival.lora_task_id,
            arrival.lora_pages,
            arrival.encoder_length,
        )

    def _measure(self, before_us: int, load: Load | None, start_us: int) -> None:
        """A request was active, so the next turn came at once, after waiting for these steps."""
        loads = [each for each in (load, self._simulation.load_before) if each is not None]
        if len(loads) == 1:
            self._workload.samples.append(Sample(loads[0], start_us - before_us))

    def _note(self, iteration: Iteration) -> None:
        """How beam searches have gone on before the decision, and what comes of drafts after it."""
        for trace in iteration.beams:
            if (job := self._unended.get(trace.request_id)) is not None:
                place = self._num_generated(trace.request_id)
                job.beams = _with(job.beams, place, trace.parents)
        for drafts in iteration.drafts:
            job = self._unended.get(drafts.request_id)
            if job is not None and drafts.num_gained > 0:
                place = self._num_generated(drafts.request_id)
                job.drafts = _with(job.drafts, place, (drafts.num_drafts, drafts.num_gained))

    def _note_matches(self, contexts: Sequence[LlmRequest]) -> None:
        """What the contexts that begin have found of a block."""
        for request in contexts:
            job = self._unended.get(request.request_id)
            if job is not None and request.prefix_match is not None:
                match = request.prefix_match[1]
                num_tokens = match.num_tokens % self._tokens_per_block
                if num_tokens:
                    place = len(match.block_ids)
                    job.partial_matches = _with(job.partial_matches, place, num_tokens)

    def _num_generated(self, request_id: int) -> int:
        request = self._simulation.find(request_id)
        assert request is not None, "a request has beams or drafts and is not active"
        return request.num_generated_tokens

    def _apply(self, step: Step, end_us: int) -> None:
        """What a step has brought, and the requests that it has ended."""
        for request in step.advanced:
            num_generated = request.num_generated_tokens
            self._workload.latencies.advanced(request.request_id, end_us, num_generated)
        for request in step.ended:
            self._end(request, end_us)

    def _end(self, request: LlmRequest, end_us: int) -> None:
        num_tokens = self._workload.latencies.ended(request.request_id)
        job = self._unended.pop(request.request_id, None)
        if job is None:
            return
        if num_tokens > 0:
            job.num_new_tokens = num_tokens
        else:
            job.patience_us = max(end_us - job.arrival_us, 0)
        self._jobs.append((request.request_id, job))

    def finish(self) -> Workload:
        """Jobs in the order in which they arrived."""
        workload = self._workload
        workload.num_unended, workload.num_steps = len(self._unended), self._num_steps
        workload.reuse = self._simulation.block_manager.reuse_stats
        jobs = [*self._jobs, *self._unended.items()]
        jobs.sort(key=lambda item: (item[1].arrival_us, item[0]))
        workload.jobs = [job for _, job in jobs]
        return workload


def _with(facts: Mapping[int, _T], place: int, fact: _T) -> Mapping[int, _T]:
    """``facts`` and one more; most jobs have none, and no dictionary of their own."""
    own = facts if isinstance(facts, dict) else {}
    own[place] = fact
    return own


def _percentile(microseconds: array[int], percent: int) -> float:
    """Milliseconds that so many percent do not exceed (nearest rank)."""
    if not microseconds:
        return 0.0
    ordered = sorted(microseconds)
    rank = max(-(-len(ordered) * percent // 100), 1)
    return ordered[rank - 1] / 1000
