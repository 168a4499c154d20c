"""Every rule of sampling at once: the same answers whatever the loop and the scheduler do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import write_checkpoint
from support.manager_harness import GUARANTEED, MAX_UTILIZATION, Recorder, request, running

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_backend.manager.step_loop import OverlapScheduler
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_scheduler import CapacitySchedulerPolicy

NUM_NEW = 14
DRAWN: dict[str, Any] = {"temperature": 1.2, "runtime_top_p": 0.95}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    {**DRAWN, "frequency_penalty": 0.5, "prompt_ignore_length": 4, "min_p": 0.01},
    {**DRAWN, "runtime_top_p_decay": 0.8, "runtime_top_p_reset_ids": 7, "presence_penalty": 0.4},
    {**DRAWN, "bad_words_list": [[3, 5, 9, 2], [1, 2, 4, -1]], "runtime_top_k": 30},
    {"embedding_bias": [0.25 * (i % 7) for i in range(199)]},
)


def make_requests() -> list[InferenceRequest]:
    """One of each kind; prompts that begin alike, so that blocks can be shared."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    return [
        request(i, [*prompt, i, 7], NUM_NEW, seed=100 + i, **kind) for i, kind in enumerate(KINDS)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_checkpoint(tmp_path_factory.mktemp("llama"))


def answers(
    folder: Path,
    policy: CapacitySchedulerPolicy = GUARANTEED,
    num_tokens: int = 1024,
    reuse: bool = False,
    **params: Any,
) -> tuple[list[list[int]], int]:
    """What each kind is answered, and how many were paused at once."""
    config = EngineConfig(
        device="cpu",
        max_batch_size=8,
        tokens_per_block=4,
        max_num_tokens=48,
        max_seq_len=48,
        max_tokens_in_paged_kv_cache=num_tokens,
    )
    recorder = Recorder(make_requests())
    params = {"overlap_scheduler": OverlapScheduler.OFF, **params}
    options = TrtGptModelOptionalParams(
        max_batch_size=8, kv_cache_config=KvCacheConfig(enable_block_reuse=reuse), **params
    )
    with running(recorder, Engine.load(folder, config), policy, params=options):
        recorder.wait_for_finals(*range(len(KINDS)))
    assert (recorder.stats[-1].get("Reused KV cache blocks", 0) > 0) == reuse
    num_paused = max(stats["Paused Requests"] for stats in recorder.stats)
    return [recorder.tokens(i) for i in range(len(KINDS))], num_paused


def test_loops_chunks_pauses_and_shared_blocks_change_nothing(folder: Path) -> None:
    expected, _ = answers(folder)
    assert len({tuple(answer) for answer in expected}) == len(KINDS)
    assert all(len(answer) == NUM_NEW for answer in expected)
    overlapped: dict[str, Any] = {"overlap_scheduler": OverlapScheduler.ON}
    assert answers(folder, **overlapped) == (expected, 0)
    assert answers(folder, reuse=True) == (expected, 0)
    chunked: dict[str, Any] = {"enable_chunked_context": True, "reuse": True}
    assert answers(folder, **chunked, **overlapped) == (expected, 0)
    for more in ({}, overlapped):
        found, num_paused = answers(folder, MAX_UTILIZATION, 72, **chunked, **more)
        assert found == expected
        assert num_paused > 0
