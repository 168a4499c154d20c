"""The real engine under every policy, with and without reuse: one answer per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.checkpoints import write_checkpoint
from support.manager_harness import GUARANTEED, MAX_UTILIZATION, Recorder, request, running

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_scheduler import CapacitySchedulerPolicy, ContextChunkingPolicy, TrtGptModelType

STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH
POLICIES = list(CapacitySchedulerPolicy)
NUM_NEW = 12
SYSTEM = [(7 * i) % 50 for i in range(21)]
PROMPTS = [[*SYSTEM[: 5 * i], i, *SYSTEM[:i]] for i in range(1, 5)] * 3


class Run(NamedTuple):
    """The new tokens of every prompt, and the statistics of every iteration."""

    answers: list[list[int]]
    stats: list[dict[str, Any]]


def run(
    folder: Path,
    policy: CapacitySchedulerPolicy,
    *,
    reuse: bool = True,
    lengths: Sequence[int] = (NUM_NEW,) * len(PROMPTS),
    model_type: TrtGptModelType = TrtGptModelType.InflightFusedBatching,
    **options: Any,
) -> Run:
    """All prompts (the first ``len(lengths)``) at once, in a pool that holds two or three."""
    config = EngineConfig(
        device="cpu",
        max_batch_size=8,
        tokens_per_block=4,
        max_tokens_in_paged_kv_cache=80,
    )
    params = TrtGptModelOptionalParams(
        max_batch_size=8, kv_cache_config=KvCacheConfig(enable_block_reuse=reuse), **options
    )
    numbered = enumerate(zip(PROMPTS, lengths, strict=False))
    recorder = Recorder([request(i, prompt, length) for i, (prompt, length) in numbered])
    engine: Any = Engine.load(folder, config)
    with running(
        recorder,
        engine,
        policy,
        params=params,
        model_type=model_type,
        exclude_input_in_output=True,
    ):
        recorder.wait_for_finals(*range(len(lengths)))
    return Run([recorder.tokens(i) for i in range(len(lengths))], recorder.stats)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    """Without reuse, chunks and pauses."""
    answers = run(folder, GUARANTEED, reuse=False).answers
    assert {len(answer) for answer in answers} == {NUM_NEW}
    assert len({tuple(answer) for answer in answers}) == 4, "four different prompts"
    return answers


def computed(stats: Sequence[dict[str, Any]]) -> int:
    return sum(each["Total Context Tokens"] for each in stats)


@pytest.mark.fast(4)
@pytest.mark.parametrize("chunking", [None, *ContextChunkingPolicy])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda each: each.name)
def test_reuse_and_chunks_change_no_token(
    policy: CapacitySchedulerPolicy,
    chunking: ContextChunkingPolicy | None,
    folder: Path,
    plain: list[list[int]],
) -> None:
    options: dict[str, Any] = {}
    if chunking is not None:
        options = {
            "enable_chunked_context": True,
            "context_chunking_policy": chunking,
            "context_chunk_unit": 3,
        }
    reused = run(folder, policy, **options)
    assert reused.answers == plain
    assert reused.stats[-1]["Reused KV cache blocks"] > 0
    assert reused.stats[-1]["KV cache hit rate"] > 0
    if policy == MAX_UTILIZATION:
        assert sum(each["Paused Requests"] for each in reused.stats) > 0
    else:
        assert computed(reused.stats) < sum(map(len, PROMPTS))


def test_without_reuse_everything_is_computed(folder: Path) -> None:
    stats = run(folder, STATIC_BATCH, reuse=False).stats
    assert computed(stats) == sum(map(len, PROMPTS))
    assert stats[-1]["Reused KV cache blocks"] == stats[-1]["KV cache hit rate"] == 0


@pytest.mark.parametrize("reuse", [False, True])
def test_v1_answers_as_in_flight_batching_does(folder: Path, reuse: bool) -> None:
    """Lock-step, on answers of unequal length: the same tokens, and slots that stay empty."""
    lengths = [3 + 4 * (i % 3) for i in range(len(PROMPTS))]
    in_flight = run(folder, GUARANTEED, lengths=lengths)
    static = run(folder, GUARANTEED, lengths=lengths, reuse=reuse, model_type=TrtGptModelType.V1)
    assert static.answers == in_flight.answers
    assert [len(answer) for answer in static.answers] == lengths
    num_generated = sum(each["Total Generation Tokens"] for each in static.stats)
    assert num_generated == sum(lengths) - len(PROMPTS), "the first of each is the context's"
    assert sum(each["Empty Generation Slots"] for each in static.stats) > 0
    assert all(
        each["Total Context Tokens"] == 0 or each["Total Generation Tokens"] == 0
        for each in static.stats
    )
