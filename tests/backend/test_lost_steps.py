"""A step of the overlapped loop that fails when it is read, and who runs beside it."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import CountingEngine, LostStep
from manager_harness import Recorder, request, running

from inflight_backend.optional_params import KvCacheConfig, TrtGptModelOptionalParams
from inflight_scheduler import ScheduledBatch

STEP_FAILED = "the engine failed while it ran this request"


class LostFirstStep(CountingEngine):
    """Overlapped; nobody ever hears of the tokens of its first step."""

    is_asynchronous = True

    def submit(self, batch: ScheduledBatch) -> Any:
        step = super().submit(batch)
        return LostStep(step.tokens) if len(self.batches) == 1 else step


@pytest.mark.case(86)
def test_who_runs_beside_a_lost_step_on_what_that_should_have_written_fails_too() -> None:
    """The second prompt begins like the first, whose numbers nobody has computed."""
    shared = list(range(100, 164))
    recorder = Recorder([request(1, shared, 20)])
    late = [request(2, [*shared, 7], 20)]

    def arrive(batch: ScheduledBatch) -> None:
        recorder.pending += late
        late.clear()

    engine = LostFirstStep(before_step=arrive)
    params = TrtGptModelOptionalParams(KvCacheConfig(enable_block_reuse=True), max_batch_size=4)
    with running(recorder, engine, params=params) as manager:
        recorder.wait_for_finals(1, 2)
        assert engine.batches[1].context_chunks, "the second ran beside the first"
        for number in (1, 2):
            assert recorder.responses[number][-1] == ([], True, STEP_FAILED)
        assert manager._batcher.is_idle_and_intact()
