"""Linears whose weights are quantised: which product a weight gets, and that of any form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from inflight_backend.models.quantization.cpu_products import CPU_PRODUCTS, CpuProduct
from inflight_backend.models.quantization.forms import JoinedWeight, PackedWeight, split
from inflight_kernels import reference

Multiply: TypeAlias = Callable[[Any], Tensor]
MultiplyGroups: TypeAlias = Callable[[Tensor, Tensor], Tensor]
MakeLinear: TypeAlias = Callable[[Any, Tensor | None], Multiply]
MakePackedLinear: TypeAlias = Callable[
    [PackedWeight | JoinedWeight, Tensor | None, MakeLinear], Multiply
]
MakePackedExperts: TypeAlias = Callable[
    [PackedWeight | JoinedWeight, Tensor | None, int, MakeLinear], MultiplyGroups
]


class HeadPart(NamedTuple):
    """Rows of each head, and whether what is multiplied has a number for each of them, or for each
    column."""

    rows: range
    by_rows: bool


MakeHeads: TypeAlias = Callable[[Any, int, Sequence[HeadPart]], list[Multiply]]
"""`make_heads`; weights are quantised where `ParameterSpec.is_packed` says so only."""


@runtime_checkable
class HasRows(Protocol):
    """A linear that gives rows of its weight, so that no more of an embedding is kept that is the
    head too."""

    def look_up(self, numbers: Tensor) -> Tensor:
        """numbers [T] -> [T, columns]."""
        ...


def make_packed_linear(
    weight: PackedWeight | JoinedWeight,
    bias: Tensor | None,
    make_plain: MakeLinear,
    products: Sequence[type[CpuProduct]] = CPU_PRODUCTS,
    join: Callable[[list[Any]], Multiply] | None = None,
) -> Multiply:
    """A linear of plain numbers x [T, columns] -> [T, rows]; ``make_plain`` makes those of parts
    that are not quantised. On a CPU the first of ``products`` that takes a weight multiplies.
    ``join`` (`JoinedLinear`): what linears of parts become."""
    if isinstance(weight, PackedWeight):
        return _make_linear(weight, bias, products)
    parts = [
        make_plain(part, own) if isinstance(part, Tensor) else _make_linear(part, own, products)
        for part, own in weight.with_bias(bias)
    ]
    return (join or JoinedLinear)(parts)


def make_packed_experts(
    weight: PackedWeight | JoinedWeight,
    bias: Tensor | None,
    count: int,
    make_plain: MakeLinear,
    products: Sequence[type[CpuProduct]] = CPU_PRODUCTS,
) -> MultiplyGroups:
    """Linears of ``count`` experts: rows x [T, columns], sorted by expert, and ``starts``
    [count + 1] of each expert's rows -> [T, rows of a weight]. bias: [count, rows of a weight]."""
    biases = [None] * count if bias is None else list(bias)
    linears = [
        make_plain(part, bias)
        if isinstance(part, Tensor)
        else make_packed_linear(part, bias, make_plain, products)
        for part, bias in zip(split(weight, count), biases, strict=True)
    ]
    return partial(_multiply_groups, linears)


def make_heads(weight: Tensor, count: int, parts: Sequence[HeadPart]) -> list[Multiply]:
    """`reference.head_linear` of each part, of ``count`` heads whose weights [rows of a head,
    columns] follow one another."""
    heads = weight.view(count, -1, weight.shape[1])
    return [
        partial(reference.head_linear, weight=heads[:, rows.start : rows.stop], by_rows=by_rows)
        for rows, by_rows in parts
    ]


def _multiply_groups(linears: list[Multiply], x: Tensor, starts: Tensor) -> Tensor:
    if not len(x):  # for the number of columns
        return linears[0](x)
    bounds = zip(linears, pairwise(starts.tolist()), strict=True)
    return torch.cat([linear(x[start:end]) for linear, (start, end) in bounds if start < end])


def _make_linear(
    weight: PackedWeight, bias: Tensor | None, products: Sequence[type[CpuProduct]]
) -> Multiply:
    if weight.factors is not None:
        plain = replace(weight, factors=None)
        return ScaledLinear(_make_linear(plain, bias, products), weight.factors)
    if weight.values.is_cpu:
        for product in products:
            if product.takes(weight):
                return product(weight, bias)
    return DequantizedLinear(weight, bias)


def dequantize(weight: PackedWeight) -> Tensor:
    """The weight [rows, columns] in its dtype, rounded once."""
    wide = reference.dequantize(
        weight.values, weight.scales, weight.wide_zeros, weight.group_size, weight.codebook
    )
    if weight.order is not None:
        wide = torch.empty_like(wide).index_copy_(1, weight.order.long(), wide)
    if weight.factors is not None:
        wide = wide * weight.factors.to(wide)
    return wide.to(weight.dtype)


class RowTable:
    """Rows of a weight, which are widened when they are looked up."""

    __slots__ = ("_weight",)

    def __init__(self, weight: Tensor | PackedWeight) -> None:
        self._weight = weight

    def __call__(self, numbers: Tensor) -> Tensor:
        """numbers [T] -> [T, columns]."""
        if isinstance(self._weight, Tensor):
            return self._weight[numbers]
        return dequantize(self._weight.with_rows(lambda rows: rows[numbers]))


class DequantizedLinear:
    """``x @ weight.T + bias`` by widening the whole weight each time: right for every form."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows]."""
        return functional.linear(x, dequantize(self._weight), self._bias)


class ScaledLinear:
    """A linear of an input whose columns are multiplied by ``factors`` [columns] first."""

    __slots__ = ("_factors", "_linear")

    def __init__(self, linear: Multiply, factors: Tensor) -> None:
        self._linear, self._factors = linear, factors

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows]."""
        return self._linear(x * self._factors)


class JoinedLinear:
    """Linears of one input, their answers side by side."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Multiply]) -> None:
        self._parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows of all]."""
        return torch.cat([each(x) for each in self._parts], dim=-1)
