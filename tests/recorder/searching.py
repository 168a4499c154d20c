"""Worlds with beams whose decisions are recorded."""

from __future__ import annotations

from collections.abc import Iterable

from recorder.recorded import RecordedWorld
from scheduler.fake_engine import draw
from scheduler.world import make_request

from inflight_recorder.cost_model import CostModel
from inflight_recorder.settings import Lists, Settings, scheduler_of
from inflight_scheduler import BatchPlanner, BeamParams, LlmRequest, ScheduledBatch
from inflight_scheduler.beam_search import Candidate

MAX_BEAMS = 3


class SearchingWorld(RecordedWorld):
    """Every request searches with 1 to 3 beams, or fewer where these do not fit.

    As in `OverlappedSteps` a step of searches is settled before the next decision, in an iteration
    of its own if it ends somebody.
    """

    def __init__(self, settings: Settings, prices: CostModel | None = None) -> None:
        super().__init__(settings, prices=prices)
        self.planner = BatchPlanner(
            self.manager, settings.max_batch_size, self.active, max_beam_width=MAX_BEAMS
        )
        self.scheduler = scheduler_of(settings.policy, settings, self.planner)

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

    def iterate(self, stops: Iterable[LlmRequest] = (), fault: str = "") -> Lists:
        before = self.running
        if before is not None and self.planner.must_settle_first(before):
            self.running = None
            if self._settle_first(before, fault):
                return [], [], []
        return super().iterate(stops, fault)

    def _settle_first(self, before: ScheduledBatch, fault: str) -> bool:
        """Whether this has ended somebody; then it was an iteration."""
        self.clock.time_us += self._price_of_running
        self._price_of_running = 0.0
        if fault == "lost":
            self.recorder.lost()
            ended = [(request, "failed") for request in self.planner.discard(before)]
        else:
            tokens, candidates = self._draw(before, fault), self._candidates(before, fault)
            settled = self.planner.settle(before, tokens, candidates)
            ended = [
                (request, "no token" if request.tokens[-1] < 0 else "")
                for request in settled
                if request.is_finished or request.tokens[-1] < 0
            ]
            if self.planner.has_forgotten:
                self.recorder.forgot()
        if ended:
            self.recorder.settled(self.active)
            for request, error in ended:
                if self.active.get(request.request_id) is request:
                    self.end(request, error)
            self.recorder.finish_iteration()
        return bool(ended)

    def _run(self, batch: ScheduledBatch, fault: str) -> tuple[list[LlmRequest], list[LlmRequest]]:
        if batch.is_empty or fault in ("failed", "lost"):
            return super()._run(batch, fault)
        tokens, candidates = self._draw(batch, fault), self._candidates(batch, fault)
        return self.planner.update(batch, tokens, candidates), []

    def _candidates(self, batch: ScheduledBatch, fault: str) -> dict[int, list[Candidate]]:
        """Of every row; in most steps all go on from one that is far better than the others."""
        found = {}
        owners = self.planner.token_owners(batch)
        for request in owners:
            if fault == "broken" and request is owners[0]:
                continue
            if request.seq_slot is None:  # it has left while the step ran
                continue
            best = draw([request.request_id, request.num_tokens], -1, 0) % 4
            for row in range(request.num_rows):
                lead = 20.0 if row == best else 0.0
                found[request.seq_slot + row] = [
                    (token, lead - 30.0 - token) for token in range(2 * MAX_BEAMS)
                ]
        return found
