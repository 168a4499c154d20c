"""`World` with a loop that plans a step while the previous one still runs.

The fake engine executes when a step is submitted, so steps run in order, as on a device; its tokens
stay unread until the next step has been submitted.
"""

from __future__ import annotations

import random

from support.scheduler_world import Decision, World

from inflight_scheduler import NO_CANDIDATES, Candidates, LlmRequest, ScheduledBatch


class OverlappedWorld(World):
    """`step` submits a step and reads the previous one."""

    running: tuple[ScheduledBatch, list[int]] | None = None
    candidates: Candidates = NO_CANDIDATES
    num_discarded_tokens = 0

    def step(self, decision: Decision | None = None) -> ScheduledBatch:
        """Schedule and submit, then apply the previous step; no request is paused while one runs.

        A step on whose tokens the next plan depends is applied first.
        """
        settled = self.running
        if settled is not None and self.planner.must_apply_first(settled[0]):
            self.running = None
            self._settle(*settled)
            self.check_invariants()
        lists = self.decide() if decision is None else decision
        if lists[2] and self.running is not None:
            lists = ([], [], [])
        before = self.running
        batch = self.plan(lists)
        self.running = None
        if not batch.is_empty:
            self.running = (batch, self.engine.execute(batch))
            self.candidates = self.engine.candidates
            self.planner.assume_step(batch)
            self.check_invariants()
        if before is not None:
            self._settle(*before)
            self.num_running += 1  # that step was running
            self.check_invariants()
        elif settled is not None:
            self.num_running += 1
        return batch if before is None else before[0]

    def fail(self, *, is_running_lost: bool) -> list[LlmRequest]:
        """The next step fails, and possibly the running one. Returns the failed requests."""
        lists = self.decide()
        batch = self.plan(([], [], []) if lists[2] else lists)
        hurt: list[LlmRequest] = []
        if self.running is not None:
            before, self.running = self.running, None
            if is_running_lost:
                hurt += self.planner.discard(before[0])
            else:
                self._settle(*before)
        hurt += [r for r in self.planner.discard(batch) if r not in hurt]
        return hurt

    def _settle(self, batch: ScheduledBatch, tokens: list[int]) -> None:
        settled = self.planner.apply_tokens(batch, tokens, self.candidates)
        self.num_discarded_tokens += len(tokens) - len(settled)
        for request in settled:
            if request.is_finished:
                self.end(request)


class MixedWorld(OverlappedWorld):
    """Switches between both loops: when a request has drafts, as the server does, and at random.

    ``share_alone`` of the other steps run alone, too.
    """

    dice: random.Random
    share_alone: float
    num_alone = num_overlapped = 0

    def step(self, decision: Decision | None = None) -> ScheduledBatch:
        """A step of either loop; one that runs alone starts after the previous one has ended."""
        by_luck = self.dice.random() < self.share_alone
        if self.active.num_with_drafts == 0 and not by_luck:
            self.num_overlapped += 1
            return super().step(decision)
        was_running = self.running is not None
        self.settle_running()
        self.num_alone += 1
        batch = World.step(self, decision)
        self.num_running += was_running
        return batch

    def settle_running(self) -> None:
        """Read the tokens of the running step, if there is one."""
        if self.running is not None:
            before, self.running = self.running, None
            self._settle(*before)
            self.check_invariants()

    def drain(self) -> None:
        """As `World.drain`."""
        self.settle_running()
        super().drain()
        self.settle_running()
