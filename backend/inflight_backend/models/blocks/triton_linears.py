"""Linears whose weights are quantised, in the Triton language; importing this needs triton.

Weights stay as they are: `quantized_linear` widens them in registers. Where a scheme quantises what
a linear reads, and the device multiplies numbers of that type, both factors are of few bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

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
    HeadPart,
    JoinedLinear,
    MakeLinear,
    Multiply,
    MultiplyGroups,
    ScaledLinear,
    dequantize,
    make_heads,
)
from inflight_kernels import launch
from inflight_kernels.ops.linear.head_linear import head_linear
from inflight_kernels.ops.linear.quantize_fp8 import quantize_fp8
from inflight_kernels.ops.linear.quantize_int8 import quantize_int8
from inflight_kernels.ops.linear.quantized_linear import (
    Tile,
    choose_tile,
    prepare,
    quantized_linear,
    rows,
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
    more than the order and the factors of their columns."""
    del make_plain
    if isinstance(weight, PackedWeight):
        stacked = replace(weight, order=None, factors=None)
        orders, factors = (
            None if each is None else each.expand(count, -1)
            for each in (weight.order, weight.factors)
        )
    else:
        stacked, orders, factors = _stack(weight, count)
    linear = TritonPackedLinear(
        stacked,
        None if bias is None else bias.flatten(),
        orders=orders,
        is_deterministic=is_deterministic,
    )
    return linear if factors is None else ScaledExperts(linear, factors)


def _stack(weight: JoinedWeight, count: int) -> tuple[PackedWeight, Tensor | None, Tensor | None]:
    """Experts whose columns have orders or factors of their own as one weight, and those [count,
    columns]; None: there are none."""
    experts = [each for each in split(weight, count) if isinstance(each, PackedWeight)]
    if len(experts) < count or len({each.form for each in experts}) > 1:
        raise ConfigurationError(
            "the experts of a layer are not all quantised alike, and there is no kernel for such "
            "ones on a GPU; use device=cpu"
        )
    stacked = join_rows([replace(each, order=None, factors=None) for each in experts])
    orders = factors = None
    if any(each.order is not None for each in experts):
        plain = torch.arange(stacked.columns, dtype=torch.int32, device=stacked.values.device)
        orders = torch.stack([plain if each.order is None else each.order for each in experts])
    if experts[0].factors is not None:
        factors = torch.stack([each.factors for each in experts if each.factors is not None])
    return stacked, orders, factors


class ScaledExperts:
    """Linears of experts, of an input whose columns are multiplied by the ``factors`` [count,
    columns] of its rows' experts first."""

    __slots__ = ("_factors", "_multiply")

    def __init__(self, multiply: MultiplyGroups, factors: Tensor) -> None:
        self._multiply, self._factors = multiply, factors

    def __call__(self, x: Tensor, starts: Tensor) -> Tensor:
        """x [T, columns], ``starts`` [count + 1] of the rows of each expert -> [T, rows]."""
        rows_of_x = torch.arange(len(x), dtype=starts.dtype, device=x.device)
        experts = torch.searchsorted(starts[1:], rows_of_x, right=True)
        return self._multiply(x * self._factors[experts], starts)


def make_triton_heads(
    weight: Tensor | PackedWeight,
    count: int,
    parts: Sequence[HeadPart],
    *,
    is_deterministic: bool,
) -> list[Multiply]:
    """`linears.make_heads`."""
    if isinstance(weight, Tensor):
        return make_heads(weight, count, parts)
    multiply = partial(
        head_linear,
        values=weight.values,
        scales=weight.scales,
        zeros=weight.wide_zeros,
        group_size=weight.group_size,
        order=weight.order,
        codebook=weight.codebook,
        tile_tokens=_TILE_TOKENS if is_deterministic else None,
    )
    return [_with_factors(multiply, part, weight.factors) for part in parts]


def _with_factors(
    multiply: Callable[..., Tensor], part: HeadPart, factors: Tensor | None
) -> Multiply:
    """The product of a part, whose columns are multiplied by ``factors`` [columns]."""
    rows, by_rows = part
    product = partial(multiply, by_rows=by_rows, first_row=rows.start, num_rows=len(rows))
    if factors is None:
        return product
    return (lambda x: product(x) * factors) if by_rows else (lambda x: product(x * factors))


class TritonPackedLinear:
    """``x @ weight.T + bias`` by `quantized_linear`; of experts too, with ``orders`` [count,
    columns] of their columns."""

    __slots__ = ("_bias", "_dtype", "_input", "_is_deterministic", "_order", "_weight")

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
        self._order = weight.order
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

    def look_up(self, numbers: Tensor) -> Tensor:
        """Rows of the weight of a linear: numbers [T] -> [T, columns]."""
        weight = self._weight
        values, scales, zeros = rows(weight, numbers)
        return dequantize(
            PackedWeight(
                values, scales, zeros, self._order, weight.group_size, self._dtype,
                codebook=weight.codebook,
            )
        )  # fmt: skip

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
