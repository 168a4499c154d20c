"""Random weights of few bits, beside what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels import reference
from inflight_kernels.ops.linear.quantized_linear import QuantizedWeight, prepare


@dataclass(frozen=True)
class Weights:
    """Arguments of `prepare`; ``order`` [G, columns]."""

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    order: Tensor | None
    codebook: Tensor | None

    @property
    def wide(self) -> Tensor:
        """[rows, columns] float32."""
        return reference.dequantize(
            self.values, self.scales, self.zeros, self.group_size, self.codebook
        )

    def gathered(self, x: Tensor) -> Tensor:
        """The columns of x that the weight's are multiplied by."""
        return x if self.order is None else x[:, self.order[0].long()]

    def prepared(
        self, device: torch.device | str = "cpu", *, is_plain: bool = False
    ) -> QuantizedWeight:
        """For the kernel."""
        zeros, order, codebook = (
            None if each is None else each.to(device)
            for each in (self.zeros, self.order, self.codebook)
        )
        return prepare(
            self.values.to(device),
            self.scales.to(device),
            zeros,
            group_size=self.group_size,
            order=order,
            codebook=codebook,
            is_plain=is_plain,
        )

    @staticmethod
    def stack(experts: Sequence[Weights]) -> Weights:
        """One below the other."""
        first = experts[0]
        bits = torch.cat([each.values.view(torch.uint8) for each in experts])
        return Weights(
            bits.view(first.values.dtype),
            torch.cat([each.scales for each in experts]),
            None,
            first.group_size,
            torch.cat([each.order for each in experts if each.order is not None]),
            None,
        )


def random_weights(
    generator: torch.Generator,
    kind: str,
    rows: int,
    columns: int,
    group_size: int,
    options: frozenset[str] = frozenset(),
    dtype: torch.dtype = torch.float32,
) -> Weights:
    """``kind``: "int4", "int8" or "float8"; ``options``: of "zeros", "order" and "codebook";
    ``dtype``: of scales and zeros, but for float8."""
    if kind == "float8":
        values = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        dtype = torch.float32
    elif kind == "int8":
        values = torch.randint(-128, 128, (rows, columns), generator=generator).to(torch.int8)
    else:
        values = torch.randint(256, (rows, columns // 2), generator=generator).to(torch.uint8)
    shape = (rows, -(-columns // group_size))
    scales = (torch.rand(shape, generator=generator) + 0.5).to(dtype)
    zeros = order = codebook = None
    if "zeros" in options:
        zeros = torch.randint(16, shape, generator=generator).to(dtype)
    if "order" in options:
        order = torch.randperm(columns, generator=generator).int()[None]
    if "codebook" in options:
        codebook = torch.randn(16, generator=generator)
    return Weights(values, scales, zeros, group_size, order, codebook)
