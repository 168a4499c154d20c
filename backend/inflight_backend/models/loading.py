"""Where the tensors of a checkpoint go while they stream in: a parameter that is filled row by row.

FP8 linears are quantised here. A scale belongs to a row, so rows may come in any portions and the
result is that of the whole weight at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from inflight_backend.errors import CheckpointError
from inflight_backend.models.layers import Fp8Weight, Parameter, Quantized, quantize
from inflight_backend.models.parameters import ParameterSpec

# Rows are quantised in portions: at most so many numbers (their float32 forms are 64 MiB each), and
# at most a sixteenth of a tensor, so that these forms together stay below the tensor itself.
_PORTION = 16 * 2**20
_SHARE = 16


class Target(Protocol):
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
) -> Target:
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
