"""The engine on the Triton kernels (interpreted here) against transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import VOCAB_SIZE, oracle_logits, oracle_tokens
from support.engine_driver import EngineDriver, Job

from inflight_backend.engine import Engine, EngineConfig

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = EngineConfig(
    device=DEVICE,
    dtype="float32",
    max_batch_size=3,
    tokens_per_block=4,
    max_tokens_in_paged_kv_cache=256,
    attention_backend="triton",
    cuda_graph_mode=False,  # test_cuda_graphs.py
)
# Biased multi-query llama, head norms, a window on one layer only.
VARIANTS = ("llama3-biased-gqa8", "qwen3", "qwen2-window")
Folder = Callable[..., Path]


def make_prompts() -> list[list[int]]:
    """One token, one block and a bit, several blocks."""
    numbers = random.Random(3)
    return [[numbers.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 6, 9)]


@pytest.fixture
def folder(checkpoint: Folder) -> Callable[[str], Path]:
    """Checkpoints whose heads the kernels take, and whose widths FP8 products take on a GPU."""
    return lambda variant: checkpoint(variant, head_dim=16, intermediate_size=64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_transformers(variant: str, folder: Callable[[str], Path]) -> None:
    prompts = make_prompts()
    expected = [oracle_tokens(folder(variant), prompt, 4) for prompt in prompts]
    driver = EngineDriver(Engine.load(folder(variant), CONFIG))
    # The short prompts generate while the long one is still read.
    assert driver.generate([Job(prompt) for prompt in prompts], 4, chunk_size=5) == expected


def test_drafts_change_no_token(folder: Callable[[str], Path]) -> None:
    """Runs of several tokens over a border of blocks, beside a context and a plain step."""
    checkpoint = folder("qwen2-window")
    prompts = make_prompts()
    expected = [oracle_tokens(checkpoint, prompt, 6) for prompt in prompts]
    driver = EngineDriver(Engine.load(checkpoint, CONFIG))
    first, second, third = jobs = [Job(prompt) for prompt in prompts]
    driver.step({first: 0, second: 0}, (), {second: [*expected[1][:3], 0, 0]})
    driver.step({third: 0}, [second, first], {first: expected[0][1:5], third: [0, 0]})
    assert (len(first.generated), len(second.generated)) == (6, 5)
    driver.step({}, [second, third])
    for job, answer in zip(jobs, expected, strict=True):
        assert job.generated == answer[: len(job.generated)]


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"kv_cache_dtype": "fp8"}, 0.1),
        ({"quantization": "fp8", "dtype": "bfloat16"}, 0.25),
        ({"quantization": "fp8", "dtype": "bfloat16", "attention_backend": "torch"}, 0.25),
    ],
)
def test_fp8_is_close_to_transformers(
    folder: Callable[[str], Path], settings: dict[str, str], share: float
) -> None:
    """The chosen token's true logit is near the best one, measured by the spread of all."""
    checkpoint = folder("qwen3")
    engine = Engine.load(checkpoint, replace(CONFIG, **settings))  # type: ignore[arg-type]
    assert "fp8" in engine.dtype_name
    for prompt in make_prompts():
        job = Job(prompt)
        EngineDriver(engine).generate([job], 2)
        for count, token in enumerate(job.generated):
            logits = oracle_logits(checkpoint, prompt + job.generated[:count])
            assert logits.max() - logits[token] < share * (logits.max() - logits.min())
