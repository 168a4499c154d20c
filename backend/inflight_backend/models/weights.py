"""Streams the tensors of a checkpoint into parameters that are allocated once.

Headers are compared with what the model needs before a byte of weights is read (`check_weights`).
FP8 linears are quantised on the way: a scale belongs to a row, so rows may come in any portions and
the result is that of the whole weight at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from inflight_backend.errors import CheckpointError
from inflight_backend.gguf_files import GgufFile
from inflight_backend.log import get_logger
from inflight_backend.models.checkpoint_files import list_names, open_weights
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.layers import Fp8Weight, Parameter, Quantized, quantize
from inflight_backend.models.parallel.place import WHOLE_EXPERTS
from inflight_backend.models.parallel.reading import cut_rows, read_cut
from inflight_backend.models.parameters import (
    Cut,
    ParameterSpec,
    Source,
    check_weights,
    duplicate_names,
    empty_biases,
    fitted,
    kv_scale_names,
)
from inflight_backend.models.quantization.forms import PackedWeight, Part, join
from inflight_backend.models.quantization.linears import dequantize
from inflight_backend.models.quantization.rounding import round_weight
from inflight_backend.models.quantization.schemes import GGUF_SCHEMES, Scheme
from inflight_backend.models.quantization.unpacking import check_scales, unpack

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
        for name in kv_scale_names(config):
            scale = float(self._read(name))
            if not 0 < scale < float("inf"):
                raise CheckpointError(
                    f"{self._headers[name].file}: {name} is {scale}; a scale must be above 0"
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
        quantization: str = "none",
        backend: str = "torch",
    ) -> dict[str, Parameter]:
        """Every parameter by name, on the device, as the linears of ``backend`` read it; tensors go
        there one at a time.

        With ``quantization`` fp8, int8 or int4 the weights of linears are rounded on their way,
        some rows at a time, so that the device never holds more than the end state and one tensor.
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
            scheme = spec.scheme_at_load(quantization)
            if not spec.is_packed(backend) and scheme is None:
                kept = spec.kept_dtype(str(dtype).removeprefix("torch."), backend)
                parameter = allocate(
                    spec, getattr(torch, kept), device, is_fp8=quantization == "fp8"
                )
            row = 0
            for source in spec.sources:
                if parameter is None:
                    part = self._part(source, dtype, device, scheme, backend)
                    if spec.num_experts:
                        _check_inputs_of_expert(part, source)
                    parts.append(part)
                else:
                    first = row
                    for rows in self._plain_portions(source):
                        put_rows(parameter, first, rows)
                        first += len(rows)
                row += source.rows
                for name in source.tensors:
                    if name in names:  # else counted: some are read for several parameters
                        names.remove(name)
                        done += self._headers[name].num_bytes
                    if on_progress is not None:
                        on_progress(done, total)
            parameters[spec.name] = join(parts) if parameter is None else parameter
        return parameters

    def weight(self, source: Source) -> Tensor:
        """A whole linear as the checkpoint has it, as numbers."""
        if source.scheme is not None:
            return dequantize(self._packed(source, torch.float32))
        return self._read(source.name)

    def _part(
        self,
        source: Source,
        dtype: torch.dtype,
        device: str,
        at_load: Scheme | None,
        backend: str,
    ) -> Part:
        """The rows of a quantised linear as memory holds them for ``backend``; ``at_load``: one
        that is not is rounded so."""
        if at_load is not None:
            return round_weight(at_load, self._plain(source).to(device), dtype)
        if source.scheme is None or not source.scheme.stays_packed(backend):
            return self._plain(source).to(device=device, dtype=dtype)
        packed = _cut_packed(self._packed(source, dtype, device), source)
        return _with_kept_scales(packed, source.scheme.kept_scales(backend))

    def _plain_portions(self, source: Source) -> Iterator[Tensor]:
        """The rows of a parameter as numbers, in portions where they are widened as they lie."""
        if source.scheme is None or source.convert is not None or source.cut != Cut():
            yield self._plain(source)
            return
        packed = self._packed(source, torch.float32)
        count = max(_PORTION // source.shape[1], 1)
        for start in range(0, packed.rows, count):
            rows = slice(start, start + count)
            yield dequantize(packed.with_rows(partial(_sliced, rows=rows)))

    def _plain(self, source: Source) -> Tensor:
        """The rows of a parameter as numbers, those of a quantised linear widened."""
        if source.scheme is not None:
            tensor = dequantize(self._packed(source, torch.float32))
        else:
            file = self._headers[source.name].file
            if source.cut != Cut() and not isinstance(opened := self._files[file], GgufFile):
                with _named(file, source.name):
                    return read_cut(opened.get_slice(source.name), source)
            tensor = self._read(source.name, source.part)
        return cut_rows(tensor if source.convert is None else source.convert(tensor), source.cut)

    def _packed(self, source: Source, dtype: torch.dtype, device: str = "cpu") -> PackedWeight:
        assert source.scheme is not None
        rows, columns = source.shape
        ends = {name: end for end, name in source.places.items()}
        tensors = {
            end: self._read(name, source.part)
            if source.expert is None
            else self._read_expert(name, source)
            for name, end in ends.items()
            if name in self._headers
        }
        for name, stored in source.tensors.items():
            if stored.scale and name in self._headers:
                try:
                    check_scales(name, tensors[ends[name]], stored.scale)
                except ValueError as error:
                    raise CheckpointError(f"{self._headers[name].file}: {error}") from None
        # Tables that blocks are looked up in lie on the host.
        place = "cpu" if source.scheme.layout in GGUF_SCHEMES else device
        try:
            there = {end: each.to(place) for end, each in tensors.items()}
            return unpack(source.scheme, there, (rows, columns), dtype).to(device)
        except ValueError as error:
            raise CheckpointError(f"{source.module}: {error}") from None

    def _read_expert(self, name: str, source: Source) -> Tensor:
        """What of a stacked tensor is the expert's, [outputs, inputs]; or the number for all."""
        expert = source.expert
        assert expert is not None
        if self._headers[name].shape in ((), (1,)):
            return self._read(name)
        tensor = self._read(name, (expert.index, expert.index + 1))[0]
        return tensor.t() if expert.is_transposed and tensor.dim() == 2 else tensor

    def _read(self, name: str, part: tuple[int, int] | None = None) -> Tensor:
        file = self._headers[name].file
        if isinstance(opened := self._files[file], GgufFile):
            return _from_bytes(opened, name, part)
        with _named(file, name):
            if part is not None:
                rows: Tensor = opened.get_slice(name)[part[0] : part[1]]
                return rows
            tensor: Tensor = opened.get_tensor(name)
            return tensor


@contextmanager
def _named(file: str, name: str) -> Iterator[None]:
    """Errors while ``name`` is read say so."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: {name} cannot be read ({error})") from None


def _with_kept_scales(packed: PackedWeight, dtype: str) -> PackedWeight:
    """The same with scales of that type again, in which they came; "": as they are."""
    if packed.dtype != torch.float32 or not dtype:
        return packed
    return replace(packed, scales=packed.scales.to(getattr(torch, dtype)))


def _cut_packed(packed: PackedWeight, source: Source) -> PackedWeight:
    """The rows of a parameter, and what of them a rank holds."""
    if source.convert is not None:
        packed = packed.with_rows(source.convert)
    cut = source.cut
    if cut.rows is not None:
        packed = packed.with_rows(lambda rows: cut_rows(rows, Cut(cut.rows)))
    try:
        return packed if cut.columns is None else packed.with_columns(cut.columns)
    except ValueError as error:
        way_out = f", or {WHOLE_EXPERTS}" if ".experts." in source.module else ""
        raise CheckpointError(f"{source.module}: {error}{way_out}") from None


def _check_inputs_of_expert(part: Part, source: Source) -> None:
    if isinstance(part, PackedWeight) and part.inputs is not None:
        raise CheckpointError(
            f"{source.module}: its columns are ordered by activation (desc_act), and several ranks "
            f"cannot hold a part of an expert's; use tensor_parallel_size 1, or {WHOLE_EXPERTS}"
        )


def give_back_freed_memory() -> None:
    """What loading has freed, to the system: glibc keeps the pieces of linears that were put into
    another order (of 1.1 B parameters in 4 bits 850 MiB beside 730 in use)."""
    with suppress(OSError, AttributeError):  # of another library
        ctypes.CDLL(None).malloc_trim(0)


def _sliced(tensor: Tensor, rows: slice) -> Tensor:
    return tensor[rows]


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _from_bytes(file: GgufFile, name: str, part: tuple[int, int] | None) -> Tensor:
    """Rows of a tensor: numbers, or bytes [rows, bytes of a row] of a quantised one."""
    rows = torch.from_numpy(file.rows(name, part).copy())
    tensor = file.tensors[name]
    if tensor.dtype not in _PLAIN:
        return rows
    plain = rows.view(_PLAIN[tensor.dtype])
    return plain[0] if len(tensor.shape) == 1 else plain
