"""Linears whose products are compiled."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from inflight_backend.models.quantization.forms import PackedWeight
from inflight_backend.models.quantization.linears import dequantize
from inflight_kernels.cpu import linear, quantized_linear
from inflight_kernels.cpu.threads import Stage


class StagedLinear(ABC):
    """One that may be a stage of a program."""

    __slots__ = ()

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Columns of what it gives."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of what it reads and gives."""

    @property
    def has_stage(self) -> bool:
        """False if its kernel reads what another op has to make of x."""
        return True

    @abstractmethod
    def stage(self, x: Tensor, out: Tensor) -> Stage:
        """The product of x [T, columns] into ``out`` [T, num_rows]."""


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

    @property
    def dtype(self) -> torch.dtype:
        """See `StagedLinear`."""
        return self._packed.dtype

    def stage(self, x: Tensor, out: Tensor) -> Stage:
        """See `StagedLinear`."""
        return linear.linear_stage(x, self._packed, self._bias, out)


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
            weight.codebook,
        )  # fmt: skip
        self._order, self._dtype = weight.order, weight.dtype
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
                codebook=self._packed.table,
            )
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        """See `StagedLinear`."""
        return self._packed.rows

    @property
    def dtype(self) -> torch.dtype:
        """See `StagedLinear`."""
        return self._dtype

    @property
    def has_stage(self) -> bool:
        """See `StagedLinear`."""
        return self._order is None and self._packed.zeros is None

    def stage(self, x: Tensor, out: Tensor) -> Stage:
        """See `StagedLinear`."""
        return quantized_linear.quantized_linear_stage(x, self._packed, self._bias, out)
