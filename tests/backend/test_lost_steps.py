"""Steps of which nobody hears: one that fails when read, and one that runs when the loop fails."""

from __future__ import annotations

from typing import Any

import pytest
from support.manager_harness import Recorder, request, running
from support.triton_stub import CountingEngine, LostStep

from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_scheduler import BatchPlanner, LlmRequest, ScheduledBatch

STEP_FAILED = "the engine failed while it ran this request"
LOOP_FAILED = "the batch manager failed while it held this request"


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


class WatchedStep:
    """A step that its engine knows as unread until somebody waits for it; it may be lost then."""

    def __init__(self, engine: WatchedEngine, tokens: list[int]) -> None:
        self._engine = engine
        self._tokens = tokens
        self.is_lost = False
        engine.unread.append(self)

    def read(self) -> list[int]:
        self._engine.unread.remove(self)
        if self.is_lost:
            raise RuntimeError("the step is lost")
        return self._tokens


class WatchedEngine(CountingEngine):
    is_asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self.unread: list[WatchedStep] = []

    def submit(self, batch: ScheduledBatch) -> Any:
        return WatchedStep(self, self.execute(batch))


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_step_that_runs_while_the_loop_fails_is_waited_for(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write blocks that others get next."""
    recorder, engine = Recorder(), WatchedEngine()
    with running(recorder, engine) as manager:
        schedule = manager._batcher.schedule

        def fail(**options: bool) -> ScheduledBatch:
            for step in engine.unread:
                step.is_lost = is_lost
                raise RuntimeError("ours")
            return schedule(**options)

        monkeypatch.setattr(manager._batcher, "schedule", fail)
        recorder.pending.append(request(1, [1], 20))
        recorder.wait_for_finals(1)
        assert recorder.responses[1] == [([], True, LOOP_FAILED)]
        recorder.pending.append(request(2, [5], 3))
        recorder.wait_for_finals(2)
        assert recorder.tokens(2) == [6, 7, 8]
        assert not engine.unread
        assert manager._batcher.is_idle_and_intact()


def test_who_had_a_token_to_get_when_the_loop_failed_and_cannot_be_released_gets_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder, params = Recorder(), TrtGptModelOptionalParams(max_batch_size=8, max_run_seconds=60)
    with running(recorder, params=params) as manager:
        apply, release, failures = manager._apply, BatchPlanner.release, [RuntimeError("ours")]

        def fail(each: LlmRequest) -> None:
            if (each.request_id, each.num_generated_tokens) == (2, 3):
                failures.append(RuntimeError("in the release"))
                raise failures.pop(0)
            apply(each)

        def fail_to_release(planner: BatchPlanner, each: LlmRequest) -> None:
            if each.request_id == 1 and len(recorder.responses[2]) == 2 and failures:
                raise failures.pop()
            release(planner, each)

        monkeypatch.setattr(manager, "_apply", fail)
        monkeypatch.setattr(BatchPlanner, "release", fail_to_release)
        recorder.pending += [request(1, [100], 20), request(2, [200], 20)]
        recorder.wait_for_finals(1, 2)
    assert not failures
    assert recorder.responses[1][2:] == [([103], False, ""), ([], True, LOOP_FAILED)]
    assert recorder.responses[2][2:] == [([], True, LOOP_FAILED)]
    assert not manager._deadlines._requests, "nothing is left of either"
