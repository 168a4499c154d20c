"""Weights of few bits and what they stand for."""

from __future__ import annotations

import torch
from torch import Tensor


def dequantize(
    values: Tensor, scales: Tensor, zeros: Tensor | None = None, group_size: int | None = None
) -> Tensor:
    """``(values - zeros) * scales`` [rows, columns] float32.

    values: float8_e4m3fn or int8 [rows, columns], or uint8 [rows, columns / 2] with two numbers of
    0 to 15 a byte, that of the lower column in the low bits; scales and zeros: [rows, groups], each
    for ``group_size`` columns (None: all), fewer in the last group.
    """
    wide = (unpack_nibbles(values) if values.dtype == torch.uint8 else values).float()
    columns = wide.shape[1]
    if zeros is not None:
        wide -= _per_column(zeros, group_size, columns)
    return wide.mul_(_per_column(scales, group_size, columns))


def unpack_nibbles(values: Tensor) -> Tensor:
    """uint8 [rows, n] -> uint8 [rows, 2 n]: the low four bits of each byte, then the high ones."""
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(1)


def pack_nibbles(values: Tensor) -> Tensor:
    """The way back."""
    return values[:, ::2] | (values[:, 1::2] << 4)


def _per_column(x: Tensor, group_size: int | None, columns: int) -> Tensor:
    x = x.float()
    if x.shape[1] == 1 or group_size is None:
        return x
    return x.repeat_interleave(group_size, dim=1)[:, :columns]
