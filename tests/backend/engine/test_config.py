"""Settings of the engine, their resolution, and the size of the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.config import resolve
from inflight_backend.engine.memory_plan import GIB, PlanSettings, check_limits
from inflight_backend.errors import ConfigurationError
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.kv_cache import KvPool, available_memory, choose_num_blocks
from inflight_backend.models.layers import Fp8Linear, Linear, quantize
from inflight_kernels.ops.copy_blocks import copy_blocks

Folder = Callable[..., Path]


@pytest.fixture
def model(checkpoint: Folder) -> ModelConfig:
    """Of a checkpoint with 256 positions."""
    return ModelConfig.from_folder(checkpoint("llama-mha", num_shards=1))


def test_defaults_on_a_cpu(model: ModelConfig) -> None:
    config = resolve(EngineConfig(device="cpu"), model)
    assert config.dtype == "float32"
    assert (config.max_seq_len, config.max_num_tokens) == (256, 8192)
    assert config.attention_backend == "torch"
    assert config.torch_dtype == torch.float32
    long = replace(model, max_position_embeddings=131_072)
    assert resolve(EngineConfig(device="cpu"), long).max_num_tokens == 8192
    whole = EngineConfig(device="cpu", enable_chunked_context=False)
    assert resolve(whole, long).max_num_tokens == 131_072
    assert resolve(replace(whole, max_num_tokens=50), long).max_num_tokens == 50
    chosen = resolve(EngineConfig(device="cpu", max_seq_len=100, max_num_tokens=50), model)
    assert (chosen.max_seq_len, chosen.max_num_tokens) == (100, 50)


@pytest.mark.parametrize(("cache", "has_bias"), [("fp8", True), ("fp8", False), ("auto", True)])
def test_an_fp8_cache_of_keys_with_biases_is_warned_of(
    model: ModelConfig, cache: str, has_bias: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no scale, and such keys are known to come near 448."""
    config = EngineConfig(device="cpu", kv_cache_dtype=cache, attention_backend="triton")
    resolve(config, replace(model, has_qkv_bias=has_bias, head_dim=16))
    assert ("up to 448" in caplog.text) == (cache == "fp8" and has_bias)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"attention_backend": "magic"}, "attention_backend must be one of auto, torch"),
        ({"quantization": "int4"}, "quantization must be one of none, fp8"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be one of auto, fp8"),
        ({"max_batch_size": 0}, "max_batch_size must be between 1"),
        ({"cuda_graph_mixed_tokens": -1}, "cuda_graph_mixed_tokens must be between 0 and 8192"),
        ({"tokens_per_block": -1}, "tokens_per_block must be between 1"),
        ({"max_num_tokens": 0}, "max_num_tokens must be between 1"),
        ({"max_tokens_in_paged_kv_cache": 0}, "max_tokens_in_paged_kv_cache must be between 1"),
        ({"kv_cache_free_gpu_mem_fraction": 1.0}, "kv_cache_free_gpu_mem_fraction must be"),
        ({"kv_cache_free_gpu_mem_fraction": float("nan")}, "kv_cache_free_gpu_mem_fraction"),
    ],
)
def test_settings_out_of_bounds(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        EngineConfig(**settings)


def test_longer_than_the_checkpoint(model: ModelConfig) -> None:
    with pytest.raises(ConfigurationError, match=r"max_seq_len \(257\).*\(256\)"):
        resolve(EngineConfig(device="cpu", max_seq_len=257), model)


def test_no_cuda_device(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="no CUDA device"):
        resolve(EngineConfig(device="cuda"), model)


def test_what_triton_needs(model: ModelConfig) -> None:
    config = EngineConfig(device="cpu", attention_backend="triton")
    with pytest.raises(ConfigurationError, match=r"head_dim .* of 16 .* use torch or auto"):
        resolve(config, replace(model, head_dim=20))
    with pytest.raises(ConfigurationError, match="up to 256; the checkpoint's is 272"):
        resolve(config, replace(model, head_dim=272))
    assert resolve(config, replace(model, head_dim=80)).attention_backend == "triton"


def test_what_fp8_needs(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"kv_cache_dtype fp8 needs .* triton"):
        resolve(EngineConfig(device="cpu", kv_cache_dtype="fp8"), model)
    chosen = EngineConfig(device="cpu", kv_cache_dtype="fp8", attention_backend="triton")
    assert resolve(chosen, replace(model, head_dim=16)).kv_dtype == torch.float8_e4m3fn
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    config = EngineConfig(quantization="fp8", dtype="bfloat16")
    fitting = replace(model, head_dim=16, hidden_size=64, intermediate_size=96)
    assert resolve(config, fitting).attention_backend == "triton"
    with pytest.raises(ConfigurationError, match="needs dtype bfloat16, not float16"):
        resolve(replace(config, dtype="float16"), fitting)
    with pytest.raises(ConfigurationError, match="intermediate_size that is a multiple of 16"):
        resolve(config, replace(fitting, intermediate_size=56))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigurationError, match=r"^quantization fp8 .* 8\.9 .* 8\.0; use none"):
        resolve(config, fitting)
    with pytest.raises(ConfigurationError, match=r"^kv_cache_dtype fp8 .* 8\.9 .* 8\.0; use auto"):
        resolve(EngineConfig(kv_cache_dtype="fp8"), fitting)
    assert resolve(EngineConfig(dtype="bfloat16"), fitting).kv_dtype == torch.bfloat16


def test_rows_of_a_launch(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """2^16 - 1 on a GPU; a CPU knows no such bound."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    most, fitting = EngineConfig(max_batch_size=2**16 - 1), replace(model, head_dim=16)
    assert resolve(most, fitting).attention_backend == "triton"
    beams = EngineConfig(max_batch_size=2048, max_beam_width=32)
    with pytest.raises(
        ConfigurationError, match=r"is 65536, more than the 65535 rows .* lower one of"
    ):
        resolve(beams, fitting)
    assert resolve(replace(beams, attention_backend="torch"), fitting).num_slots == 2**16
    assert resolve(replace(beams, device="cpu"), fitting).num_slots == 2**16
    planned = PlanSettings(gpu_memory=GIB, max_batch_size=2048, max_beam_width=32)
    with pytest.raises(ConfigurationError, match="is 65536, more than the 65535 rows"):
        check_limits(fitting, planned)
    check_limits(replace(fitting, head_dim=8), planned)
    check_limits(fitting, replace(planned, gpu_memory=None))
    check_limits(fitting, replace(planned, max_beam_width=31))


def test_blocks_of_a_cpu_pool() -> None:
    assert choose_num_blocks(1, 32, None, None, 0.9) == 65_536 // 32
    assert choose_num_blocks(1, 32, None, 100, 0.9) == 3
    bytes_per_token = 2**30
    expected = available_memory() / 4 / bytes_per_token
    assert choose_num_blocks(bytes_per_token, 1, None, None, 0.9) == pytest.approx(expected, abs=2)


def test_pool_too_small_for_a_block(checkpoint: Folder) -> None:
    config = EngineConfig(device="cpu", tokens_per_block=32, max_tokens_in_paged_kv_cache=31)
    with pytest.raises(ConfigurationError, match="room for 31 tokens and a block takes 32"):
        Engine.load(checkpoint("llama-mha", num_shards=1), config)


def test_pool_larger_than_memory() -> None:
    with pytest.raises(ConfigurationError, match="no memory on cpu for 1099511627776 KV blocks"):
        KvPool(4, 2**40, 64, 8, 128, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_copied_blocks_are_read_before_any_is_written(dtype: torch.dtype) -> None:
    """By the kernel of a GPU, interpreted here, as by torch: 1 goes to 2 and 2 to 0."""
    numbers = torch.randn(2, 2, 3, 4, 1, 16, generator=torch.Generator().manual_seed(0))
    sources, destinations = torch.tensor([1, 2]).int(), torch.tensor([2, 0]).int()
    for op in (None, copy_blocks):
        pool = KvPool(2, 3, 4, 1, 16, dtype, "cpu", op)
        for layer in range(2):
            for half, cache in enumerate(pool.layer(layer)):
                cache.copy_(numbers[layer, half])
        pool.copy(sources, destinations)
        for layer in range(2):
            for half, cache in enumerate(pool.layer(layer)):
                expected = numbers[layer, half].to(dtype).float()[[2, 1, 1]]
                assert torch.equal(cache.float(), expected)


def test_cleaning_keeps_numbers() -> None:
    pool = KvPool(2, 3, 4, 1, 2, torch.float32, "cpu")
    keys, values = pool.layer(1)
    keys[0], keys[2], values[2, 1] = torch.nan, 5.0, torch.inf
    pool.clean([2])
    assert keys[0].isnan().all()
    assert (keys[2] == 5.0).all()
    assert values.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize(("num_tokens", "has_bias"), [(1, True), (3, False), (600, True)])
def test_linear_in_every_dtype(
    dtype: torch.dtype, tolerance: float, num_tokens: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, 24, generator=generator).to(dtype)
    weight = torch.randn(40, 24, generator=generator).to(dtype)
    bias = torch.randn(40, generator=generator).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    with torch.inference_mode():
        answer = Linear(weight, bias)(x)
    assert answer.dtype == dtype
    torch.testing.assert_close(answer.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("has_bias", [True, False])
def test_fp8_linear(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 256, generator=generator)
    weight[3] *= 1000  # a large row has a scale of its own and spoils no other
    bias = torch.randn(48, generator=generator) if has_bias else None
    x = torch.randn(64, 256, generator=generator)
    x[2] /= 100
    found = Fp8Linear(weight, bias)(quantize(x)) - (0 if bias is None else bias)
    expected = x @ weight.T
    # Two roundings to 4 bits, at most 2^-4 each; errors of 256 products average out.
    error = (found - expected).norm(dim=0) / expected.norm(dim=0)
    assert float(error.max()) < 0.06
    assert float(error.min()) > 0.001
    assert found.dtype == weight.dtype


def test_quantised_rows_use_the_whole_range() -> None:
    values, scales = quantize(torch.tensor([[1.0, -7.0, 0.0], [0.0, 0.0, 0.0], [2e4, 1.0, -3e4]]))
    assert values.float().abs().amax(dim=1).tolist() == [448.0, 0.0, 448.0]
    assert torch.isfinite(scales).all()
    assert (values.float() * scales)[0, 1] == pytest.approx(-7.0)
