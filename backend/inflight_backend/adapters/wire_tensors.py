"""Adapters in the tensors ``lora_weights`` and ``lora_config`` of TensorRT-LLM.

A row is a module of a layer: in ``lora_config`` its id, the layer and the rank (and whether it is
DoRA); in ``lora_weights`` ``A`` [rank, in], ``B`` [out, rank] times its scale, then with DoRA the
magnitudes over the norms of the changed weight [out], one after the other, zeros up to the end.
Of experts a row has the ``A`` of all, then the ``B`` of all. (TensorRT-LLM's documentation,
``advanced/lora.md``, and ``lora_manager.py``; folders as its converter writes them.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from inflight_backend.adapters.experts import ExpertTarget
from inflight_backend.adapters.targets import MODULE_NAMES, Target, changed_twice, wire_targets
from inflight_backend.errors import CheckpointError, InvalidRequest
from inflight_backend.models.blocks.lora import Adapter, AdapterPart
from inflight_backend.models.config import ModelConfig

Array: TypeAlias = npt.NDArray[Any]

WEIGHTS, CONFIG = "lora_weights", "lora_config"
_FILES = {WEIGHTS: "model.lora_weights.npy", CONFIG: "model.lora_config.npy"}


def read_wire_tensors(
    weights: Array, config: Array, model: ModelConfig, dtype: torch.dtype, max_rank: int,
    digest: bytes,
) -> Adapter:  # fmt: skip
    """weights [1, rows, n] float16 or float32, config [1, rows, 3 or 4] int32; `InvalidRequest`
    names the row and the bound."""
    weights, config = without_batch(WEIGHTS, weights), without_batch(CONFIG, config)
    if config.dtype != np.int32 or config.shape[1] not in (3, 4):
        raise InvalidRequest(
            f"'{CONFIG}' has shape {list(config.shape)} of {config.dtype}: a row is 3 or 4 of int32"
        )
    if len(weights) != len(config) or not len(config):
        raise InvalidRequest(
            f"'{WEIGHTS}' has {len(weights)} rows and '{CONFIG}' has {len(config)}: they must have "
            "one each for every module of a layer"
        )
    parts: list[AdapterPart] = []
    targets: dict[int, dict[int, list[Target | ExpertTarget]]] = {}
    seen: set[tuple[int, int]] = set()
    for number, (row, values) in enumerate(zip(config.tolist(), weights, strict=True)):
        module, layer, rank, *rest = row
        where = f"row {number} of '{CONFIG}'"
        if not 0 <= layer < model.num_layers:
            raise InvalidRequest(f"{where}: layer {layer} is outside 0..{model.num_layers - 1}")
        if not 0 < rank <= max_rank:
            raise InvalidRequest(
                f"{where}: rank {rank} is outside 1..{max_rank} (lora_cache_max_adapter_size)"
            )
        if (module, layer) in seen:
            raise InvalidRequest(f"{where}: module {module} of layer {layer} is there twice")
        seen.add((module, layer))
        if layer not in targets:
            targets[layer] = wire_targets(model, layer)
        if module not in targets[layer]:
            known = 0 <= module < len(MODULE_NAMES)
            name = f" ({MODULE_NAMES[module]})" if known else ""
            enabled = ", ".join(f"{each} {MODULE_NAMES[each]}" for each in sorted(targets[layer]))
            raise InvalidRequest(
                f"{where}: module {module}{name} is not enabled; layer {layer} has {enabled}"
            )
        for target in targets[layer][module]:
            parts.append(_part(target, values, rank, bool(rest and rest[0]), dtype, number))
    return Adapter(_joined(parts), digest)


def without_batch(name: str, tensor: Array) -> Array:
    """[1, rows, n] -> [rows, n]."""
    if tensor.ndim != 3 or tensor.shape[0] != 1:
        raise InvalidRequest(
            f"'{name}' has shape {list(tensor.shape)}, expected [1, rows, columns]"
        )
    rows: Array = tensor[0]
    return rows


def _part(
    target: Target | ExpertTarget, values: Array, rank: int, is_dora: bool, dtype: torch.dtype,
    number: int,
) -> AdapterPart:  # fmt: skip
    inputs, outputs = target.inputs, target.outputs
    count = target.count if isinstance(target, ExpertTarget) else 1
    ends = [count * rank * inputs, count * rank * (inputs + outputs)]
    length = ends[1] + (outputs if is_dora else 0)
    if is_dora and (isinstance(target, ExpertTarget) or not target.may_scale):
        raise InvalidRequest(f"row {number} of '{CONFIG}': experts and routers cannot be DoRA")
    if len(values) < length:
        raise InvalidRequest(
            f"row {number} of '{WEIGHTS}' has {len(values)} numbers; {target.linear} with rank "
            f"{rank} needs {length}"
        )
    row = torch.from_numpy(values[:length].astype(np.float32))
    if not bool(row.isfinite().all()):
        raise InvalidRequest(f"row {number} of '{WEIGHTS}' holds a number that is not finite")
    a = row[: ends[0]].view(count, rank, inputs).to(dtype)
    b = row[ends[0] : ends[1]].view(count, outputs, rank)
    if isinstance(target, ExpertTarget):
        return target.part(a, b.to(dtype))
    scales = None
    if is_dora:
        scales = row[ends[1] :]
        b = b * scales[:, None]
        scales = scales.to(dtype)
    return target.part(a[0], b[0].to(dtype), scales)


def _joined(parts: list[AdapterPart]) -> tuple[AdapterPart, ...]:
    """In the order of linears; `InvalidRequest` if two change the same rows."""
    parts = sorted(parts, key=lambda part: (part.linear, part.start))
    if twice := changed_twice(parts):
        raise InvalidRequest(
            f"'{CONFIG}' changes rows of {twice} twice: a fused module beside its parts"
        )
    return tuple(parts)


def read_prefetch_folder(folder: Path) -> dict[int, tuple[Array, Array]]:
    """``lora_prefetch_dir``: weights and config by task id, which is the name of their folder."""
    if not folder.is_dir():
        raise CheckpointError(f"lora_prefetch_dir = '{folder}' is no folder")
    found = {}
    for path in sorted(each for each in folder.iterdir() if each.is_dir()):
        if not (path.name.isdecimal() and int(path.name) < 2**64):
            raise CheckpointError(
                f"lora_prefetch_dir: the folder {path.name!r} is no task id (a whole number)"
            )
        found[int(path.name)] = (_load(path, WEIGHTS), _load(path, CONFIG))
    return found


def _load(folder: Path, name: str) -> Array:
    path = folder / _FILES[name]
    try:
        array: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if array.dtype == "V2":  # bfloat16, as the converter saves it
        array = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float().numpy()
    return array if array.ndim == 3 else array[None]
