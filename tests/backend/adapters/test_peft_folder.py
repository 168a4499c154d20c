"""Adapters written by PEFT: the tokens of transformers with them, one of each kind in one batch."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import ADAPTERS, NUM_TOKENS, World, check, prompts_of, read, write_adapter
from support.checkpoints import write_checkpoint
from support.engine_driver import EngineDriver, Job
from support.families import write_family
from support.graph_replay import Rerun
from support.quantized import SCHEMES, write_quantized
from transformers import AutoModelForCausalLM

from inflight_backend.adapters.peft_folder import CONFIG as CONFIG_FILE
from inflight_backend.adapters.peft_folder import WEIGHTS, read_peft_config, read_peft_folder
from inflight_backend.adapters.targets import module_targets, place_of
from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.errors import CheckpointError
from inflight_backend.models.families.registry import read_model

CONFIG = EngineConfig(
    device="cpu",
    max_batch_size=32,
    tokens_per_block=4,
    max_tokens_in_paged_kv_cache=2048,
    enable_lora=True,
)


def load(engine: Engine, base: Path, place: int, folder: Path) -> None:
    engine.load_adapter(place, engine.prepare_adapter(read(engine, base, folder)))


@pytest.mark.fast(1)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_one_of_each_kind_and_none_in_mixed_batches(world: World, backend: str) -> None:
    config = replace(
        CONFIG,
        attention_backend=backend,
        lora_cache_max_adapter_size=12,
        lora_cache_optimal_adapter_size=3,
        lora_cache_pages=11,
    )
    engine = Engine.load(world.base, config)
    jobs, expected = [], []
    for place, answered in enumerate(world.adapters.values()):
        is_plain = answered.folder is None
        if answered.folder is not None:
            load(engine, world.base, place, answered.folder)
        jobs += [Job(prompt, adapter=-1 if is_plain else place) for prompt in answered.prompts]
        expected += answered.answers
    order = torch.randperm(len(jobs), generator=torch.Generator().manual_seed(1)).tolist()
    answers = EngineDriver(engine).generate([jobs[i] for i in order], NUM_TOKENS, chunk_size=5)
    assert answers == [expected[i] for i in order]


@pytest.mark.slow
def test_recorded_steps(world: World) -> None:
    """Each size twice: steps without an adapter have recordings that do nothing for any."""
    capture = Rerun()
    config = replace(
        CONFIG,
        attention_backend="triton",
        max_batch_size=3,
        cuda_graph_mixed_tokens=0,
        lora_cache_max_adapter_size=8,
        lora_cache_pages=2,
    )
    engine = Engine.load(world.base, config, capture=capture)
    jobs, expected = [], []
    for name, place in (("plain", 0), ("dora", 1), ("", -1)):
        answered = world.adapters[name]
        if answered.folder is not None:
            load(engine, world.base, place, answered.folder)
        jobs.append(Job(answered.prompts[0], adapter=place))
        expected.append(answered.answers[0][:5])
    assert EngineDriver(engine).generate(jobs, 5) == expected
    num_replays = capture.num_replays
    assert num_replays > 0
    without = Job(world.adapters[""].prompts[1])
    assert EngineDriver(engine).generate([without], 4) == [world.adapters[""].answers[1][:4]]
    assert capture.num_replays > num_replays


FAMILIES = (
    *("gpt2", "gpt_neox", "gpt_bigcode", "codegen", "opt-350m", "bloom", "mpt", "falcon-40b"),
    *("llama-bias", "phi3", "gemma2", "gemma4-keqv", "seed_oss", "minicpm3"),
    *("mixtral", "qwen2_moe", "qwen3_next", "deepseek_v3"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_of_a_layer(tmp_path: Path, name: str) -> None:
    """With magnitudes, which need the weights as they lie in the checkpoint."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    write_family(base, name)
    engine = Engine.load(base, CONFIG)
    targets = module_targets(engine.model_config)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    linears = {
        module: place
        for module, each in model.named_modules()
        if type(each).__name__.endswith(("Linear", "Conv1D"))
        and (place := place_of(engine.model_config, module)) in targets
        and not module.endswith("kv_b_proj")  # without magnitudes
        # PEFT takes such names for those of experts.
        and not (name in ("qwen3_next", "deepseek_v3") and ".mlp." in module)
    }
    all_linears = {place for place, (first, *_) in targets.items() if first.may_scale}
    assert set(linears.values()) == all_linears or name in ("qwen3_next", "deepseek_v3")
    config: dict[str, Any] = {
        "r": 3,
        "target_modules": list(linears),
        "use_dora": True,
        "fan_in_fan_out": name == "gpt2",
    }
    write_adapter(base, folder, 1, **config)
    check(engine, read(engine, base, folder), base, folder)


QLORA = ("bnb-nf4-double", "bnb-8", "gptq-order", "awq", "ct-w4a16", "ct-w8a16", "fp8-blocks")


@pytest.mark.parametrize(
    "name",
    [
        each if each == "bnb-nf4-double" else pytest.param(each, marks=pytest.mark.slow)
        for each in QLORA
    ],
)
def test_over_a_quantised_base(tmp_path: Path, name: str) -> None:
    """Those of the numbers that it stands for, also where magnitudes need its weights."""
    plain = write_checkpoint(
        tmp_path / "plain", "llama-mha", hidden_size=128, intermediate_size=192, head_dim=32
    )
    base, wide = write_quantized(plain, tmp_path, SCHEMES[name])
    engine, prompts, jobs, expected = Engine.load(base, CONFIG), prompts_of(3, 5), [], []
    for place, kind in enumerate(("plain", "dora")):
        folder = tmp_path / kind
        expected += write_adapter(wide, folder, place, prompts, 6, **ADAPTERS[kind])
        load(engine, base, place, folder)
        jobs += [Job(prompt, adapter=place) for prompt in prompts]
    assert EngineDriver(engine).generate(jobs, 6, chunk_size=5) == expected


@pytest.mark.slow
def test_over_a_quantised_base_whose_weights_were_transposed(tmp_path: Path) -> None:
    plain, folder, prompts = tmp_path / "plain", tmp_path / "adapter", prompts_of(3, 5)
    write_family(plain, "gpt2")
    pattern = re.compile(r".*\.h\.\d+\.(attn|mlp)\.c_\w+\.weight")
    base, wide = write_quantized(plain, tmp_path, SCHEMES["ct-w8a16"], pattern, is_transposed=True)
    config = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    expected = write_adapter(wide, folder, 1, prompts, 6, r=3, use_dora=True, **config)
    engine = Engine.load(base, CONFIG)
    load(engine, base, 0, folder)
    jobs = [Job(prompt, adapter=0) for prompt in prompts]
    assert EngineDriver(engine).generate(jobs, 6) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        *(
            ({key: value}, f"{key} is .*, which is not supported")
            for key, value in {
                "modules_to_save": ["lm_head"],
                "trainable_token_indices": [1],
                "bias": "lora_only",
                "lora_bias": True,
                "layer_replication": [[0, 2]],
                "alora_invocation_tokens": [1],
                "use_qalora": True,
                "use_bdlora": {"target_modules_bd_a": ["q_proj"]},
                "arrow_config": {"top_k": 2},
                "monteclora_config": {"num_samples": 3},
                "kasa_config": {"beta": 1.0},
            }.items()
        ),
        ({"r": "many"}, "r is 'many'"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern cannot be used"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern cannot be used"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_configurations_that_are_refused(
    world: World, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """And those that ask for nothing are not, nor keys that nobody knows yet."""
    folder = world.adapters["plain"].folder
    assert folder is not None
    values = json.loads((folder / CONFIG_FILE).read_text())
    neutral = {**dict.fromkeys(changes), "new_key": 3}
    neutral |= {key: values[key] for key in changes if key in ("peft_type", "r", "lora_alpha")}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(values | neutral))
    assert read_peft_config(tmp_path).rank == 8
    (tmp_path / CONFIG_FILE).write_text(json.dumps(values | changes))
    with pytest.raises(CheckpointError, match=message):
        read_peft_config(tmp_path)


def test_tensors_that_are_refused(world: World, tmp_path: Path) -> None:
    folder = world.adapters["plain"].folder
    assert folder is not None
    shutil.copytree(folder, tmp_path / "it")
    path, tensors = tmp_path / "it" / WEIGHTS, load_file(folder / WEIGHTS)
    model = read_model(world.base)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    head = "base_model.model.lm_head.lora_"
    a = tensors[f"{name}A.weight"]
    for changes, message in (
        ({f"{name}A.weight": None}, "q_proj has B, and adapter_config.json asks for A, B"),
        ({f"{name}A.weight": a[:4].clone()}, r"has shape \[4, 64\]; the rank in adapter_config"),
        ({f"{name}A.weight": a * float("inf")}, "holds a number that is not finite"),
        ({f"{name}A.bias": a}, "q_proj.lora_A.bias is not supported"),
        ({f"{head}A.weight": a, f"{head}B.weight": a}, "lm_head is no linear of a layer"),
        ({f"{name}magnitude_vector": a[0].clone()}, "asks for A, B"),
    ):
        merged = {**tensors, **changes}
        kept = {key: each.clone() for key, each in merged.items() if each is not None}
        save_file(kept, path)
        with pytest.raises(CheckpointError, match=message):
            read_peft_folder(tmp_path / "it", model, torch.float32, lambda _: a)
    path.rename(path.with_name("adapter_model.bin"))
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin is not read: it may run code"):
        read_peft_folder(tmp_path / "it", model, torch.float32, lambda _: a)
