"""How memory holds the weight of a quantised linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    """One weight with the rows of all; each keeps its scales. Neighbours of one form become one."""
    alike: list[list[Part]] = []
    for part in parts:
        if alike and _is_alike(alike[-1][0], part):
            alike[-1].append(part)
        else:
            alike.append([part])
    joined = [_join_alike(each) for each in alike]
    return joined[0] if len(joined) == 1 else JoinedWeight(tuple(joined))


def split(weight: Part | JoinedWeight, count: int) -> list[Part | JoinedWeight]:
    """``count`` weights of equally many rows, in order; they share the memory of ``weight``."""
    parts = weight.parts if isinstance(weight, JoinedWeight) else (weight,)
    lengths = [len(part) if isinstance(part, Tensor) else part.rows for part in parts]
    size = sum(lengths) // count
    found: list[list[Part]] = [[] for _ in range(count)]
    first = 0
    for part, length in zip(parts, lengths, strict=True):
        start = 0
        while start < length:
            index = (first + start) // size
            end = min(length, (index + 1) * size - first)
            found[index].append(_rows(part, start, end))
            start = end
        first += length
    return [each[0] if len(each) == 1 else JoinedWeight(tuple(each)) for each in found]


def _rows(part: Part, start: int, end: int) -> Part:
    if isinstance(part, Tensor):
        return part[start:end]
    return part.with_rows(lambda tensor: tensor[start:end])


def _is_alike(one: Part, other: Part) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor)
    if one.order is None or other.order is None:
        has_same_order = one.order is other.order
    else:
        has_same_order = torch.equal(one.order, other.order)
    return has_same_order and _form(one) == _form(other)


def _form(part: PackedWeight) -> object:
    has_zeros = part.zeros is not None
    return part.values.dtype, part.group_size, part.scales.shape[1], has_zeros, part.quantizes_input


def _join_alike(parts: list[Part]) -> Part:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat([each for each in parts if isinstance(each, Tensor)])
    packed = [each for each in parts if isinstance(each, PackedWeight)]
    zeros = [each.zeros for each in packed if each.zeros is not None]
    values = torch.cat([each.values.view(torch.uint8) for each in packed])
    return replace(
        first,
        values=values.view(first.values.dtype),
        scales=torch.cat([each.scales for each in packed]),
        zeros=torch.cat(zeros) if zeros else None,
    )
