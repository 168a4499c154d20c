"""What came in, and what an iteration cost: the two things a recording is asked for by what-if."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from inflight_recorder.cost_model import Load, Sample
from inflight_recorder.errors import RecordingError
from inflight_recorder.files import RecordingReader
from inflight_recorder.latency import Latencies
from inflight_recorder.made_up import MadeUpText
from inflight_recorder.records import Arrival, Iteration
from inflight_recorder.simulation import Simulation
from inflight_recorder.steps import Step
from inflight_recorder.text_book import TextBook
from inflight_scheduler.request import LlmRequest

MAX_NUM_JOBS = 1_000_000

_NOTHING: Mapping[int, Any] = MappingProxyType({})


class Job(NamedTuple):
    """A request to come: when, how long, and how many tokens it generates in the end.

    ``text_number``: its text in a book of texts (block reuse); None for one that is like no other.
    ``patience_us``: it ends so long after its arrival if it has no token by then. By the number of
    tokens generated before: ``moves`` says how the rows of its beams go on then, ``drafts`` how
    many drafts it has and how many tokens come of them.
    """

    arrival_us: int
    prompt_len: int
    max_new_tokens: int
    num_new_tokens: int
    priority: float = 0.5
    text_number: int | None = None
    beam_width: int = 1
    patience_us: int | None = None
    moves: Mapping[int, tuple[int, ...]] = _NOTHING
    drafts: Mapping[int, tuple[int, int]] = _NOTHING


@dataclass(slots=True)
class RecordedWorkload:
    """Jobs in order of arrival, the iterations that measured a full turn, and the latencies.

    ``book``: with block reuse, the texts of the jobs, prompts and what was generated.
    ``num_found`` were in flight when the recording began and are no jobs, and ``num_unended`` jobs
    had not ended with it. ``num_steps`` were run: iterations, and requests in each of them.
    """

    jobs: list[Job] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    latencies: Latencies = field(default_factory=Latencies)
    book: TextBook | None = None
    num_found: int = 0
    num_unended: int = 0
    num_steps: int = 0


def read_workload(reader: RecordingReader) -> RecordedWorkload:
    """Follow a recording and collect its jobs, costs and latencies.

    A job ends where the recorded one did, whatever ended it; one that ended without a token has
    patience until then, and one still running at the end of the recording is taken to use all its
    tokens.
    """
    try:
        collector = _Collector(reader)
    except RecordingError as error:
        raise reader.fail(error) from None
    for iteration in reader:
        try:
            collector.add(iteration)
        except RecordingError as error:
            raise reader.fail(error) from None
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
    time_us = 0.0
    jobs = []
    for _ in range(num_requests):
        time_us += rng.expovariate(rate) * 1e6
        length = rng.randint(*output_lens)
        jobs.append(Job(int(time_us), rng.randint(*prompt_lens), length, length))
    return jobs


@dataclass(slots=True)
class _Coming:
    """A request of the recording that came and has not ended; see `Job`."""

    came_us: int
    arrival: Arrival
    text_number: int | None
    moves: dict[int, tuple[int, ...]] = field(default_factory=dict)
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
            self.text_number,
            arrival.beam_width,
            patience_us,
            self.moves or _NOTHING,
            self.drafts or _NOTHING,
        )


class _Collector:
    """Follows the iterations of a recording."""

    def __init__(self, reader: RecordingReader) -> None:
        header = reader.header
        self._simulation = Simulation(
            header.settings, header.active, None, header.cache, is_running=header.is_running
        )
        self._found = list(self._simulation.active)
        self._workload = RecordedWorkload(book=self._simulation.book, num_found=len(self._found))
        self._arrived: dict[int, _Coming] = {}
        self._jobs: list[tuple[int, Job]] = []
        self._last: tuple[int, Load | None] | None = None

    def add(self, iteration: Iteration) -> None:
        """One iteration more."""
        simulation, latencies = self._simulation, self._workload.latencies
        start_us = iteration.start_us
        for request in self._found:  # until the first iteration nobody knows when that was
            latencies.found(request.request_id, request.num_generated_tokens, start_us)
        self._found = []
        self._workload.num_steps += 1
        if iteration.decision is not None:
            self._workload.num_steps += iteration.decision.num_requests
        is_alone = iteration.decision is None and iteration.is_settled
        if self._last is not None and (not is_alone or simulation.must_settle):
            # Somebody was active, so the next turn came at once, after waiting for these steps.
            before_us, load = self._last
            loads = [each for each in (load, simulation.load_before) if each is not None]
            if len(loads) == 1:
                self._workload.samples.append(Sample(loads[0], start_us - before_us))
        self._last = None
        requests = simulation.arrivals(iteration)
        for arrival, request in zip(iteration.arrivals, requests, strict=True):
            came_us = max(start_us - arrival.waited_us, 0)
            number = _text_number(request)
            self._arrived[arrival.request_id] = _Coming(came_us, arrival, number)
            latencies.arrived(arrival.request_id, came_us)
        if iteration.decision is not None:
            simulation.begin(iteration)
            simulation.draft(iteration)
            self._note(iteration)
            lists = simulation.follow(iteration.decision)
            plan = simulation.plan(lists, iteration)
            latencies.decided(lists)
            step = simulation.run(plan, iteration)
            self._apply(step, start_us + iteration.step_us)
            if simulation.active:
                self._last = (start_us, step.load)
        elif iteration.is_settled:
            self._apply(simulation.settle(iteration), start_us + iteration.step_us)
        end_us = start_us + iteration.step_us
        for request in simulation.end(iteration):
            self._end(request, end_us)

    def _note(self, iteration: Iteration) -> None:
        """How searches have gone on before the decision, and what comes of drafts after it."""
        for moves in iteration.moves:
            if (coming := self._arrived.get(moves.request_id)) is not None:
                coming.moves[self._num_generated(moves.request_id)] = moves.parents
        for drafts in iteration.drafts:
            coming = self._arrived.get(drafts.request_id)
            if coming is not None and drafts.num_gained > 0:
                place = self._num_generated(drafts.request_id)
                coming.drafts[place] = drafts.num_drafts, drafts.num_gained

    def _num_generated(self, request_id: int) -> int:
        request = self._simulation.find(request_id)
        assert request is not None, "somebody moves or drafts who is not active"
        return request.num_generated_tokens

    def _apply(self, step: Step, end_us: int) -> None:
        """What a step has brought, and whom it has ended."""
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


def _text_number(request: LlmRequest) -> int | None:
    """Where the text of ``request`` is in the book, if there is one."""
    text = request.tokens
    return text.number if isinstance(text, MadeUpText) and text.book is not None else None


def check_jobs(jobs: Sequence[Job], book: TextBook | None) -> None:
    """`RecordingError` if there is nothing to run; `ValueError` if texts have no book."""
    if book is None and any(job.text_number is not None for job in jobs):
        raise ValueError("these jobs have texts: the book that holds them is needed")
    if not jobs:
        raise RecordingError("the recording holds no request that came")
