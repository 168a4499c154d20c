"""Adapters written by PEFT over tiny checkpoints, and what transformers says with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.checkpoints import write_checkpoint
from support.engine_driver import EngineDriver, Job
from transformers import AutoModelForCausalLM

from inflight_backend.adapters.peft_folder import read_peft_folder
from inflight_backend.engine import Engine
from inflight_backend.models.blocks.lora import Adapter
from inflight_backend.models.weights import Checkpoint
from inflight_scheduler import OutputParams

LLAMA_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": LLAMA_LINEARS},
    "rank-stabilized": {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "patterns": {
        "r": 6,
        "lora_alpha": 3,
        "target_modules": LLAMA_LINEARS,
        "rank_pattern": {r"layers\.0\..*q_proj": 3, "down_proj": 12, "q_proj": 5},
        "alpha_pattern": {"up_proj": 20, r"model.layers.1.self_attn.v_proj": 9},
    },
    "dora": {"r": 5, "lora_alpha": 10, "use_dora": True, "target_modules": LLAMA_LINEARS},
}
"""Name -> arguments of `LoraConfig`."""


def write_adapter(
    base: Path, folder: Path, seed: int, prompts: Sequence[Sequence[int]] = (), count: int = 12,
    **config: Any,
) -> list[list[int]]:  # fmt: skip
    """Write an adapter with random weights; the greedy answers of transformers with it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude" in name:
                parameter *= 0.5 + torch.rand_like(parameter)
            elif "lora_" in name:  # wide enough to change most tokens of an answer
                parameter.normal_(std=0.5 / len(parameter) ** 0.5 if "lora_A" in name else 0.3)
    adapted.save_pretrained(folder)
    return greedy(adapted, prompts, count)


@torch.no_grad()
def greedy(model: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """``count`` tokens after each prompt."""
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


MODULE_IDS = {
    "q_proj": 1,
    "k_proj": 2,
    "v_proj": 3,
    "o_proj": 4,
    "gate_proj": 5,
    "down_proj": 6,
    "up_proj": 7,
}
"""As TensorRT-LLM's converter maps them, not as its documentation lists them."""


def to_wire(
    base: Path, folder: Path, dtype: Any = np.float32
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """``lora_weights`` and ``lora_config`` of a PEFT folder over a Llama, as the converter of
    TensorRT-LLM makes them, by PEFT's own scales."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, folder)
    rows, config = [], []
    for name, layer in adapted.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        b = b * layer.scaling["default"]
        row = [a.flatten(), b.flatten()]
        is_dora = "default" in getattr(layer, "lora_magnitude_vector", {})
        if is_dora:
            norms = torch.linalg.vector_norm(layer.base_layer.weight + b @ a, dim=1)
            row.append(layer.lora_magnitude_vector["default"].weight / norms)
        rows.append(torch.cat(row).detach().numpy().astype(dtype))
        number = int(name.split("layers.")[1].split(".")[0])
        config.append([MODULE_IDS[name.rpartition(".")[2]], number, len(a), int(is_dora)])
    weights = np.zeros((1, len(rows), max(map(len, rows))), dtype)
    for number, values in enumerate(rows):
        weights[0, number, : len(values)] = values
    columns = 4 if any(row[3] for row in config) else 3
    return weights, np.array([config], np.int32)[:, :, :columns]


NUM_TOKENS = 12


@dataclass(frozen=True)
class Answered:
    """An adapter's folder (None: without), prompts and the greedy answers to them."""

    folder: Path | None
    prompts: list[list[int]]
    answers: list[list[int]]


@dataclass(frozen=True)
class World:
    """The base model, and by name what is answered with each adapter, "" for none."""

    base: Path
    adapters: dict[str, Answered]


def prompts_of(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(0, 97, (n,), generator=generator).tolist() for n in lengths]


def write_world(folder: Path) -> World:
    """Written into ``folder``."""
    base = write_checkpoint(folder / "base", "qwen2-tied", hidden_size=64)
    adapters = {}
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        prompts = prompts_of(4, seed)
        answers = write_adapter(base, folder / name, seed, prompts, NUM_TOKENS, **config)
        adapters[name] = Answered(folder / name, prompts, answers)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    prompts = [prompt for each in adapters.values() for prompt in each.prompts]
    adapters[""] = Answered(None, prompts, greedy(model, prompts, NUM_TOKENS))
    for number, name in enumerate(ADAPTERS):  # else a test would not see them
        without = adapters[""].answers[4 * number : 4 * number + 4]
        assert all(map(list.__ne__, adapters[name].answers, without))
    return World(base, adapters)


_PROMPTS, _COUNT = prompts_of(2, 5), 5


def read(engine: Engine, base: Path, folder: Path) -> Adapter:
    """An adapter of PEFT's over the checkpoint of ``engine``."""
    with Checkpoint(base) as checkpoint:
        return read_peft_folder(folder, engine.model_config, torch.float32, checkpoint.weight)


def check(engine: Engine, adapter: Adapter, base: Path, folder: Path) -> None:
    """Logits and tokens, with and without the adapter in one batch."""
    model: Any = AutoModelForCausalLM.from_pretrained(  # eager: others forget Gemma 2's bound
        base, dtype=torch.float32, attn_implementation="eager"
    )
    adapted = PeftModel.from_pretrained(model, folder).eval()
    expected = greedy(adapted, _PROMPTS, _COUNT)
    with torch.no_grad():
        wanted = adapted(torch.tensor([_PROMPTS[0]])).logits[0]
    plain = EngineDriver(engine).generate([Job(each) for each in _PROMPTS], _COUNT, chunk_size=5)
    before = logits_of(engine, -1)
    engine.load_adapter(1, engine.prepare_adapter(adapter))
    jobs = [job for prompt in _PROMPTS for job in (Job(prompt, adapter=1), Job(prompt))]
    answers = EngineDriver(engine).generate(jobs, _COUNT, chunk_size=5)
    assert answers[::2] == expected
    assert answers[1::2] == plain
    assert float((logits_of(engine, 1) - wanted).abs().max() / wanted.std()) < 1e-4
    assert float((before - wanted).abs().max() / wanted.std()) > 0.1


def logits_of(engine: Engine, place: int) -> torch.Tensor:
    """Those of the first prompt."""
    driver = EngineDriver(engine)
    driver.step({Job(_PROMPTS[0], outputs=OutputParams(context_logits=True), adapter=place): 0}, [])
    outputs = engine.take_outputs()
    assert outputs is not None
    return torch.cat([torch.tensor(each.logits) for each in outputs.context_logits])
