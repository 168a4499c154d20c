"""The linear layers of the decoder: packed for the CPU where that is faster, or in FP8."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from inflight_backend.log import get_logger
from inflight_backend.models.quantization.forms import JoinedWeight, PackedWeight

_logger = get_logger(__name__)

_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0  # largest finite float8_e4m3fn

# What torch says where cuBLAS or CUTLASS has no product of a shape with a scale per row.
_NO_SUCH_PRODUCT = ("CUBLAS_STATUS_NOT_SUPPORTED", "cutlass cannot")
_ADA, _ADA_IS_MENDED = (8, 9), (2, 12)
_Shape: TypeAlias = tuple[int, int, int]
_refused: set[_Shape] = set()


class Quantized(NamedTuple):
    """Rows in FP8: ``values`` [T, n] float8_e4m3fn times ``scales`` [T, 1] float32."""

    values: Tensor
    scales: Tensor


Activation: TypeAlias = Tensor | Quantized
"""What a linear layer reads."""


class Fp8Weight(NamedTuple):
    """A linear's weight as it is kept: ``rows`` [rows, columns], and the dtype it answers in."""

    rows: Quantized
    dtype: torch.dtype


Parameter: TypeAlias = Tensor | Fp8Weight | PackedWeight | JoinedWeight
"""A parameter of the decoder as it comes from a checkpoint."""


def parameter_tensors(parameter: Parameter) -> list[Tensor]:
    """What of it takes memory."""
    if isinstance(parameter, Tensor):
        return [parameter]
    return list(parameter.rows) if isinstance(parameter, Fp8Weight) else parameter.tensors


class Linear:
    """``x @ weight.T + bias`` for x [num_tokens, columns] and weight [rows, columns].

    On a CPU the weight is kept in oneDNN's blocked layout, so that no product has to rearrange it
    first.
    """

    __slots__ = ("_bias", "_is_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._is_packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
        self._weight = _pack(weight) if self._is_packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows]."""
        if self._is_packed:
            return _packed_linear(x, self._weight, self._bias)
        return functional.linear(x, self._weight, self._bias)


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """True if this torch has the operators of its own compiler for packed weights of ``dtype``.

    They are not public, and not every CPU has them in bfloat16, so they must prove that they do
    what they did.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    x, weight = torch.ones(2, 3, dtype=dtype), torch.arange(12.0).view(4, 3).to(dtype)
    try:
        answer = _packed_linear(x, _pack(weight), None)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(answer, functional.linear(x, weight))


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    answer: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return answer


class Fp8Linear:
    """``x @ weight.T + bias`` in FP8, with a scale per row of the weight and per token.

    Each number of the weight is rounded to 4 significant bits: when it is loaded (`Fp8Weight`), so
    that no other form of it is ever kept, or here. On CUDA the product is cuBLAS's or CUTLASS's, in
    bfloat16 out; on other devices float32, for tests. Both dimensions of the weight must
    be multiples of 16 on CUDA (`config.resolve` sees to it).

    A library may have no product with a scale per row for some shapes: cuBLAS on Hopper refused few
    tokens with many columns (pytorch/ao issue 4582: 256 and 9,216). `_without_library` makes those.
    """

    __slots__ = ("_bias", "_dtype", "_weight")

    def __init__(self, weight: Tensor | Fp8Weight, bias: Tensor | None = None) -> None:
        if isinstance(weight, Tensor):
            weight = Fp8Weight(quantize(weight), weight.dtype)
        self._weight, self._dtype = weight
        self._bias = bias

    def __call__(self, x: Quantized) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows] in the dtype of the first weight."""
        product = self._library_product(x) if x.values.is_cuda else self._in_float32(x)
        return self._without_library(x) if product is None else product

    def _in_float32(self, x: Quantized) -> Tensor:
        weight, scales = self._weight
        product = functional.linear(x.values.float(), weight.float()) * x.scales * scales.t()
        return (product if self._bias is None else product + self._bias).to(self._dtype)

    def _without_library(self, x: Quantized) -> Tensor:
        return self._in_float32(x)

    def _library_product(self, x: Quantized) -> Tensor | None:
        """None if the library has none. Refusing is its choice of a kernel: nothing has been
        launched then, and what is recorded has run before, so a recording never holds a refusal."""
        weight, scales = self._weight
        shape = (len(x.values), *weight.shape)
        if shape in _refused or not _takes_row_scales(weight.device):
            return None
        try:
            # Row-major times column-major, as the tensor cores want it.
            return torch._scaled_mm(
                x.values,
                weight.t(),
                scale_a=x.scales,
                scale_b=scales.t(),
                bias=self._bias,
                out_dtype=self._dtype,
                use_fast_accum=True,
            )
        except RuntimeError as error:
            if not any(text in str(error) for text in _NO_SUCH_PRODUCT):
                raise
            if not _refused:
                _logger.warning(
                    "the library has no FP8 product with a scale per row for %d tokens and a "
                    "weight of %d x %d: it is made without it, there and wherever else it is "
                    "refused",
                    *shape,
                )
            _refused.add(shape)
        return None


def is_refused(num_tokens: int, rows: int, columns: int) -> bool:
    """Whether the library refused such a product (see `Fp8Linear`)."""
    return (num_tokens, rows, columns) in _refused


@cache
def _takes_row_scales(device: torch.device) -> bool:
    """False on Ada with a torch before 2.12: its kernel there ignores the current stream, so it can
    neither be recorded nor run on another one (pytorch issue 177651)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _ADA:
        return True
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= _ADA_IS_MENDED


def quantize(x: Tensor) -> Quantized:
    """Each row of x [T, n] scaled so that its largest number becomes 448, rounded to nearest."""
    wide = x.float()
    # The floor keeps a row of zeros finite.
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / _FP8_MAX
    return Quantized((wide / scales).clamp(-_FP8_MAX, _FP8_MAX).to(_FP8), scales)
