"""Capacity policies, chunked contexts, block reuse, priorities and static batches."""

from __future__ import annotations

from pathlib import Path
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
    serve,
)
from support.triton_stub import CountingEngine

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_backend.manager.user_scheduler import find_entry
from inflight_recorder.replay import replay
from inflight_recorder.storage import open_recording
from inflight_recorder.timeline import build_timeline, title
from inflight_scheduler import (
    POLICIES,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    TrtGptModelType,
)
from inflight_server.serve.settings import DEMO_MODEL

STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH


EQUAL_PROGRESS = ContextChunkingPolicy.EQUAL_PROGRESS


V1 = TrtGptModelType.V1


def params(**values: Any) -> TrtGptModelOptionalParams:
    return TrtGptModelOptionalParams(**{"max_batch_size": 8, **values})


OWN_POLICY = """
from inflight_scheduler import GuaranteedNoEvictScheduler, register_policy

@register_policy("one_at_a_time")
class OneAtATime(GuaranteedNoEvictScheduler):
    def schedule_request(self, active_requests):
        return super().schedule_request(active_requests[:1])
"""


def test_registered_policy_schedules_records_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy in a file of its own; it never pauses, so long requests need not be recomputed."""
    (tmp_path / "own_policy.py").write_text(OWN_POLICY)
    monkeypatch.syspath_prepend(str(tmp_path))
    find_entry("policy", "own_policy:OneAtATime", "ClassName")
    path = tmp_path / "recording.jsonl"
    params = TrtGptModelOptionalParams(
        max_batch_size=8, record_file=str(path), enable_chunked_context=False
    )
    engine = CountingEngine(max_num_tokens=16)
    recorder = Recorder([request(i, [100 * i] * 10, 8) for i in (1, 2, 3)])
    try:
        with running(recorder, engine, "one_at_a_time", params=params) as manager:
            assert manager.policy == "one_at_a_time"
            recorder.wait_for_finals(1, 2, 3)
        with open_recording(path) as reader:
            assert title(build_timeline(reader)).startswith("one_at_a_time: 3 requests")
        with open_recording(path) as reader:
            assert replay(reader).divergence is None
    finally:
        del POLICIES["one_at_a_time"]
    assert [recorder.tokens(i)[0] for i in (1, 2, 3)] == [101, 201, 301]
    sizes = [len(each.context_chunks) + len(each.generation_slots) for each in engine.batches]
    assert max(sizes) == 1


@pytest.mark.parametrize("name", ["one_at_a_time", "MAX_UTILIZATION", ""])
def test_unknown_policy_is_refused_with_the_known_ones(name: str) -> None:
    known = "guaranteed_no_evict, static_batch, max_utilization"
    text = f"scheduler_policy: there is no capacity policy '{name}'; known are {known}"
    with pytest.raises(ConfigurationError, match=text), running(Recorder(), policy=name):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"params": params(enable_chunked_context=False)},
        {"params": params(deterministic_mode=True)},  # other chunks could give other numbers
        {"model_type": TrtGptModelType.V1},
    ],
)
def test_prompt_above_max_num_tokens_is_refused_without_chunks(options: dict[str, Any]) -> None:
    recorder = serve(
        [request(1, list(range(30)), 5, streaming=False)],
        CountingEngine(max_num_tokens=16),
        **options,
    )
    text = recorder.responses[1][0][2]
    assert "set enable_chunked_context" in text
    assert "30" in text
    assert "16" in text


@pytest.mark.contract("tensorrt_llm parameter", "enable_chunked_context")
@pytest.mark.parametrize(("max_seq_len", "is_chunked"), [(17, True), (16, False)])
def test_contexts_are_chunked_by_default_where_max_seq_len_is_above_max_num_tokens(
    max_seq_len: int, is_chunked: bool
) -> None:
    engine = CountingEngine(max_num_tokens=16, max_seq_len=max_seq_len)
    serve(
        [request(i, list(range(i, i + 12)), 3) for i in (1, 2)],
        engine,
        params=params(kv_cache_config=KvCacheConfig(None, 0.9, False)),
    )
    chunks = [chunk for batch in engine.batches for chunk in batch.context_chunks]
    assert any(not chunk.is_last for chunk in chunks) == is_chunked


def test_block_reuse_computes_a_shared_prompt_once() -> None:
    prompt = list(range(20))
    engine = CountingEngine(tokens_per_block=4)
    recorder = Recorder([request(1, prompt, 3)])
    with running(recorder, engine):
        recorder.wait_for_finals(1)
        recorder.pending.append(request(2, prompt, 3))
        recorder.wait_for_finals(2)
    chunks = [chunk for batch in engine.batches for chunk in batch.context_chunks]
    assert [(chunk.start, len(chunk.tokens)) for chunk in chunks] == [(0, 20), (19, 1)]
    assert recorder.tokens(1) == recorder.tokens(2) == [20, 21, 22]
    assert recorder.stats[-1]["Reused KV cache blocks"] == 5
    assert recorder.stats[-1]["KV cache hit rate"] == 5 / 10
    assert sum(len(batch.block_copies) for batch in engine.batches) == 1, "of the last one"


@pytest.mark.parametrize(
    ("policy", "scheduler_class", "is_refused"),
    [
        (MAX_UTILIZATION, None, True),
        (GUARANTEED, None, False),
        (GUARANTEED, "support.user_schedulers:OneAtATime", True),
    ],
)
def test_text_that_a_pause_would_recompute_must_fit_an_iteration(
    policy: CapacitySchedulerPolicy, scheduler_class: str | None, is_refused: bool
) -> None:
    """Of 10 prompt tokens and 8 more, 17 may be computed again; 16 fit."""
    options = params(scheduler_class=scheduler_class, enable_chunked_context=False)
    recorder = serve(
        [request(1, range(10), 8), request(2, range(10), 7)],
        CountingEngine(max_num_tokens=16),
        policy,
        params=options,
    )
    assert recorder.tokens(2) == list(range(10, 17))
    assert len(recorder.tokens(1)) == (0 if is_refused else 8)
    error = recorder.responses[1][-1][2]
    assert ("computed again from 17 tokens after a pause" in error) == is_refused


@pytest.mark.parametrize("name", ["context_chunk_unit", "max_queue_seconds", "max_run_seconds"])
def test_settings_out_of_bounds_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be above 0, not 0"):
        params(**{name: 0})
    with pytest.raises(ConfigurationError, match="priority_span must be at least 0"):
        params(priority_span=-1)
    for values in ({"context_chunk_unit": 8}, {"context_chunking_policy": EQUAL_PROGRESS}):
        with pytest.raises(ConfigurationError, match="set enable_chunked_context to true"):
            params(**values, enable_chunked_context=False)
        params(**values)
    unit = params(enable_chunked_context=True, context_chunk_unit=17)
    with (
        pytest.raises(ConfigurationError, match="unit is 17, more than max_num_tokens = 16"),
        running(Recorder(), CountingEngine(max_num_tokens=16), params=unit),
    ):
        pass


def test_many_requests_share_a_long_prefix_on_the_real_engine() -> None:
    """Each sharer gets all shared blocks: more assignments in a step than there are blocks."""
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


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy), ids=lambda each: each.name)
def test_v1_batch_admits_no_request_until_it_has_ended(policy: CapacitySchedulerPolicy) -> None:
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


@pytest.mark.parametrize("exclude", [False, True])
def test_v1_stream_gets_one_whole_answer(exclude: bool) -> None:
    recorder = serve(
        [request(1, [5, 6], 3, streaming=True)], model_type=V1, exclude_input_in_output=exclude
    )
    expected = [7, 8, 9] if exclude else [5, 6, 7, 8, 9]
    assert recorder.responses[1] == [(expected, True, "")]


@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_chunked_context", True),
        ("scheduler_class", "support.user_schedulers:ShortestJobFirst"),
        ("logits_processors", {"mine": lambda *_: None}),
    ],
)
def test_v1_refuses_settings_that_would_take_its_batches_apart(
    policy: CapacitySchedulerPolicy, name: str, value: Any
) -> None:
    with (
        pytest.raises(ConfigurationError, match=f"{name}.* V1"),
        running(Recorder(), None, policy, model_type=V1, **{name: value}),
    ):
        pass
