"""Streams the safetensors of a checkpoint folder into parameters that are allocated once.

Headers are read and compared with what the model needs before a byte of weights is: every tensor
must be there, be used exactly once and have the right shape and a float type. Only safetensors are
read, never a pickle. FP8 linears are quantised on the way: a scale belongs to a row, so rows may
come in any portions and the result is that of the whole weight at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import (
    DTYPE_TO_BYTES,
    INDEX,
    check_names,
    damage,
    find_file,
    weight_files,
)
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.layers import Fp8Weight, Parameter, Quantized, quantize
from inflight_backend.models.parameters import ParameterSpec, check_weights, duplicate_names

# Rows are quantised in portions: at most so many numbers (their float32 forms are 64 MiB each), and
# at most a sixteenth of a tensor, so that these forms together stay below the tensor itself.
_PORTION = 16 * 2**20
_SHARE = 16


class RowTarget(Protocol):
    """A parameter in the making."""

    @property
    def parameter(self) -> Parameter:
        """What it became."""

    def put(self, row: int, source: Tensor) -> None:
        """Rows ``source`` [n, ...], any float dtype, on the host, to ``row`` and following."""


class _Plain:
    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter

    @property
    def parameter(self) -> Parameter:
        return self._parameter

    def put(self, row: int, source: Tensor) -> None:
        self._parameter[row : row + len(source)].copy_(source)


class _Fp8:
    def __init__(self, rows: Quantized, dtype: torch.dtype) -> None:
        self._rows = rows
        self._dtype = dtype

    @property
    def parameter(self) -> Parameter:
        return Fp8Weight(self._rows, self._dtype)

    def put(self, row: int, source: Tensor) -> None:
        values, scales = self._rows
        count = min(_PORTION // source.shape[1], len(source) // _SHARE)
        for portion in source.split(max(count, 1)):  # type: ignore[no-untyped-call]
            end = row + len(portion)
            done = quantize(portion.to(device=values.device, dtype=self._dtype))
            values[row:end].copy_(done.values)
            scales[row:end].copy_(done.scales)
            row = end


def make_target(
    spec: ParameterSpec, dtype: torch.dtype, device: str, *, is_fp8: bool = False
) -> RowTarget:
    """Memory for a parameter; `CheckpointError` if there is none left."""
    if not (is_fp8 and spec.is_linear):
        return _Plain(_allocate(spec, spec.shape, dtype, device))
    values = _allocate(spec, spec.shape, torch.float8_e4m3fn, device)
    scales = _allocate(spec, (spec.shape[0], 1), torch.float32, device)
    return _Fp8(Quantized(values, scales), dtype)


def _allocate(spec: ParameterSpec, shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    with suppress(RuntimeError, MemoryError):  # torch says out of memory with a RuntimeError
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    raise CheckpointError(f"{spec.name}: no memory on {device} for shape {list(shape)}")


OnProgress = Callable[[int, int], None]
"""Gets bytes loaded and bytes in all."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the checkpoint as its header describes it."""

    file: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_TO_BYTES.get(self.dtype, 1)


class Checkpoint:
    """An open checkpoint folder; use it as a context manager, so that its files are closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._entries: dict[str, _Entry] = {}

    def __enter__(self) -> Checkpoint:
        """Open all files and read their headers; `CheckpointError` names the file."""
        with ExitStack() as stack:
            for name, expected in weight_files(self._folder).items():
                opened = _open(self._folder, name, stack)
                self._files[name] = opened
                self._add_entries(name, opened, expected)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._files.clear()

    def check(self, config: ModelConfig) -> None:
        """`CheckpointError` unless every tensor has one use and every use has its tensor."""
        where = INDEX if len(self._files) > 1 else next(iter(self._files))
        check_weights(config, self._entries, where)
        for name, original in duplicate_names(config).items():
            if name in self._entries:
                self._check_duplicate(name, original)

    def load(
        self,
        specs: Sequence[ParameterSpec],
        dtype: torch.dtype,
        device: str,
        on_progress: OnProgress | None = None,
        *,
        is_fp8: bool = False,
    ) -> dict[str, Parameter]:
        """Every parameter by name, on the device; tensors go there one at a time.

        With ``is_fp8`` the weights of linears are quantised on their way, some rows at a time, so
        that the device never holds more than the end state and a part of one tensor.
        """
        total = sum(self._entries[src.name].num_bytes for spec in specs for src in spec.sources)
        done = 0
        parameters: dict[str, Parameter] = {}
        for spec in specs:
            target = make_target(spec, dtype, device, is_fp8=is_fp8)
            row = 0
            for source in spec.sources:
                end = row + source.shape[0]
                target.put(row, self._read(source.name))
                row = end
                done += self._entries[source.name].num_bytes
                if on_progress is not None:
                    on_progress(done, total)
            parameters[spec.name] = target.parameter
        return parameters

    def _add_entries(self, file: str, opened: Any, expected: set[str] | None) -> None:
        names = set(opened.keys())
        check_names(file, names, expected)
        for name in names:
            tensor = opened.get_slice(name)
            self._entries[name] = _Entry(file, tuple(tensor.get_shape()), tensor.get_dtype())

    def _check_duplicate(self, name: str, original: str) -> None:
        if not torch.equal(self._read(name), self._read(original)):
            raise CheckpointError(
                f"{self._entries[name].file}: {name} differs from {original}, though config.json "
                "ties them (tie_word_embeddings)"
            )

    def _read(self, name: str) -> Tensor:
        entry = self._entries[name]
        try:
            tensor = self._files[entry.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{entry.file}: {name} cannot be read ({error})") from None
        assert isinstance(tensor, Tensor)
        return tensor


def _open(folder: Path, name: str, stack: ExitStack) -> Any:
    path = find_file(folder, name)
    if path is None:
        raise CheckpointError(f"{name}: no such file")
    try:
        return stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{damage(path)} ({error})") from None
