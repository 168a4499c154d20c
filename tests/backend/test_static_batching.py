"""V1: static batches in lock-step through `GptManager`, with their own statistics."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.manager_harness import (
    GUARANTEED,
    MAX_UTILIZATION,
    WAIT,
    GatedEngine,
    Recorder,
    request,
    running,
)
from support.triton_stub import CountingEngine

from inflight_backend.engine.interface import StepOutputs
from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_backend.manager.step_loop import OverlapScheduler
from inflight_backend.speculative.drafter import SpeculativeDecodingConfig
from inflight_scheduler import CapacitySchedulerPolicy, ScheduledBatch, TrtGptModelType

V1 = TrtGptModelType.V1
STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy), ids=lambda each: each.name)
def test_nobody_joins_until_all_of_the_batch_has_finished(policy: CapacitySchedulerPolicy) -> None:
    engine = GatedEngine()
    recorder = Recorder([request(1, [1], 2), request(2, [50, 51], 5)])
    with running(recorder, engine, policy, model_type=V1) as manager:
        assert manager.policy == STATIC_BATCH
        assert engine.has_begun.wait(WAIT)
        recorder.pending.append(request(3, [80], 3))
        engine.go_on.set()
        recorder.wait_for_finals(1, 2, 3)
    steps = [(len(b.context_chunks), len(b.generation_slots)) for b in engine.batches]
    assert steps == [(2, 0), (0, 2), (0, 1), (0, 1), (0, 1), (1, 0), (0, 1), (0, 1)]
    assert recorder.responses[3] == [([80, 81, 82, 83], True, "")]


def test_statistics_count_the_slots_that_padding_would_waste() -> None:
    recorder = Recorder([request(1, [1], 2), request(2, [50, 51], 4), request(3, [9], 1)])
    with running(recorder, model_type=V1):
        recorder.wait_for_finals(1, 2, 3)
    seen = [
        (
            stats["Scheduled Requests"],
            stats["Context Requests"],
            stats["Total Context Tokens"],
            stats["Total Generation Tokens"],
            stats["Empty Generation Slots"],
        )
        for stats in recorder.stats
    ]
    assert seen == [(3, 3, 4, 0, 0), (2, 0, 0, 2, 1), (1, 0, 0, 1, 2), (1, 0, 0, 1, 2)]
    only_in_flight = {"Generation Requests", "MicroBatch ID", "Paused Requests"}
    assert not only_in_flight & set(recorder.stats[0])


def test_an_idle_manager_has_no_empty_slots() -> None:
    recorder = Recorder([request(1, [1], 1), request(2, [5], 3)])
    with running(recorder, model_type=V1) as manager:
        recorder.wait_for_finals(1, 2)
        deadline = time.monotonic() + WAIT
        while '"Empty Generation Slots": 0' not in manager.stats_json:
            assert time.monotonic() < deadline
            time.sleep(0.001)


class SearchingEngine(CountingEngine):
    """Counts, and tells every row that searches the same candidates."""

    max_beam_width = 2

    def __init__(self) -> None:
        super().__init__()
        self._num_candidates: dict[int, int] = {}
        self._outputs = StepOutputs()

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """One token for each row."""
        for setup in batch.setups:
            self._num_candidates[setup.slot] = setup.num_candidates
        for move in batch.beam_moves:
            self._last_token[move.slot] = move.token
        rows = [run.slot for run in batch.runs if run.is_last]
        self._outputs = StepOutputs(
            candidates={
                slot: [(token, -1.0 - token) for token in range(self._num_candidates[slot])]
                for slot in (*rows, *batch.generation_slots)
                if self._num_candidates[slot]
            }
        )
        return super().execute(batch)

    def take_outputs(self) -> StepOutputs:
        """Those of the last step."""
        return self._outputs


def test_the_slot_of_one_that_waits_for_those_with_other_beams_is_not_empty() -> None:
    """Requests 1 and 3 run together; 2 has two beams and generates when both have finished."""
    requests = [request(1, [1], 3), request(2, [50, 51], 4, beam_width=2), request(3, [7], 2)]
    recorder = Recorder(requests)
    with running(recorder, SearchingEngine(), model_type=V1, max_beam_width=2):
        recorder.wait_for_finals(1, 2, 3)
    seen = [(s["Total Generation Tokens"], s["Empty Generation Slots"]) for s in recorder.stats]
    assert seen == [(0, 0), (2, 0), (1, 1), (1, 2), (1, 2), (1, 2)]


def test_a_batch_is_what_fits_the_blocks_and_the_tokens() -> None:
    requests = [request(i, [10 * i] * 6, 6) for i in range(1, 6)]
    engine = CountingEngine(num_blocks=9, tokens_per_block=4, max_num_tokens=12)
    recorder = Recorder(requests)
    with running(recorder, engine, model_type=V1):
        recorder.wait_for_finals(*range(1, 6))
    assert [len(b.context_chunks) for b in engine.batches if b.context_chunks] == [2, 2, 1]
    assert all(not (b.context_chunks and b.generation_slots) for b in engine.batches)


@pytest.mark.parametrize("exclude", [False, True])
def test_a_streaming_request_gets_one_whole_answer(exclude: bool) -> None:
    recorder = Recorder([request(1, [5, 6], 3, streaming=True)])
    with running(recorder, model_type=V1, exclude_input_in_output=exclude):
        recorder.wait_for_finals(1)
    expected = [7, 8, 9] if exclude else [5, 6, 7, 8, 9]
    assert recorder.responses[1] == [(expected, True, "")]


def test_a_stopped_request_leaves_its_slot_empty() -> None:
    recorder = Recorder([request(1, [1], 200), request(2, [50], 4)])
    recorder.stops = {1}
    with running(recorder, model_type=V1):
        recorder.wait_for_finals(1, 2)
    assert recorder.responses[1] == [([1, 2], True, "")]
    assert [stats["Empty Generation Slots"] for stats in recorder.stats] == [0, 1, 1, 1]


def test_tokens_that_are_waited_for_do_not_forget_the_size_of_the_batch() -> None:
    """A request with drafts comes while a step runs, which is then read in a turn of its own."""
    params = TrtGptModelOptionalParams(
        max_batch_size=2,
        overlap_scheduler=OverlapScheduler.ON,
        speculative_decoding_config=SpeculativeDecodingConfig(max_draft_len=2),
    )
    drafting = request(3, [70], 4, draft_input_ids=[71, 72])
    recorder = Recorder([request(1, [1], 6), request(2, [50], 4), drafting])
    with running(recorder, params=params, model_type=V1):
        recorder.wait_for_finals(1, 2, 3)
    seen = [stats["Empty Generation Slots"] for stats in recorder.stats]
    assert min(seen) == 0
    assert max(seen) == 1


@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_chunked_context", True),
        ("scheduler_class", "support.user_schedulers:ShortestJobFirst"),
    ],
)
def test_what_would_take_a_batch_apart_is_refused(
    policy: CapacitySchedulerPolicy, name: str, value: Any
) -> None:
    params = TrtGptModelOptionalParams(**{name: value})
    with (
        pytest.raises(ConfigurationError, match=f"{name}.* V1"),
        running(Recorder(), None, policy, model_type=V1, params=params),
    ):
        pass
