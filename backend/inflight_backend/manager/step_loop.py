"""Runs steps one after another, or plans the next while the one before still runs.

Both loops give the same answers. The overlapped one hides the host's work behind the device's::

    plain        plan 1  run 1 ......  send 1  plan 2  run 2 ......  send 2
    overlapped   plan 1  run 1 ......  run 2 ......  run 3 ......
                         plan 2        send 1  plan 3  send 2  plan 4

A request may turn out to be finished when its next step runs already (its end token, a stop
signal); what that step draws for it is dropped.

How far a step with drafts comes is known when its tokens are, so nothing overlaps while somebody
has drafts or is about to get some: the step that runs is settled in a turn of its own, and the next
ones are awaited as in the plain loop.

What a guided request may draw depends on its last token, which in the overlapped loop the step
before may still compute. Its mask is therefore made between the decoder and the draw: while the
decoder runs, the host waits for the step before, and nobody leaves the overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from inflight_backend.engine.interface import PendingStep, StepEngine, StepOutputs
from inflight_backend.log import get_logger
from inflight_backend.manager.health import means_lost_device
from inflight_recorder.recorder import FlightRecorder
from inflight_scheduler import (
    NO_CANDIDATES,
    ActiveRequests,
    BatchPlanner,
    Candidates,
    LlmRequest,
    LlmRequestState,
    ScheduledBatch,
)

_logger = get_logger(__name__)

_NO_BATCH = ScheduledBatch(iteration=0)


class OverlapScheduler(Enum):
    """Whether steps overlap: AUTO says yes where the engine runs on a device of its own."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"

    def is_on(self, engine: StepEngine) -> bool:
        """The choice for ``engine``."""
        if self is OverlapScheduler.AUTO:
            return engine.is_asynchronous
        return self is OverlapScheduler.ON


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one turn of a loop did.

    ``batch`` was started; ``advanced`` got a token, of that step or of the one before; the steps of
    ``failed`` went wrong. A request of ``advanced`` may be in ``failed`` as well. ``outputs`` came
    with the tokens, for requests that asked. ``is_completed``: the tokens of a step were applied.
    ``lowest_token``: of those; below 0 somebody may have got none, or it is not known.
    """

    batch: ScheduledBatch
    advanced: list[LlmRequest] = field(default_factory=list)
    failed: list[LlmRequest] = field(default_factory=list)
    outputs: StepOutputs | None = None
    is_completed: bool = False
    lowest_token: int = -1

    @property
    def concerned(self) -> Sequence[LlmRequest]:
        """Those of ``advanced`` for whom their token may mean more than to go on.

        Thousands may wait for whole answers: a look at each costs as much as to schedule it.
        """
        if self.lowest_token < 0 or self.outputs is not None:
            return self.advanced
        done = LlmRequestState.GENERATION_COMPLETE
        return [each for each in self.advanced if each.is_streaming or each.state is done]


class StepSource(Protocol):
    """What a loop asks for: who decides, plans and runs its steps. `Batcher` is one."""

    engine: StepEngine
    planner: BatchPlanner
    active: ActiveRequests
    recorder: FlightRecorder
    num_paused: int
    """By the last decision."""

    @property
    def wants_drafts(self) -> bool:
        """True when the next step may verify drafts, so that nothing can be planned beside it."""

    def schedule(self, *, may_pause: bool = True) -> ScheduledBatch:
        """The next plan, empty if nobody can run; without ``may_pause`` nobody is paused for it."""

    def prepare_sampling(
        self, batch: ScheduledBatch, before: tuple[ScheduledBatch, PendingStep] | None = None
    ) -> None:
        """Before ``batch`` runs: who may draw what, given the step ``before``, not yet read."""

    def take_outputs(self) -> StepOutputs | None:
        """What the plan executed last brought beside tokens; None if no request asked."""


class SyncSteps:
    """Every step is awaited before the next one is decided."""

    is_running = False

    def __init__(self, batcher: StepSource) -> None:
        self._batcher = batcher
        self.has_lost_device = False  # by the failure of a step

    def abandon(self) -> None:
        """Forget a step that still runs; here there is none."""

    def turn(self) -> StepOutcome:
        """Schedule, execute, update; an empty batch when nobody can run."""
        batcher = self._batcher
        batch = batcher.schedule()
        if batch.is_empty:
            return StepOutcome(batch)
        try:
            batcher.prepare_sampling(batch)
            tokens = batcher.engine.execute(batch)
            outputs = batcher.take_outputs()
            advanced = batcher.planner.update(batch, tokens, candidates_of(outputs))
            lowest = min(tokens, default=0)
            return StepOutcome(batch, advanced, [], outputs, is_completed=True, lowest_token=lowest)
        except Exception as error:
            _log_failure(batch)
            self.has_lost_device |= means_lost_device(error)
            batcher.recorder.failed()
            return StepOutcome(batch, failed=batcher.planner.discard(batch))


class OverlappedSteps:
    """A step is decided and submitted while the one before it runs, whose tokens come after."""

    def __init__(self, batcher: StepSource) -> None:
        self._batcher = batcher
        self._plain = SyncSteps(batcher)
        self._running: tuple[ScheduledBatch, PendingStep] | None = None
        self._lowest_token = -1  # of those settled last
        self._has_lost_device = False

    @property
    def is_running(self) -> bool:
        """True while the tokens of a step have not been read."""
        return self._running is not None

    @property
    def has_lost_device(self) -> bool:
        """By the failure of a step."""
        return self._has_lost_device or self._plain.has_lost_device

    def abandon(self) -> None:
        """Wait for a step that still runs and forget it; its batcher is of no more use then."""
        running, self._running = self._running, None
        if running is not None:
            with suppress(Exception):
                running[1].read()

    def turn(self) -> StepOutcome:
        """Schedule and submit a step, then read and apply the one before.

        Nobody is paused while a step runs: such a decision waits for the next turn. A step that
        says how the next one goes on is read before that is decided.
        """
        self._batcher.num_paused = 0  # where nothing is scheduled
        if self._batcher.wants_drafts:
            return self._turn_alone()
        batcher, before = self._batcher, self._running
        failed: list[LlmRequest] = []
        settled: list[LlmRequest] | None = None
        if before is not None and batcher.planner.must_apply_first(before[0]):
            self._running = None
            settled = self._settle(before, failed)
            if failed or any(map(_has_ended, settled)):
                # They hold their slots until the caller releases them.
                batcher.recorder.settled(batcher.active)
                outputs = None if failed else read_outputs(before[1])
                return StepOutcome(_NO_BATCH, settled, failed, outputs, is_completed=not failed)
        batch = batcher.schedule(may_pause=before is None or settled is not None)
        self._running = None
        has_failed = False
        if not batch.is_empty:
            try:
                batcher.prepare_sampling(batch, before if settled is None else None)
                self._running = batch, batcher.engine.submit(batch)
                batcher.planner.assume_step(batch)
            except Exception as error:
                _log_failure(batch)
                self._has_lost_device |= means_lost_device(error)
                has_failed, self._running = True, None
        advanced = self._settle(before, failed) if settled is None else settled
        is_completed = before is not None and not failed
        outputs = read_outputs(before[1]) if before is not None and is_completed else None
        if has_failed:
            batcher.recorder.failed()
            failed += batcher.planner.discard(batch)
        return StepOutcome(batch, advanced, failed, outputs, is_completed, self._lowest_token)

    def _turn_alone(self) -> StepOutcome:
        """Settle the step that runs, else run one to its end."""
        before, self._running = self._running, None
        self._batcher.recorder.settled(self._batcher.active)
        if before is None:
            return self._plain.turn()
        failed: list[LlmRequest] = []
        advanced = self._settle(before, failed)
        outputs = None if failed else read_outputs(before[1])
        return StepOutcome(_NO_BATCH, advanced, failed, outputs, is_completed=not failed)

    def _settle(
        self, before: tuple[ScheduledBatch, PendingStep] | None, failed: list[LlmRequest]
    ) -> list[LlmRequest]:
        """Who got a token of the step before; if it was lost, so is the one behind it."""
        if before is None:
            return []
        batch, pending = before
        planner = self._batcher.planner
        try:
            tokens = pending.read()
            self._lowest_token = min(tokens, default=0)
            settled = planner.apply_tokens(batch, tokens, candidates_of(read_outputs(pending)))
            if planner.has_forgotten:
                self._batcher.recorder.forgot()
            return settled
        except Exception as error:
            _log_failure(batch)
            self._has_lost_device |= means_lost_device(error)
            self._batcher.recorder.lost()
            failed += planner.discard(batch)
            if self._running is not None:
                failed += planner.discard(self._running[0])
                self._running = None
            return []


def read_outputs(step: PendingStep) -> StepOutputs | None:
    """What a step whose tokens were read has brought beside them; None if no request asked."""
    read: Callable[[], StepOutputs | None] | None = getattr(step, "read_outputs", None)
    return None if read is None else read()


def candidates_of(outputs: StepOutputs | None) -> Candidates:
    """Those of the rows that search."""
    return NO_CANDIDATES if outputs is None else outputs.candidates


def _has_ended(request: LlmRequest) -> bool:
    """Finished, or without a token to go on with, which its caller answers with an error."""
    return request.is_finished or request.tokens[request.num_drawn_tokens - 1] < 0


def _log_failure(batch: ScheduledBatch) -> None:
    _logger.exception("the step of iteration %d failed", batch.iteration)
