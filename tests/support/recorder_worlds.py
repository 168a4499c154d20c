"""Worlds whose decisions are recorded: plain requests, beam searches and drafts."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import pytest
from hypothesis import strategies as st
from support.fake_engine import VOCAB_SIZE, draw
from support.scheduler_world import make_request

from inflight_backend.engine.interface import StepOutputs
from inflight_backend.manager.batcher import Batcher
from inflight_backend.manager.step_loop import StepLoop
from inflight_recorder import recorder as recorder_module
from inflight_recorder.cost_model import CostModel, Load
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.schema import format_header, format_iteration
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
from inflight_scheduler.beam_search import Candidate

MAX_BEAMS = 3
GUARANTEED = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION

PRICES = CostModel(900.0, 120.0, 40.0, 25.0, 1.0)  # whole microseconds, as recorded times are
BASE = Settings(MAX_UTILIZATION, 24, 4, 8, 40, enable_reuse=True, may_copy_blocks=True)

chunkings = st.none() | st.builds(
    ContextChunking, st.sampled_from(ContextChunkingPolicy), st.integers(1, 4)
)


class _Pending:
    """A step that runs: its tokens are drawn when they are read."""

    def __init__(self, world: RecordedWorld, batch: ScheduledBatch) -> None:
        self._world = world
        self._batch = batch

    def read(self) -> list[int]:
        return self._world.run_step(self._batch, ("lost",))

    def read_outputs(self) -> StepOutputs | None:
        return self._world.take_outputs()


class RecordedWorld:
    """The batcher and the engine of a `StepLoop`, around a recorder; the model is that of `World`.

    With ``prices`` time goes by while a step is waited for, and only then. ``batches`` are all that
    were planned, one for each decision.
    """

    def __init__(
        self,
        settings: Settings,
        scheduler: RequestScheduler | None = None,
        prices: CostModel | None = None,
        max_beams: int = 1,
    ) -> None:
        self.manager = BlockManager(
            settings.num_blocks,
            settings.tokens_per_block,
            enable_reuse=settings.enable_reuse,
            may_copy_blocks=settings.may_copy_blocks,
            windows=settings.windows,
            max_chunk_tokens=settings.max_chunk_tokens,
            max_drafts=settings.max_drafts,
            num_snapshots=settings.num_snapshots,
        )
        self.active = ActiveRequests(self.manager, settings.priority_span)
        self.planner = BatchPlanner(
            self.manager,
            settings.max_batch_size,
            self.active,
            max_beams,
            settings.make_cross_blocks(),
        )
        self.scheduler = scheduler or scheduler_of(settings.policy, settings, self.planner)
        self.clock = Clock()
        self.recorder = FlightRecorder(
            settings,
            self.manager,
            software="test",
            clock=time.monotonic_ns if prices is None else self.clock,
        )
        self._prices = prices
        self._price_of: dict[int, float] = {}  # of the steps that were planned, by iteration
        self.batches: list[ScheduledBatch] = []
        self.finished: list[LlmRequest] = []
        self.num_pauses = self.num_paused = 0
        self.is_overlapped = settings.is_overlapped
        self.engine = self
        self._loop = StepLoop(cast(Batcher, self))
        self._fault = ""
        self._decision: Lists = ([], [], [])
        self._candidates: dict[int, list[Candidate]] = {}

    def place_adapters(self, batch: ScheduledBatch) -> ScheduledBatch:
        return batch

    def forget_adapters(self) -> None:
        pass

    def arrive(self, request: LlmRequest, came_ns: int | None = None) -> None:
        """Make ``request`` active."""
        self.active.add(request)
        self.recorder.arrived(request, came_ns)

    def iterate(self, stops: Iterable[LlmRequest] = (), fault: str = "") -> Lists:
        """One turn of the loop, then the stops; returns the decision.

        ``fault``: "failed" for the step that is decided, "lost" for the one before (overlapped),
        "unseen" if only those get no token of that who have left meanwhile, and "broken" for one
        whose numbers have failed.
        """
        self._fault, self._decision = fault, ([], [], [])
        outcome = self._loop.run_once()
        for request in outcome.advanced:
            is_broken = request.tokens[request.num_drawn_tokens - 1] < 0
            if request.is_finished or is_broken:
                self.end(request, "no token" if is_broken else "")
        for request in outcome.failed:
            if self.active.get(request.request_id) is request:
                self.end(request, "failed")
        for request in stops:
            if self.active.get(request.request_id) is request:
                request.finish(FinishReason.CANCELLED)
                self.end(request)
        self.recorder.finish_iteration()
        return self._decision

    def end(self, request: LlmRequest, error: str = "") -> None:
        """Release, and take from the active list."""
        if error:
            request.finish(FinishReason.CANCELLED)
        self.planner.release(request)
        self.active.remove(request)
        self.finished.append(request)
        self.recorder.ended(request, error)

    @property
    def is_running(self) -> bool:
        """True while the tokens of a step are to come."""
        return self._loop.is_running

    @property
    def text(self) -> str:
        """The recording."""
        return "".join(self.recorder.lines())

    # What the loop asks of its batcher, and of the engine.

    @property
    def wants_drafts(self) -> bool:
        return self.active.num_with_drafts > 0

    def schedule(self, *, may_pause: bool = True) -> ScheduledBatch:
        if not self.active:
            return self.planner.plan((), ())
        lists = self.scheduler.schedule_request(self.active, ())
        context, generation, paused = self._decision = (
            ([], [], []) if lists[2] and not may_pause else lists
        )
        self.recorder.decided(self.active, context, generation, paused)
        batch = self.planner.plan(context, generation, paused)
        self.recorder.carried_out(self.manager.num_free_blocks)
        self.num_pauses += len(paused)
        self.batches.append(batch)
        if self._prices is not None:
            self._price_of[batch.iteration] = self._prices.predict(_load_of(batch, generation))
        return batch

    def prepare_sampling(self, batch: ScheduledBatch, before: object = None) -> None:
        """There are no hooks."""

    def execute(self, batch: ScheduledBatch) -> list[int]:
        return self.run_step(batch, ("failed", "lost"))

    def submit(self, batch: ScheduledBatch) -> _Pending:
        if self._fault == "failed":
            raise RuntimeError("the step has failed")
        return _Pending(self, batch)

    def take_outputs(self) -> StepOutputs | None:
        return StepOutputs(candidates=self._candidates) if self._candidates else None

    def run_step(self, batch: ScheduledBatch, failures: Sequence[str]) -> list[int]:
        """The same text goes on in the same way, as with a greedy model."""
        self.clock.time_us += self._price_of.pop(batch.iteration, 0.0)
        if self._fault in failures:
            raise RuntimeError("the step has failed")
        owners, tokens = self.planner.token_owners(batch), list[int]()
        for run in (run for run in batch.runs if run.is_last):
            text = owners[len(tokens)].tokens[: run.start + len(run.tokens)]
            ends = range(len(run.drafts) + 1)
            tokens += [draw([*text, *run.drafts[:end]], -1, 0) for end in ends]
        tokens += [draw(r.tokens[: r.num_drawn_tokens], -1, 0) for r in owners[len(tokens) :]]
        broken = owners[:1] if self._fault == "broken" else []
        if self._fault == "unseen" and self.is_overlapped:
            broken = [request for request in owners if not request.num_pending_tokens]
        self._candidates = self._candidates_of(owners, broken)
        return [-1 if r in broken else token for r, token in zip(owners, tokens, strict=True)]

    def _candidates_of(
        self, owners: Iterable[LlmRequest], broken: Sequence[LlmRequest]
    ) -> dict[int, list[Candidate]]:
        """Of every row; in most steps all go on from one that is far better than the others."""
        found = {}
        for request in owners:  # one without a slot has left while the step ran
            if request.beams is None or request in broken or request.seq_slot is None:
                continue
            best = draw([request.request_id, request.num_tokens], -1, 0) % 4
            for row in range(request.num_rows):
                lead = 20.0 if row == best else 0.0
                found[request.seq_slot + row] = [
                    (token, lead - 30.0 - token) for token in range(2 * MAX_BEAMS)
                ]
        return found


def _load_of(batch: ScheduledBatch, generation: Sequence[LlmRequest]) -> Load:
    num_cached = sum(request.num_cached_tokens * request.num_rows for request in generation)
    num_tokens = sum(len(chunk.tokens + chunk.drafts) for chunk in batch.context_chunks)
    num_rows = sum(request.num_rows for request in generation)
    num_rows += sum(len(run.drafts) for run in batch.draft_runs)
    return Load(num_tokens, len(batch.context_chunks), num_rows, num_cached)


class SearchingWorld(RecordedWorld):
    """Every request searches with 1 to 3 beams, or fewer where these do not fit."""

    def __init__(self, settings: Settings, prices: CostModel | None = None) -> None:
        super().__init__(settings, prices=prices, max_beams=MAX_BEAMS)

    def arrive(self, request: LlmRequest, came_ns: int | None = None) -> None:
        for width in range(1 + request.request_id % MAX_BEAMS, 1, -1):
            search = make_request(
                request.request_id,
                request.prompt_len,
                request.max_new_tokens,
                end_id=request.end_id,
                family=request.request_id % 3,
                beam_width=width,
                search=BeamParams(width, 1),
                priority=request.priority,
            )
            if self.manager.can_ever_fit(search):
                request = search
                break
        super().arrive(request, came_ns)


class DraftingWorld(RecordedWorld):
    """Some requests get drafts, right and wrong ones; then no step overlaps another."""

    def __init__(self, settings: Settings, seed: int, prices: CostModel | None = None) -> None:
        super().__init__(settings, prices=prices)
        self.dice = random.Random(seed)
        self.num_accepted = 0

    def iterate(self, stops: Iterable[LlmRequest] = (), fault: str = "") -> Lists:
        if self.dice.random() < 0.4:
            self._guess()
        return super().iterate(stops, fault)

    def end(self, request: LlmRequest, error: str = "") -> None:
        self.num_accepted += request.num_accepted_drafts
        super().end(request, error)

    def _guess(self) -> None:
        budget = self.scheduler.micro_batch_scheduler.max_num_tokens or 2**20  # type: ignore[attr-defined]
        for request in self.active:
            is_fresh = request.is_context_init_state and request.seq_slot is None
            if request.num_pending_tokens or not (
                is_fresh or request.is_generation_in_progress_state
            ):
                continue
            limit = budget - (request.prompt_len if is_fresh else 1)
            text = list(request.tokens)
            for _ in range(self.dice.randint(0, max(0, min(4, limit)))):
                is_right = self.dice.random() < 0.7
                text.append(draw(text, -1, 0) if is_right else self.dice.randrange(VOCAB_SIZE))
            request.set_draft_tokens(text[request.num_tokens :])


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


class TextSink:
    """A sink that keeps the recording in memory, as ``text``."""

    def __init__(self) -> None:
        self.text = ""

    def begin(self, settings: Settings, software: str, started: str) -> None:
        self.text = format_header(settings, software, started)

    def add(self, iteration: bytes) -> None:
        self.text += format_iteration(iteration)

    def close(self) -> None:
        pass


def read(text: str | bytes | bytearray) -> RecordingReader:
    """A reader of a recording in memory."""
    content = text.encode() if isinstance(text, str) else text
    return RecordingReader(io.BytesIO(content), "test.jsonl")


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
    longest = settings.num_blocks * settings.tokens_per_block // len(settings.windows)
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


def long_ring() -> str:
    """A ring that has dropped its beginning: 20 requests are in flight when it begins, three when
    it ends, and six come near its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "CHUNK_ITERATIONS", 30)
        patch.setattr(recorder_module, "NUM_CHUNKS", 3)
        world = RecordedWorld(Settings(GUARANTEED, 3000, 4, 40, 640), prices=PRICES)
        for number in range(1, 21):
            world.arrive(make_request(number, 10, 300))
        for _ in range(120):
            world.iterate()
        for number in range(21, 27):
            request = make_request(number, 10, 400 if number % 2 else 5)
            world.arrive(request, int(world.clock.time_us) * 1000)
            for _ in range(5):
                world.iterate()
        return world.text
