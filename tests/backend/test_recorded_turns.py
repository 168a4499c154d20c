"""What the loop does when nobody is active any more is recorded: a step may still run then."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from support.manager_harness import MAX_UTILIZATION, Recorder, request, running
from support.triton_stub import CountedStep, CountingEngine

from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_recorder.replay import replay
from inflight_recorder.storage import RecordingReader
from inflight_recorder.timeline import build_timeline
from inflight_recorder.workload import read_workload
from inflight_scheduler import ScheduledBatch


@dataclass(frozen=True)
class BadStep(CountedStep):
    """Its numbers have failed, or it is lost."""

    is_lost: bool = False

    def read(self) -> list[int]:
        """No token for anybody."""
        if self.is_lost:
            raise RuntimeError("the step is lost")
        return [-1] * len(self.tokens)


class EngineThatFailsOnce(CountingEngine):
    """Overlapped; the step with this number goes wrong."""

    is_asynchronous = True

    def __init__(self, bad_step: int, fault: str) -> None:
        super().__init__()
        self._bad_step, self._fault = bad_step, fault

    def submit(self, batch: ScheduledBatch) -> CountedStep:
        """Count on; the answer is read later."""
        tokens = self.execute(batch)
        if len(self.batches) == self._bad_step and self._fault:
            return BadStep(tokens, is_lost=self._fault == "lost")
        return CountedStep(tokens)


class Pausing(Recorder):
    """The second half of the requests comes when nothing has happened for some turns."""

    def __init__(self, first: InferenceRequest, others: Sequence[InferenceRequest]) -> None:
        super().__init__([first])
        self._others = list(others)
        self._num_quiet_turns = 0

    def get(self, room: int) -> list[InferenceRequest]:
        self._num_quiet_turns += self.finals() == {1}
        if self._num_quiet_turns == 4:
            self.pending += self._others
        return super().get(room)


@pytest.mark.parametrize("fault", ["", "lost", "not finite"])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_the_tokens_of_a_step_come_to_nobody(fault: str, has_drafts: bool) -> None:
    """The only request is stopped behind its third token while its next step runs."""
    prompt = list(range(1, 21))
    drafts: dict[str, Any] = {"draft_input_ids": [21, 22]} if has_drafts else {}
    recorder = Pausing(
        request(1, prompt, 20), [request(2, prompt, 6, **drafts), request(3, prompt, 6)]
    )
    recorder.on_response = lambda *_: (
        recorder.stops.add(1) if len(recorder.responses[1]) == 3 else None
    )
    params = TrtGptModelOptionalParams(KvCacheConfig(enable_block_reuse=True), max_batch_size=4)
    engine = EngineThatFailsOnce(4, fault)
    with running(recorder, engine, MAX_UTILIZATION, params=params) as manager:
        recorder.wait_for_finals(1, 2, 3)
        text = "".join(manager.recording().result())
    assert recorder.tokens(1) == [21, 22, 23]
    assert len(engine.batches[3].generation_slots) == 1, "no step ran on"

    def read() -> RecordingReader:
        return RecordingReader(io.BytesIO(text.encode()), "ring")

    result = replay(read())
    assert result.divergence is None, str(result)
    assert result.num_requests == 3
    assert len(build_timeline(read()).lanes) == len(read_workload(read()).jobs) == 3


class EngineThatLeavesOnce(CountingEngine):
    """Its first step ends the thread, as a panic of a library would."""

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """Count on, from the second step on."""
        tokens = super().execute(batch)
        if len(self.batches) == 1:
            raise SystemExit("a panic")
        return tokens


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_nothing_of_a_step_that_ended_the_thread_is_taken_as_cached(is_overlapped: bool) -> None:
    """The first prompt was never computed: the second request computes it, and the third waits."""
    prompt = list(range(1, 21))
    recorder = Recorder([request(1, prompt, 6)])
    later = [request(2, prompt, 6), request(3, range(40, 50), 6)]

    def send_later(request_id: int, _: bool) -> None:
        if request_id == 1:
            recorder.pending += later

    recorder.on_response = send_later
    params = TrtGptModelOptionalParams(
        KvCacheConfig(enable_block_reuse=True), max_batch_size=4, enable_chunked_context=False
    )
    engine = EngineThatLeavesOnce(max_num_tokens=24)
    engine.is_asynchronous = is_overlapped
    with running(recorder, engine, params=params) as manager:
        recorder.wait_for_finals(1, 2, 3)
        text = "".join(manager.recording().result())
    assert recorder.tokens(2) == list(range(21, 27))
    assert [len(batch.context_chunks) for batch in engine.batches[1:3]] == [1, 1]
    result = replay(RecordingReader(io.BytesIO(text.encode()), "ring"))
    assert result.divergence is None, str(result)
