"""Streams the safetensors of a checkpoint folder into parameters that are allocated once.

Headers are compared with what the model needs before a byte of weights is read (`check_weights`).
FP8 linears are quantised on the way: a scale belongs to a row, so rows may come in any portions and
the result is that of the whole weight at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from inflight_backend.errors import CheckpointError
from inflight_backend.log import get_logger
from inflight_backend.models.checkpoint_files import list_names, open_weights
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.layers import Fp8Weight, Parameter, Quantized, quantize
from inflight_backend.models.parameters import (
    ParameterSpec,
    Source,
    check_weights,
    duplicate_names,
    empty_biases,
    fitted,
)
from inflight_backend.models.quantization.forms import PackedWeight, Part, join
from inflight_backend.models.quantization.linears import dequantize
from inflight_backend.models.quantization.unpacking import unpack

_logger = get_logger(__name__)

# Rows are quantised in portions: at most so many numbers (their float32 forms are 64 MiB each), and
# at most a sixteenth of a tensor, so that these forms together stay below the tensor itself.
_PORTION = 16 * 2**20
_SHARE = 16


def allocate(
    spec: ParameterSpec, dtype: torch.dtype, device: str, *, is_fp8: bool = False
) -> Tensor | Fp8Weight:
    """Memory for a parameter, to be filled by `put_rows`; `CheckpointError` if there is none left.

    With ``is_fp8`` the weights of linears become an `Fp8Weight`.
    """
    try:
        if not (is_fp8 and spec.is_linear):
            kept = torch.float32 if spec.is_wide else dtype
            return torch.empty(spec.shape, dtype=kept, device=device)
        values = torch.empty(spec.shape, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty((spec.shape[0], 1), dtype=torch.float32, device=device)
        return Fp8Weight(Quantized(values, scales), dtype)
    except (RuntimeError, MemoryError):  # torch says out of memory with a RuntimeError
        raise CheckpointError(
            f"{spec.name}: no memory on {device} for shape {list(spec.shape)}"
        ) from None


def put_rows(parameter: Tensor | Fp8Weight, row: int, source: Tensor) -> None:
    """Rows ``source`` [n, ...], any float dtype, to ``row`` and following of ``parameter``."""
    if isinstance(parameter, Tensor):
        parameter[row : row + len(source)].copy_(source)
        return
    (values, scales), dtype = parameter
    count = min(_PORTION // source.shape[1], len(source) // _SHARE)
    for portion in source.split(max(count, 1)):  # type: ignore[no-untyped-call]
        end = row + len(portion)
        done = quantize(portion.to(device=values.device, dtype=dtype))
        values[row:end].copy_(done.values)
        scales[row:end].copy_(done.scales)
        row = end


OnProgress = Callable[[int, int], None]
"""Gets bytes loaded and bytes in all."""


class Checkpoint:
    """An open checkpoint folder; use it as a context manager, so that its files are closed."""

    def __init__(self, folder: Path) -> None:
        self._opened = open_weights(folder, "pt")

    def __enter__(self) -> Checkpoint:
        """Open all files and read their headers; `CheckpointError` names the file."""
        self._files, self._headers = self._opened.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.__exit__(None, None, None)

    def fit(self, config: ModelConfig) -> ModelConfig:
        """``config`` with the names that the tensors have here."""
        return fitted(config, self._headers)

    def check(self, config: ModelConfig) -> None:
        """`CheckpointError` unless every tensor has one use and every use has its tensor; other
        parts of a multimodal model are left out, and logged."""
        if ignored := check_weights(config, self._headers):
            _logger.info("%d tensors are left out: %s", len(ignored), list_names(ignored))
        for name in empty_biases(config, ignored):
            if self._read(name).any():
                raise CheckpointError(
                    f"{self._headers[name].file}: {name} is not 0, and {config.architecture} has "
                    "no bias there"
                )
        for name, original in duplicate_names(config).items():
            if name in self._headers and not torch.equal(self._read(name), self._read(original)):
                raise CheckpointError(
                    f"{self._headers[name].file}: {name} differs from {original}, though "
                    "config.json ties them (tie_word_embeddings)"
                )

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
        names = {
            name
            for spec in specs
            for source in spec.sources
            for name in source.tensors
            if name in self._headers
        }
        total = sum(self._headers[name].num_bytes for name in names)
        done = 0
        parameters: dict[str, Parameter] = {}
        for spec in specs:
            parts: list[Part] = []
            parameter = None
            if not spec.is_packed:
                parameter = allocate(spec, dtype, device, is_fp8=is_fp8)
            row = 0
            for source in spec.sources:
                if parameter is None:
                    parts.append(self._part(source, dtype))
                else:
                    put_rows(parameter, row, self._plain(source))
                row += source.rows
                for name in source.tensors:
                    if name in names:  # else counted: some are read for several parameters
                        names.remove(name)
                        done += self._headers[name].num_bytes
                    if on_progress is not None:
                        on_progress(done, total)
            parameters[spec.name] = join(parts) if parameter is None else parameter
        return parameters

    def _part(self, source: Source, dtype: torch.dtype) -> Part:
        """The rows of a quantised linear as memory holds them."""
        if source.scheme is None:
            return self._plain(source).to(dtype)
        packed = self._packed(source, dtype)
        return packed if source.convert is None else packed.with_rows(source.convert)

    def _plain(self, source: Source) -> Tensor:
        """The rows of a parameter as numbers, those of a quantised linear widened."""
        if source.scheme is None:
            tensor = self._read(source.name, source.part)
        else:
            tensor = dequantize(self._packed(source, torch.float32))
        return tensor if source.convert is None else source.convert(tensor)

    def _packed(self, source: Source, dtype: torch.dtype) -> PackedWeight:
        assert source.scheme is not None
        rows, columns = source.shape
        tensors = {
            name.removeprefix(f"{source.module}."): self._read(name)
            for name in source.tensors
            if name in self._headers
        }
        try:
            return unpack(source.scheme, tensors, (rows, columns), dtype)
        except ValueError as error:
            raise CheckpointError(f"{source.module}: {error}") from None

    def _read(self, name: str, part: tuple[int, int] | None = None) -> Tensor:
        file = self._headers[name].file
        try:
            if part is not None:
                rows: Tensor = self._files[file].get_slice(name)[part[0] : part[1]]
                return rows
            tensor: Tensor = self._files[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: {name} cannot be read ({error})") from None
        return tensor
