"""Recurrences: a prompt goes on where a snapshot of their state is, and answers stay the same."""

from __future__ import annotations

import random
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

from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.parameters import OverlapScheduler
from inflight_backend.speculative.drafter import SpeculativeDecodingConfig
from inflight_recorder.replay import replay
from inflight_recorder.storage import open_recording
from inflight_scheduler import CapacitySchedulerPolicy

NUM_NEW = 20
OVERLAPPED: dict[str, Any] = {"overlap_scheduler": OverlapScheduler.ON}


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("name", "policy", "num_snapshots", "options"),
    [
        ("qwen3_next", GUARANTEED, None, {}),
        ("qwen3_next", MAX_UTILIZATION, None, OVERLAPPED),
        ("qwen3_next", MAX_UTILIZATION, 0, {}),
        ("qwen3_next", MAX_UTILIZATION, 1, OVERLAPPED),
        ("qwen3_5", MAX_UTILIZATION, 3, {}),
        ("deepseek_v3", MAX_UTILIZATION, None, OVERLAPPED),
    ],
)
def test_answers_with_and_without_reuse(
    tmp_path: Path,
    name: str,
    policy: CapacitySchedulerPolicy,
    num_snapshots: int | None,
    options: dict[str, Any],
) -> None:
    """In chunks, paused, side by side; then two turns of a chat. Latents, which have no state,
    are in blocks alone."""
    write_family(tmp_path / name, name)
    engine = small_engine(
        tmp_path / name,
        160,
        max_num_tokens=16,
        max_seq_len=128,
        max_state_snapshots=num_snapshots,
    )
    numbers = random.Random(0)
    text = [numbers.randrange(VOCAB_SIZE) for _ in range(40)]
    prompts = [text, text, text[:20]]
    prompts += [text[:number] + [number] * 3 for number in (5, 17, 18, 22, 23)]
    file = tmp_path / "recording.jsonl"
    recorder = Recorder([request(i, prompt, NUM_NEW) for i, prompt in enumerate(prompts)])
    with running(recorder, engine, policy, record_file=str(file), **options) as manager:
        recorder.wait_for_finals(*range(len(prompts)))
        turn = text[::-1]
        for _ in range(2):  # of a chat; the second one goes on behind the answer of the first
            prompts.append(turn)
            number = len(prompts) - 1
            recorder.pending.append(request(number, turn, NUM_NEW))
            manager.wake()
            recorder.wait_for_finals(number)
            turn = [*turn, *recorder.tokens(number), 1, 2, 3]
        assert manager._batcher.is_idle_and_intact()
    for number, prompt in enumerate(prompts):
        assert recorder.tokens(number) == oracle_tokens(tmp_path / name, prompt, NUM_NEW)
    with open_recording(file) as reader:
        assert replay(reader).divergence is None
    has_reused = recorder.stats[-1].get("Reused KV cache blocks", 0) > 0
    assert has_reused is (num_snapshots != 0)
    has_paused = max(stats["Paused Requests"] for stats in recorder.stats) > 0
    assert has_paused is (policy == MAX_UTILIZATION)


def test_drafts_are_refused_by_name(tmp_path: Path) -> None:
    """What a wrong draft has done to a state cannot be undone."""
    write_family(tmp_path, "qwen3_5")
    engine = small_engine(tmp_path, 64)
    drafts = SpeculativeDecodingConfig(mode="ngram", max_draft_len=3)
    with (
        pytest.raises(ConfigurationError, match="a recurrence cannot take back"),
        running(Recorder([]), engine, GUARANTEED, speculative_decoding_config=drafts),
    ):
        pass
