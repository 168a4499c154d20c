"""Weights of few bits and what they stand for."""

from __future__ import annotations

import torch
from torch import Tensor


def dequantize(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    group_size: int | None = None,
    codebook: Tensor | None = None,
) -> Tensor:
    """``(values - zeros) * scales``, or ``codebook[values] * scales``: [rows, columns] float32.

    values: float8_e4m3fn or int8 [rows, columns], or uint8 [rows, columns / 2] with two numbers of
    0 to 15 a byte, that of the lower column in the low bits; scales and zeros: [rows, groups], each
    for ``group_size`` columns (None: all), fewer in the last group. codebook: [16] float32. Without
    zeros and codebook 8 stands for 0 of 4 bits.
    """
    wide = _widen(values) if codebook is None else _look_up(values, codebook)
    if zeros is not None:
        _by_group(wide, group_size).sub_(_aligned(zeros, wide, group_size))
    elif values.dtype == torch.uint8 and codebook is None:
        wide -= 8
    _by_group(wide, group_size).mul_(_aligned(scales, wide, group_size))
    return wide


def head_linear(x: Tensor, weight: Tensor, *, by_rows: bool) -> Tensor:
    """x [T, H, columns] times a weight [H, rows, columns] of each head: [T, H, rows]; ``by_rows``
    x [T, H, rows] times the same transposed: [T, H, columns]."""
    return torch.einsum("thr,hrc->thc" if by_rows else "thc,hrc->thr", x, weight)


def _widen(values: Tensor) -> Tensor:
    """[rows, columns] float32."""
    if values.dtype == torch.uint8:
        return unpack_nibbles(values).float()
    if values.dtype == torch.float8_e4m3fn and values.is_cpu:
        # Torch's own conversion takes five times as long. The bits of e4m3, moved to where bfloat16
        # has its last four bits of exponent, are the same number but for the exponents' offsets;
        # not so NaN, which no weight is.
        bits = values.view(torch.int8).to(torch.int16)
        bits <<= 4
        bits &= _SIGN_AND_NUMBER
        return bits.view(torch.bfloat16).float().mul_(2.0 ** (127 - 7))
    return values.float()


_SIGN_AND_NUMBER = 0x87F0 - 2**16


def _look_up(values: Tensor, codebook: Tensor) -> Tensor:
    """[rows, columns] float32. The two numbers of a byte at once: a tenth of the time that one
    index for each takes on a CPU."""
    pairs = torch.stack((codebook.repeat(16), codebook.repeat_interleave(16)), dim=-1)
    found = pairs.view(torch.int64).flatten().index_select(0, values.flatten().int())
    return found.view(torch.float32).view(len(values), -1)


def _by_group(wide: Tensor, group_size: int | None) -> Tensor:
    """[rows, groups, group_size], where all groups are full, else as it is."""
    columns = wide.shape[1]
    if group_size is None or columns % group_size:
        return wide
    return wide.view(len(wide), -1, group_size)


def _aligned(x: Tensor, wide: Tensor, group_size: int | None) -> Tensor:
    """x [rows, groups] in float32, for `_by_group`."""
    columns = wide.shape[1]
    x = x.float()
    if group_size is None:
        return x
    return (
        x.repeat_interleave(group_size, dim=1)[:, :columns]
        if columns % group_size
        else x[..., None]
    )


def unpack_nibbles(values: Tensor) -> Tensor:
    """uint8 [rows, n] -> uint8 [rows, 2 n]: the low four bits of each byte, then the high ones."""
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(1)


def pack_nibbles(values: Tensor) -> Tensor:
    """The way back. Two numbers are read as one of 16 bits: reading every other byte takes fifty
    times as long on a CPU."""
    pairs = values.contiguous().view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of x [T, n] scaled so that its largest number becomes 127, rounded to nearest:
    int8 [T, n] and scales [T, 1] float32."""
    wide = x.float()
    # The floor keeps a row of zeros finite.
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return (wide / scales).round_().to(torch.int8), scales
