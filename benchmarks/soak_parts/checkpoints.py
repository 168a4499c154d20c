"""The demo model as models of other kinds, which answer as it does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight_server.serve.settings import DEMO_MODEL

Config = dict[str, Any]
Weights = dict[str, Tensor]

_WINDOW = 256
_NUM_EXPERTS, _NUM_CHOSEN = 4, 2
_MATRICES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def _with_windows(config: Config, _: Weights) -> None:
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config["sliding_window"] = _WINDOW


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
