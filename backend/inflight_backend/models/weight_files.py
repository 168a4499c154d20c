"""Which files of a checkpoint folder hold its weights, and of what types those may be: no torch.

The loader and ``inflight plan`` both ask here, so that the plan is of what the server would load.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import find_file, is_lfs_pointer
from inflight_backend.models.json_reader import JsonReader

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPE_TO_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""The types that weights may have, by their names in safetensors."""

_SHOWN_NAMES = 3
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OF_TRAINING = ("optimizer", "rng_state", "scaler", "scheduler", "training_args")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


def weight_files(folder: Path) -> dict[str, set[str] | None]:
    """Weight file -> the tensors the index promises in it, None where there is no index.

    `CheckpointError` says what the folder holds instead, and the way out.
    """
    _refuse_adapter(folder)
    if (path := find_file(folder, INDEX)) is not None:
        index = JsonReader.from_file(path).section("weight_map")
        files: dict[str, set[str] | None] = {}
        for tensor in index:
            file = index.text(tensor)
            if Path(file).name != file or not file.endswith(".safetensors"):
                index.fail(tensor, f"must name a .safetensors file of the folder, not {file!r}")
            promised = files.setdefault(file, set())
            assert promised is not None
            promised.add(tensor)
        if not files:
            raise CheckpointError(f"{INDEX}: weight_map is empty")
        if SINGLE not in files and find_file(folder, SINGLE) is not None:
            raise CheckpointError(
                f"{SINGLE}: is beside {INDEX}, which names other files (transformers reads the "
                "first, vLLM the others); remove the one that is old"
            )
        return dict(sorted(files.items()))
    if find_file(folder, SINGLE) is not None:
        return {SINGLE: None}
    raise CheckpointError(_what_else(folder))


def check_names(file: str, names: Set[str], promised: Set[str] | None) -> None:
    """`CheckpointError` if ``file`` holds other tensors than the index promises in it."""
    if promised is not None and names != promised:
        odd = list_names(sorted(names ^ promised))
        raise CheckpointError(f"{file}: does not hold what {INDEX} says ({odd})")


def list_names(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def damage(path: Path) -> str:
    """What to say of a file that is no safetensors file."""
    if is_lfs_pointer(path):
        return f"{path.name}: a pointer of Git LFS, not the weights; run git lfs pull"
    return f"{path.name}: not a whole safetensors file, truncated or damaged"


def _refuse_adapter(folder: Path) -> None:
    """Where the model's own weights are too, transformers adds the adapter to them."""
    for name in _ADAPTERS:
        if (folder / "adapter_config.json").is_file() and (folder / name).is_file():
            raise CheckpointError(
                f"{name}: an adapter (LoRA) is not supported; merge it into its model, or take it "
                "and adapter_config.json out of the folder"
            )


def _what_else(folder: Path) -> str:
    pickles = [name for name in _names(folder, *_PICKLES) if not name.startswith(_OF_TRAINING)]
    if pickles:
        return (
            f"{pickles[0]}: only safetensors are read, a pickle could run code; convert it "
            f"(transformers: save_pretrained writes {SINGLE})"
        )
    if quantised := _names(folder, "*.gguf"):
        return f"{quantised[0]}: GGUF is not read; give the model's safetensors"
    found = ", ".join(_names(folder, "*.safetensors")[:2])
    return f"{folder}: no {SINGLE} and no {INDEX}" + (f", only {found}" if found else "")


def _names(folder: Path, *patterns: str) -> list[str]:
    return sorted(path.name for pattern in patterns for path in folder.glob(pattern))
