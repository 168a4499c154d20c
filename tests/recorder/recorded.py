"""Worlds whose decisions are recorded, and the way from a recording to its readers."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import strategies as st
from scheduler.fake_engine import FakeEngine, draw
from scheduler.world import make_request

from inflight_recorder import recorder as recorder_module
from inflight_recorder.cost_model import CostModel, Load
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.settings import Lists, Settings, scheduler_of
from inflight_recorder.storage import RecordingReader
from inflight_recorder.whatif import Clock
from inflight_scheduler import (
    ActiveRequests,
    BatchPlanner,
    BeamParams,
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    ContextChunkingPolicy,
    FinishReason,
    LlmRequest,
    RequestScheduler,
    ScheduledBatch,
)

GUARANTEED = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION

chunkings = st.none() | st.builds(
    ContextChunking, st.sampled_from(ContextChunkingPolicy), st.integers(1, 4)
)
small_settings = st.builds(
    Settings,
    policy=st.just(GUARANTEED),
    num_blocks=st.integers(2, 16),
    tokens_per_block=st.sampled_from([1, 2, 4]),
    max_batch_size=st.integers(1, 8),
    max_num_tokens=st.none() | st.integers(4, 40),
    chunking=chunkings,
)
"""Of worlds in which everything soon runs short; each policy takes its turn in them."""


class RecordedWorld:
    """The loop of the batch manager around a recorder; the model is that of `World`.

    With ``prices`` time goes by while a step is waited for, and only then. ``batches`` are all that
    were planned, one for each decision.
    """

    def __init__(
        self,
        settings: Settings,
        scheduler: RequestScheduler | None = None,
        prices: CostModel | None = None,
    ) -> None:
        self.manager = BlockManager(
            settings.num_blocks,
            settings.tokens_per_block,
            enable_reuse=settings.enable_reuse,
            may_copy_blocks=settings.may_copy_blocks,
        )
        self.active = ActiveRequests(self.manager, settings.priority_span)
        self.planner = BatchPlanner(self.manager, settings.max_batch_size, self.active)
        self.scheduler = scheduler or scheduler_of(settings.policy, settings, self.planner)
        self.clock = Clock()
        self.recorder = FlightRecorder(
            settings,
            self.manager,
            software="test",
            clock=time.monotonic_ns if prices is None else self.clock,
        )
        self._prices = prices
        self._price_of_running = 0.0
        self.batches: list[ScheduledBatch] = []
        self.is_overlapped = settings.is_overlapped
        self.running: ScheduledBatch | None = None
        self.finished: list[LlmRequest] = []
        self.num_pauses = 0

    def arrive(self, request: LlmRequest, came_ns: int | None = None) -> None:
        """Make ``request`` active."""
        self.active.add(request)
        self.recorder.arrived(request, came_ns)

    def decide(self) -> Lists:
        """What the scheduler says, noted."""
        decision = self.scheduler.schedule_request(self.active, ())
        if decision[2] and self.running is not None:
            decision = ([], [], [])
        self.recorder.decided(self.active, *decision)
        return decision

    def iterate(self, stops: Iterable[LlmRequest] = (), fault: str = "") -> Lists:
        """One pass of the loop: decide, run, then the stops.

        ``fault``: "failed" for the step that is decided, "lost" for the one before (overlapped),
        "unseen" if only those get no token of that who have left meanwhile, and "broken" for one
        whose numbers have failed.
        """
        decision = self.decide()
        batch = self.planner.plan(*decision)
        self.num_pauses += len(decision[2])
        self.recorder.carried_out(self.manager.num_free_blocks)
        self.batches.append(batch)
        self._wait(batch, decision[1])
        run = self._run_overlapped if self.is_overlapped else self._run
        settled, hurt = run(batch, fault)
        for request in settled:
            is_broken = request.tokens[request.num_drawn_tokens - 1] < 0
            if request.is_finished or is_broken:
                self.end(request, "no token" if is_broken else "")
        for request in hurt:
            if self.active.get(request.request_id) is request:
                self.end(request, "failed")
        for request in stops:
            if self.active.get(request.request_id) is request:
                request.finish(FinishReason.CANCELLED)
                self.end(request)
        self.recorder.finish_iteration()
        return decision

    def _wait(self, batch: ScheduledBatch, generation: Sequence[LlmRequest]) -> None:
        """For the step, overlapped for the one before."""
        if self._prices is None:
            return
        num_cached = sum(request.num_cached_tokens * request.num_rows for request in generation)
        num_tokens = sum(len(chunk.tokens + chunk.drafts) for chunk in batch.context_chunks)
        num_rows = sum(request.num_rows for request in generation)
        num_rows += sum(len(run.drafts) for run in batch.draft_runs)
        load = Load(num_tokens, len(batch.context_chunks), num_rows, num_cached)
        price = 0.0 if batch.is_empty else self._prices.predict(load)
        if self.is_overlapped:
            price, self._price_of_running = self._price_of_running, price
        self.clock.time_us += price

    def _run(self, batch: ScheduledBatch, fault: str) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Who got a token, and whom a fault has hurt."""
        if batch.is_empty:
            return [], []
        if fault in ("failed", "lost"):
            self.recorder.failed()
            return [], self.planner.discard(batch)
        return self.planner.update(batch, self._draw(batch, fault)), []

    def _run_overlapped(
        self, batch: ScheduledBatch, fault: str
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """As `OverlappedSteps.turn`."""
        planner = self.planner
        before, self.running = self.running, None
        has_failed = fault == "failed" and not batch.is_empty
        if not batch.is_empty and not has_failed:
            planner.advance(batch)
            self.running = batch
        settled: list[LlmRequest] = []
        hurt: list[LlmRequest] = []
        if before is not None and fault == "lost":
            self.recorder.lost()
            hurt += planner.discard(before)
            if self.running is not None:
                hurt += planner.discard(self.running)
                self.running = None
        elif before is not None:
            tokens = self._draw(before, fault)
            if fault == "unseen":
                owners = planner.token_owners(before)
                pairs = zip(owners, tokens, strict=True)
                tokens = [token if r.num_pending_tokens else -1 for r, token in pairs]
            settled = planner.settle(before, tokens)
            if planner.has_forgotten:
                self.recorder.forgot()
        if has_failed:
            self.recorder.failed()
            hurt += planner.discard(batch)
        return settled, hurt

    def _draw(self, batch: ScheduledBatch, fault: str = "") -> list[int]:
        """The same text goes on in the same way, as with a greedy model."""
        owners = self.planner.token_owners(batch)
        broken = owners[:1] if fault == "broken" else []
        return [-1 if r in broken else draw(r.tokens[: r.num_drawn_tokens], -1, 0) for r in owners]

    def end(self, request: LlmRequest, error: str = "") -> None:
        """Release, and take from the active list."""
        if error:
            request.finish(FinishReason.CANCELLED)
        self.planner.release(request)
        self.active.remove(request)
        self.finished.append(request)
        self.recorder.ended(request, error)

    @property
    def text(self) -> str:
        """The recording."""
        return "".join(self.recorder.lines())


class SearchingWorld(RecordedWorld):
    """Its requests search; a fake engine tells the candidates."""

    def __init__(self, settings: Settings, prices: CostModel | None = None) -> None:
        super().__init__(settings, prices=prices)
        self.planner = BatchPlanner(self.manager, settings.max_batch_size, self.active, 4)
        self.scheduler = scheduler_of(settings.policy, settings, self.planner)
        self.engine = FakeEngine(settings.num_blocks, settings.tokens_per_block, None)

    def _run(self, batch: ScheduledBatch, fault: str) -> tuple[list[LlmRequest], list[LlmRequest]]:
        tokens = self.engine.execute(batch)
        return self.planner.update(batch, tokens, self.engine.candidates), []


def searching(number: int, width: int = 3, priority: float = 0.5) -> LlmRequest:
    """A request that searches, for 16 tokens or until its end id."""
    return make_request(
        number,
        3 + number % 7,
        16,
        end_id=1,
        beam_width=width,
        priority=priority,
        search=BeamParams(width, 1),
    )


def read(text: str) -> RecordingReader:
    """A reader of a recording in memory."""
    return RecordingReader(io.BytesIO(text.encode()), "test.jsonl")


def play(
    settings: Settings,
    *,
    num_requests: int = 40,
    seed: int = 0,
    world: RecordedWorld | None = None,
    priorities: Sequence[float] = (0.5,),
    salts: Sequence[bytes] = (b"",),
    max_iterations: int | None = None,
    fault_rate: float = 0.0,
) -> RecordedWorld:
    """Random requests through a world, some ended by a stop, some by an end id.

    Until all have ended, or for ``max_iterations``.
    """
    rng = random.Random(seed)
    world = world or RecordedWorld(settings)
    longest = settings.num_blocks * settings.tokens_per_block
    if settings.max_num_tokens is not None and settings.chunking is None:
        longest = min(longest, settings.max_num_tokens)
    next_id = 1
    num_left = max_iterations
    while (next_id <= num_requests or world.active) and num_left != 0:
        while next_id <= num_requests and rng.random() < 0.4:
            num_prompt = rng.randint(1, max(1, longest // 2))
            max_new = rng.randint(1, max(1, longest - num_prompt))
            world.arrive(
                make_request(
                    next_id,
                    num_prompt,
                    max_new,
                    end_id=rng.choice([-1, 3]),
                    priority=rng.choice(priorities),
                    family=rng.randint(1, 3) if settings.enable_reuse else None,
                    cache_salt=rng.choice(salts),
                )
            )
            next_id += 1
        if not world.active:
            continue
        stops = [request for request in world.active if rng.random() < 0.02]
        fault = (
            rng.choice(["failed", "lost", "unseen", "broken"])
            if fault_rate and rng.random() < fault_rate
            else ""
        )
        world.iterate(stops, fault)
        num_left = None if num_left is None else num_left - 1
    assert all(request.finish_reason != FinishReason.NOT_FINISHED for request in world.finished)
    return world


@contextmanager
def tiny_ring() -> Iterator[None]:
    """Three chunks of five iterations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "CHUNK_ITERATIONS", 5)
        patch.setattr(recorder_module, "NUM_CHUNKS", 3)
        yield
