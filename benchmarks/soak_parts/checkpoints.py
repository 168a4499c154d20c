"""The demo model as models of other kinds, which answer as it does; one of them is quantised."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight_server.serve.settings import DEMO_MODEL

Config = dict[str, Any]
Weights = dict[str, Tensor]

_WINDOW = 256
_NUM_EXPERTS, _NUM_CHOSEN = 4, 2
_LINEAR = re.compile(r".*layers\.\d+\..*_proj\.weight")
_MATRICES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def _with_windows(config: Config, weights: Weights) -> None:
    """In int8, too. Rounding changes no answer: the best token stays 15 ahead of the next one."""
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config["sliding_window"] = _WINDOW
    _round(config, weights)


def _round(config: Config, weights: Weights) -> None:
    """W8A16 of compressed-tensors, with a scale for each row of a linear."""
    numbers = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers}},
    }
    for name in [each for each in weights if _LINEAR.fullmatch(each)]:
        scales = weights[name].abs().amax(1, keepdim=True) / 127
        scales = scales.clamp(min=torch.finfo(scales.dtype).tiny)  # of rows without a number
        weights[name.replace(".weight", ".weight_scale")] = scales
        weights[name] = (weights[name] / scales).round().to(torch.int8)


def _with_experts(config: Config, weights: Weights) -> None:
    """All experts are the MLP that there was, so it does not matter which of them are chosen."""
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {"num_local_experts": _NUM_EXPERTS, "num_experts_per_tok": _NUM_CHOSEN}
    for name in [each for each in weights if ".mlp." in each]:
        layer, _, matrix = name.partition(".mlp.")
        found = weights.pop(name)
        inside = f"{layer}.block_sparse_moe"
        for expert in range(_NUM_EXPERTS):
            renamed = _MATRICES[matrix.removesuffix(".weight")]
            weights[f"{inside}.experts.{expert}.{renamed}.weight"] = found.clone()
        rows = weights[f"{layer}.self_attn.q_proj.weight"]
        weights[f"{inside}.gate.weight"] = rows[:_NUM_EXPERTS].clone()


@dataclass(frozen=True)
class Kind:
    """``settings``: of the server; ``has_beams``: whether requests may search with some."""

    change: Callable[[Config, Weights], None]
    settings: dict[str, Any] = field(default_factory=dict)
    has_beams: bool = True


KINDS = {
    "plain": Kind(lambda config, weights: None),
    "windows": Kind(_with_windows, {"max_beam_width": 1}, has_beams=False),
    "experts": Kind(_with_experts),
}


def write_checkpoint(folder: Path, kind: Kind) -> Path:
    """A new folder with a model of that kind."""
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    kind.change(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
