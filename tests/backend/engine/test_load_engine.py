"""What a user sets on the Triton model arrives in the engine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.manager.batcher import load_engine
from inflight_backend.manager.parameters import TrtGptModelOptionalParams, parse_parameters
from inflight_backend.manager.step_loop import OverlapScheduler

SMALL = {"device": "cpu", "max_tokens_in_paged_kv_cache": "256", "max_batch_size": "2"}


@pytest.mark.contract("tensorrt_llm parameter", "cuda_graph_mode")
def test_kernels_and_types_are_the_ones_asked_for(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(head_dim=16)
    raw = {
        **SMALL,
        "gpt_model_path": str(folder),
        "attention_backend": "triton",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "cuda_graph_mode": "false",
        "cuda_graph_mixed_tokens": "96",
        "deterministic_mode": "true",
        "overlap_scheduler": "on",
    }
    params = TrtGptModelOptionalParams.from_parameters(parse_parameters(raw))
    assert params.overlap_scheduler is OverlapScheduler.ON
    engine = load_engine(folder, params)
    assert isinstance(engine, Engine)
    config = engine.config
    assert (config.attention_backend, config.quantization) == ("triton", "fp8")
    assert (config.kv_cache_dtype, config.cuda_graph_mode) == ("fp8", False)
    assert config.cuda_graph_mixed_tokens == 96
    assert config.deterministic_mode


@pytest.mark.parametrize("setting", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_of_a_gpu_comes_in_segments_that_grow_unless_the_user_says_otherwise(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, setting: str | None
) -> None:
    """torch reads it when it first takes memory of a GPU: before the first engine."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "max_split_size_mb:64")
        if name != setting:
            monkeypatch.delenv(name)
    params = TrtGptModelOptionalParams.from_parameters(
        parse_parameters({**SMALL, "gpt_model_path": "unused"})
    )
    load_engine(checkpoint(), params)
    expected = "expandable_segments:True" if setting is None else "max_split_size_mb:64"
    assert os.environ[setting or "PYTORCH_CUDA_ALLOC_CONF"] == expected
    assert len({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ)) == 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep nothing")
def test_what_loading_frees_goes_back_to_the_system(checkpoint: Callable[..., Path]) -> None:
    """Pieces as small as those of a quantised linear, with one behind them that stays."""
    config = EngineConfig(device="cpu", attention_backend="torch", max_tokens_in_paged_kv_cache=64)
    Engine.load(checkpoint(), config)
    pieces = [b"x" * 100_000 for _ in range(3000)]
    del pieces[:-1]
    before = psutil.Process().memory_info().rss
    Engine.load(checkpoint(), config)
    assert psutil.Process().memory_info().rss < before - 200e6
