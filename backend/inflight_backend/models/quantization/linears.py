"""Linears whose weights are quantised, for a CPU.

Integers have products of their own in bfloat16; float32 is for exactness, and its products of few
bits are slower than widening (milliseconds of one thread, 2048 x 2048, 1 / 8 / 32 tokens: bfloat16
linear 0.4 / 0.6 / 1.8, 4 bits 0.2 / 0.8 / 3.1, 8 bits 0.2 / 0.8 / 3.3, 8 bits times 8 bits
0.1 / 0.9 / 1.3).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from inflight_backend.models.quantization.forms import JoinedWeight, PackedWeight, split
from inflight_kernels import reference

Multiply: TypeAlias = Callable[[Any], Tensor]
MultiplyGroups: TypeAlias = Callable[[Tensor, Tensor], Tensor]
MakeLinear: TypeAlias = Callable[[Any, Tensor | None], Multiply]


def make_packed_linear(
    weight: PackedWeight | JoinedWeight, bias: Tensor | None, make_plain: MakeLinear
) -> Multiply:
    """A linear of plain numbers x [T, columns] -> [T, rows]; ``make_plain`` makes those of parts
    that are not quantised."""
    if isinstance(weight, PackedWeight):
        return _make_linear(weight, bias)
    parts = [
        make_plain(each, None) if isinstance(each, Tensor) else _make_linear(each, None)
        for each in weight.parts
    ]
    return JoinedLinear(parts, bias)


def make_packed_experts(
    weight: PackedWeight | JoinedWeight, bias: Tensor | None, count: int, make_plain: MakeLinear
) -> MultiplyGroups:
    """Linears of ``count`` experts: rows x [T, columns], sorted by expert, and ``starts``
    [count + 1] of each expert's rows -> [T, rows of a weight]. bias: [count, rows of a weight]."""
    biases = [None] * count if bias is None else list(bias)
    linears = [
        make_plain(part, bias)
        if isinstance(part, Tensor)
        else make_packed_linear(part, bias, make_plain)
        for part, bias in zip(split(weight, count), biases, strict=True)
    ]
    return partial(_multiply_groups, linears)


def _multiply_groups(linears: list[Multiply], x: Tensor, starts: Tensor) -> Tensor:
    if not len(x):  # for the number of columns
        return linears[0](x)
    bounds = zip(linears, pairwise(starts.tolist()), strict=True)
    return torch.cat([linear(x[start:end]) for linear, (start, end) in bounds if start < end])


def _make_linear(weight: PackedWeight, bias: Tensor | None) -> Multiply:
    if weight.values.is_cpu:
        for kind in (Int4Linear, Int8Linear, IntegerLinear):
            if kind.takes(weight):
                return kind(weight, bias)
    return DequantizedLinear(weight, bias)


def dequantize(weight: PackedWeight) -> Tensor:
    """The weight [rows, columns] in its dtype, rounded once."""
    wide = reference.dequantize(weight.values, weight.scales, weight.zeros, weight.group_size)
    if weight.order is not None:
        wide = torch.empty_like(wide).index_copy_(1, weight.order.long(), wide)
    return wide.to(weight.dtype)


class DequantizedLinear:
    """``x @ weight.T + bias`` by widening the whole weight each time: right for every form."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows]."""
        return functional.linear(x, dequantize(self._weight), self._bias)


class Int4Linear:
    """The same of 4-bit weights by torch's product of few tokens, which widens in registers."""

    __slots__ = ("_bias", "_group_size", "_order", "_packed", "_pairs")

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        assert weight.zeros is not None
        self._bias, self._order, self._group_size = bias, weight.order, weight.group_size
        numbers = reference.unpack_nibbles(weight.values).to(torch.int32)
        self._packed = _pack_int4(numbers)
        # The product is of (number - 8) * scale + shift.
        shifts = (8 - weight.zeros) * weight.scales
        self._pairs = torch.stack((weight.scales.t(), shifts.t()), dim=-1).contiguous()

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether there is such a product for it."""
        rows, columns = weight.rows, 2 * weight.values.shape[1]
        return (
            weight.values.dtype == torch.uint8
            and weight.dtype == torch.bfloat16
            and weight.group_size in (32, 64, 128, 256)
            and columns % weight.group_size == 0
            and rows % 16 == 0
            and _multiplies_int4()
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows]."""
        x = x.contiguous() if self._order is None else x.index_select(1, self._order)
        answer = _linear_int4(x, self._packed, self._group_size, self._pairs)
        return answer if self._bias is None else answer.add_(self._bias)


def _pack_int4(numbers: Tensor) -> Tensor:
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    return packed


def _linear_int4(x: Tensor, packed: Tensor, group_size: int, pairs: Tensor) -> Tensor:
    answer: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group_size, pairs)
    return answer


@cache
def _multiplies_int4() -> bool:
    """True if this torch has the operators, which are not public, and they do what they did."""
    numbers = torch.arange(16 * 32, dtype=torch.int32).view(16, 32) % 16
    pairs = torch.tensor([2.0, 1.0], dtype=torch.bfloat16).expand(1, 16, 2).contiguous()
    try:
        answer = _linear_int4(torch.eye(32).bfloat16(), _pack_int4(numbers), 32, pairs)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(answer.float(), ((numbers - 8) * 2 + 1).t().float())


_FEW_TOKENS = 16
"""Up to so many the product of `Int8Linear` is faster than widening the weight."""


class Int8Linear:
    """The same of 8-bit weights with a scale per row, by torch's product for few tokens."""

    __slots__ = ("_bias", "_scales", "_weight")

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self._weight, self._bias, self._scales = weight, bias, weight.scales[:, 0].contiguous()

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether there is such a product for it."""
        is_plain = weight.zeros is None and weight.order is None and weight.scales.shape[1] == 1
        return (
            weight.values.dtype == torch.int8
            and weight.dtype == torch.bfloat16
            and is_plain
            and not weight.quantizes_input
            and hasattr(torch, "_weight_int8pack_mm")
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows]."""
        if len(x) > _FEW_TOKENS:
            return functional.linear(x, dequantize(self._weight), self._bias)
        answer = torch._weight_int8pack_mm(x.contiguous(), self._weight.values, self._scales)
        return answer if self._bias is None else answer.add_(self._bias)


class IntegerLinear:
    """``x @ weight.T + bias`` in integers of 8 bits, with a scale per row and per token."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether the scheme asks for it, and the machine multiplies integers exactly."""
        is_plain = weight.zeros is None and weight.order is None and weight.scales.shape[1] == 1
        return weight.quantizes_input and is_plain and _multiplies_int8()

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows]."""
        weight = self._weight
        numbers, scales = reference.quantize_int8(x)
        sums = torch._int_mm(numbers, weight.values.t())
        answer = (sums * scales).mul_(weight.scales.t()).to(weight.dtype)
        return answer if self._bias is None else answer.add_(self._bias)


@cache
def _multiplies_int8() -> bool:
    """Old CPUs add up products of two integers in 16 bits, which the largest ones overflow."""
    x = torch.full((5, 64), -128, dtype=torch.int8)
    try:
        answer = torch._int_mm(x, x.t().contiguous()[:, :5])
    except (AttributeError, RuntimeError):
        return False
    return bool((answer == 64 * 128 * 128).all())


class JoinedLinear:
    """Linears of one input, their answers side by side."""

    __slots__ = ("_bias", "_parts")

    def __init__(self, parts: list[Multiply], bias: Tensor | None) -> None:
        self._parts, self._bias = parts, bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows of all]."""
        answer = torch.cat([each(x) for each in self._parts], dim=-1)
        return answer if self._bias is None else answer + self._bias
