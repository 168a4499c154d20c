"""Linears whose weights are quantised, for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from inflight_backend.models.quantization.forms import JoinedWeight, PackedWeight
from inflight_kernels import reference

Multiply: TypeAlias = Callable[[Any], Tensor]
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


def _make_linear(weight: PackedWeight, bias: Tensor | None) -> Multiply:
    return DequantizedLinear(weight, bias)


def dequantize(weight: PackedWeight) -> Tensor:
    """The weight [rows, columns] in its dtype, rounded once."""
    wide = reference.dequantize(weight.values, weight.scales, weight.zeros, weight.group_size)
    if weight.order is not None:
        wide[:, weight.order.long()] = wide.clone()
    return wide.to(weight.dtype)


class DequantizedLinear:
    """``x @ weight.T + bias`` by widening the whole weight each time: right for every form."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows]."""
        return functional.linear(x, dequantize(self._weight), self._bias)


class JoinedLinear:
    """Linears of one input, their answers side by side."""

    __slots__ = ("_bias", "_parts")

    def __init__(self, parts: list[Multiply], bias: Tensor | None) -> None:
        self._parts, self._bias = parts, bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows of all]."""
        answer = torch.cat([each(x) for each in self._parts], dim=-1)
        return answer if self._bias is None else answer + self._bias
