"""How memory holds the weight of a quantised linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from inflight_kernels import reference


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [rows, columns]: numbers minus zeros, times scales.

    ``values``: float8_e4m3fn or int8 [rows, columns], or uint8 [rows, columns / 2], two numbers of
    4 bits a byte, that of the lower column in the low bits. ``scales`` [rows, groups]: of
    ``group_size`` neighbouring columns each, float32 beside float8, else of ``dtype`` (of 4 bits in
    float32 also float16 or bfloat16); ``zeros``:
    the same for the number that stands for 0 (None: 8 of 4 bits, else 0), or uint8 [rows, groups /
    2] of whole ones of 4 bits, packed as values, to which ``first_zero`` is added.
    ``order`` [columns] int32: the columns of the weight
    in the order in which ``values`` has them. ``dtype``: in which the linear answers.
    ``codebook`` [16] float32: the numbers of 4 bits are its indices (FP4, NF4), and there are no
    zeros. ``factors`` [columns]: what the columns of an input are multiplied by first
    (`Scheme.has_factors`). ``inputs`` [columns] int32: of which columns of a whole weight
    these are, if they are not neighbours there: its linear reads what all ranks have.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    group_size: int
    dtype: torch.dtype
    quantizes_input: bool = False
    codebook: Tensor | None = None
    first_zero: int = 0
    factors: Tensor | None = None
    inputs: Tensor | None = None

    @property
    def rows(self) -> int:
        """Outputs of the linear."""
        return len(self.values)

    @property
    def columns(self) -> int:
        """Inputs of the linear."""
        return self.values.shape[1] * (2 if self.values.dtype == torch.uint8 else 1)

    @property
    def form(self) -> object:
        """Weights of one input and one form may be joined."""
        zeros = None if self.zeros is None else (self.zeros.dtype, self.first_zero)
        kind = self.values.dtype, self.group_size, self.scales.shape[1], self.scales.dtype
        return *kind, zeros, self.quantizes_input, self.factors is not None

    @property
    def wide_zeros(self) -> Tensor | None:
        """``zeros`` [rows, groups] of the type of the scales."""
        if self.zeros is None or self.zeros.dtype != torch.uint8:
            return self.zeros
        numbers = reference.unpack_nibbles(self.zeros)[:, : self.scales.shape[1]]
        return (numbers + self.first_zero).to(self.scales.dtype)

    @property
    def tensors(self) -> list[Tensor]:
        """What takes memory; a codebook is shared by all weights that have it."""
        found = (self.values, self.scales, self.zeros, self.order, self.factors, self.inputs)
        return [each for each in found if each is not None]

    def to(self, device: str) -> PackedWeight:
        """The same there."""
        zeros, order, codebook, factors, inputs = (
            None if each is None else each.to(device)
            for each in (self.zeros, self.order, self.codebook, self.factors, self.inputs)
        )
        return replace(
            self,
            values=self.values.to(device),
            scales=self.scales.to(device),
            zeros=zeros,
            order=order,
            codebook=codebook,
            factors=factors,
            inputs=inputs,
        )

    def with_rows(self, convert: Callable[[Tensor], Tensor]) -> PackedWeight:
        """The same with rows picked or sorted by ``convert``."""
        # Not every torch picks rows of float8.
        values = convert(self.values.view(torch.uint8)).view(self.values.dtype)
        zeros = None if self.zeros is None else convert(self.zeros)
        return replace(self, values=values, scales=convert(self.scales), zeros=zeros)

    def with_columns(self, ranges: Sequence[tuple[int, int]]) -> PackedWeight:
        """The same with these columns only, from the first to the one behind the last of each;
        `ValueError` where they do not begin and end with groups of one scale. Those of a weight
        with an ``order`` are counted in it."""
        num_groups = self.scales.shape[1]
        size = self.group_size if num_groups > 1 else 1
        per_byte = 2 if self.values.dtype == torch.uint8 else 1
        if any(edge % size or edge % per_byte for pair in ranges for edge in pair):
            raise ValueError(
                f"columns have scales in groups of {max(size, per_byte)}, and tensor_parallel_size "
                f"would part them at {ranges[0][1] - ranges[0][0]}; use a smaller one"
            )
        values = _columns(self.values.view(torch.uint8), ranges, per_byte)
        scales, zeros = self.scales, self.zeros
        if num_groups > 1:
            scales = _columns(scales, ranges, size)
            if zeros is not None and zeros.dtype == torch.uint8:
                numbers = reference.unpack_nibbles(zeros)
                zeros = pack_zeros(_columns(numbers, ranges, size))
            elif zeros is not None:
                zeros = _columns(zeros, ranges, size)
        group_size = self.group_size if num_groups > 1 else values.shape[1] * per_byte
        factors = self.factors
        if factors is not None:
            factors = torch.cat([factors[start:end] for start, end in ranges])
        inputs = None
        if self.order is not None:
            inputs = torch.cat([self.order[start:end] for start, end in ranges])
        return replace(
            self,
            factors=factors,
            values=values.view(self.values.dtype),
            scales=scales,
            zeros=zeros,
            order=None,
            inputs=inputs,
            group_size=group_size,
        )


def pack_zeros(numbers: Tensor) -> Tensor:
    """[rows, groups] from 0 to 15, as `PackedWeight.zeros` has them in bytes."""
    even = functional.pad(numbers.to(torch.uint8), (0, numbers.shape[1] % 2))
    return reference.pack_nibbles(even)


def _columns(tensor: Tensor, ranges: Sequence[tuple[int, int]], size: int) -> Tensor:
    """Those of ``ranges``, ``size`` of which are one of the tensor's."""
    return torch.cat([tensor[:, start // size : end // size] for start, end in ranges], 1)


Part: TypeAlias = Tensor | PackedWeight

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of FP4, by their codes (OCP Microscaling Formats 1.0)."""


@dataclass(frozen=True, slots=True)
class JoinedWeight:
    """Weights of one input whose rows follow one another, and whose forms differ."""

    parts: tuple[Part, ...]

    def with_bias(self, bias: Tensor | None) -> list[tuple[Part, Tensor | None]]:
        """Each part with its share of a bias [rows of all]."""
        lengths = [len(part) if isinstance(part, Tensor) else part.rows for part in self.parts]
        shares = [None] * len(lengths) if bias is None else bias.split_with_sizes(lengths)
        return list(zip(self.parts, shares, strict=True))

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
    same = (
        _is_equal(getattr(one, name), getattr(other, name))
        for name in ("order", "codebook", "factors")
    )
    return one.form == other.form and all(same)


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _join_alike(parts: list[Part]) -> Part:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat([each for each in parts if isinstance(each, Tensor)])
    return join_rows([each for each in parts if isinstance(each, PackedWeight)])


def join_rows(packed: Sequence[PackedWeight]) -> PackedWeight:
    """The rows of all, which have one form, order of columns, codebook and factors."""
    first = packed[0]
    zeros = [each.zeros for each in packed if each.zeros is not None]
    values = torch.cat([each.values.view(torch.uint8) for each in packed])
    return replace(
        first,
        values=values.view(first.values.dtype),
        scales=torch.cat([each.scales for each in packed]),
        zeros=torch.cat(zeros) if zeros else None,
    )
