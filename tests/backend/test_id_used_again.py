"""From its final response on an id may be used again; a step of its first request may still run."""

from __future__ import annotations

import io
from typing import Any

import pytest
from support.manager_harness import MAX_UTILIZATION, Recorder, request, running
from support.triton_stub import CountedStep, CountingEngine, LostStep

from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_backend.requests.validation import PROCESSOR_FIELD
from inflight_recorder.replay import replay
from inflight_recorder.storage import RecordingReader
from inflight_scheduler import ScheduledBatch


class EngineThatLosesOne(CountingEngine):
    """Overlapped; its fourth step is lost. Counts the steps in which processors have a part."""

    is_asynchronous = True
    num_edited = 0

    def edit_next(self, edits: object) -> None:
        """One of them; nothing is asked of the processors."""
        self.num_edited += 1

    def submit(self, batch: ScheduledBatch) -> CountedStep:
        """Count on; the answer is read later."""
        tokens = self.execute(batch)
        return LostStep(tokens) if len(self.batches) == 4 else CountedStep(tokens)


def test_a_lost_step_of_the_first_one_does_not_touch_the_second_one() -> None:
    """The first one ends while that step runs for it; the second one waits for blocks."""
    values: dict[str, Any] = {PROCESSOR_FIELD: "mine"}
    later = [request(1, range(289, 301), 4, **values)]
    recorder = Recorder([request(1, [20], 9, end_id=23), request(2, range(97, 101), 12)])
    recorder.on_response = lambda request_id, is_final: (
        recorder.pending.append(later.pop())
        if later and (request_id, is_final) == (1, True)
        else None
    )
    engine = EngineThatLosesOne(num_blocks=4)
    params = TrtGptModelOptionalParams(
        max_batch_size=4, logits_processors={"mine": lambda *_: None}
    )
    with running(recorder, engine, MAX_UTILIZATION, params=params) as manager:
        recorder.wait_for_finals(2)
        with recorder.done:
            recorder.done.wait_for(lambda: len(recorder.tokens(1)) == 6, 30)
        text = "".join(manager.recording().result())
    assert recorder.responses[2][-1][2] != "", "no step was lost"
    assert recorder.tokens(1) == [21, 22, 301, 302, 303, 304]
    assert len(engine.batches[3].generation_slots) == 2, "no step ran on for the first one"
    assert engine.num_edited == 4
    result = replay(RecordingReader(io.BytesIO(text.encode()), "ring"))
    assert (result.divergence, result.num_requests) == (None, 3)


@pytest.mark.parametrize("end", ["length", "stop", "error"])
def test_nobody_knows_a_request_any_more_that_has_ended(end: str) -> None:
    """Who comes next with its id is another one. Ends with an error have no lengths."""

    class Engine(EngineThatLosesOne):
        is_asynchronous = False

        def execute(self, batch: ScheduledBatch) -> list[int]:
            if (end, len(self.batches)) == ("error", 5):
                raise RuntimeError
            return super().execute(batch)

    values: dict[str, Any] = {PROCESSOR_FIELD: "mine", "stop_words_list": [[900], [1]]}
    recorder = Recorder([request(1, [100], 20, **values)])
    recorder.on_response = lambda request_id, is_final: (
        recorder.stops.add(1) if (end, len(recorder.tokens(1))) == ("stop", 5) else None
    )
    params = TrtGptModelOptionalParams(
        max_batch_size=4, max_run_seconds=60, logits_processors={"mine": lambda *_: None}
    )
    with running(recorder, Engine(), params=params) as manager:
        recorder.wait_for_finals(1)
        assert (recorder.responses[1][-1][2] == "") == (end != "error"), recorder.responses
        assert not manager._rules
        assert not manager._stop_words._watched
        assert not manager._deadlines._requests
        lengths = {"length": [(1, 20)], "stop": [(1, 5)], "error": []}
        assert manager.lengths.take() == lengths[end]
