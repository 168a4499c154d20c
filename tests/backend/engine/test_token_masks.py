"""Masks between decoder and draw: beside rows without, in replayed steps, against min_length."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import VOCAB_SIZE
from support.engine_driver import EngineDriver, Job
from support.fake_cuda import on_both_devices
from support.graph_replay import Rerun
from torch import Tensor

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.interface import TokenMasks
from inflight_scheduler import SamplingParams

END = 7
DRAWN = SamplingParams(top_k=50, seed=3)


def mask(row: int, allowed: list[int], forced: int = -1) -> TokenMasks:
    words = np.zeros(2 + -(-VOCAB_SIZE // 32), dtype=np.int32)
    words[:2] = row, forced
    for token in allowed:
        words[2 + token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
    return words


@pytest.fixture
def engine(small_engine: Callable[[], Engine]) -> Engine:
    return small_engine()


@on_both_devices
@pytest.mark.parametrize("sampling", [SamplingParams(), DRAWN], ids=["greedy", "drawn"])
def test_masked_rows_obey_and_the_others_never_notice(
    engine: Engine, sampling: SamplingParams
) -> None:
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    expected = EngineDriver(engine).generate([Job(p, sampling) for p in prompts], 6)
    driver = EngineDriver(engine)
    jobs = [Job(prompt, sampling) for prompt in prompts]
    for step in range(6):
        allowed = [10 + step, 40 + step, 198]
        masks = np.stack([mask(1, allowed)])
        engine.mask_next(partial(np.copy, masks))
        driver.step({} if step else dict.fromkeys(jobs, 0), jobs if step else ())
        assert jobs[1].generated[-1] in allowed
    assert [jobs[0].generated, jobs[2].generated] == [expected[0], expected[2]]
    assert driver.step({}, jobs)  # a mask is for one step only


def test_replayed_steps_are_masked_too(checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig(
        device="cpu",
        max_batch_size=2,
        max_tokens_in_paged_kv_cache=64,
        attention_backend="triton",  # the one that can be recorded
        cuda_graph_mixed_tokens=2,
    )
    engine = Engine.load(checkpoint(head_dim=16), config, capture=Rerun())
    driver, jobs = EngineDriver(engine), [Job([1]), Job([2])]
    driver.step(dict.fromkeys(jobs, 0))
    free = driver.step({}, jobs)
    for job in jobs:
        driver.release(job)
    jobs = [Job([1]), Job([2])]
    driver.step(dict.fromkeys(jobs, 0))
    engine.mask_next(lambda: np.stack([mask(1, [5, 6])]))
    masked = driver.step({}, jobs)
    assert masked[0] == free[0]
    assert masked[1] in (5, 6)

    def keep_nine(logits: Tensor, stream: int | None) -> None:
        assert stream is None  # on a CPU
        logits[..., :9], logits[..., 10:] = -torch.inf, -torch.inf

    engine.edit_next(lambda: [(0, keep_nine)])  # what a logits processor does
    assert driver.step({}, jobs)[0] == 9


@on_both_devices
def test_a_forced_token_wins_over_bias_and_minimum(engine: Engine) -> None:
    sampling = SamplingParams(bias=((END, -np.inf),), min_length=5)
    driver, job = EngineDriver(engine), Job([1, 2], sampling, END, min_end_position=7)
    engine.mask_next(lambda: np.stack([mask(0, [END], forced=END)]))
    assert driver.step({job: 0}) == [END]


def test_a_mask_without_any_token_is_told(engine: Engine) -> None:
    driver, jobs = EngineDriver(engine), [Job([1, 2]), Job([3])]
    engine.mask_next(lambda: np.stack([mask(1, [])]))
    first, second = driver.step(dict.fromkeys(jobs, 0))
    assert first >= 0
    assert second == -1


def test_a_source_that_fails_leaves_nothing_behind(engine: Engine) -> None:
    driver, job = EngineDriver(engine), Job([1, 2])

    def fail() -> TokenMasks:
        raise RuntimeError("no masks today")

    engine.mask_next(fail)
    with pytest.raises(RuntimeError, match="no masks"):
        driver.step({job: 0})
    other = Job([3])
    assert driver.step({other: 0})[0] >= 0
