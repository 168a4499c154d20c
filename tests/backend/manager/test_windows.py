"""Layers with a window give back what lies behind it: texts far longer than the pool come through,
and are what transformers answers."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import oracle_tokens
from support.families import VOCAB_SIZE, write_family
from support.manager_harness import (
    GUARANTEED,
    MAX_UTILIZATION,
    Recorder,
    request,
    running,
    small_engine,
)

from inflight_backend.manager.parameters import KvCacheConfig, OverlapScheduler
from inflight_backend.speculative.drafter import SpeculativeDecodingConfig
from inflight_recorder.replay import replay
from inflight_recorder.storage import open_recording
from inflight_scheduler import CapacitySchedulerPolicy

SIZES = {
    "mistral": (48, 150),
    "gemma3": (48, 150),
    "llama4": (48, 100),
    "gpt_oss": (48, 66),
    "gemma4": (96, 110),
}
"""Tokens of the pool, if all layers kept them, and of the longest request. One group with a window;
one without and six with; with a chunk; as many with as without; heads of two sizes."""

NUM_NEW = 40

PLAIN: dict[str, Any] = {}
DRAFTS: dict[str, Any] = {
    "speculative_decoding_config": SpeculativeDecodingConfig(mode="ngram", max_draft_len=3)
}
OVERLAPPED: dict[str, Any] = {"overlap_scheduler": OverlapScheduler.ON}
WITHOUT_REUSE: dict[str, Any] = {"kv_cache_config": KvCacheConfig(enable_block_reuse=False)}


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("name", "policy", "options"),
    [
        ("mistral", GUARANTEED, PLAIN),
        ("mistral", MAX_UTILIZATION, OVERLAPPED),
        ("gemma3", GUARANTEED, OVERLAPPED),
        ("gemma3", MAX_UTILIZATION, DRAFTS),
        ("gemma3", MAX_UTILIZATION, WITHOUT_REUSE),
        ("llama4", MAX_UTILIZATION, PLAIN),
        ("gpt_oss", MAX_UTILIZATION, OVERLAPPED),
        ("gemma4", GUARANTEED, DRAFTS),
    ],
)
def test_answers_longer_than_the_pool(
    tmp_path: Path,
    name: str,
    policy: CapacitySchedulerPolicy,
    options: dict[str, Any],
) -> None:
    write_family(tmp_path / name, name)
    pool, length = SIZES[name]
    engine = small_engine(tmp_path / name, pool, max_num_tokens=16, max_seq_len=256)
    numbers = random.Random(0)
    text = [numbers.randrange(VOCAB_SIZE) for _ in range(length - NUM_NEW)]
    # The same text twice, its first half, and texts that begin like it: short ones and long ones.
    prompts = [text, text, text[: len(text) // 2]]
    prompts += [text[:number] + [number] * 3 for number in (5, 14, 22)]
    file = tmp_path / "recording.jsonl"
    recorder = Recorder([request(i, prompt, NUM_NEW) for i, prompt in enumerate(prompts)])
    with running(recorder, engine, policy, record_file=str(file), **options) as manager:
        recorder.wait_for_finals(*range(len(prompts)))
        again = len(prompts)  # the whole text is cached, as far as it is seen
        recorder.pending.append(request(again, text, NUM_NEW))
        manager.wake()
        recorder.wait_for_finals(again)
        assert manager._batcher.is_idle_and_intact()
    for number, prompt in enumerate([*prompts, text]):
        assert recorder.tokens(number) == oracle_tokens(tmp_path / name, prompt, NUM_NEW)
    with open_recording(file) as reader:
        assert replay(reader).divergence is None
    is_reusing = options is not WITHOUT_REUSE
    assert (recorder.stats[-1]["Reused KV cache blocks"] > 0) is is_reusing
    assert max(each["Used KV cache blocks"] for each in recorder.stats) <= engine.num_blocks


@pytest.mark.contract("tensorrt_llm parameter", "max_attention_window_size")
def test_a_window_for_layers_that_have_none(tmp_path: Path) -> None:
    """Seven tokens for every other layer, as if the checkpoint said so."""
    write_family(tmp_path / "some", "ministral")
    shutil.copytree(tmp_path / "some", tmp_path / "all")
    config = tmp_path / "all" / "config.json"
    config.write_text(config.read_text().replace("sliding_attention", "full_attention"))
    engine = small_engine(tmp_path / "all", 256, max_attention_window=(7, 4096))
    assert engine.windows == small_engine(tmp_path / "some", 256).windows != (None,)
    numbers = random.Random(1)
    prompt = [numbers.randrange(VOCAB_SIZE) for _ in range(30)]
    recorder = Recorder([request(1, prompt, NUM_NEW - 8)])
    with running(recorder, engine, GUARANTEED):
        recorder.wait_for_finals(1)
    expected = oracle_tokens(tmp_path / "some", prompt, NUM_NEW - 8)
    assert recorder.tokens(1) == expected != oracle_tokens(tmp_path / "all", prompt, NUM_NEW - 8)
