"""The same requests under other settings: the scheduler runs for real, the clock is a cost model.

Requests arrive when they arrived and generate as many tokens as they did, independent of how fast
they are answered (an open loop). A request that no iteration could ever run under the new settings
is refused, as the server would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from inflight_scheduler.admission import refusal_reason
from inflight_scheduler.recording.cost_model import CostModel
from inflight_scheduler.recording.errors import RecordingError
from inflight_scheduler.recording.latency import Latencies, Summary
from inflight_scheduler.recording.likeness import TextBook
from inflight_scheduler.recording.recorder import FlightRecorder
from inflight_scheduler.recording.records import Arrival, Settings
from inflight_scheduler.recording.simulation import MakeScheduler, Simulation, default_scheduler
from inflight_scheduler.recording.workload import Job, check_jobs
from inflight_scheduler.request import FinishReason, LlmRequest
from inflight_scheduler.scheduler import CapacitySchedulerPolicy


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings with a name for the table."""

    name: str
    settings: Settings


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
    book: TextBook | None = None,
    make_scheduler: MakeScheduler = default_scheduler,
    recorder: FlightRecorder | None = None,
    clock: Clock | None = None,
) -> Summary:
    """Run ``jobs`` under ``settings``; ``recorder`` (with the same ``clock``) hears everything.

    ``book``: the texts of the jobs (block reuse), from where the jobs are.
    """
    check_jobs(jobs, book)
    simulation = Simulation(settings, (), make_scheduler, book=book)
    return _Run(simulation, jobs, cost, recorder, clock or Clock()).run()


class _Run:
    """One prediction."""

    def __init__(
        self,
        simulation: Simulation,
        jobs: Sequence[Job],
        cost: CostModel,
        recorder: FlightRecorder | None,
        clock: Clock,
    ) -> None:
        self._simulation = simulation
        self._settings = simulation.settings
        self._cost = cost
        self._recorder = recorder
        self._clock = clock
        self._waiting = deque(enumerate(jobs, start=1))
        self._to_generate: dict[int, int] = {}
        self._latencies = Latencies()
        self._num_refused = 0

    def run(self) -> Summary:
        """Until every job has ended."""
        while self._waiting or self._is_busy:
            if not self._is_busy:
                next_us = self._waiting[0][1].arrival_us
                self._clock.time_us = max(self._clock.time_us, float(next_us))
            self._admit()
            if self._is_busy:
                self._step()
        return self._latencies.summary(self._num_refused)

    @property
    def _is_busy(self) -> bool:
        return bool(self._simulation.active) or self._simulation.is_running

    def _admit(self) -> None:
        """Everybody who has come by now, as far as there are places."""
        limit, now = self._settings.max_batch_size, self._clock.time_us
        while self._waiting and len(self._simulation.active) < limit:
            number, job = self._waiting[0]
            if job.arrival_us > now:
                return
            self._waiting.popleft()
            if self._is_refused(number, job):
                self._num_refused += 1
                continue
            arrival = Arrival(number, job.prompt_len, job.max_new_tokens, priority=job.priority)
            request = self._simulation.arrive(arrival, job.text_number)
            self._to_generate[number] = job.num_new_tokens
            self._latencies.arrived(number, job.arrival_us)
            if self._recorder is not None:
                self._recorder.arrived(request, job.arrival_us * 1000)

    def _is_refused(self, number: int, job: Job) -> bool:
        reason = refusal_reason(
            LlmRequest(number, [0] * job.prompt_len, job.max_new_tokens),
            block_manager=self._simulation.block_manager,
            max_num_tokens=self._settings.max_num_tokens,
            may_pause=self._settings.policy == CapacitySchedulerPolicy.MAX_UTILIZATION,
            may_chunk=self._settings.chunking is not None,
        )
        return reason is not None

    def _step(self) -> None:
        simulation, recorder = self._simulation, self._recorder
        simulation.begin()
        lists = simulation.decide()
        if not lists[0] and not lists[1] and not simulation.is_running:
            raise RecordingError("nobody runs under these settings, though requests wait")
        if recorder is not None:
            recorder.decided(simulation.active, *lists)
        plan = simulation.plan(lists)
        self._latencies.decided(lists)
        if recorder is not None:
            recorder.carried_out(simulation.block_manager.num_free_blocks)
        step = simulation.run(plan)
        if step.load is not None:
            self._clock.time_us += self._cost.predict(step.load)
        now = int(self._clock.time_us)
        early = []
        for request in step.advanced:
            self._latencies.advanced(request.request_id, now)
            if request.num_generated_tokens >= self._to_generate[request.request_id]:
                if not request.is_finished:
                    request.finish(FinishReason.END_ID)
                    early.append(request)
                self._latencies.ended(request.request_id)
                if recorder is not None:
                    recorder.ended(request)
        simulation.forget(early)
        if recorder is not None:
            recorder.finish_iteration()
