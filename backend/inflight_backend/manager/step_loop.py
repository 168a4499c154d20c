"""Runs steps one after another, or plans the next while the previous one still runs.

Both loops give the same answers. The overlapped one hides the host's work behind the device's::

    plain        plan 1  run 1 ......  send 1  plan 2  run 2 ......  send 2
    overlapped   plan 1  run 1 ......  run 2 ......  run 3 ......
                         plan 2        send 1  plan 3  send 2  plan 4

A request may turn out to be finished (its end token, a stop signal) while its next step already
runs; the token of that step is dropped.

How many tokens a step with drafts yields is known only when it has ended, so steps do not overlap
while a request has drafts or is about to get some: the running step is read in a turn of its own,
and the next ones run as in the plain loop.

The mask of a guided request depends on its last token, which in the overlapped loop the previous
step may still compute. The mask is therefore made between decoder and sampling: while the decoder
runs, the host waits for the previous step, and the steps stay overlapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from inflight_backend.engine.interface import PendingStep, StepOutputs
from inflight_backend.errors import EngineLost
from inflight_backend.log import get_logger
from inflight_backend.manager.batcher import Batcher
from inflight_backend.manager.health import means_lost_device
from inflight_backend.manager.parameters import OverlapScheduler as OverlapScheduler
from inflight_scheduler import (
    NO_CANDIDATES,
    ActiveRequests,
    Candidates,
    LlmRequest,
    ScheduledBatch,
)

_logger = get_logger(__name__)

_NO_BATCH = ScheduledBatch(iteration=0)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one turn of a loop did.

    ``batch`` was started; ``advanced`` got a token, of that step or of the previous one; the steps
    of ``failed`` failed. A request of ``advanced`` may be in ``failed`` as well. ``outputs`` came
    with the tokens, for requests that asked. ``is_completed``: the tokens of a step were applied.
    ``lowest_token``: of those tokens; below 0 a request may have got none, or it is not known.
    """

    batch: ScheduledBatch
    advanced: list[LlmRequest] = field(default_factory=list)
    failed: list[LlmRequest] = field(default_factory=list)
    outputs: StepOutputs | None = None
    is_completed: bool = False
    lowest_token: int = -1

    def concerned(self, active: ActiveRequests) -> Sequence[LlmRequest]:
        """Those of ``active`` whose token may call for a response.

        Thousands may wait for whole answers: a look at each costs as much as scheduling it.
        """
        if self.lowest_token < 0 or self.outputs is not None:
            return self.advanced
        if active.num_streaming == 0:
            return active.finished
        return [each for each in self.advanced if each.is_streaming or each.is_finished]


class StepLoop:
    """Runs the steps of a batcher in the loop that its settings ask for."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._running: tuple[ScheduledBatch, PendingStep] | None = None
        self.has_lost_device = False
        """True once a step has failed because the device is lost."""
        self.why_failed = "the engine failed while it ran this request"
        """What the requests of a failed step are told."""

    @property
    def is_running(self) -> bool:
        """True while the tokens of a step have not been read."""
        return self._running is not None

    def abandon(self) -> None:
        """Wait for the running step and drop its tokens; the batcher cannot be used any more."""
        running, self._running = self._running, None
        if running is not None:
            with suppress(Exception):
                running[1].read()

    def run_once(self) -> StepOutcome:
        """One turn; the batch of its outcome is empty when no request can run.

        In the overlapped loop: schedule and submit a step, then read and apply the previous one. No
        request is paused while a step runs: such a decision waits for the next turn. A step on
        whose tokens the next plan depends is read before that is scheduled.
        """
        batcher, before = self._batcher, self._running
        if not batcher.is_overlapped:
            return self._run_to_end()
        batcher.num_paused = 0  # in case nothing is scheduled
        if batcher.wants_drafts:
            self._running = None
            batcher.recorder.settled(batcher.active)
            return self._run_to_end() if before is None else self._apply(before)
        outcome: StepOutcome | None = None
        if before is not None and batcher.planner.must_apply_first(before[0]):
            self._running = None
            outcome = self._apply(before)
            if outcome.failed or any(map(_has_ended, outcome.advanced)):
                # They hold their slots until the caller releases them.
                batcher.recorder.settled(batcher.active)
                return outcome
        batch = batcher.schedule(may_pause=before is None or outcome is not None)
        self._running = None
        has_failed = False
        if not batch.is_empty:
            try:
                batch = batcher.place_adapters(batch)
                batcher.prepare_sampling(batch, before if outcome is None else None)
                self._running = batch, batcher.engine.submit(batch)
                batcher.planner.assume_step(batch)
            except Exception as error:
                self._note_failure(batch, error)
                has_failed, self._running = True, None
        if outcome is None:
            outcome = StepOutcome(_NO_BATCH) if before is None else self._apply(before)
        if has_failed:
            batcher.recorder.failed()
            outcome.failed.extend(batcher.planner.discard(batch))
        return replace(outcome, batch=batch)

    def _run_to_end(self) -> StepOutcome:
        """Schedule, execute, update."""
        batcher = self._batcher
        batch = batcher.schedule()
        if batch.is_empty:
            return StepOutcome(batch)
        try:
            batch = batcher.place_adapters(batch)
            batcher.prepare_sampling(batch)
            step = batcher.engine.submit(batch)
            tokens, outputs = step.read(), step.read_outputs()
            advanced = batcher.planner.update(batch, tokens, _candidates_of(outputs))
            return _completed(batch, advanced, tokens, outputs)
        except Exception as error:
            self._note_failure(batch, error)
            batcher.recorder.failed()
            return StepOutcome(batch, failed=batcher.planner.discard(batch))

    def _apply(self, before: tuple[ScheduledBatch, PendingStep]) -> StepOutcome:
        """Read and apply the tokens of the previous step; if it is lost, the next one fails too."""
        batch, pending = before
        planner, recorder = self._batcher.planner, self._batcher.recorder
        try:
            tokens, outputs = pending.read(), pending.read_outputs()
            advanced = planner.apply_tokens(batch, tokens, _candidates_of(outputs))
            if planner.has_forgotten:
                recorder.forgot()
            return _completed(_NO_BATCH, advanced, tokens, outputs)
        except Exception as error:
            self._note_failure(batch, error)
            recorder.lost()
            failed = planner.discard(batch)
            if self._running is not None:
                failed += planner.discard(self._running[0])
                self._running = None
            return StepOutcome(_NO_BATCH, failed=failed)

    def _note_failure(self, batch: ScheduledBatch, error: Exception) -> None:
        _logger.exception("the step of iteration %d failed", batch.iteration)
        self.has_lost_device |= means_lost_device(error)
        if isinstance(error, EngineLost):
            self.why_failed = str(error)
        self._batcher.forget_adapters()


def _completed(
    batch: ScheduledBatch,
    advanced: list[LlmRequest],
    tokens: Sequence[int],
    outputs: StepOutputs | None,
) -> StepOutcome:
    lowest = min(tokens, default=0)
    return StepOutcome(batch, advanced, [], outputs, is_completed=True, lowest_token=lowest)


def _candidates_of(outputs: StepOutputs | None) -> Candidates:
    """Those of the rows in a beam search."""
    return NO_CANDIDATES if outputs is None else outputs.candidates


def _has_ended(request: LlmRequest) -> bool:
    """Finished, or without a token to continue from, which the caller answers with an error."""
    return request.is_finished or request.tokens[request.num_drawn_tokens - 1] < 0
