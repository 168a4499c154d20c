"""Checkpoints with scales of a KV cache of 8 bits, and transformers that rounds keys and values."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.quantized import set_quantization
from torch.nn import functional

SCALES = {"fp8": ((0.004, 0.002), (0.007, 0.009)), "int8": ((0.03, 0.02), (0.04, 0.05))}
"""Of keys and values, by layer: the largest numbers are cut."""


def with_scales(
    plain: Path, folder: Path, kind: str, names: tuple[str, str], config: dict[str, Any]
) -> Path:
    """A copy of a checkpoint with scales of its cache."""
    shutil.copytree(plain, folder)
    weights = load_file(plain / "model.safetensors")
    for layer, scales in enumerate(SCALES[kind]):
        for name, scale in zip(names, scales, strict=True):
            weights[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    save_file(weights, folder / "model.safetensors")
    set_quantization(folder, config)
    return folder


def expected_logits(plain: Path, tokens: Sequence[int], kind: str) -> torch.Tensor:
    """transformers' of each token, whose keys and values are rounded before attention."""

    def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
        if kind == "int8":
            return (x / scale).round().clamp(-128, 127) * scale
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        scales = SCALES[kind][module.layer_idx]
        key, value = (rounded(*each) for each in zip((key, value), scales, strict=True))
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=module.scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    transformers.AttentionInterface.register("rounded", attend)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="rounded"
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits
