"""Settings of the engine and their resolution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from inflight_backend.engine import EngineConfig
from inflight_backend.engine.config import resolve, resolve_on_device
from inflight_backend.errors import ConfigurationError
from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import LatentConfig, ModelConfig
from inflight_backend.models.families.registry import read_family
from inflight_backend.models.quantization.schemes import Quantization
from inflight_server.serve.settings import DEMO_MODEL


@pytest.fixture
def model() -> ModelConfig:
    """With 256 positions, heads that the kernels take and widths that FP8 products take."""
    return demo_like()


def demo_like(**changes: object) -> ModelConfig:
    """The demo model's with these keys changed."""
    values: dict[str, object] = {
        "max_position_embeddings": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 16,
        "dtype": "bfloat16",
    }
    reader = JsonReader.from_file(DEMO_MODEL / "config.json")
    return read_family(reader.with_values(**{**values, **changes}))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"dtype": "float32", "attention_backend": "torch", "max_seq_len": 256}),
        ({}, {"max_num_tokens": 8192}),
        ({"max_seq_len": 100, "max_num_tokens": 50}, {"max_seq_len": 100, "max_num_tokens": 50}),
        ({"enable_chunked_context": False}, {"max_num_tokens": 8192}),
        ({"device": "cuda"}, {"dtype": "bfloat16", "attention_backend": "triton"}),
        ({"device": "cuda", "attention_backend": "torch"}, {"attention_backend": "torch"}),
        ({"device": "cuda", "kv_cache_dtype": "fp8"}, {"kv_dtype": torch.float8_e4m3fn}),
        ({"device": "cuda", "max_batch_size": 2**16 - 1}, {"num_slots": 2**16 - 1}),
        ({"max_batch_size": 2048, "max_beam_width": 32}, {"num_slots": 2**16}),
        ({"attention_backend": "triton", "dtype": "float16"}, {"kv_dtype": torch.float16}),
    ],
)
def test_settings_are_resolved(
    model: ModelConfig, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = EngineConfig(**{"device": "cpu", **settings})
    resolved = resolve_on_device(config, model, has_triton=True)
    assert {name: getattr(resolved, name) for name in expected} == expected


def test_a_step_has_room_for_the_longest_context_that_is_computed_whole(model: ModelConfig) -> None:
    long = replace(model, max_position_embeddings=131_072)
    whole = EngineConfig(device="cpu", enable_chunked_context=False)
    assert resolve(whole, long).max_num_tokens == 131_072
    assert resolve(replace(whole, max_num_tokens=50), long).max_num_tokens == 50
    assert resolve(EngineConfig(device="cpu"), long).max_num_tokens == 8192


@pytest.mark.parametrize(("cache", "has_bias"), [("fp8", True), ("fp8", False), ("model", True)])
def test_an_fp8_cache_of_keys_with_biases_is_warned_of(
    model: ModelConfig, cache: str, has_bias: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no scale, and such keys are known to come near 448."""
    config = EngineConfig(device="cpu", kv_cache_dtype=cache, attention_backend="triton")
    resolve(config, demo_like(attention_bias=has_bias))
    assert ("up to 448" in caplog.text) == (cache == "fp8" and has_bias)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"attention_backend": "magic"}, "attention_backend must be one of auto, torch"),
        ({"quantization": "int3"}, "quantization must be one of none, fp8, int8, int4"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be one of auto, model, fp8"),
        ({"max_batch_size": 0}, "max_batch_size must be between 1"),
        ({"cuda_graph_mixed_tokens": -1}, "cuda_graph_mixed_tokens must be between 0 and 8192"),
        ({"tokens_per_block": -1}, "tokens_per_block must be between 1"),
        ({"max_num_tokens": 0}, "max_num_tokens must be between 1"),
        ({"max_tokens_in_paged_kv_cache": 0}, "max_tokens_in_paged_kv_cache must be between 1"),
        ({"max_attention_window": (4, 0)}, "max_attention_window_size must be between 1"),
        ({"kv_cache_free_gpu_mem_fraction": 1.0}, "kv_cache_free_gpu_mem_fraction must be"),
        ({"kv_cache_free_gpu_mem_fraction": float("nan")}, "kv_cache_free_gpu_mem_fraction"),
        ({"cross_kv_cache_fraction": 0.0}, "cross_kv_cache_fraction must be between 0 and 1"),
    ],
)
def test_settings_out_of_bounds(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        EngineConfig(**settings)


FP8 = {"device": "cuda", "quantization": "fp8"}
FP8_CACHE = {"device": "cuda", "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"max_seq_len": 257}, {}, r"max_seq_len \(257\).*\(256\)"),
        (
            {"attention_backend": "triton"},
            {"head_dim": 20},
            r"head_dim .* of 16 .* use torch or auto",
        ),
        (
            {"attention_backend": "triton"},
            {"head_dim": 592},
            "up to 576; the checkpoint's is 592",
        ),
        ({"deterministic_mode": True}, {}, "deterministic_mode needs attention_backend triton"),
        (FP8_CACHE, {"head_dim": 20}, r"kv_cache_dtype fp8 needs a head_dim .* is 20; use model"),
        (FP8_CACHE, {"head_dim": 512}, r"kv_cache_dtype fp8 needs .* up to 256; .* 512; use model"),
        ({**FP8, "dtype": "float16"}, {}, "needs dtype bfloat16, not float16"),
        (FP8, {"intermediate_size": 56}, "intermediate_size that is a multiple of 16"),
        (
            {"device": "cuda", "max_batch_size": 2048, "max_beam_width": 32},
            {},
            r"is 65536, more than the 65535 rows .* lower one of",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(
    settings: dict[str, Any], changes: dict[str, int], message: str
) -> None:
    config = EngineConfig(**{"device": "cpu", **settings})
    with pytest.raises(ConfigurationError, match=message):
        resolve_on_device(config, demo_like(**changes), has_triton=True)


@pytest.mark.parametrize(("settings", "largest"), [({"device": "cuda"}, 576), (FP8_CACHE, 256)])
def test_the_largest_heads_that_kernels_take(settings: dict[str, Any], largest: int) -> None:
    config, model = EngineConfig(**settings), demo_like(head_dim=largest)
    assert resolve_on_device(config, model, has_triton=True).attention_backend == "triton"


def test_every_linear_must_fit_fp8(model: ModelConfig) -> None:
    latent = LatentConfig(kv_rank=16, nope=16, rope=8, value=16)
    odd = model.with_attention(lambda *_: {"latent": latent})
    with pytest.raises(ConfigurationError, match=r"layers.0.key_value.weight .* has \[24, 64\]"):
        resolve_on_device(EngineConfig(device="cuda", quantization="fp8"), odd, has_triton=True)


def test_no_deterministic_mode_of_latent_attention(model: ModelConfig) -> None:
    latent = LatentConfig(kv_rank=16, nope=16, rope=16, value=16)
    config = EngineConfig(device="cpu", attention_backend="triton", deterministic_mode=True)
    with pytest.raises(ConfigurationError, match="not supported for latent attention"):
        resolve_on_device(
            config, model.with_attention(lambda *_: {"latent": latent}), has_triton=True
        )


def test_triton_must_be_installed_where_it_is_asked_for(model: ModelConfig) -> None:
    config = EngineConfig(device="cuda")
    resolved = resolve_on_device(config, model, has_triton=False)
    assert resolved.attention_backend == "torch"
    with pytest.raises(ConfigurationError, match="triton, which is not installed"):
        resolve_on_device(replace(config, attention_backend="triton"), model, has_triton=False)


def test_the_device_is_that_of_the_machine(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve(EngineConfig(), model).device == "cpu"
    with pytest.raises(ConfigurationError, match="no CUDA device"):
        resolve(EngineConfig(device="cuda"), model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert resolve(EngineConfig(**FP8), model).device == "cuda"  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigurationError, match=r"^quantization fp8 .* 8\.9 .* 8\.0; use none"):
        resolve(EngineConfig(**FP8), model)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"^kv_cache_dtype fp8 .* 8\.9 .* 8\.0; use model"):
        resolve(EngineConfig(**FP8_CACHE), model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "kept"), [((8, 0), "model"), ((8, 9), "fp8")], ids=["8.0", "8.9"]
)
def test_a_cache_in_fp8_is_kept_where_the_gpu_has_it(
    model: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    kept: str,
) -> None:
    """The checkpoint asks for it, the operator does not insist."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    asks = Quantization("fp8", (), kv_cache="fp8")
    model = replace(model, quantization=asks, kv_scales=("k_scale", "v_scale"))
    assert resolve(EngineConfig(device="cuda"), model).kv_cache_dtype == kept
    assert ("asks for an FP8 KV cache" in caplog.text) == (kept == "model")


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "compiled"),
        ({"dtype": "bfloat16"}, "compiled"),
        ({"dtype": "float16"}, "torch"),
        ({"quantization": "fp8"}, "torch"),
        ({"kv_cache_dtype": "fp8"}, "compiled"),
        ({"attention_backend": "torch"}, "torch"),
        ({"attention_backend": "compiled"}, "compiled"),
    ],
    ids=str,
)
def test_the_backend_of_a_cpu(model: ModelConfig, settings: dict[str, Any], expected: str) -> None:
    config = EngineConfig(**{"device": "cpu", **settings})
    assert resolve(config, model).attention_backend == expected


@pytest.mark.parametrize("settings", [{"dtype": "float16"}, {"quantization": "fp8"}], ids=str)
def test_compiled_ops_are_refused_where_they_do_not_run(
    model: ModelConfig, settings: dict[str, Any]
) -> None:
    config = EngineConfig(device="cpu", attention_backend="compiled", **settings)
    with pytest.raises(ConfigurationError, match=r"attention_backend compiled needs .* use torch"):
        resolve(config, model)
