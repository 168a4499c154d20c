"""Quantised checkpoints made of plain ones by the public formulas, beside what they stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
Made = tuple[dict[str, Tensor], Tensor]
"""Tensors by the ends of their names, and the weight that they stand for."""
_LINEAR = re.compile(r".*layers\.\d+\.(self_attn|mlp)\..*proj\.weight")
Make = Callable[[str, Tensor], Made]


@dataclass(frozen=True)
class Scheme:
    """``make`` quantises a linear by name, ``config`` says how in config.json."""

    make: Make
    config: dict[str, Any]


def write_quantized(
    plain: Path, folder: Path, scheme: Scheme, pattern: re.Pattern[str] = _LINEAR
) -> tuple[Path, Path]:
    """Two copies of a checkpoint in one file, with the weights of ``pattern`` quantised and as
    plain numbers of the same values."""
    quantised, expected = folder / "quantised", folder / "expected"
    of_quantised: dict[str, Tensor] = {}
    of_expected: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if pattern.fullmatch(name):
            module = name.removesuffix(".weight")
            tensors, wide = scheme.make(module, tensor)
            of_quantised |= {f"{module}.{end}": each for end, each in tensors.items()}
            of_expected[name] = wide.float()
        else:
            of_quantised[name] = of_expected[name] = tensor
    for target, weights in ((quantised, of_quantised), (expected, of_expected)):
        target.mkdir(parents=True)
        shutil.copy(plain / "config.json", target)
        contiguous = {name: each.contiguous() for name, each in weights.items()}
        save_file(contiguous, target / "model.safetensors")
    set_quantization(quantised, scheme.config)
    return quantised, expected


def set_quantization(folder: Path, config: dict[str, Any]) -> None:
    """Replace ``quantization_config``."""
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), "quantization_config": config}
    path.write_text(json.dumps(content))


def compressed(
    format: str, bits: int = 8, strategy: str = "channel", **weights: Any
) -> dict[str, Any]:
    """``quantization_config`` of compressed-tensors with one group for all linears."""
    kind = "float" if format.startswith("float") else "int"
    numbers = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "dynamic": False, "observer": "minmax", **weights},
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def with_inputs(config: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    """The same with quantised activations."""
    group = config["config_groups"]["group_0"]
    return {
        **config,
        "config_groups": {"group_0": {**group, "input_activations": {"num_bits": 8, **inputs}}},
    }


def fp8_tensor(_: str, weight: Tensor) -> Made:
    """A scale for all, and one of the inputs."""
    scale = (weight.abs().max() / 448).bfloat16().reshape(1)
    values = (weight / scale.float()).to(FP8)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.ones(1)}
    return tensors, values.float() * scale.float()


def fp8_rows(_: str, weight: Tensor) -> Made:
    """A scale for each row."""
    scales = (weight.abs().amax(1, keepdim=True) / 448).float()
    values = (weight / scales).to(FP8)
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def fp8_blocks(name: str) -> Make:
    """A scale for each block of 128 x 128, in a tensor of that ``name``."""

    def make(_: str, weight: Tensor) -> Made:
        rows, columns = weight.shape
        shape = (-(-rows // 128), -(-columns // 128))
        scales = torch.empty(shape)
        values = torch.empty(weight.shape, dtype=FP8)
        wide = torch.empty_like(weight)
        for i in range(shape[0]):
            for j in range(shape[1]):
                place = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
                scales[i, j] = weight[place].abs().max() / 448
                values[place] = (weight[place] / scales[i, j]).to(FP8)
                wide[place] = values[place].float() * scales[i, j]
        return {"weight": values, name: scales}, wide

    return make


_FLOAT_ROWS = compressed("float-quantized")
SCHEMES = {
    "ct-fp8-tensor-static": Scheme(
        fp8_tensor,
        with_inputs(
            compressed("float-quantized", strategy="tensor"),
            type="float",
            strategy="tensor",
            dynamic=False,
        ),
    ),
    "ct-fp8-channel-dynamic": Scheme(
        fp8_rows, with_inputs(_FLOAT_ROWS, type="float", strategy="token", dynamic=True)
    ),
    "fbgemm_fp8": Scheme(
        fp8_rows,
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "fp8-blocks": Scheme(
        fp8_blocks("weight_scale_inv"),
        {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": None,
        },
    ),
    "ct-fp8-blocks": Scheme(
        fp8_blocks("weight_scale"),
        compressed("float-quantized", strategy="block", block_structure=[128, 128]),
    ),
}
"""By names of their own."""
