"""Which files of a checkpoint folder hold its weights, and of what types those may be: no torch.

The loader and ``inflight plan`` both ask here, so that the plan is of what the server would load.
"""

from __future__ import annotations

from pathlib import Path

from inflight_backend.checkpoint_files import find_file
from inflight_backend.engine.json_reader import JsonReader
from inflight_backend.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_TYPE_TO_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""The types that weights may have in the files."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def weight_files(folder: Path) -> dict[str, set[str] | None]:
    """Weight file -> the tensors the index promises in it, None where there is no index.

    `CheckpointError` where there are none, or the index is damaged.
    """
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
        return dict(sorted(files.items()))
    if find_file(folder, SINGLE) is not None:
        return {SINGLE: None}
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{pickles[0]}: only safetensors are read, a pickle could run code; convert it "
            f"(transformers: save_pretrained writes {SINGLE})"
        )
    raise CheckpointError(f"{folder}: no {SINGLE} and no {INDEX}")


def check_weight(
    file: str, name: str, kind: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    """`CheckpointError` if the tensor has another shape than ``wanted``, or no float type."""
    if shape != wanted:
        raise CheckpointError(
            f"{file}: {name} has shape {list(shape)}, config.json asks for {list(wanted)}"
        )
    if kind not in WEIGHT_TYPE_TO_BYTES:
        raise CheckpointError(
            f"{file}: {name} is {kind}, supported are {', '.join(WEIGHT_TYPE_TO_BYTES)}"
        )
