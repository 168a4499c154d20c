"""Many servers behind a router: each is a `PredictedServer`, with one clock for all.

The network and the router itself take no time. A server that nothing has been sent to yet costs
nothing; each of the others takes some 60 bytes per block of its pool, besides its requests.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from inflight_recorder.cost_model import CostModel
from inflight_recorder.fleet.routers import Router
from inflight_recorder.settings import RecordingError, Settings
from inflight_recorder.simulator import MakeScheduler, Simulation, default_scheduler
from inflight_recorder.whatif import PredictedServer
from inflight_recorder.workload import Job, Latencies, Summary
from inflight_scheduler.kv.block_manager import ReuseStats


def predict_fleet(
    settings: Settings,
    jobs: Sequence[Job],
    cost: CostModel,
    num_replicas: int,
    router: Router,
    *,
    make_scheduler: MakeScheduler = default_scheduler,
    num_recorded_steps: int | None = None,
) -> Summary:
    """Run ``jobs`` on ``num_replicas`` servers with these ``settings``; see `whatif.predict`.

    The largest batch is that of one server; all else is of the fleet.
    """
    if not jobs:
        raise RecordingError("the recording holds no request that came")
    fleet = _Fleet(num_replicas)
    for number, job in enumerate(jobs, start=1):
        fleet.advance(job.arrival_us)
        chosen = router.choose(job, fleet.loads)
        server = fleet.servers[chosen]
        if server is None:
            server = fleet.servers[chosen] = PredictedServer(
                Simulation(settings, make_scheduler),
                cost,
                num_recorded_steps=num_recorded_steps,
                seed=chosen,
            )
        server.submit(number, job)
        fleet.loads[chosen] += 1
        fleet.wait_for(chosen, server)
    latencies, num_refused, num_reused, num_missed = Latencies(), 0, 0, 0
    for server in filter(None, fleet.servers):
        server.advance()
        latencies.add(server.latencies)
        num_refused += server.num_refused
        num_reused += server.reuse.num_reused_blocks
        num_missed += server.reuse.num_missed_blocks
    return latencies.summary(num_refused, ReuseStats(num_reused, num_missed))


class _Fleet:
    """The servers, and what a router knows of their load."""

    def __init__(self, num_replicas: int) -> None:
        self.servers: list[PredictedServer | None] = [None] * num_replicas
        self.loads = [0] * num_replicas
        self._due = [math.inf] * num_replicas  # when each server is to be advanced next
        self._queue: list[tuple[float, int]] = []  # a heap of these; those out of date are ignored
        self._ends: list[tuple[float, int]] = []  # a heap: when a request leaves which server

    def wait_for(self, index: int, server: PredictedServer) -> None:
        """Note what ``server`` does next."""
        self._due[index] = server.next_us
        if self._due[index] < math.inf:
            heapq.heappush(self._queue, (self._due[index], index))

    def advance(self, until_us: float) -> None:
        """Come to that time: servers do what begins before it, and loads are those of then."""
        while self._queue and self._queue[0][0] < until_us:
            due_us, index = heapq.heappop(self._queue)
            server = self.servers[index]
            if server is None or due_us != self._due[index]:
                continue
            server.advance(until_us)
            for end_us in server.ends_us:
                heapq.heappush(self._ends, (end_us, index))
            server.ends_us.clear()
            self.wait_for(index, server)
        while self._ends and self._ends[0][0] <= until_us:
            self.loads[heapq.heappop(self._ends)[1]] -= 1
