"""Linears whose weights are quantised, in the Triton language; importing this needs triton.

Weights stay as they are: `quantized_linear` widens them in registers. Where a scheme quantises what
a linear reads, and the device multiplies numbers of that type, both factors are of few bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from inflight_backend.errors import ConfigurationError
from inflight_backend.models.quantization.forms import (
    JoinedWeight,
    PackedWeight,
    join_rows,
    split,
)
from inflight_backend.models.quantization.linears import (
    JoinedLinear,
    MakeLinear,
    Multiply,
    MultiplyGroups,
    ScaledLinear,
)
from inflight_kernels import launch
from inflight_kernels.ops.linear.quantize_fp8 import quantize_fp8
from inflight_kernels.ops.linear.quantize_int8 import quantize_int8
from inflight_kernels.ops.linear.quantized_linear import (
    Tile,
    choose_tile,
    prepare,
    quantized_linear,
)

_FP8 = torch.float8_e4m3fn
_FP8_CAPABILITY = 89
_FP8_GROUP = 128  # columns that share a scale in activations, as in weights of 128 x 128
_LIBRARY_STEP = 16  # of rows and columns in the library's FP8 product
_TILE_TOKENS, _EXPERT_TILE_TOKENS = 64, 16  # in deterministic mode


def make_triton_packed_linear(
    weight: PackedWeight | JoinedWeight,
    bias: Tensor | None,
    make_plain: MakeLinear,
    *,
    make_fp8: Callable[[PackedWeight, Tensor | None], Multiply],
    is_deterministic: bool,
) -> Multiply:
    """`linears.make_packed_linear`; ``make_fp8`` makes those of FP8 by FP8 with scales of rows."""
    if isinstance(weight, JoinedWeight):
        parts = [
            make_plain(part, own)
            if isinstance(part, Tensor)
            else make_triton_packed_linear(
                part, own, make_plain, make_fp8=make_fp8, is_deterministic=is_deterministic
            )
            for part, own in weight.with_bias(bias)
        ]
        return JoinedLinear(parts)
    if weight.factors is not None:
        linear = make_triton_packed_linear(
            replace(weight, factors=None),
            bias,
            make_plain,
            make_fp8=make_fp8,
            is_deterministic=is_deterministic,
        )
        return ScaledLinear(linear, weight.factors)
    if _fits_library(weight):
        return make_fp8(weight, bias)
    return TritonPackedLinear(weight, bias, is_deterministic=is_deterministic)


def make_triton_packed_experts(
    weight: PackedWeight | JoinedWeight,
    bias: Tensor | None,
    count: int,
    make_plain: MakeLinear,
    *,
    is_deterministic: bool,
) -> MultiplyGroups:
    """`linears.make_packed_experts` in one launch. `ConfigurationError` where experts differ in
    more than the order of their columns."""
    del make_plain
    stacked, orders = (weight, None) if isinstance(weight, PackedWeight) else _stack(weight, count)
    if stacked.factors is not None:
        raise ConfigurationError(
            "what a layer's experts read has factors of its columns (pre_quant_scale), and there "
            "is no kernel for such experts on a GPU; use device=cpu"
        )
    if stacked.order is not None:
        orders = stacked.order.expand(count, -1)
        stacked = replace(stacked, order=None)
    return TritonPackedLinear(
        stacked,
        None if bias is None else bias.flatten(),
        orders=orders,
        is_deterministic=is_deterministic,
    )


def _stack(weight: JoinedWeight, count: int) -> tuple[PackedWeight, Tensor]:
    """Experts whose columns have orders of their own as one weight, and those [count, columns]."""
    experts = [each for each in split(weight, count) if isinstance(each, PackedWeight)]
    if len(experts) < count or len({each.form for each in experts}) > 1:
        raise ConfigurationError(
            "the experts of a layer are not all quantised alike, and there is no kernel for such "
            "ones on a GPU; use device=cpu"
        )
    columns = experts[0].columns
    plain = torch.arange(columns, dtype=torch.int32, device=experts[0].values.device)
    orders = [plain if each.order is None else each.order for each in experts]
    return join_rows([replace(each, order=None) for each in experts]), torch.stack(orders)


class TritonPackedLinear:
    """``x @ weight.T + bias`` by `quantized_linear`; of experts too, with ``orders`` [count,
    columns] of their columns."""

    __slots__ = ("_bias", "_dtype", "_input", "_is_deterministic", "_weight")

    def __init__(
        self,
        weight: PackedWeight,
        bias: Tensor | None,
        *,
        orders: Tensor | None = None,
        is_deterministic: bool,
    ) -> None:
        if orders is None and weight.order is not None:
            orders = weight.order[None]
        self._input = None if orders is not None else _input_of(weight)
        self._weight = prepare(
            weight.values,
            weight.scales,
            weight.wide_zeros,
            group_size=weight.group_size,
            order=orders,
            codebook=weight.codebook,
            is_plain=self._input is not None,
        )
        self._dtype, self._bias, self._is_deterministic = weight.dtype, bias, is_deterministic

    def __call__(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """x [T, columns] -> [T, rows]; with ``starts`` [count + 1] of the rows of each expert."""
        weight, scales = self._weight, None
        x = x.contiguous()
        if self._input == torch.int8:
            x, scales = quantize_int8(x)
        elif self._input == _FP8:
            is_whole = len(weight.scales) == 1
            x, scales = quantize_fp8(x, None if is_whole else _FP8_GROUP)
        return quantized_linear(
            x,
            weight,
            self._bias,
            x_scales=scales,
            starts=starts,
            out_dtype=self._dtype,
            tile=self._tile(starts) if self._is_deterministic else None,
        )

    def _tile(self, starts: Tensor | None) -> Tile:
        """The same whatever a step holds."""
        weight, count = self._weight, 1 if starts is None else len(starts) - 1
        num_tokens = _TILE_TOKENS if starts is None else count * _EXPERT_TILE_TOKENS
        dtype = self._input or self._dtype
        return choose_tile(weight, num_tokens, len(weight.values) // count, dtype, count)


def _input_of(weight: PackedWeight) -> torch.dtype | None:
    """The type of few bits that x gets; None for that of the model. (float32 is for exactness: FP8
    stays out of it.)"""
    dtype, num_groups = weight.values.dtype, weight.scales.shape[1]
    if not weight.quantizes_input or weight.zeros is not None or weight.order is not None:
        return None
    if dtype == torch.int8 and num_groups == 1:
        return dtype
    fits = num_groups == 1 or weight.group_size == _FP8_GROUP
    is_fast = weight.dtype != torch.float32 and launch.capability() >= _FP8_CAPABILITY
    return dtype if dtype == _FP8 and fits and is_fast else None


def _fits_library(weight: PackedWeight) -> bool:
    """Whether the FP8 product of `Fp8Linear` is for it."""
    sizes = weight.values.shape
    return (
        _input_of(weight) == _FP8
        and weight.scales.shape[1] == 1
        and weight.dtype == torch.bfloat16
        and not any(size % _LIBRARY_STEP for size in sizes)
    )
