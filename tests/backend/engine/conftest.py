"""Checkpoints and engines the tests of the engine share; each is made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import write_checkpoint
from support.fake_cuda import FakeCuda

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
def fake_cuda() -> FakeCuda:
    """The device of `fake_cuda`, for all engines of this process."""
    return FakeCuda()


@pytest.fixture
def device(
    request: pytest.FixtureRequest, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Where engines run: on the CPU, unless a test asks for more (`on_both_devices`)."""
    name: str = getattr(request, "param", "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        fake_cuda.install(monkeypatch)
    return name


@pytest.fixture(scope="session")
def _small_engines() -> dict[tuple[str, str], Engine]:
    return {}


@pytest.fixture
def small_engine(
    checkpoint: Callable[..., Path], device: str, _small_engines: dict[tuple[str, str], Engine]
) -> Callable[[str], Engine]:
    """``small_engine(variant)``: 8 slots, blocks of 4 tokens, 256 blocks, float32."""
    # On a device the largest step is run when an engine is made.
    config = SMALL if device == "cpu" else replace(SMALL, device="cuda", max_num_tokens=256)

    def make(variant: str = "llama-mha") -> Engine:
        if (variant, device) not in _small_engines:
            folder = checkpoint(variant, num_shards=3 if variant.startswith("qwen") else 1)
            _small_engines[variant, device] = Engine.load(folder, config)
        return _small_engines[variant, device]

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny models: a second thread only waits."""
    torch.set_num_threads(1)
