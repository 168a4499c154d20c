"""Quantised checkpoints against plain ones with the numbers that they stand for."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_checkpoint
from support.engine_driver import EngineDriver, Job
from support.families import FAMILY_VARIANTS, write_family
from support.quantized import (
    SCHEMES,
    W8A8,
    Scheme,
    compressed,
    gptq,
    set_quantization,
    write_quantized,
)

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.config import resolve_on_device
from inflight_backend.engine.memory_plan import make_plan
from inflight_backend.errors import CheckpointError, ConfigurationError
from inflight_backend.models.families.registry import read_model
from inflight_backend.models.layers import Linear, Parameter, parameter_tensors
from inflight_backend.models.parameters import decoder_parameters
from inflight_backend.models.quantization.forms import PackedWeight
from inflight_backend.models.quantization.linears import (
    DequantizedLinear,
    Int4Linear,
    Int8Linear,
    IntegerLinear,
    dequantize,
    make_packed_linear,
)
from inflight_backend.models.weights import Checkpoint
from inflight_scheduler import OutputParams

CONFIG = EngineConfig(device="cpu", max_batch_size=2, max_tokens_in_paged_kv_cache=64)
PROMPT = [(7 * index + 3) % 97 for index in range(24)]
_SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fused linears with biases, blocks of 128 that are not full."""
    folder = tmp_path_factory.mktemp("plain")
    return write_checkpoint(folder, "llama-mha", attention_bias=True, **_SIZES)


def logits(folder: Path, config: EngineConfig = CONFIG) -> torch.Tensor:
    """Those of each token of a prompt, and of one generated."""
    driver = EngineDriver(Engine.load(folder, config))
    wants = OutputParams(context_logits=True, generation_logits=True)
    job = Job(PROMPT, outputs=wants)
    found = []
    for chunks in ({job: 17}, {job: 0}, {}):
        driver.step(chunks, [] if chunks else [job])
        outputs = driver.engine.take_outputs()
        assert outputs is not None
        found += [torch.tensor(each.logits) for each in outputs.context_logits]
        rows = [row for each in outputs.generation_logits.values() for row in each]
        found += [torch.tensor(row)[None] for row in rows]
    assert sum(map(len, found)) == len(PROMPT) + 2
    return torch.cat(found)


def difference(folder: Path, expected: Path, config: EngineConfig = CONFIG) -> float:
    """The largest, in units of the deviation of what is expected."""
    wanted = logits(expected, config)
    return float((logits(folder, config) - wanted).abs().max() / wanted.std())


def loaded(folder: Path, dtype: torch.dtype) -> dict[str, Parameter]:
    """The parameters as an engine takes them over."""
    with Checkpoint(folder) as opened:
        model = opened.fit(read_model(folder))
        return opened.load(decoder_parameters(model), dtype, "cpu")


def loaded_bytes(folder: Path, config: EngineConfig) -> int:
    """What they take."""
    dtype = resolve_on_device(config, read_model(folder), has_triton=False).torch_dtype
    parameters = loaded(folder, dtype).values()
    return sum(each.nbytes for part in parameters for each in parameter_tensors(part))


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_numbers(tmp_path: Path, plain: Path, name: str) -> None:
    """In float32, so that nothing but the order of sums differs; and memory is what is planned."""
    folder, expected = write_quantized(plain, tmp_path, SCHEMES[name])
    assert difference(folder, expected) < 1e-4
    for dtype in ("float32", "bfloat16"):
        config = replace(CONFIG, dtype=dtype)
        made = make_plan(folder, config)
        assert loaded_bytes(folder, config) == made.weight_bytes
        assert made.weight_bytes < make_plan(expected, config).weight_bytes
        assert made.num_parameters == make_plan(expected, config).num_parameters


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ct-w4a16", Int4Linear),
        ("ct-w4a16-asymmetric", Int4Linear),
        ("ct-w4a16-order", Int4Linear),
        ("awq", Int4Linear),
        ("gptq-order", Int4Linear),
        ("ct-w8a16", Int8Linear),
        ("ct-w4a16-channel", DequantizedLinear | Int4Linear),
        ("ct-w8a16-groups", DequantizedLinear),
        ("fp8-blocks", DequantizedLinear),
    ],
)
def test_products_in_bfloat16(tmp_path: Path, plain: Path, name: str, kind: Any) -> None:
    """Those of torch for few bits differ from that of the wide weight by their rounding."""
    folder, _ = write_quantized(plain, tmp_path, SCHEMES[name])
    for part in ("qkv", "gate_up", "down"):
        weight = loaded(folder, torch.bfloat16)[f"layers.1.{part}.weight"]
        assert isinstance(weight, PackedWeight)
        wide = dequantize(weight)
        bias = torch.randn(len(wide), generator=torch.Generator().manual_seed(2)).bfloat16()
        linear = make_packed_linear(weight, bias, Linear)
        assert isinstance(linear, kind)
        for count in (0, 1, 5, 40):
            x = torch.randn(count, wide.shape[1], generator=torch.Generator().manual_seed(3))
            expected = x.bfloat16().float() @ wide.float().t() + bias.float()
            bound = 2e-2 * float(wide.float().std()) * wide.shape[1] ** 0.5
            answer = linear(x.bfloat16())
            assert answer.shape == expected.shape
            assert bool(((answer - expected).abs() < 2 * bound).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_integers_times_integers(tmp_path: Path, plain: Path, dtype: str) -> None:
    """What a linear reads is rounded to 8 bits, as the scheme wants: logits differ by a few
    hundredths of their deviation (`docs/models.md`)."""
    folder, expected = write_quantized(plain, tmp_path, W8A8)
    config = replace(CONFIG, dtype=dtype)
    found, wanted = logits(folder, config), logits(expected, config)
    assert float((found - wanted).square().mean().sqrt() / wanted.std()) < 0.08
    weight = loaded(folder, getattr(torch, dtype))["layers.0.down.weight"]
    assert isinstance(weight, PackedWeight)
    linear = make_packed_linear(weight, None, Linear)
    assert isinstance(linear, IntegerLinear)
    assert linear(torch.empty(0, weight.values.shape[1], dtype=weight.dtype)).shape == (0, 128)
    x = torch.randn(3, weight.values.shape[1], generator=torch.Generator().manual_seed(3))
    x = x.to(weight.dtype)
    peaks = x.double().abs().amax(1, keepdim=True)
    numbers = (x.double() * 127 / peaks).round()
    wanted = numbers @ weight.values.double().t() * (peaks / 127) * weight.scales.double().t()
    torch.testing.assert_close(linear(x).double(), wanted, rtol=2**-7, atol=1e-5)


_ANY_SIZE = ("ct-w4a16-channel", "ct-w8a16", "fp8-blocks", "ct-fp8-tensor-static")


@pytest.mark.fast(8)
@pytest.mark.parametrize(
    ("family", "name"), list(zip(FAMILY_VARIANTS, cycle(_ANY_SIZE), strict=False))
)
def test_any_family_goes_with_any_scheme(tmp_path: Path, family: str, name: str) -> None:
    """Fused linears, rows in orders of their own, linears of each expert, latents whose matrices
    are taken apart, recurrences."""
    plain = tmp_path / "plain"
    write_family(plain, family)
    with Checkpoint(plain) as opened:
        model = opened.fit(read_model(plain))
    linears = {
        re.escape(source.name)
        for spec in decoder_parameters(model)
        if spec.is_linear or ".experts." in spec.name
        for source in spec.sources
        if source.name.endswith(".weight") and len(source.shape) == 2
    }
    pattern = re.compile("|".join(linears))
    folder, expected = write_quantized(plain, tmp_path, SCHEMES[name], pattern)
    if model.names.is_transposed:
        with pytest.raises(CheckpointError, match="keeps transposed or stacked; give an unquant"):
            make_plan(folder, CONFIG)
    else:
        assert difference(folder, expected) < (1e-2 if model.deltas else 1e-4)
        assert loaded_bytes(folder, CONFIG) == make_plan(folder, CONFIG).weight_bytes


@pytest.mark.parametrize("name", ["ct-w8a16", "ct-fp8-tensor-static"])
def test_a_chunk_of_a_prompt_that_draws_nothing(tmp_path: Path, name: str) -> None:
    """No token reaches the last layer's experts then."""
    plain = tmp_path / "plain"
    write_family(plain, "phimoe")
    pattern = re.compile(r".*experts\.\d+\.w\d\.weight|.*_proj\.weight")
    folder, expected = write_quantized(plain, tmp_path, SCHEMES[name], pattern)
    answers = [
        EngineDriver(Engine.load(each, CONFIG)).generate([Job(PROMPT)], 4, chunk_size=7)
        for each in (folder, expected)
    ]
    assert answers[0] == answers[1]


def test_experts_stay_quantised(tmp_path: Path) -> None:
    """Each with an order of its columns; one is not quantised, and of another a part."""
    plain = tmp_path / "plain"
    write_family(plain, "qwen3_moe")
    config = {**SCHEMES["gptq-order"].config, "group_size": 8}
    pattern = re.compile(r".*experts\.((?!3|1\.up)\d.*)_proj\.weight")
    scheme = Scheme(gptq(8, has_order=True), config)
    folder, expected = write_quantized(plain, tmp_path, scheme, pattern)
    assert difference(folder, expected) < 1e-4
    planned = make_plan(folder, CONFIG).weight_bytes
    assert loaded_bytes(folder, CONFIG) == planned
    assert planned < 0.7 * make_plan(expected, CONFIG).weight_bytes


def test_parts_of_a_fused_linear_may_differ(tmp_path: Path, plain: Path) -> None:
    """A part that is not quantised between two that are."""
    pattern = re.compile(r".*(q|v|gate)_proj\.weight")
    scheme = SCHEMES["ct-fp8-channel-dynamic"]
    folder, expected = write_quantized(plain, tmp_path, scheme, pattern)
    assert difference(folder, expected) < 1e-4
    assert loaded_bytes(folder, CONFIG) == make_plan(folder, CONFIG).weight_bytes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported; supported: compressed-"),
        ({"bits": 4}, "quant_method is missing"),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_lb": 1},
            "activation_scale_lb is not supported; supported: quant_method, ",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported; supported: e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups is missing"),
        (compressed("marlin-24"), "format 'marlin-24' is not supported; supported: float-quant"),
        (compressed("float-quantized", bits=4), "weights: num_bits 4 is not supported; suppo"),
        ({"quant_method": "awq", "bits": 3}, "bits 3 is not supported; supported: 4"),
        ({"quant_method": "awq", "w_bit": 8}, "w_bit 8 is not supported; supported: 4"),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            "version 'gemv' is not supported; supported: gemm",
        ),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported; supported: 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be -1 or above"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*down.*": {}}},
            "dynamic is not supported",
        ),
        (compressed("pack-quantized", bits=2), "weights: num_bits 2 is not supported; suppor"),
        (compressed("float-quantized", type="int"), "type 'int' does not go with format float-"),
        (compressed("float-quantized", hadamard=2), "weights: hadamard is not supported; suppo"),
        (
            compressed("float-quantized", strategy="group"),
            "weights: strategy 'group' is not supported; supported: tensor, channel, block",
        ),
        (
            {**compressed("float-quantized"), "sparsity_config": {"format": "sparse-24"}},
            "sparsity_config is not supported",
        ),
        (
            {**compressed("float-quantized"), "quantization_status": "frozen"},
            "quantization_status 'frozen' is not supported; supported: compressed",
        ),
    ],
)
def test_configurations_that_are_refused(
    tmp_path: Path, plain: Path, config: dict[str, Any], message: str
) -> None:
    folder, _ = write_quantized(plain, tmp_path, SCHEMES["fbgemm_fp8"])
    set_quantization(folder, config)
    with pytest.raises(CheckpointError) as caught:
        make_plan(folder, CONFIG)
    assert str(caught.value).startswith("config.json: quantization_config")
    assert message in str(caught.value)


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path, plain: Path) -> None:
    folder, expected = write_quantized(plain, tmp_path, SCHEMES["modelopt"])
    shutil.copy(plain / "config.json", folder)
    with pytest.raises(CheckpointError, match="has no quantization_config"):
        make_plan(folder, CONFIG)
    content = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    assert difference(folder, expected) < 1e-4
    content["quantization"]["quant_algo"] = "W4A8_AWQ"
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    message = r"^hf_quant_config\.json: quantization: quant_algo 'W4A8_AWQ'"
    with pytest.raises(CheckpointError, match=message):
        make_plan(folder, CONFIG)


def test_biases_that_gptq_writes_for_none(tmp_path: Path) -> None:
    """Old files have a bias of zeros for each linear; one of other numbers has a meaning."""
    plain = write_checkpoint(tmp_path / "plain", "llama-mha", **_SIZES)
    folder, expected = write_quantized(plain, tmp_path, SCHEMES["gptq"])
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.bias"
    save_file({**weights, name: torch.zeros(192)}, folder / "model.safetensors")
    assert difference(folder, expected) < 1e-4
    save_file({**weights, name: torch.ones(192)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(f"{name} is not 0")):
        Engine.load(folder, CONFIG)


def test_what_is_said_of_a_quantised_model(tmp_path: Path, plain: Path) -> None:
    folder, _ = write_quantized(plain, tmp_path, SCHEMES["awq"])
    assert make_plan(folder, CONFIG).quantization == "awq"
    assert Engine.load(folder, CONFIG).dtype_name == "float32 (awq) with float32 KV cache"


def test_the_rule_of_a_linear_is_that_which_names_it(tmp_path: Path, plain: Path) -> None:
    """Two groups: blocks for what a pattern names, rows for all others."""
    config = compressed("float-quantized")
    blocks = compressed("float-quantized", strategy="block", block_structure=[128, 128])
    group = {**blocks["config_groups"]["group_0"], "targets": ["re:.*self_attn.*"]}
    config["config_groups"]["group_1"] = group
    of_blocks, of_rows = SCHEMES["ct-fp8-blocks"].make, SCHEMES["ct-fp8-channel-dynamic"].make
    mixed = Scheme(
        lambda module, weight: (of_blocks if "self_attn" in module else of_rows)(module, weight),
        config,
    )
    folder, expected = write_quantized(plain, tmp_path, mixed)
    assert difference(folder, expected) < 1e-4
    del config["config_groups"]["group_0"]
    config["config_groups"]["group_2"] = {**group, "targets": ["model.layers.0.mlp.up_proj"]}
    set_quantization(folder, config)
    with pytest.raises(CheckpointError, match="no target of its config_groups fits"):
        make_plan(folder, CONFIG)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(device="cuda"), "there are no kernels for it on a GPU yet; use device=cpu"),
        (EngineConfig(device="cpu", quantization="fp8"), "already; use quantization=none"),
        (EngineConfig(device="cpu", deterministic_mode=True), "deterministic_mode needs an unqua"),
    ],
)
def test_settings_that_a_quantised_checkpoint_does_not_go_with(
    tmp_path: Path, plain: Path, config: EngineConfig, message: str
) -> None:
    folder, _ = write_quantized(plain, tmp_path, SCHEMES["fbgemm_fp8"])
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        resolve_on_device(config, read_model(folder), has_triton=True)


@pytest.mark.parametrize(
    ("end", "tensor", "message"),
    [
        ("weight_scale", None, "1 missing tensor: model.layers.0.mlp.up_proj.weight_scale"),
        ("weight_scale", torch.ones(7, 1), "weight_scale has shape [7, 1], config.json asks for ["),
        ("weight_scale", torch.ones(192, 1).int(), "up_proj.weight_scale is I32, supported are F"),
        ("qzeros", torch.ones(1), "1 unused tensor: model.layers.0.mlp.up_proj.qzeros"),
    ],
)
def test_tensors_that_a_scheme_does_not_have(
    tmp_path: Path, plain: Path, end: str, tensor: torch.Tensor | None, message: str
) -> None:
    folder, _ = write_quantized(plain, tmp_path, SCHEMES["fbgemm_fp8"])
    weights = load_file(folder / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{end}"
    weights.pop(name, None)
    if tensor is not None:
        weights[name] = tensor
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        make_plan(folder, CONFIG)
