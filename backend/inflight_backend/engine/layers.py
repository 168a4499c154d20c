"""The linear layers of the decoder: packed for the CPU where that is faster, or in FP8."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

_MANY_TOKENS = 512
_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0  # largest finite float8_e4m3fn


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


Parameter: TypeAlias = Tensor | Fp8Weight
"""A parameter of the decoder as it comes from a checkpoint."""


class Linear:
    """``x @ weight.T + bias`` for x [num_tokens, columns] and weight [rows, columns].

    On a CPU in float32 the weight is kept in oneDNN's blocked layout: products with few tokens are
    1.1 to 1.6 times as fast, since nothing has to be rearranged first. With many tokens the plain
    product is faster by a tenth or two, which more than pays for a plain copy made on the fly.
    """

    __slots__ = ("_bias", "_is_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        is_float32_on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._is_packed = is_float32_on_cpu and _can_pack()
        self._weight = _pack(weight) if self._is_packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows]."""
        if self._is_packed:
            if len(x) < _MANY_TOKENS:
                return _packed_linear(x, self._weight, self._bias)
            return functional.linear(x, self._weight.to_dense(), self._bias)
        return functional.linear(x, self._weight, self._bias)


@lru_cache(maxsize=1)
def _can_pack() -> bool:
    """True if this torch has the operators of its own compiler for packed weights.

    They are not public, so they must prove that they still do what they did.
    """
    x, weight = torch.ones(2, 3), torch.arange(12.0).view(4, 3)
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
    bfloat16 out; elsewhere it is taken in float32, for tests. Both dimensions of the weight must
    be multiples of 16 on CUDA (`config.resolve` sees to it).
    """

    __slots__ = ("_bias", "_dtype", "_weight")

    def __init__(self, weight: Parameter, bias: Tensor | None = None) -> None:
        if isinstance(weight, Tensor):
            weight = Fp8Weight(quantize(weight), weight.dtype)
        self._weight, self._dtype = weight
        self._bias = bias

    def __call__(self, x: Quantized) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows] in the dtype of the first weight."""
        weight, scales = self._weight
        if x.values.is_cuda:
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
        product = functional.linear(x.values.float(), weight.float()) * x.scales * scales.t()
        return (product if self._bias is None else product + self._bias).to(self._dtype)


def quantize(x: Tensor) -> Quantized:
    """Each row of x [T, n] scaled so that its largest number becomes 448, rounded to nearest."""
    wide = x.float()
    # The floor keeps a row of zeros finite.
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / _FP8_MAX
    return Quantized((wide / scales).clamp(-_FP8_MAX, _FP8_MAX).to(_FP8), scales)
