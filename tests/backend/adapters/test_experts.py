"""Adapters of experts and routers: the tokens of transformers with PEFT, which writes them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import check, read, write_adapter
from support.families import write_family
from transformers import AutoModelForCausalLM

from inflight_backend.adapters.peft_folder import CONFIG, WEIGHTS, names_experts
from inflight_backend.adapters.service import AdapterConfig, AdapterService
from inflight_backend.adapters.wire_tensors import read_wire_tensors
from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.errors import CheckpointError, InvalidRequest

ENGINE = EngineConfig(
    device="cpu",
    max_batch_size=8,
    tokens_per_block=4,
    max_tokens_in_paged_kv_cache=512,
    enable_lora=True,
    lora_cache_max_adapter_size=8,
    lora_cache_optimal_adapter_size=3,
    lora_cache_pages=6,
    lora_experts=True,
)


def targets_of(base: Path) -> dict[str, Any]:
    """All experts and routers, and what stands beside them, by the names that transformers has."""
    model = AutoModelForCausalLM.from_pretrained(base)
    pattern = r".*\.(experts\.(gate_up|down)_proj|(gate|router)(\.(wg|gate|proj))?\.weight)"
    names = [name for name, _ in model.named_parameters() if re.fullmatch(pattern, name)]
    known = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    modules = ["o_proj", *known.intersection(("shared_expert_gate", "kv_b_proj"))]
    return {"target_modules": modules, "target_parameters": names}


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("qwen2_moe", "torch"),
        pytest.param("deepseek_v3", "triton", marks=pytest.mark.slow),
        *(
            pytest.param(family, "torch", marks=pytest.mark.slow)
            for family in (
                *("mixtral", "phimoe", "gpt_oss", "granitemoe", "gemma4-moe", "llama4"),
                *("deepseek_v3", "qwen3_5_moe", "afmoe", "hunyuan_moe", "minimax_m2"),
            )
        ),
    ],
)
def test_parameters(tmp_path: Path, family: str, backend: str) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    settings = {} if backend == "torch" else {"kv_lora_rank": 24}  # of a size that kernels take
    write_family(base, family, **settings)
    config = {
        "r": 4,
        "lora_alpha": 32,
        "rank_pattern": {"experts.down_proj": 3},
        "alpha_pattern": {r"layers\.1\..*gate_up_proj": 5},
        **targets_of(base),
    }
    write_adapter(base, folder, 1, **config)
    assert names_experts(folder)
    engine = Engine.load(base, replace(ENGINE, attention_backend=backend))
    adapter = read(engine, base, folder)
    tensors = load_file(folder / WEIGHTS)
    num_of_latents = sum("kv_b_proj" in name for name in tensors)  # keys and values are two parts
    assert len(tensors) + num_of_latents == 2 * len(adapter.parts)
    check(engine, adapter, base, folder)


OLD = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
"""Where transformers had experts before its version 5: their folder; gate, up and down."""


def write_old_adapter(base: Path, folder: Path, family: str) -> None:
    """As PEFT wrote it when each expert had linears of its own, and routers were linears."""
    place, parts = OLD[family]
    config = json.loads((base / "config.json").read_text())
    hidden = config["hidden_size"]
    size = config.get("moe_intermediate_size") or config["intermediate_size"]
    count = config.get("num_experts") or config["num_local_experts"]
    shapes = dict(zip(parts, ((size, hidden), (size, hidden), (hidden, size)), strict=True))
    modules = {f"experts.{n}.{part}": shapes[part] for n in range(count) for part in parts}
    modules["gate"] = (count, hidden)
    generator, rank, tensors = torch.Generator().manual_seed(2), 4, {}
    for layer in range(config["num_hidden_layers"]):
        for module, (rows, columns) in modules.items():
            name = f"base_model.model.model.layers.{layer}.{place}.{module}"
            a = 0.25 * torch.randn(rank, columns, generator=generator)
            tensors[f"{name}.lora_A.weight"] = a
            tensors[f"{name}.lora_B.weight"] = 0.3 * torch.randn(rows, rank, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": [*parts, "gate"],
    }
    (folder / CONFIG).write_text(json.dumps(settings))


@pytest.mark.slow
@pytest.mark.parametrize("family", OLD)
def test_linears_of_single_experts(tmp_path: Path, family: str) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    write_family(base, family)
    write_old_adapter(base, folder, family)
    engine = Engine.load(base, ENGINE)
    check(engine, read(engine, base, folder), base, folder)


def test_in_tensors(tmp_path: Path) -> None:
    """As TensorRT-LLM's `lora_manager.py` lays them: `A` of all experts, then `B` of all."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    write_family(base, "mixtral")
    write_old_adapter(base, folder, "mixtral")
    engine = Engine.load(base, ENGINE)
    adapter = read(engine, base, folder)
    modules = {("gate_up", 0): 13, ("gate_up", 112): 15, ("down", 0): 14, ("router", 0): 16}
    rows, config = [], []
    for part in adapter.parts:
        _, layer, *_, name = part.linear.split(".")
        rows.append(torch.cat((part.a.flatten(), part.b.flatten())).numpy())
        config.append([modules[name, part.start], int(layer), part.rank])
    weights = np.zeros((1, len(rows), max(map(len, rows))), np.float32)
    for number, row in enumerate(rows):
        weights[0, number, : len(row)] = row
    tensors = weights, np.array([config], np.int32)
    found = read_wire_tensors(*tensors, engine.model_config, torch.float32, 8, b"d")
    assert len(found.parts) == len(adapter.parts) == 4 * 3
    for one, other in zip(found.parts, adapter.parts, strict=True):
        assert (one.linear, one.start) == (other.linear, other.start)
        assert torch.equal(one.a, other.a)
        assert torch.equal(one.b, other.b)
    tensors[1][0, 0] = [13, 0, 9]
    with pytest.raises(InvalidRequest, match=r"rank 9 is outside 1\.\.8"):
        read_wire_tensors(*tensors, engine.model_config, torch.float32, 8, b"d")


def test_what_is_refused(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    write_family(base, "mixtral")
    write_old_adapter(base, folder, "mixtral")
    engine = Engine.load(base, replace(ENGINE, attention_backend="triton", lora_experts=False))
    pages = engine.adapter_pages
    assert pages is not None

    def serve(**changes: Any) -> None:
        AdapterService(
            AdapterConfig(modules={"mine": str(folder)}),
            replace(pages, **changes),
            engine.model_config,
            torch.float32,
            base,
            lambda adapter: adapter,
        )

    with pytest.raises(CheckpointError, match=r"adapter mine changes experts.*set lora_experts"):
        serve()
    with pytest.raises(CheckpointError, match=r"adapter mine has rank 4, more than .*_size = 3"):
        serve(has_experts=True, max_rank=3)
    serve(has_experts=True)
    settings = json.loads((folder / CONFIG).read_text())
    tensors = load_file(folder / WEIGHTS)
    first = "base_model.model.model.layers.0.block_sparse_moe.experts"
    stacked = {
        f"{first}.lora_A.weight": torch.ones(6 * 4, 64),
        f"{first}.lora_B.weight": torch.ones(224, 6 * 4),
    }
    cases: list[tuple[dict[str, Any], dict[str, torch.Tensor], str]] = [
        ({"use_dora": True}, {}, "use_dora is not supported for experts, routers"),
        ({"r": 3}, {}, "has shape .4, 64.; the rank in adapter_config.json"),
        ({}, stacked, "changes rows of layers.0.experts.gate_up twice"),
        ({"r": 3}, stacked, "experts.gate_up_proj has rank 4"),
        *(
            (
                {},
                stacked | {f"{first}.lora_A.weight": torch.ones(*shape)},
                "cannot be of gate_up_proj or down_proj of 6 experts",
            )
            for shape in ((6 * 4, 65), (6 * 4,), (0, 64), (23, 64))
        ),
    ]
    for changes, more, message in cases:
        (folder / CONFIG).write_text(json.dumps(settings | changes))
        kept = {} if message.startswith("experts.") or "cannot" in message else tensors
        save_file({**kept, **more}, folder / WEIGHTS)
        with pytest.raises(CheckpointError, match=message):
            serve(has_experts=True)
