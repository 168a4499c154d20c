"""Whether a checkpoint holds the tensors that its model needs: no torch.

The loader and ``inflight plan`` both ask here, so that what is planned is what can be loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from inflight_backend.errors import CheckpointError
from inflight_backend.models.model_config import ModelConfig
from inflight_backend.models.parameters import (
    Source,
    decoder_parameters,
    duplicate_names,
    ignorable_names,
)
from inflight_backend.models.weight_files import DTYPE_TO_BYTES, list_names

# What tools lay beside or instead of a weight that they quantise (GPTQ and AWQ, ModelOpt and
# compressed-tensors, bitsandbytes, MLX), some without a word of it in config.json.
_QUANTISED = (
    ".qweight",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight.absmax",
    ".SCB",
    ".scales",
)


class Entry(Protocol):
    """A tensor of a checkpoint as the header of its file describes it."""

    @property
    def file(self) -> str:
        """Name of that file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its dimensions."""

    @property
    def dtype(self) -> str:
        """Its type, by the name that safetensors has for it."""


def check_weights(config: ModelConfig, entries: Mapping[str, Entry], where: str) -> None:
    """`CheckpointError` unless every tensor has one use and every use has its tensor.

    ``entries``: of all files, by name; ``where``: the file to blame if some are missing.
    """
    if packed := next((name for name in entries if name.endswith(_QUANTISED)), None):
        raise CheckpointError(
            f"{entries[packed].file}: {packed} is of quantised weights, which are not supported; "
            "give an unquantised checkpoint"
        )
    specs = decoder_parameters(config)
    sources = {source.name: source for spec in specs for source in spec.sources}
    if missing := [name for name in sources if name not in entries]:
        raise CheckpointError(f"{where}: {_list('missing tensor', missing)}")
    duplicates = duplicate_names(config)
    known = {*sources, *duplicates, *ignorable_names(config)}
    if unused := [name for name in entries if name not in known]:
        raise CheckpointError(f"{entries[unused[0]].file}: {_list('unused tensor', unused)}")
    for source in sources.values():
        _check_weight(source, entries[source.name])
    for name, original in duplicates.items():
        if name in entries:
            _check_weight(Source(name, sources[original].shape), entries[name])


def _check_weight(wanted: Source, entry: Entry) -> None:
    if entry.shape != wanted.shape:
        raise CheckpointError(
            f"{entry.file}: {wanted.name} has shape {list(entry.shape)}, "
            f"config.json asks for {list(wanted.shape)}"
        )
    if entry.dtype not in DTYPE_TO_BYTES:
        raise CheckpointError(
            f"{entry.file}: {wanted.name} is {entry.dtype}, "
            f"supported are {', '.join(DTYPE_TO_BYTES)}"
        )


def _list(what: str, names: Sequence[str]) -> str:
    plural = "s" if len(names) > 1 else ""
    return f"{len(names)} {what}{plural}: {list_names(names)}"
