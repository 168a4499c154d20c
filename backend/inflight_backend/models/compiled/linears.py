"""Linears whose products are compiled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from inflight_backend.models.quantization.forms import PackedWeight
from inflight_backend.models.quantization.linears import dequantize
from inflight_kernels.cpu import elementwise, linear, quantized_linear
from inflight_kernels.cpu.routed.experts import SortedRows
from inflight_kernels.cpu.threads import Stage

Make: TypeAlias = Callable[[str, int, torch.dtype], Tensor]
"""Memory of a name: columns and type -> [rows of the program, columns], the same one each time."""


class StagedLinear(ABC):
    """One that may be stages of a program."""

    __slots__ = ()

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Columns of what it gives."""

    @abstractmethod
    def reads(self, dtype: torch.dtype) -> bool:
        """Whether that may be the type of what it reads, and then gives, too."""

    @abstractmethod
    def stages(self, x: Tensor, out: Tensor, make: Make) -> list[Stage]:
        """The product of x [T, columns] into ``out`` [T, num_rows], a row of which is contiguous.
        ``make``: for what is between the stages."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The same by itself: x [T, columns] -> [T, num_rows]."""


class CompiledLinear(StagedLinear):
    """``x @ weight.T + bias`` for x [num_tokens, columns] and weight [rows, columns]."""

    __slots__ = ("_bias", "_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = linear.pack(weight)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows]."""
        return linear.linear(x, self._packed, self._bias)

    def look_up(self, numbers: Tensor) -> Tensor:
        """Rows of the weight: numbers [T] -> [T, columns]."""
        return linear.rows(self._packed, numbers)

    @property
    def num_rows(self) -> int:
        """See `StagedLinear`."""
        return linear.num_rows(self._packed)

    def reads(self, dtype: torch.dtype) -> bool:
        """See `StagedLinear`."""
        return dtype in (self._packed.dtype, torch.float32)

    def stages(self, x: Tensor, out: Tensor, make: Make) -> list[Stage]:
        """See `StagedLinear`."""
        return [linear.linear_stage(x, self._packed, self._bias, out)]


class CompiledHead(CompiledLinear):
    """Of any number of rows: those of zeros behind them are left out of the answer."""

    __slots__ = ("_num_tokens",)

    def __init__(self, weight: Tensor) -> None:
        super().__init__(linear.padded(weight), None)
        self._num_tokens = len(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows]."""
        return super().__call__(x)[:, : self._num_tokens]


class CompiledPackedLinear(StagedLinear):
    """The same of a quantised weight, which stays as small as it is."""

    __slots__ = ("_bias", "_dtype", "_order", "_packed")

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self._packed = quantized_linear.pack(
            weight.values, weight.scales, weight.zeros, weight.group_size, weight.dtype,
            weight.codebook, weight.first_zero,
        )  # fmt: skip
        self._order = None if weight.order is None else weight.order.int()
        self._dtype = weight.dtype
        self._bias = None if bias is None else bias.float()

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether there is such a product for it."""
        return quantized_linear.takes(
            weight.values,
            weight.dtype,
            weight.group_size,
            has_codebook=weight.codebook is not None,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows]."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        return quantized_linear.quantized_linear(x, self._packed, self._bias)

    def look_up(self, numbers: Tensor) -> Tensor:
        """Rows of the weight: numbers [T] -> [T, columns]."""
        values, scales, zeros = quantized_linear.rows(self._packed, numbers)
        return dequantize(
            PackedWeight(
                values, scales, zeros, self._order, self._packed.group_size, self._dtype,
                codebook=self._packed.codebook, first_zero=self._packed.first_zero,
            )
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        """See `StagedLinear`."""
        return self._packed.rows

    def reads(self, dtype: torch.dtype) -> bool:
        """See `StagedLinear`."""
        return dtype == self._dtype

    def stages(self, x: Tensor, out: Tensor, make: Make) -> list[Stage]:
        """See `StagedLinear`."""
        packed, found, sums = self._packed, list[Stage](), None
        if self._order is not None:
            ordered = make("ordered", x.shape[1], x.dtype)
            found.append(elementwise.select_columns_stage(x, self._order, ordered))
            x = ordered
        if packed.zeros is not None:
            sums = make("sums", packed.num_groups, torch.float32)
            found.append(elementwise.group_sums_stage(x, packed.group_size, sums))
        found.append(quantized_linear.quantized_linear_stage(x, packed, self._bias, out, sums))
        return found


class CompiledIntegerLinear(StagedLinear):
    """`IntegerLinear`, whose numbers it has."""

    __slots__ = ("_bias", "_dtype", "_packed")

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self._packed = quantized_linear.pack_integers(weight.values, weight.scales)
        self._dtype = weight.dtype
        self._bias = None if bias is None else bias.float()

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether the scheme asks for it, and there is such a product here."""
        is_plain = weight.zeros is None and weight.order is None
        takes = quantized_linear.takes_integers
        return weight.quantizes_input and is_plain and takes(weight.values, weight.scales)

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows]."""
        return quantized_linear.integer_linear(x, self._packed, self._bias)

    @property
    def num_rows(self) -> int:
        """See `StagedLinear`."""
        return self._packed.rows

    def reads(self, dtype: torch.dtype) -> bool:
        """See `StagedLinear`."""
        return dtype == self._dtype

    def stages(self, x: Tensor, out: Tensor, make: Make) -> list[Stage]:
        """See `StagedLinear`."""
        numbers = make("numbers", x.shape[1], torch.uint8)
        scales = make("scales", 1, torch.float32)
        return [
            elementwise.quantize_stage(x, numbers, scales),
            quantized_linear.quantized_linear_stage(numbers, self._packed, self._bias, out, scales),
        ]


class CompiledJoinedLinear(StagedLinear):
    """Linears of one input, their answers side by side."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[StagedLinear]) -> None:
        self._parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows of all]."""
        return torch.cat([each(x) for each in self._parts], dim=-1)

    @property
    def num_rows(self) -> int:
        """See `StagedLinear`."""
        return sum(each.num_rows for each in self._parts)

    def reads(self, dtype: torch.dtype) -> bool:
        """See `StagedLinear`."""
        return all(each.reads(dtype) for each in self._parts)

    def stages(self, x: Tensor, out: Tensor, make: Make) -> list[Stage]:
        """See `StagedLinear`."""
        shares = out.split_with_sizes([each.num_rows for each in self._parts], dim=-1)
        pairs = zip(self._parts, shares, strict=True)
        return [stage for part, share in pairs for stage in part.stages(x, share, make)]


class CompiledExperts:
    """Linears of experts: rows of x, sorted by expert, times their expert's weight."""

    __slots__ = ("_bias", "_packed", "num_rows")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [E, rows, columns], bias [E, rows]."""
        self.num_rows = weight.shape[1]
        self._packed = linear.pack(weight.flatten(0, 1))
        self._bias = None if bias is None else bias.float().flatten()

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether there is a product for each expert."""
        return linear.takes(weight[0])

    def __call__(self, x: Tensor, starts: Tensor) -> Tensor:
        """x [T, columns], ``starts`` [E + 1] of each expert's rows -> [T, rows]."""
        return linear.grouped_linear(x, self._packed, starts, self._bias)

    def stage(self, x: Tensor, rows: SortedRows, out: Tensor) -> Stage:
        """The same of sorted rows into ``out``."""
        return linear.grouped_linear_stage(
            x, self._packed, self._bias, rows.starts, rows.active, out
        )
