"""Checkpoints and engines the tests of the engine share; each is made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint

from inflight_backend.engine import Engine, EngineConfig

SMALL = EngineConfig(
    device="cpu", max_batch_size=8, tokens_per_block=4, max_tokens_in_paged_kv_cache=1024
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint(variant, **settings)``: its folder; every other call must only read it."""
    made: dict[str, Path] = {}

    def make(variant: str = "llama-mha", **settings: Any) -> Path:
        key = repr((variant, sorted(settings.items())))
        if key not in made:
            made[key] = write_checkpoint(tmp_path_factory.mktemp(variant), variant, **settings)
        return made[key]

    return make


@pytest.fixture(scope="session")
def small_engine(checkpoint: Callable[..., Path]) -> Callable[[str], Engine]:
    """``small_engine(variant)``: 8 slots, blocks of 4 tokens, 256 blocks, float32 on the CPU."""
    made: dict[str, Engine] = {}

    def make(variant: str = "llama-mha") -> Engine:
        if variant not in made:
            num_shards = 3 if variant.startswith("qwen") else 1
            made[variant] = Engine.load(checkpoint(variant, num_shards=num_shards), SMALL)
        return made[variant]

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny models: a second thread only waits."""
    torch.set_num_threads(1)
