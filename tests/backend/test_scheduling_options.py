"""Chunked context, static batches, block reuse, priorities and deadlines through `GptManager`."""

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

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.errors import CapacityText, ConfigurationError
from inflight_backend.manager.health import DeadlineWatch
from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_scheduler import (
    ActiveRequests,
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    LlmRequest,
    ScheduledBatch,
    TrtGptModelType,
)
from inflight_server.serve.settings import DEMO_MODEL

STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH
EQUAL_PROGRESS = ContextChunkingPolicy.EQUAL_PROGRESS
LIMIT = 1.0
"""Seconds of a deadline that a first step meets on a busy machine, too."""


def params(**values: Any) -> TrtGptModelOptionalParams:
    return TrtGptModelOptionalParams(**{"max_batch_size": 8, **values})


@pytest.mark.contract("tensorrt_llm parameter", "enable_chunked_context")
@pytest.mark.parametrize("chunking", list(ContextChunkingPolicy), ids=lambda each: each.name)
@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION, STATIC_BATCH])
def test_a_prompt_over_the_token_budget_runs_in_chunks(
    policy: CapacitySchedulerPolicy, chunking: ContextChunkingPolicy
) -> None:
    prompts = [[10 * i + k for k in range(30)] for i in (1, 2, 3)]
    recorder = Recorder([request(i, prompt, 5) for i, prompt in enumerate(prompts)])
    engine = CountingEngine(num_blocks=40, max_num_tokens=16)
    options = params(enable_chunked_context=True, context_chunking_policy=chunking)
    with running(recorder, engine, policy, params=options):
        recorder.wait_for_finals(0, 1, 2)
    for i, prompt in enumerate(prompts):
        assert recorder.tokens(i) == list(range(prompt[-1] + 1, prompt[-1] + 6))
    assert max(batch.num_tokens for batch in engine.batches) <= 16


@pytest.mark.parametrize(
    "options",
    [
        {"params": params(enable_chunked_context=False)},
        {"params": params(deterministic_mode=True)},  # other chunks could be other numbers
        {"model_type": TrtGptModelType.V1},
    ],
)
def test_without_chunks_such_a_prompt_is_refused_with_the_fix(options: dict[str, Any]) -> None:
    recorder = Recorder([request(1, list(range(30)), 5, streaming=False)])
    with running(recorder, CountingEngine(max_num_tokens=16), **options):
        recorder.wait_for_finals(1)
    text = recorder.responses[1][0][2]
    assert "set enable_chunked_context" in text
    assert "30" in text
    assert "16" in text


@pytest.mark.contract("tensorrt_llm parameter", "enable_chunked_context")
@pytest.mark.parametrize(("max_seq_len", "is_chunked"), [(17, True), (16, False)])
def test_contexts_run_in_chunks_by_default_where_a_step_may_not_hold_them(
    max_seq_len: int, is_chunked: bool
) -> None:
    engine = CountingEngine(max_num_tokens=16, max_seq_len=max_seq_len)
    recorder = Recorder([request(i, list(range(i, i + 12)), 3) for i in (1, 2)])
    with running(recorder, engine, params=params(kv_cache_config=KvCacheConfig(None, 0.9, False))):
        recorder.wait_for_finals(1, 2)
    chunks = [chunk for batch in engine.batches for chunk in batch.context_chunks]
    assert any(not chunk.is_last for chunk in chunks) == is_chunked


def test_a_static_batch_admits_nobody_until_it_has_ended() -> None:
    engine = GatedEngine()
    recorder = Recorder([request(1, [1], 5), request(2, [50], 9)])
    with running(recorder, engine, STATIC_BATCH):
        assert engine.has_begun.wait(WAIT)
        recorder.pending.append(request(3, [80], 2))
        engine.go_on.set()
        recorder.wait_for_finals(1, 2, 3)
    assert [len(b.setups) for b in engine.batches] == [2, *[0] * 8, 1, 0]
    assert recorder.tokens(3) == [81, 82]


def test_reuse_computes_a_shared_prompt_once() -> None:
    prompt = list(range(20))
    engine = CountingEngine(tokens_per_block=4)
    recorder = Recorder([request(1, prompt, 3)])
    with running(recorder, engine):
        recorder.wait_for_finals(1)
        recorder.pending.append(request(2, prompt, 3))
        recorder.wait_for_finals(2)
    chunks = [chunk for batch in engine.batches for chunk in batch.context_chunks]
    assert [(chunk.start, len(chunk.tokens)) for chunk in chunks] == [(0, 20), (16, 4)]
    assert recorder.tokens(1) == recorder.tokens(2) == [20, 21, 22]
    assert recorder.stats[-1]["Reused KV cache blocks"] == 4
    assert recorder.stats[-1]["KV cache hit rate"] == 4 / 10
    assert not any(batch.block_copies for batch in engine.batches), "this engine cannot copy"


@pytest.mark.parametrize(
    ("policy", "scheduler_class", "is_refused"),
    [
        (MAX_UTILIZATION, None, True),
        (GUARANTEED, None, False),
        (GUARANTEED, "support.user_schedulers:OneAtATime", True),
    ],
)
def test_where_a_pause_may_come_its_text_must_fit_an_iteration(
    policy: CapacitySchedulerPolicy, scheduler_class: str | None, is_refused: bool
) -> None:
    """Of 10 prompt tokens and 8 more, 17 may have to be computed again; 16 fit."""
    recorder = Recorder([request(1, range(10), 8), request(2, range(10), 7)])
    options = params(scheduler_class=scheduler_class, enable_chunked_context=False)
    with running(recorder, CountingEngine(max_num_tokens=16), policy, params=options):
        recorder.wait_for_finals(1, 2)
    assert recorder.tokens(2) == list(range(10, 17))
    assert len(recorder.tokens(1)) == (0 if is_refused else 8)
    error = recorder.responses[1][-1][2]
    assert ("computed again from 17 tokens after a pause" in error) == is_refused


def test_a_request_that_never_starts_in_time_hears_why() -> None:
    engine = GatedEngine(num_blocks=8, tokens_per_block=4)
    recorder = Recorder([request(1, [1], 30), request(2, [9], 30), request(3, [5], 30)])
    with running(recorder, engine, params=params(max_queue_seconds=LIMIT)):
        assert engine.has_begun.wait(WAIT)
        time.sleep(LIMIT)
        engine.go_on.set()
        recorder.wait_for_finals(1, 2, 3)
    assert recorder.tokens(1) == list(range(2, 32)), "who has started has met its deadline"
    text = "not started before its deadline (place {} of 2): {}"
    no_room = "waiting for KV blocks: needs 8, free 0"
    behind = "behind 1 other, first of them request 2"
    assert recorder.responses[2] == [([], True, text.format(1, no_room))]
    assert recorder.responses[3] == [([], True, text.format(2, behind))]
    assert isinstance(recorder.responses[2][0][2], CapacityText), "UNAVAILABLE, not our fault"


@pytest.mark.case(70)
def test_a_request_past_its_run_deadline_ends_with_what_it_has() -> None:
    engine = GatedEngine()
    recorder = Recorder([request(1, [1], 200)])
    with running(recorder, engine, params=params(max_run_seconds=LIMIT)):
        assert engine.has_begun.wait(WAIT)
        time.sleep(LIMIT)
        engine.go_on.set()
        recorder.wait_for_finals(1)
    assert recorder.responses[1] == [([2], False, ""), ([], True, "")]


def test_a_run_deadline_without_a_start_says_what_was_in_the_way() -> None:
    """An empty answer would look like a short one."""
    engine = GatedEngine(num_blocks=8, tokens_per_block=4)
    recorder = Recorder([request(1, [1], 30), request(2, [9], 30)])
    with running(recorder, engine, params=params(max_run_seconds=LIMIT)) as manager:
        assert engine.has_begun.wait(WAIT)
        time.sleep(LIMIT)
        engine.go_on.set()
        recorder.wait_for_finals(1, 2)
    assert recorder.responses[1][-1] == ([], True, "")
    reason = "(place 1 of 1): waiting for KV blocks: needs 8, free 0"
    assert recorder.responses[2] == [([], True, f"not started before its deadline {reason}")]
    assert manager.describe_load() == (
        "0 of 8 places are taken, 0 of those requests wait, and 8 of 8 KV blocks are free"
    )


def test_requests_that_have_ended_are_not_watched_for_ever() -> None:
    active = ActiveRequests(BlockManager(4, 4))
    watch = DeadlineWatch()
    far = time.monotonic() + 1000
    for request_id in range(5000):
        ended = LlmRequest(request_id, [1], 1, queue_deadline=far, run_deadline=far)
        active.add(ended)
        watch.add(ended)
        active.remove(ended)
    assert len(watch._heap) <= 1026
    late = LlmRequest(1, [1], 1, queue_deadline=0.0, run_deadline=0.0)
    active.add(late)
    watch.add(late)
    assert [entry.request for entry in watch.take_expired()] == [late, late]
    active.remove(late)
    watch.add(late)
    assert watch.take_expired() == []


def test_of_requests_that_have_ended_nothing_is_kept() -> None:
    """Below `inflight serve` each has a deadline, hours from now; one may have 100,000 tokens."""
    recorder = Recorder([request(i, [1], 3) for i in range(1, 21)])
    with running(recorder, params=params(max_run_seconds=7200.0)) as manager:
        recorder.wait_for_finals(20)
        assert (manager._deadlines._requests, manager._deadlines._numbers) == ({}, {})
        assert len(manager._deadlines._heap) == 20


def test_who_is_paused_has_started_in_time() -> None:
    """It may hold tokens that its client has; only a run deadline ends it."""
    active, watch = ActiveRequests(BlockManager(4, 4)), DeadlineWatch()
    paused, waiting = (LlmRequest(i, [1], 4, queue_deadline=0.0) for i in (1, 2))
    for each in (paused, waiting):
        active.add(each)
        watch.add(each)
    paused.pause()
    assert [entry.request for entry in watch.take_expired()] == [waiting]


def test_a_failed_request_and_its_deadlines_do_not_touch_the_next_with_its_id() -> None:
    def fail_once(batch: ScheduledBatch) -> None:
        if batch.iteration == 2:
            raise RuntimeError("once")

    milliseconds = int(1000 * LIMIT)
    first = request(1, [1], 10, max_queue_time_ms=milliseconds, allotted_time_ms=milliseconds)
    recorder = Recorder([first])
    with running(recorder, CountingEngine(before_step=fail_once), params=params()):
        recorder.wait_for_finals(1)
        assert recorder.responses[1][-1][2] == "the engine failed while it ran this request"
        recorder.responses.clear()
        again = request(1, [50], 100)
        recorder.on_response = lambda request_id, is_final: (
            time.sleep(LIMIT) if len(recorder.tokens(1)) == 1 else None  # the deadlines pass
        )
        recorder.pending.append(again)
        recorder.wait_for_finals(1)
    assert recorder.tokens(1) == list(range(51, 151))


def test_priority_decides_who_starts_first() -> None:
    engine = GatedEngine(num_blocks=3, tokens_per_block=4)
    recorder = Recorder([request(1, [1], 9)])
    with running(recorder, engine):
        assert engine.has_begun.wait(WAIT)
        for request_id, priority in ((2, 0.1), (3, 0.9), (4, 0.5)):
            recorder.pending.append(request(request_id, [1], 9, priority=priority))
        engine.go_on.set()
        recorder.wait_for_finals(1, 2, 3, 4)
    started = [setup.request_id for batch in engine.batches for setup in batch.setups]
    assert started == [1, 3, 4, 2]


@pytest.mark.parametrize("name", ["context_chunk_unit", "max_queue_seconds", "max_run_seconds"])
def test_numbers_that_mean_nothing_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be above 0, not 0"):
        params(**{name: 0})
    with pytest.raises(ConfigurationError, match="priority_span must be at least 0"):
        params(priority_span=-1)
    for values in ({"context_chunk_unit": 8}, {"context_chunking_policy": EQUAL_PROGRESS}):
        with pytest.raises(ConfigurationError, match="set enable_chunked_context to true"):
            params(**values, enable_chunked_context=False)
        params(**values)  # chunked where the model's texts are long
    unit = params(enable_chunked_context=True, context_chunk_unit=17)
    with (
        pytest.raises(ConfigurationError, match="unit is 17, more than max_num_tokens = 16"),
        running(Recorder(), CountingEngine(max_num_tokens=16), params=unit),
    ):
        pass


def test_many_requests_share_a_long_beginning_on_the_real_engine() -> None:
    """Each sharer is told all shared blocks: more assignments in a step than there are blocks."""
    config = EngineConfig(
        device="cpu",
        max_batch_size=32,
        max_seq_len=128,
        max_num_tokens=64,
        tokens_per_block=2,
        max_tokens_in_paged_kv_cache=400,
    )
    engine = Engine.load(DEMO_MODEL, config)
    prompt = [20 + k % 10 for k in range(100)]
    recorder = Recorder([request(0, prompt, 4)])
    options = params(max_batch_size=32, enable_chunked_context=True, max_seq_len=128)
    with running(recorder, engine, MAX_UTILIZATION, params=options) as manager:
        recorder.wait_for_finals(0)
        recorder.pending.extend(request(i, prompt, 4) for i in range(1, 33))
        manager.wake()
        recorder.wait_for_finals(*range(33))
    assert all(recorder.responses[i][-1][2] == "" for i in range(33))
    assert all(recorder.tokens(i) == recorder.tokens(0) for i in range(33))
    assert max(stats["Reused KV cache blocks"] for stats in recorder.stats) >= 49
