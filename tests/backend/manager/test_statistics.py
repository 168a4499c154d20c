"""The statistics of an iteration, of in-flight batching and of V1."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from support.manager_harness import (
    BOTH_LOOPS,
    GUARANTEED,
    WAIT,
    Recorder,
    request,
    running,
    serve,
)
from support.triton_stub import CountingEngine

from inflight_backend.manager.batcher import Batcher
from inflight_backend.manager.parameters import OverlapScheduler, TrtGptModelOptionalParams
from inflight_backend.manager.statistics import RequestTimes
from inflight_backend.speculative.drafter import SpeculativeDecodingConfig
from inflight_protocol import METRICS
from inflight_scheduler import FinishReason, LlmRequest, ScheduledBatch, TrtGptModelType
from inflight_scheduler.batch import SlotSetup
from inflight_scheduler.sampling import SamplingParams

V1 = TrtGptModelType.V1


@BOTH_LOOPS
def test_keys_are_the_documented_ones(overlap: OverlapScheduler) -> None:
    recorder = serve([request(1, [1, 2, 3], 3)], overlap_scheduler=overlap)
    keys = sorted(recorder.stats[0])
    assert keys == [
        "Active Request Count",
        "Context Requests",
        "Fraction used KV cache blocks",
        "Free KV cache blocks",
        "Generation Requests",
        "Iteration Counter",
        "KV cache hit rate",
        "KV cache transfer time",
        "Max KV cache blocks",
        "Max Request Count",
        "MicroBatch ID",
        "Paused Requests",
        "Request count",
        "Reused KV cache blocks",
        "Runtime CPU Memory Usage",
        "Runtime GPU Memory Usage",
        "Runtime Pinned Memory Usage",
        "Scheduled Requests",
        "Timestamp",
        "Tokens per KV cache block",
        "Total Context Tokens",
        "Used KV cache blocks",
        "Waiting Requests",
    ]
    # The peer's CI wants a key for each line of its families; the hit rate is in one of ours.
    gauges = [family for family in METRICS if family.name.startswith("nv_trt_llm")]
    assert len(keys) - 1 == sum(len(family.values) for family in gauges) == 22
    first, last = recorder.stats[0], recorder.stats[-1]
    assert (first["Context Requests"], first["Total Context Tokens"]) == (1, 3)
    assert (first["Active Request Count"], last["Active Request Count"]) == (1, 0)
    counters = [stats["Iteration Counter"] for stats in recorder.stats]
    assert list(dict.fromkeys(counters)) == [1, 2, 3]


@BOTH_LOOPS
def test_running_and_waiting_requests_are_counted(overlap: OverlapScheduler) -> None:
    """One of three fits until its last token: it needs five blocks of eight."""
    recorder = serve(
        [request(i, [100 * i, 1, 2], 17) for i in range(1, 4)],
        CountingEngine(num_blocks=8),
        overlap_scheduler=overlap,
    )
    # The overlapped loop also reports turns in which it only reads the last token of a request.
    turns = [stats for stats in recorder.stats if stats["Scheduled Requests"] > 0]
    assert [stats["Waiting Requests"] for stats in turns] == [2] * 17 + [1] * 17 + [0] * 17
    for stats in turns:
        kinds = (stats["Context Requests"], stats["Generation Requests"])
        assert kinds in ((1, 0), (0, 1))
        assert stats["Scheduled Requests"] == 1


def test_time_is_that_of_the_measurement_and_the_load_names_its_numbers() -> None:
    """Statistics that are read later, as while a step hangs, must look old."""
    batcher = Batcher(CountingEngine(), GUARANTEED, TrtGptModelOptionalParams(max_batch_size=8))
    empty = ScheduledBatch(iteration=0)
    stats = batcher.measure(empty, iteration=7, num_waiting=2, num_repairs=0)
    stats = replace(stats, measured_at=datetime(2026, 1, 2, 3, 4, 5).timestamp())
    assert json.loads(stats.to_json())["Timestamp"] == "01-02-2026 03:04:05"
    assert stats.describe_load() == (
        "0 of 8 places are taken, 2 of those requests wait, and 64 of 64 KV blocks are free"
    )


@pytest.mark.parametrize(
    ("requests", "stops", "seen"),
    [
        # What padding would waste.
        ([(1, [1], 2), (2, [50, 51], 4), (3, [9], 1)], (), [(0, 0), (2, 1), (1, 2), (1, 2)]),
        # Requests 1 and 3 run together; 2 has two beams and generates after both: it waits.
        (
            [(1, [1], 3), (2, [50, 51], 4, 2), (3, [7], 2)],
            (),
            [(0, 0), (2, 0), (1, 1), (1, 2), (1, 2), (1, 2)],
        ),
        # Request 1 is stopped.
        ([(1, [1], 200), (2, [50], 4)], (1,), [(0, 0), (1, 1), (1, 1), (1, 1)]),
    ],
)
def test_v1_counts_tokens_and_empty_slots(
    requests: list[Any], stops: tuple[int, ...], seen: list[tuple[int, int]]
) -> None:
    recorder = Recorder()
    for request_id, prompt, num_new, *width in requests:
        recorder.pending.append(request(request_id, prompt, num_new, beam_width=[*width, 1][0]))
    recorder.stops = set(stops)
    serve(recorder, model_type=V1, max_beam_width=2)
    assert [
        (stats["Total Generation Tokens"], stats["Empty Generation Slots"])
        for stats in recorder.stats
    ] == seen
    num_prompt_tokens = sum(len(prompt) for _, prompt, *_ in requests)
    assert recorder.stats[0]["Total Context Tokens"] == num_prompt_tokens
    assert not {"Generation Requests", "MicroBatch ID", "Paused Requests"} & set(recorder.stats[0])


def test_v1_has_no_empty_slots_while_idle() -> None:
    recorder = Recorder([request(1, [1], 1), request(2, [5], 3)])
    with running(recorder, model_type=V1) as manager:
        recorder.wait_for_finals(1, 2)
        deadline = time.monotonic() + WAIT
        while '"Empty Generation Slots": 0' not in manager.stats_json:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_v1_batch_size_is_kept_in_turns_that_only_read_tokens() -> None:
    """A request with drafts arrives while a step runs, which is then read in a turn of its own."""
    drafting = request(3, [70], 4, draft_input_ids=[71, 72])
    recorder = serve(
        [request(1, [1], 6), request(2, [50], 4), drafting],
        max_batch_size=2,
        overlap_scheduler=OverlapScheduler.ON,
        speculative_decoding_config=SpeculativeDecodingConfig(max_draft_len=2),
        model_type=V1,
    )
    seen = [stats["Empty Generation Slots"] for stats in recorder.stats]
    assert min(seen) == 0
    assert max(seen) == 1


def test_times_of_requests_become_histograms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cumulative, as Prometheus has them; what was taken is not taken again."""
    now = 10.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    times, one = RequestTimes(), LlmRequest(7, [5, 6, 7], 2)
    times.arrived(7, 9_000_000_000)
    begun = ScheduledBatch(1, setups=(SlotSetup(0, 7, SamplingParams()),))
    for seconds, num_paused in ((0.0, 0), (0.03, 1)):
        now += seconds
        one.add_new_token(5)
        times.stepped(begun, [one], num_paused)
    one.finish(FinishReason.LENGTH)
    times.ended(one, "")
    found = times.take()
    first = found["vllm:time_to_first_token_seconds_bucket"]
    bounds = list(map(float, first))
    assert (bounds[:2], bounds[-2:]) == ([1, 2.5], [2560, math.inf])
    assert set(first.values()) == {1}
    assert min(map(float, found["vllm:inter_token_latency_seconds_bucket"])) == 0.05
    assert found["vllm:inter_token_latency_seconds_sum"][""] == pytest.approx(0.03)
    assert found["vllm:request_inference_time_seconds_sum"][""] == pytest.approx(0.03)
    assert found["vllm:request_success_total"] == {"length": 1}
    assert found["vllm:generation_tokens_total"] == {"": 2}
    assert found["vllm:num_preemptions_total"] == {"": 1}
    assert found["vllm:request_prompt_tokens_count"] == {"": 1}
    assert times.take() == {}


def test_gaps_and_tokens_count_however_requests_come_pause_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against a clock for each request. Some steps bring a request two tokens, as drafts do."""
    now, dice, times = 0.0, random.Random(5), RequestTimes()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    active: dict[int, LlmRequest] = {}
    last: dict[int, float] = {}
    gaps: list[float] = []
    num_tokens = 0
    for step in range(200):
        now += 0.125
        if step < 150:
            active[step] = LlmRequest(step, [1], 1000)
            times.arrived(step, 0)
        share = dice.choice((1.0, 1.0, 0.5, 0.0))
        advanced = [each for each in active.values() if dice.random() < share]
        for each in advanced:
            gaps += [now - last[each.request_id]] if each.request_id in last else []
            last[each.request_id] = now
            for _ in range(dice.choice((1, 1, 2))):
                each.add_new_token(5)
                num_tokens += 1
        times.stepped(ScheduledBatch(step), advanced, 0)
        for each in list(active.values()):
            if each.num_generated_tokens and (step == 199 or dice.random() < 0.1):
                del active[each.request_id]
                each.finish(FinishReason.LENGTH)
                times.ended(each, "")
    assert not active
    found = times.take()
    assert found["vllm:generation_tokens_total"] == {"": num_tokens}
    assert found["vllm:inter_token_latency_seconds_count"] == {"": len(gaps)}
    assert found["vllm:inter_token_latency_seconds_sum"][""] == pytest.approx(sum(gaps))
