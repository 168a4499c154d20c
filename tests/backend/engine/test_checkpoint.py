"""Checkpoints that cannot be served: one clear error that names the file and the tensor."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import oracle_tokens
from support.engine_driver import EngineDriver, Job

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.memory_plan import make_plan
from inflight_backend.errors import CheckpointError

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
    return Path(shutil.copytree(checkpoint("qwen2-tied", num_shards=3), tmp_path / "copy"))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; ``__`` stands for a dot."""
    weights = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    (folder / WEIGHTS).unlink()
    save_file(weights, folder / WEIGHTS)


def refusal(folder: Path) -> str:
    """The one-line complaint about the folder; nothing of another error's traceback behind it."""
    with pytest.raises(CheckpointError) as caught:
        Engine.load(folder, CONFIG)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_progress_ends_at_the_total(sharded: Path) -> None:
    seen: list[tuple[int, int]] = []
    Engine.load(sharded, CONFIG, lambda done, total: seen.append((done, total)))
    weights = [load_file(path) for path in sharded.glob("*.safetensors")]
    total = sum(tensor.nbytes for file in weights for tensor in file.values())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert len(seen) == sum(len(file) for file in weights)


def test_half_precision_weights_are_widened(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    save_file({name: x.to(torch.bfloat16) for name, x in weights.items()}, folder / WEIGHTS)
    job = Job([5, 6, 7])
    EngineDriver(Engine.load(folder, CONFIG)).generate([job], 5)
    assert job.generated == oracle_tokens(folder, [5, 6, 7], 5)


@pytest.mark.case(102)
def test_missing_tensors(folder: Path) -> None:
    change(
        folder,
        model__layers__1__mlp__up_proj__weight=None,
        model__norm__weight=None,
    )
    text = refusal(folder)
    assert "model.layers.1.mlp.up_proj.weight" in text
    assert "model.norm.weight" in text
    assert "2 missing" in text
    assert WEIGHTS in text


@pytest.mark.case(102)
def test_left_over_tensor(folder: Path) -> None:
    change(folder, model__layers__2__mlp__up_proj__weight=torch.zeros(2))
    assert "1 unused tensor: model.layers.2.mlp.up_proj.weight" in refusal(folder)


def test_bias_the_family_does_not_know(folder: Path) -> None:
    change(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(48))
    assert "q_proj.bias" in refusal(folder)


def test_known_buffers_are_passed_over(folder: Path) -> None:
    change(folder, model__layers__1__self_attn__rotary_emb__inv_freq=torch.zeros(6))
    Engine.load(folder, CONFIG)


@pytest.mark.case(102)
def test_wrong_shape(folder: Path) -> None:
    change(folder, model__layers__0__self_attn__k_proj__weight=torch.zeros(47, 48))
    text = refusal(folder)
    assert "k_proj.weight has shape [47, 48]" in text
    assert "[48, 48]" in text


def test_config_of_another_size(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=2**24)
    assert "model.embed_tokens.weight has shape [199, 48]" in refusal(folder)


@pytest.mark.case(102)
def test_wrong_dtype(folder: Path) -> None:
    change(folder, model__norm__weight=torch.zeros(48, dtype=torch.int8))
    text = refusal(folder)
    assert "model.norm.weight is I8" in text
    assert "BF16" in text


def test_tied_head_may_be_repeated_but_not_differ(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    shard = sharded / index["model.embed_tokens.weight"]
    weights = load_file(shard)
    shard.unlink()
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, shard)
    edit(sharded / INDEX, weight_map={**index, "lm_head.weight": shard.name})
    Engine.load(sharded, CONFIG)
    head[0, 0] += 1
    shard.unlink()
    save_file({**weights, "lm_head.weight": head}, shard)
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(sharded)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
@pytest.mark.case(102)
def test_truncated_file(folder: Path, size: int) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).write_bytes(data[:size])
    assert refusal(folder).startswith(f"{WEIGHTS}: not a whole safetensors file")


@pytest.mark.parametrize("length", [2**40, 2**63, 3])
@pytest.mark.case(102)
def test_header_of_a_false_length(folder: Path, length: int) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).write_bytes(length.to_bytes(8, "little") + data[8:])
    assert refusal(folder).startswith(f"{WEIGHTS}: not a whole safetensors file")


def test_missing_shard(sharded: Path) -> None:
    name = sorted(path.name for path in sharded.glob("*.safetensors"))[1]
    (sharded / name).unlink()
    assert refusal(sharded) == f"{name}: no such file"


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/secret.safetensors", "weights.bin", "a/b.safetensors"]
)
def test_index_that_points_elsewhere(sharded: Path, name: str) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    edit(sharded / INDEX, weight_map={**index, "model.norm.weight": name})
    assert "model.norm.weight must name a .safetensors file of the folder" in refusal(sharded)


def test_index_that_does_not_fit_its_files(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    files = sorted(set(index.values()))
    moved = files[0] if index["model.norm.weight"] != files[0] else files[1]
    edit(sharded / INDEX, weight_map={**index, "model.norm.weight": moved})
    text = refusal(sharded)
    assert "model.norm.weight" in text
    assert INDEX in text
    with pytest.raises(CheckpointError) as caught:
        make_plan(sharded)
    assert str(caught.value) == text


def test_empty_or_broken_index(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": {}}')
    assert "weight_map is empty" in refusal(sharded)
    (sharded / INDEX).write_text("[" * 100_000)
    assert f"{INDEX}: not valid JSON" in refusal(sharded)
    (sharded / INDEX).write_text("version https://git-lfs.github.com/spec/v1\n")
    assert refusal(sharded).endswith("not valid JSON (a pointer of Git LFS; run git lfs pull)")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
@pytest.mark.case(105)
def test_pickles_are_not_opened(folder: Path, name: str) -> None:
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(print))
    text = refusal(folder)
    assert text.startswith(f"{name}: only safetensors are read")


def test_weights_in_one_file_and_in_others(sharded: Path, checkpoint: Folder) -> None:
    """Whoever saved last meant one of them; transformers reads the first, vLLM the others."""
    shutil.copy(checkpoint("llama-mha", num_shards=1) / WEIGHTS, sharded / WEIGHTS)
    assert refusal(sharded).startswith(f"{WEIGHTS}: is beside {INDEX}, which names other files")
    with pytest.raises(CheckpointError, match="remove the one that is old"):
        make_plan(sharded)


def test_an_index_of_one_file(folder: Path) -> None:
    names = load_file(folder / WEIGHTS)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, WEIGHTS)}))
    Engine.load(folder, CONFIG)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_beside_the_model(folder: Path, name: str) -> None:
    """transformers adds it to the model's weights; one that was merged may leave its settings."""
    (folder / "adapter_config.json").write_text("{}")
    Engine.load(folder, CONFIG)
    (folder / name).write_bytes(b"")
    assert refusal(folder).startswith(f"{name}: an adapter (LoRA) is not supported; merge it")


@pytest.mark.parametrize(
    "name",
    [
        "qweight",  # GPTQ and AWQ
        "weight_packed",  # compressed-tensors
        "weight_scale",  # ModelOpt
        "SCB",  # bitsandbytes
        "scales",  # MLX
    ],
)
def test_quantised_without_a_word_in_the_configuration(folder: Path, name: str) -> None:
    change(folder, **{f"model__layers__0__mlp__up_proj__{name}": torch.zeros(2)})
    text = refusal(folder)
    assert text.startswith(f"{WEIGHTS}: model.layers.0.mlp.up_proj.{name} is of quantised weights")
    with pytest.raises(CheckpointError, match="give an unquantised checkpoint"):
        make_plan(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert "no model.safetensors" in refusal(folder)
    for name in ("optimizer.pt", "training_args.bin", "rng_state_0.pth", "scheduler.pt"):
        (folder / name).write_bytes(b"")  # what a training leaves is no reason to convert it
    assert "no model.safetensors" in refusal(folder)


@pytest.mark.case(106)
def test_link_that_leaves_the_folder(folder: Path, tmp_path: Path) -> None:
    outside = (folder / WEIGHTS).rename(tmp_path / "outside.safetensors")
    (folder / WEIGHTS).symlink_to(outside)
    assert "leaves the checkpoint folder" in refusal(folder)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(tmp_path / "nowhere")
    assert refusal(folder) == f"{WEIGHTS}: no such file"


def test_link_inside_the_folder(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    (folder / WEIGHTS).symlink_to("other.safetensors")
    Engine.load(folder, CONFIG)


def test_snapshot_of_a_hub_cache(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / "0123abcd"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate((WEIGHTS, "config.json")):
        (folder / name).rename(repository / "blobs" / str(number))
        (snapshot / name).symlink_to(Path("../../blobs") / str(number))
    Engine.load(snapshot, CONFIG)
    (repository / "blobs" / "0").rename(repository / "0")
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to("../../0")
    assert "leaves the checkpoint folder" in refusal(snapshot)


def edit(path: Path, **changes: object) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
