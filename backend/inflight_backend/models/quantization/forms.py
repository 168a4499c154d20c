"""How memory holds the weight of a quantised linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [rows, columns]: numbers minus zeros, times scales.

    ``values``: float8_e4m3fn or int8 [rows, columns], or uint8 [rows, columns / 2], two numbers of
    4 bits a byte, that of the lower column in the low bits. ``scales`` [rows, groups]: of
    ``group_size`` neighbouring columns each, float32 beside float8, else of ``dtype``; ``zeros``:
    the same for the number that stands for 0. ``order`` [columns] int32: the columns of the weight
    in the order in which ``values`` has them. ``dtype``: in which the linear answers.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    group_size: int
    dtype: torch.dtype
    quantizes_input: bool = False

    @property
    def rows(self) -> int:
        """Outputs of the linear."""
        return len(self.values)

    @property
    def tensors(self) -> list[Tensor]:
        """What takes memory."""
        found = (self.values, self.scales, self.zeros, self.order)
        return [each for each in found if each is not None]

    def with_rows(self, convert: Callable[[Tensor], Tensor]) -> PackedWeight:
        """The same with rows picked or sorted by ``convert``."""
        # Not every torch picks rows of float8.
        values = convert(self.values.view(torch.uint8)).view(self.values.dtype)
        zeros = None if self.zeros is None else convert(self.zeros)
        return replace(self, values=values, scales=convert(self.scales), zeros=zeros)


Part: TypeAlias = Tensor | PackedWeight


@dataclass(frozen=True, slots=True)
class JoinedWeight:
    """Weights of one input whose rows follow one another, and whose forms differ."""

    parts: tuple[Part, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """What takes memory."""
        return [
            tensor
            for part in self.parts
            for tensor in (part.tensors if isinstance(part, PackedWeight) else [part])
        ]


def join(parts: Sequence[Part]) -> Part | JoinedWeight:
    """One weight with the rows of all; each keeps its scales."""
    joined: list[Part] = []
    for _, group in groupby(parts, _form):
        joined += _join_alike(list(group))
    return joined[0] if len(joined) == 1 else JoinedWeight(tuple(joined))


def _form(part: Part) -> object:
    if isinstance(part, Tensor):
        return part.dtype
    has = (part.zeros is not None, part.order is not None)
    return (part.values.dtype, part.group_size, part.scales.shape[1], part.quantizes_input, *has)


def _join_alike(parts: list[Part]) -> list[Part]:
    if len(parts) == 1:
        return parts
    packed = [each for each in parts if isinstance(each, PackedWeight)]
    if not packed:
        return [torch.cat([each for each in parts if isinstance(each, Tensor)])]
    first = packed[0]
    orders = [each.order for each in packed if each.order is not None]
    if any(not torch.equal(each, orders[0]) for each in orders):
        return parts
    zeros = [each.zeros for each in packed if each.zeros is not None]
    values = torch.cat([each.values.view(torch.uint8) for each in packed])
    return [
        replace(
            first,
            values=values.view(first.values.dtype),
            scales=torch.cat([each.scales for each in packed]),
            zeros=torch.cat(zeros) if zeros else None,
        )
    ]
