"""What a what-if takes from a recording: requests, costs of iterations, and latencies."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from inflight_recorder.cost_model import Load, Sample
from inflight_recorder.schema import Arrival, Iteration
from inflight_recorder.settings import RecordingError
from inflight_recorder.simulator import Simulation, Step, split_hashes
from inflight_recorder.storage import RecordingReader
from inflight_scheduler.request import LlmRequest

MAX_NUM_JOBS = 1_000_000

_WHOLE = 2**62
"""A context that was complete once: from then on all of a text has been computed."""

_NOTHING: Mapping[int, Any] = MappingProxyType({})


class Job(NamedTuple):
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
    hashes: bytes = b""
    partial_matches: Mapping[int, int] = _NOTHING
    patience_us: int | None = None
    beams: Mapping[int, tuple[int, ...]] = _NOTHING
    drafts: Mapping[int, tuple[int, int]] = _NOTHING


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in milliseconds; 0 where nothing was measured.

    ``max_batch``: requests in the largest iteration. ``num_unanswered`` of ``num_requests`` ended
    without a token.
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


@dataclass(slots=True)
class Latencies:
    """Collects the times of one run, in microseconds of its clock."""

    _arrivals: dict[int, int] = field(default_factory=dict)
    _last_token: dict[int, int] = field(default_factory=dict)
    _num_tokens_of: dict[int, int] = field(default_factory=dict)
    _first: array[int] = field(default_factory=lambda: array("q"))
    _gaps: array[int] = field(default_factory=lambda: array("q"))
    _first_us: int | None = None
    _last_us: int = 0
    _num_tokens: int = 0
    _num_ended: int = 0
    _num_unanswered: int = 0
    _num_pauses: int = 0
    _num_recomputed: int = 0
    _computed: dict[int, int] = field(default_factory=dict)  # tokens of each context, at most
    _max_batch: int = 0

    def arrived(self, request_id: int, time_us: int) -> None:
        """A request came."""
        self._arrivals[request_id] = time_us
        if self._first_us is None:
            self._first_us = time_us

    def found(self, request_id: int, num_generated: int, time_us: int) -> None:
        """A request was in flight before, and had so many tokens when the run began."""
        self._num_tokens_of[request_id] = num_generated
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
            start = request.context_current_position
            end = start + request.context_chunk_size
            # A request that was paused before this run began had computed all, as far as is known.
            before = self._computed.get(request.request_id, _WHOLE if request.num_pauses else 0)
            if request.num_pauses:
                self._num_recomputed += max(min(end, before) - start, 0)
            now = _WHOLE if end == request.prompt_len else end
            self._computed[request.request_id] = max(before, now)

    def advanced(self, request_id: int, time_us: int, num_generated: int) -> None:
        """A request has got tokens, so that it has ``num_generated``.

        Those that come at once share the time since the last one. What beams generate again after
        a pause is no news.
        """
        num_new = num_generated - self._num_tokens_of.get(request_id, 0)
        if num_new <= 0:
            return
        self._last_us = time_us
        self._num_tokens += num_new
        self._num_tokens_of[request_id] = num_generated
        last = self._last_token.get(request_id)
        if last is not None:
            gap, rest = divmod(time_us - last, num_new)
            self._gaps.extend([gap + (place < rest) for place in range(num_new)])
        elif request_id in self._arrivals:
            self._first.append(time_us - self._arrivals[request_id])
            self._gaps.extend([0] * (num_new - 1))
        self._last_token[request_id] = time_us

    def has_token(self, request_id: int) -> bool:
        """Whether a request that has not ended got one."""
        return request_id in self._last_token

    def ended(self, request_id: int) -> int:
        """A request ended; how many tokens it had."""
        num_tokens = self._num_tokens_of.pop(request_id, 0)
        self._num_ended += 1
        self._num_unanswered += num_tokens == 0
        self._arrivals.pop(request_id, None)
        self._computed.pop(request_id, None)
        self._last_token.pop(request_id, None)
        return num_tokens

    def summary(self, num_refused: int = 0) -> Summary:
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
        )


@dataclass(slots=True)
class RecordedWorkload:
    """Jobs in order of arrival, the iterations that measured a full turn, and the latencies.

    ``tokens_per_block``: those that each of the hashes of the jobs stands for. ``num_found``
    requests were in flight when the recording began and are no jobs, and ``num_unended`` jobs had
    not ended with it. ``num_steps`` were run: iterations, and requests in each of them.
    """

    jobs: list[Job] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    latencies: Latencies = field(default_factory=Latencies)
    tokens_per_block: int = 1
    num_found: int = 0
    num_unended: int = 0
    num_steps: int = 0


def read_workload(reader: RecordingReader) -> RecordedWorkload:
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


@dataclass(slots=True)
class _Coming:
    """A request of the recording that came and has not ended; see `Job`."""

    came_us: int
    arrival: Arrival
    hashes: bytes = b""
    partial_matches: dict[int, int] = field(default_factory=dict)
    beams: dict[int, tuple[int, ...]] = field(default_factory=dict)
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def job(self, num_new_tokens: int, patience_us: int | None = None) -> Job:
        """What a prediction is told of it."""
        arrival = self.arrival
        return Job(
            self.came_us,
            arrival.prompt_len,
            arrival.max_new_tokens,
            num_new_tokens,
            arrival.priority,
            arrival.beam_width,
            self.hashes,
            self.partial_matches or _NOTHING,
            patience_us,
            self.beams or _NOTHING,
            self.drafts or _NOTHING,
        )


class _Collector:
    """Follows the iterations of a recording."""

    def __init__(self, reader: RecordingReader) -> None:
        header, settings = reader.header, reader.settings
        self._simulation = Simulation(
            settings, header.active, None, header.cache, is_running=header.is_running
        )
        self._found = list(self._simulation.active)
        self._workload = RecordedWorkload(
            tokens_per_block=settings.tokens_per_block, num_found=len(self._found)
        )
        self._arrived: dict[int, _Coming] = {}
        self._jobs: list[tuple[int, Job]] = []
        self._last: tuple[int, Load | None] | None = None

    def add(self, iteration: Iteration) -> None:
        """One iteration more."""
        simulation, latencies = self._simulation, self._workload.latencies
        start_us = iteration.start_us
        for request in self._found:  # the first iteration says when that was
            latencies.found(request.request_id, request.num_generated_tokens, start_us)
        self._found = []
        self._workload.num_steps += 1
        if iteration.decision is not None:
            self._workload.num_steps += iteration.decision.num_requests
        is_alone = iteration.decision is None and iteration.is_settled
        if self._last is not None and (not is_alone or simulation.must_settle):
            self._measure(*self._last, start_us)
        self._last = None
        simulation.arrivals(iteration)
        for arrival in iteration.arrivals:
            came_us = max(start_us - arrival.waited_us, 0)
            self._arrived[arrival.request_id] = _Coming(came_us, arrival)
            latencies.arrived(arrival.request_id, came_us)
        self._grow(iteration)
        if iteration.decision is not None:
            simulation.begin(iteration)
            simulation.draft(iteration)
            self._note(iteration)
            lists = simulation.follow(iteration.decision)
            plan = simulation.plan(lists, iteration)
            latencies.decided(lists)
            self._note_matches(lists[0])
            step = simulation.run(plan, iteration)
            self._apply(step, start_us + iteration.step_us)
            if simulation.active:
                self._last = (start_us, step.load)
        elif iteration.is_settled:
            self._apply(simulation.settle(iteration), start_us + iteration.step_us)
        end_us = start_us + iteration.step_us
        for request in simulation.end(iteration):
            self._end(request, end_us)

    def _grow(self, iteration: Iteration) -> None:
        for request_id, hashes in iteration.growths:
            if request_id in self._arrived:
                self._arrived[request_id].hashes += hashes

    def _measure(self, before_us: int, load: Load | None, start_us: int) -> None:
        """A request was active, so the next turn came at once, after waiting for these steps."""
        loads = [each for each in (load, self._simulation.load_before) if each is not None]
        if len(loads) == 1:
            self._workload.samples.append(Sample(loads[0], start_us - before_us))

    def _note(self, iteration: Iteration) -> None:
        """How beam searches have gone on before the decision, and what comes of drafts after it."""
        for trace in iteration.beams:
            if (coming := self._arrived.get(trace.request_id)) is not None:
                coming.beams[self._num_generated(trace.request_id)] = trace.parents
        for drafts in iteration.drafts:
            coming = self._arrived.get(drafts.request_id)
            if coming is not None and drafts.num_gained > 0:
                place = self._num_generated(drafts.request_id)
                coming.drafts[place] = drafts.num_drafts, drafts.num_gained

    def _note_matches(self, contexts: Sequence[LlmRequest]) -> None:
        """What the contexts that begin have found of a block."""
        for request in contexts:
            coming = self._arrived.get(request.request_id)
            if coming is not None and request.prefix_match is not None:
                match = request.prefix_match[1]
                num_tokens = match.num_tokens % self._workload.tokens_per_block
                if num_tokens:
                    coming.partial_matches[len(match.block_ids)] = num_tokens

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

    def finish(self) -> RecordedWorkload:
        """Jobs in the order in which they arrived."""
        self._workload.num_unended = len(self._arrived)
        for request_id, coming in self._arrived.items():
            self._append(request_id, coming.job(coming.arrival.max_new_tokens))
        self._jobs.sort(key=lambda item: (item[1].arrival_us, item[0]))
        self._workload.jobs = [job for _, job in self._jobs]
        return self._workload

    def _end(self, request: LlmRequest, end_us: int) -> None:
        num_tokens = self._workload.latencies.ended(request.request_id)
        coming = self._arrived.pop(request.request_id, None)
        if coming is None:
            return
        if num_tokens > 0:
            job = coming.job(num_tokens)
        else:
            job = coming.job(coming.arrival.max_new_tokens, max(end_us - coming.came_us, 0))
        self._append(request.request_id, job)

    def _append(self, request_id: int, job: Job) -> None:
        if len(self._jobs) >= MAX_NUM_JOBS:
            raise RecordingError(f"more than {MAX_NUM_JOBS} requests: cut the recording")
        self._jobs.append((request_id, job))


def check_jobs(jobs: Sequence[Job], hash_tokens: int, tokens_per_block: int) -> None:
    """`RecordingError` if there is nothing to run, or equal blocks are not known.

    ``hash_tokens``: those that each hash of the jobs stands for.
    """
    if not jobs:
        raise RecordingError("the recording holds no request that came")
    if tokens_per_block % hash_tokens and any(job.hashes for job in jobs):
        raise RecordingError(
            f"tokens_per_block is {tokens_per_block}: it must be a multiple of the recorded "
            f"{hash_tokens}, since which texts share smaller blocks is not recorded"
        )


def block_keys(job: Job, hash_tokens: int, tokens_per_block: int) -> list[bytes]:
    """The hash of each known full block of so many tokens (see `check_jobs`)."""
    every = tokens_per_block // hash_tokens
    return split_hashes(job.hashes)[every - 1 :: every]


def _percentile(microseconds: array[int], percent: int) -> float:
    """Milliseconds that so many percent do not exceed (nearest rank)."""
    if not microseconds:
        return 0.0
    ordered = sorted(microseconds)
    rank = max(-(-len(ordered) * percent // 100), 1)
    return ordered[rank - 1] / 1000
