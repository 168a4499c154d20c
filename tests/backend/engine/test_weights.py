"""Weights as they stream in; those that cannot be served: one error that names file and tensor."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import oracle_tokens
from support.engine_driver import EngineDriver, Job
from support.families import write_family
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.memory_plan import make_plan
from inflight_backend.errors import CheckpointError
from inflight_backend.models.families.registry import read_model
from inflight_backend.models.layers import Fp8Weight, Parameter, parameter_tensors, quantize
from inflight_backend.models.parameters import decoder_parameters
from inflight_backend.models.weights import Checkpoint

CONFIG = EngineConfig(device="cpu", max_batch_size=2, max_tokens_in_paged_kv_cache=64)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Folder) -> Path:
    """A copy of a checkpoint in one file, to be broken."""
    return Path(shutil.copytree(checkpoint("llama-mha", num_shards=1), tmp_path / "copy"))


@pytest.fixture
def sharded(tmp_path: Path, checkpoint: Folder) -> Path:
    """A copy of a checkpoint in several files, to be broken."""
    return Path(shutil.copytree(checkpoint("qwen2-tied", num_shards=3), tmp_path / "sharded"))


def rewrite(path: Path, **tensors: Tensor | None) -> None:
    """Replace, add or (None) remove tensors; ``__`` stands for a dot."""
    weights: dict[str, Tensor | None] = dict(load_file(path))
    weights |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    path.unlink()
    save_file({name: each for name, each in weights.items() if each is not None}, path)


def edit(path: Path, **changes: object) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(folder: Path) -> str:
    """The one-line complaint about the folder, of an engine as of a plan; nothing of another
    error's traceback behind it."""
    texts = []
    for read in (lambda: Engine.load(folder, CONFIG), lambda: make_plan(folder)):
        with pytest.raises(CheckpointError) as caught:
            read()
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert "\n" not in texts[0]
    return texts[0]


def test_progress_ends_at_the_total(sharded: Path) -> None:
    seen: list[tuple[int, int]] = []
    Engine.load(sharded, CONFIG, lambda done, total: seen.append((done, total)))
    weights = [load_file(path) for path in sharded.glob("*.safetensors")]
    total = sum(tensor.nbytes for file in weights for tensor in file.values())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert len(seen) == sum(len(file) for file in weights)


def test_half_precision_weights_are_widened(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    rewrite(folder / WEIGHTS, **{name: x.to(torch.bfloat16) for name, x in weights.items()})
    job = Job([5, 6, 7])
    EngineDriver(Engine.load(folder, CONFIG)).generate([job], 5)
    assert job.generated == oracle_tokens(folder, [5, 6, 7], 5)


UP = "model__layers__0__mlp__up_proj__"


@pytest.mark.case(102)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__layers__1__mlp__up_proj__weight": None, "model__norm__weight": None},
            "2 missing tensors: model.layers.1.mlp.up_proj.weight, model.norm.weight",
        ),
        (
            {"model__layers__2__mlp__up_proj__weight": torch.zeros(2)},
            "1 unused tensor: model.layers.2.mlp.up_proj.weight",
        ),
        (
            {"model__layers__0__self_attn__q_proj__bias": torch.zeros(48)},
            "1 unused tensor: model.layers.0.self_attn.q_proj.bias",
        ),
        (
            {"model__layers__0__self_attn__k_proj__weight": torch.zeros(47, 48)},
            "model.layers.0.self_attn.k_proj.weight has shape [47, 48], config.json asks for "
            "[48, 48]",
        ),
        (
            {"model__norm__weight": torch.zeros(48, dtype=torch.int8)},
            "model.norm.weight is I8, supported are F32, F16, BF16",
        ),
        (
            {"model__norm__weight": torch.zeros(48, dtype=torch.float64)},
            "model.norm.weight is F64, supported are F32, F16, BF16",
        ),
        *(
            ({UP + name: torch.zeros(2)}, f"model.layers.0.mlp.up_proj.{name} is of quantised")
            for name in ("qweight", "weight_packed", "weight_scale", "SCB", "scales")
        ),
    ],
)
def test_tensors_that_are_not_the_models(
    folder: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    """Some tools that quantise leave no word of it in config.json."""
    rewrite(folder / WEIGHTS, **changes)
    assert refusal(folder).startswith(f"{WEIGHTS}: {message}")


def test_config_of_another_size(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=2**24)
    assert "model.embed_tokens.weight has shape [199, 48]" in refusal(folder)


def test_known_buffers_are_passed_over(folder: Path) -> None:
    name = "model__layers__1__self_attn__rotary_emb__inv_freq"
    rewrite(folder / WEIGHTS, **{name: torch.zeros(6)})
    Engine.load(folder, CONFIG)


def test_tied_head_may_be_repeated_but_not_differ(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    shard = sharded / index["model.embed_tokens.weight"]
    head = load_file(shard)["model.embed_tokens.weight"].clone()
    rewrite(shard, lm_head__weight=head)
    edit(sharded / INDEX, weight_map={**index, "lm_head.weight": shard.name})
    Engine.load(sharded, CONFIG)
    head[0, 0] += 1
    rewrite(shard, lm_head__weight=head)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tok"):
        Engine.load(sharded, CONFIG)


HEADER_OF_A_LIST = (2).to_bytes(8, "little") + b"[]"


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, size=size: data[:size] for size in (0, 4, 100, -1)),
        *(
            lambda data, length=length: length.to_bytes(8, "little") + data[8:]
            for length in (2**40, 2**63, 3)
        ),
        lambda data: HEADER_OF_A_LIST + data,
    ],
)
@pytest.mark.case(102)
def test_a_file_that_is_cut_off_or_damaged(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).write_bytes(damage(data))
    assert refusal(folder).startswith(f"{WEIGHTS}: not a whole safetensors file")


@pytest.mark.case(102)
def test_a_pointer_of_git_lfs(folder: Path, sharded: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1")
    assert refusal(folder).startswith(f"{WEIGHTS}: a pointer of Git LFS, not the weights; run git")
    (sharded / INDEX).write_text("version https://git-lfs.github.com/spec/v1\n")
    assert refusal(sharded).endswith("not valid JSON (a pointer of Git LFS; run git lfs pull)")


def test_missing_shard(sharded: Path) -> None:
    name = sorted(path.name for path in sharded.glob("*.safetensors"))[1]
    (sharded / name).unlink()
    assert refusal(sharded).startswith(f"{name}: no such file, but model.safetensors.index.json")


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/secret.safetensors", "weights.bin", "a/b.safetensors"]
)
def test_index_that_points_out_of_the_folder(sharded: Path, name: str) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    edit(sharded / INDEX, weight_map={**index, "model.norm.weight": name})
    assert "model.norm.weight must name a .safetensors file of the folder" in refusal(sharded)


def test_index_that_does_not_fit_its_files(sharded: Path, folder: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    files = sorted(set(index.values()))
    moved = files[0] if index["model.norm.weight"] != files[0] else files[1]
    edit(sharded / INDEX, weight_map={**index, "model.norm.weight": moved})
    assert f"does not hold what {INDEX} says (model.norm.weight)" in refusal(sharded)
    names = load_file(folder / WEIGHTS)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, WEIGHTS)}))
    Engine.load(folder, CONFIG)


def test_empty_or_broken_index(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": {}}')
    assert "weight_map is empty" in refusal(sharded)
    (sharded / INDEX).write_text("[" * 100_000)
    assert f"{INDEX}: not valid JSON" in refusal(sharded)


def test_weights_in_one_file_and_in_others(sharded: Path, checkpoint: Folder) -> None:
    """transformers reads the first, vLLM the others."""
    shutil.copy(checkpoint("llama-mha", num_shards=1) / WEIGHTS, sharded / WEIGHTS)
    text = refusal(sharded)
    assert text.startswith(f"{WEIGHTS}: is beside {INDEX}, which names other files")
    assert text.endswith("remove the one that is old")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_beside_the_model(folder: Path, name: str) -> None:
    """transformers adds it to the model's weights; one that was merged may leave its settings."""
    (folder / "adapter_config.json").write_text("{}")
    Engine.load(folder, CONFIG)
    (folder / name).write_bytes(b"")
    assert refusal(folder).startswith(f"{name}: an adapter (LoRA) beside its model is not")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pytorch_model.bin"], "pytorch_model.bin: only safetensors are read"),
        (["consolidated.00.pth"], "consolidated.00.pth: only safetensors are read"),
        (["model.pt"], "model.pt: only safetensors are read"),
        (["model.gguf"], "model.gguf: is no GGUF file: it does not begin with"),
        (["consolidated.safetensors"], "{folder}: no model.safetensors and no model.safetensors."),
        # What a training leaves is no reason to convert it.
        (["optimizer.pt", "training_args.bin", "rng_state_0.pth", "scheduler.pt"], "{folder}: no"),
    ],
)
@pytest.mark.case(105)
def test_other_files_in_place_of_the_weights(folder: Path, names: list[str], message: str) -> None:
    """A pickle is never opened."""
    (folder / WEIGHTS).unlink()
    for name in names:
        (folder / name).write_bytes(pickle.dumps(print))
    assert refusal(folder).startswith(message.format(folder=folder))


SIZES = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 16}


@pytest.fixture
def wide(checkpoint: Folder) -> Path:
    """A checkpoint whose linears outweigh all else."""
    return checkpoint("qwen2-tied", **SIZES)


@torch.inference_mode()
def load(folder: Path, *, is_fp8: bool) -> dict[str, Parameter]:
    specs = decoder_parameters(read_model(folder))
    with Checkpoint(folder) as opened:
        return opened.load(specs, torch.bfloat16, "cpu", quantization="fp8" if is_fp8 else "none")


def num_bytes(parameters: dict[str, Parameter]) -> int:
    tensors: list[Tensor] = []
    for parameter in parameters.values():
        tensors += parameter_tensors(parameter)
    return sum(tensor.nbytes for tensor in tensors)


def peak_bytes(call: Callable[[], Any], mapped_bytes: int) -> int:
    """The most memory that torch took at once while ``call`` ran: every allocation and every
    release, as the profiler books them. The file itself, which is mapped, is booked as well; it is
    left out by its size."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = call()
    results = profiled.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    assert events, "the profiler books no memory any more"
    taken = most = 0
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert sizes.count(mapped_bytes) == sizes.count(-mapped_bytes) == 1
    for size in sizes:
        taken += 0 if abs(size) == mapped_bytes else size
        most = max(most, taken)
    del kept
    return most


def test_rows_are_those_of_the_whole_weight(wide: Path) -> None:
    plain, quantised = load(wide, is_fp8=False), load(wide, is_fp8=True)
    assert plain.keys() == quantised.keys()
    linears = [name for name, value in quantised.items() if isinstance(value, Fp8Weight)]
    assert {name.rpartition(".")[2] for name in linears} == {"weight"}
    assert len(linears) == 4 * read_model(wide).num_layers
    for name, value in quantised.items():
        weight = plain[name]
        assert isinstance(weight, Tensor)
        if isinstance(value, Fp8Weight):
            expected = quantize(weight)
            assert value.dtype == torch.bfloat16
            assert torch.equal(value.rows.values.float(), expected.values.float()), name
            assert torch.equal(value.rows.scales, expected.scales), name
        else:
            assert isinstance(value, Tensor)
            assert torch.equal(value, weight)


def test_the_peak_is_the_end_state_and_a_part_of_one_tensor(wide: Path) -> None:
    """All weights in bfloat16 first would take nearly twice as much."""
    load(wide, is_fp8=True)  # what torch takes once is no part of it
    end_state = num_bytes(load(wide, is_fp8=True))
    config = EngineConfig(dtype="bfloat16", quantization="fp8")
    assert end_state == make_plan(wide, config).weight_bytes
    [file] = wide.glob("*.safetensors")
    largest = max(tensor.nbytes for tensor in load_file(file).values())
    peak = peak_bytes(lambda: load(wide, is_fp8=True), file.stat().st_size)
    assert end_state <= peak < end_state + largest
    quantised_later = peak_bytes(
        lambda: [quantize(p) for p in load(wide, is_fp8=False).values() if isinstance(p, Tensor)],
        file.stat().st_size,
    )
    assert quantised_later > end_state + 2 * largest, "the measure sees the other way"


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["gpt_oss", "llama4", "dbrx", "granitemoe", "gpt2"])
def test_what_is_turned_on_its_way_is_a_part_of_one_tensor(tmp_path: Path, name: str) -> None:
    """Stacked experts come one by one; other weights that are stored turned are at most copied."""
    write_family(tmp_path, name)
    end_state = num_bytes(load(tmp_path, is_fp8=False))
    [file] = tmp_path.glob("*.safetensors")
    largest = max(tensor.nbytes for tensor in load_file(file).values())
    peak = peak_bytes(lambda: load(tmp_path, is_fp8=False), file.stat().st_size)
    assert end_state <= peak < end_state + 1.1 * largest
