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
from torch.nn import functional

from inflight_backend.models.ops import MakeExperts
from inflight_backend.models.quantization.forms import (
    JoinedWeight,
    PackedWeight,
    Part,
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
    make_experts: MakeExperts,
    is_deterministic: bool,
) -> MultiplyGroups:
    """`linears.make_packed_experts`, in one launch for all experts of one form; ``make_experts``
    makes those that are not quantised."""
    del make_plain
    make = partial(_packed_experts, is_deterministic=is_deterministic)
    if isinstance(weight, PackedWeight):
        order, factors = (
            None if each is None else each.expand(count, -1)
            for each in (weight.order, weight.factors)
        )
        return make(replace(weight, order=None, factors=None), order, factors, bias)

    def make_alike(parts: Sequence[Part], own_bias: Tensor | None) -> MultiplyGroups:
        wide = [each for each in parts if isinstance(each, Tensor)]
        if wide:
            return make_experts(torch.stack(wide), own_bias)
        return make(*_stack([each for each in parts if isinstance(each, PackedWeight)]), own_bias)

    # Gate and up of an expert may differ.
    num_parts = 2 if any(isinstance(each, JoinedWeight) for each in split(weight, count)) else 1
    parts = split(weight, num_parts * count)
    plain_parts = [each for each in parts if not isinstance(each, JoinedWeight)]
    biases = [None] * num_parts if bias is None else bias.chunk(num_parts, 1)
    made = [_mixed(plain_parts[i::num_parts], own, make_alike) for i, own in enumerate(biases)]
    return made[0] if num_parts == 1 else partial(_side_by_side, made)


def _side_by_side(parts: Sequence[MultiplyGroups], x: Tensor, starts: Tensor) -> Tensor:
    return torch.cat([each(x, starts) for each in parts], 1)


def _packed_experts(
    weight: PackedWeight,
    orders: Tensor | None,
    factors: Tensor | None,
    bias: Tensor | None,
    *,
    is_deterministic: bool,
) -> MultiplyGroups:
    """Experts whose rows are those of ``weight``; ``orders`` and ``factors`` of their columns
    [experts, columns]."""
    bias = None if bias is None else bias.flatten()
    linear = TritonPackedLinear(weight, bias, orders=orders, is_deterministic=is_deterministic)
    return linear if factors is None else ScaledExperts(linear, factors)


def _stack(experts: Sequence[PackedWeight]) -> tuple[PackedWeight, Tensor | None, Tensor | None]:
    """Experts of one form, whose columns have orders or factors of their own, as one weight, and
    those [count, columns]; None: there are none."""
    stacked = join_rows([replace(each, order=None, factors=None) for each in experts])
    orders = factors = None
    if any(each.order is not None for each in experts):
        plain = torch.arange(stacked.columns, dtype=torch.int32, device=stacked.values.device)
        orders = torch.stack([plain if each.order is None else each.order for each in experts])
    if experts[0].factors is not None:
        factors = torch.stack([each.factors for each in experts if each.factors is not None])
    return stacked, orders, factors


def _mixed(
    experts: Sequence[Part],
    bias: Tensor | None,
    make: Callable[[Sequence[Part], Tensor | None], MultiplyGroups],
) -> MultiplyGroups:
    """Experts of any forms, by what ``make`` makes of those of one form and their biases."""
    alike: dict[object, list[int]] = {}
    for index, expert in enumerate(experts):
        alike.setdefault(_kind(expert), []).append(index)
    groups = [
        (make([experts[index] for index in each], None if bias is None else bias[each]), each)
        for each in alike.values()
    ]
    first = experts[0]
    device = (first if isinstance(first, Tensor) else first.values).device
    return groups[0][0] if len(groups) == 1 else MixedExperts(groups, device)


def _kind(expert: Part) -> object:
    """Equal for experts that are multiplied in one launch."""
    if isinstance(expert, Tensor):
        return None
    table = expert.codebook
    return expert.form, None if table is None else tuple(table.tolist())


class MixedExperts:
    """Linears of experts of several forms, each form with a product of its own."""

    __slots__ = ("_groups",)

    def __init__(
        self, groups: Sequence[tuple[MultiplyGroups, Sequence[int]]], device: torch.device
    ) -> None:
        """Of each form the product, and the experts that have it."""
        count = sum(len(experts) for _, experts in groups)
        self._groups = []
        for multiply, experts in groups:
            chosen = torch.tensor(experts, device=device)
            is_own = torch.zeros(count, dtype=torch.bool, device=device)
            is_own[chosen] = True
            self._groups.append((multiply, chosen, is_own))

    def __call__(self, x: Tensor, starts: Tensor) -> Tensor:
        """x [T, columns], ``starts`` [count + 1] of the rows of each expert -> [T, rows]."""
        experts, answer = _experts_of_rows(x, starts), x.new_empty(0)
        for index, (multiply, chosen, is_of_form) in enumerate(self._groups):
            is_own = is_of_form[experts]
            # Own rows first; what is behind them gets no answer, so that nothing waits for a count.
            order = (~is_own).int().argsort(stable=True)
            own_starts = functional.pad(starts.diff()[chosen].cumsum(0, dtype=torch.int32), (1, 0))
            found = multiply(x[order], own_starts)
            placed = torch.empty_like(found)
            placed[order] = found
            answer = torch.where(is_own[:, None], placed, answer) if index else placed
        return answer


def _experts_of_rows(x: Tensor, starts: Tensor) -> Tensor:
    """The expert of each row of x; rows behind the last one's count as his."""
    rows_of_x = torch.arange(len(x), dtype=starts.dtype, device=x.device)
    return torch.searchsorted(starts[1:-1], rows_of_x, right=True)


class ScaledExperts:
    """Linears of experts, of an input whose columns are multiplied by the ``factors`` [count,
    columns] of its rows' experts first."""

    __slots__ = ("_factors", "_multiply")

    def __init__(self, multiply: MultiplyGroups, factors: Tensor) -> None:
        self._multiply, self._factors = multiply, factors

    def __call__(self, x: Tensor, starts: Tensor) -> Tensor:
        """x [T, columns], ``starts`` [count + 1] of the rows of each expert -> [T, rows]."""
        return self._multiply(x * self._factors[_experts_of_rows(x, starts)], starts)


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
