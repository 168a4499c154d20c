"""The deterministic mode: what a request draws and on what, alone and among others, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support.engine_driver import EngineDriver, Job
from torch import Tensor

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.models import triton_attention
from inflight_kernels.ops.linear import invariant_linear
from inflight_scheduler import SamplingParams

LENGTHS = (1, 9, 8)  # one token, a block of 8, and one more
NUM_TOKENS = 2


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Iterator[Engine]:
    config = EngineConfig(
        device="cpu",
        dtype="bfloat16",
        quantization="fp8",
        kv_cache_dtype="fp8",
        attention_backend="triton",
        deterministic_mode=True,
        max_batch_size=len(LENGTHS),
        tokens_per_block=8,
        max_tokens_in_paged_kv_cache=8 * 8 * len(LENGTHS),
    )
    with pytest.MonkeyPatch.context() as patch:  # less to interpret; any tile and split will do
        patch.setattr(triton_attention, "DETERMINISTIC_SPLITS", 2)
        small = invariant_linear.Tile(tokens=16, rows=32, columns=64, num_stages=4, num_warps=4)
        patch.setattr(invariant_linear, "choose_tile", lambda *_: small)
        yield Engine.load(checkpoint(head_dim=16), config)


def make_job(number: int) -> Job:
    generator = torch.Generator().manual_seed(number)
    prompt = torch.randint(100, (LENGTHS[number],), generator=generator).tolist()
    return Job(prompt, SamplingParams(temperature=1.5, top_p=0.95, seed=40 + number))


def run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, jobs: Sequence[Job]
) -> dict[Job, list[Tensor]]:
    """The logits every job drew from, after running all of them side by side."""
    seen: list[Tensor] = []
    logits = engine._decoder.logits

    def watched(hidden: Tensor) -> Tensor:
        seen.append(logits(hidden))
        return seen[-1].clone()

    monkeypatch.setattr(engine._decoder, "logits", watched)
    driver = EngineDriver(engine)
    driver.step(dict.fromkeys(jobs, 0))
    for _ in range(NUM_TOKENS - 1):
        driver.step({}, jobs)
    monkeypatch.setattr(engine._decoder, "logits", logits)
    return {job: [rows[index] for rows in seen] for index, job in enumerate(jobs)}


@pytest.mark.slow
def test_a_request_alone_and_among_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another slot, other blocks and another row of the batch, too."""
    together = [make_job(number) for number in reversed(range(len(LENGTHS)))]
    by_job = run(engine, monkeypatch, together)
    other = together[1]
    alone = make_job(LENGTHS.index(len(other.prompt)))
    [rows] = run(engine, monkeypatch, [alone]).values()
    assert alone.generated == other.generated
    assert len(alone.generated) == NUM_TOKENS
    assert all(map(torch.equal, rows, by_job[other])), "not one bit differs"
    assert not engine.supports_drafts, "tokens of one run come from another kernel"
