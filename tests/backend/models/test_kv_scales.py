"""KV caches of 8 bits with the scales of a checkpoint, beside transformers with rounded keys."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cache_scales import expected_logits, with_scales
from support.checkpoints import write_checkpoint
from support.engine_driver import EngineDriver, Job
from support.quantized import SCHEMES, compressed, set_quantization, write_quantized

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.memory_plan import make_plan
from inflight_backend.errors import CheckpointError, ConfigurationError
from inflight_scheduler import OutputParams

CONFIG = EngineConfig(device="cpu", max_batch_size=2, max_tokens_in_paged_kv_cache=64)
PROMPT = [(7 * index + 3) % 97 for index in range(24)]
_SCHEME = {"num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
_FP8, _INT8 = ({**_SCHEME, "type": kind} for kind in ("float", "int"))
_IN_ATTENTION = ("k_scale", "v_scale")
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, half as many key heads as query heads."""
    folder = tmp_path_factory.mktemp("plain")
    return write_checkpoint(folder, "llama-mha", num_key_value_heads=2, head_dim=32)


def logits(folder: Path, config: EngineConfig) -> tuple[list[int], torch.Tensor]:
    """Of a prompt in two chunks and of tokens that follow, and all these tokens."""
    driver = EngineDriver(Engine.load(folder, config))
    job = Job(PROMPT, outputs=OutputParams(context_logits=True, generation_logits=True))
    found = []
    for chunks in ({job: 17}, {job: 0}, {}, {}):
        driver.step(chunks, [] if chunks else [job])
        outputs = driver.engine.take_outputs()
        assert outputs is not None
        found += [torch.tensor(each.logits) for each in outputs.context_logits]
        rows = [row for each in outputs.generation_logits.values() for row in each]
        found += [torch.tensor(row)[None] for row in rows[-1:] if not chunks]
    return PROMPT + job.generated[:-1], torch.cat(found)


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root of the mean square, in units of the deviation of what is expected."""
    return float((found - expected).square().mean().sqrt() / expected.std())


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("kind", "names", "config"),
    [
        ("fp8", _IN_ATTENTION, {"kv_cache_scheme": _FP8}),
        ("int8", _IN_ATTENTION, {"kv_cache_scheme": _INT8}),
        ("fp8", ("k_proj.k_scale", "v_proj.v_scale"), {**_MODELOPT, "kv_cache_quant_algo": "FP8"}),
        ("fp8", _IN_ATTENTION, {"quant_method": "fp8", "kv_cache_scheme": "static"}),
        ("int8", ("k_proj.output_scale", "v_proj.output_scale"), {"kv_cache_scheme": _INT8}),
    ],
)
@pytest.mark.parametrize(
    ("backend", "tolerance"), [("torch", 1e-5), ("compiled", 1e-5), ("triton", 5e-3)]
)
def test_logits_are_those_of_rounded_keys_and_values(
    tmp_path: Path,
    plain: Path,
    kind: str,
    names: tuple[str, str],
    config: dict[str, Any],
    backend: str,
    tolerance: float,
) -> None:
    """``auto`` is what the checkpoint says; ``model`` is a cache that rounds nothing. The kernels
    multiply in float16."""
    quantization = {**compressed("pack-quantized"), "config_groups": {}, **config}
    if "quant_method" in config:
        quantization = config
    folder = with_scales(plain, tmp_path / "scaled", kind, names, quantization)
    settings = replace(CONFIG, attention_backend=backend)
    tokens, found = logits(folder, settings)
    expected = expected_logits(plain, tokens, kind)
    assert found.shape == expected.shape
    assert deviation(found, expected) < tolerance
    _, unrounded = logits(folder, replace(settings, kv_cache_dtype="model"))
    assert torch.equal(unrounded, logits(plain, settings)[1])
    assert deviation(unrounded, expected) > 3 * tolerance
    engine, made = Engine.load(folder, settings), make_plan(folder, settings)
    assert engine.dtype_name.endswith(f"with {kind} KV cache")
    pool = [each for index in range(2) for each in engine._pool.layer(index)]
    assert sum(each.nbytes for each in pool) == made.pool_bytes
    assert made.kv_cache_dtype == kind


def test_what_is_said_without_scales(tmp_path: Path, plain: Path) -> None:
    """Integers need them; FP8 is stored as it is where that is asked for. What only some layers
    have counts as none."""
    with pytest.raises(ConfigurationError, match="kv_cache_dtype int8 needs a scale for the keys"):
        Engine.load(plain, replace(CONFIG, kv_cache_dtype="int8"))
    expected = logits(plain, replace(CONFIG, kv_cache_dtype="fp8"))[1]
    assert not torch.equal(expected, logits(plain, CONFIG)[1])
    config = {**compressed("pack-quantized"), "config_groups": {}, "kv_cache_scheme": _FP8}
    folder = with_scales(plain, tmp_path / "scaled", "fp8", _IN_ATTENTION, config)
    with pytest.raises(ConfigurationError, match="scales of the checkpoint are for fp8; use auto"):
        make_plan(folder, replace(CONFIG, kv_cache_dtype="int8"))
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.v_scale"
    save_file({**weights, name: torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(f"{name} is 0.0; a scale must be above 0")):
        Engine.load(folder, CONFIG)
    del weights[name]
    save_file(weights, folder / "model.safetensors")
    assert make_plan(folder, CONFIG).kv_cache_dtype == "model"
    assert torch.equal(logits(folder, replace(CONFIG, kv_cache_dtype="fp8"))[1], expected)


@pytest.mark.parametrize(
    "change",
    [{"num_bits": 4}, {"strategy": "attn_head"}, {"symmetric": False}, {"dynamic": True}],
    ids=str,
)
def test_other_schemes_of_a_cache_are_passed_over(
    tmp_path: Path, plain: Path, change: dict[str, Any]
) -> None:
    folder, _ = write_quantized(plain, tmp_path, SCHEMES["ct-w8a16"])
    content = json.loads((folder / "config.json").read_text())["quantization_config"]
    set_quantization(folder, {**content, "kv_cache_scheme": {**_INT8, **change}})
    assert make_plan(folder, CONFIG).kv_cache_dtype == "model"
