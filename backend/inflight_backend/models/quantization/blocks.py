"""Unpacks GGUF's blocks of 32 or 256 neighbouring columns, which hold their scales.

Layouts: https://github.com/ggml-org/ggml, ``ggml-common.h``; the oracle of the tests is
``gguf.quants``. What comes out stands for the same numbers, exactly in float32 but for the rounding
of the number for zero: ``scale * q + offset`` becomes ``scale * (q - zero)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inflight_backend.gguf_files import BLOCKS
from inflight_backend.models.quantization.forms import E2M1, PackedWeight
from inflight_backend.models.quantization.schemes import Scheme
from inflight_kernels import reference


class _Numbers(NamedTuple):
    """``values`` [..., columns of a block], ``scales`` [..., groups of a block] float32. What a
    value is counted from: ``zero``, or ``offsets`` like scales, which are added. ``codebook``: see
    `PackedWeight`."""

    values: Tensor
    scales: Tensor
    zero: int = 0
    offsets: Tensor | None = None
    codebook: Tensor | None = None


def unpack_blocks(scheme: Scheme, rows: Tensor, dtype: torch.dtype) -> PackedWeight:
    """rows: uint8 [rows, bytes of a row] -> the weight in a model of ``dtype``."""
    _, size = BLOCKS[scheme.layout]
    found = _UNPACK[scheme.layout](rows.view(len(rows), -1, size))
    values, scales, zero, offsets, codebook = found
    values, scales = values.reshape(len(rows), -1), scales.reshape(len(rows), -1)
    for each in (scales, offsets):
        if each is not None and not bool(each.isfinite().all()):
            raise ValueError(f"its blocks ({scheme.layout}) have scales that are not finite")
    zeros = None
    if offsets is not None:
        values, scales, zeros = _with_zeros(values, scales, offsets.reshape(len(rows), -1))
    elif codebook is None:  # of 4 bits 8 is 0
        values = values.to(torch.int16) - zero + (8 if scheme.bits == 4 else 0)
    if scheme.bits == 4:
        values = reference.pack_nibbles(values.to(torch.uint8))
    assert scheme.group_size is not None
    return PackedWeight(
        values if scheme.bits == 4 else values.to(torch.int8).contiguous(),
        scales.to(dtype).contiguous(),
        None if zeros is None else zeros.to(dtype).contiguous(),
        None,
        scheme.group_size,
        dtype,
        codebook=codebook,
    )


def _with_zeros(values: Tensor, scales: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with zeros in the place of offsets. A group without a scale is its offset, which is
    1 below a zero of -1 for the value 0."""
    is_flat = scales == 0
    if is_flat.any():
        grouped = values.view(len(values), scales.shape[1], -1)
        values = grouped.masked_fill(is_flat[..., None], 0).flatten(1)
        scales = torch.where(is_flat, offsets, scales)
    zeros = torch.where(is_flat, -1.0, -offsets / torch.where(is_flat, 1.0, scales))
    return values, scales, zeros


def _half(blocks: Tensor, place: int) -> Tensor:
    """The float16 at a byte of each block [..., 1]."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2 n]: the low halves, then the high ones."""
    data = data.contiguous()  # of a block that has more: torch is slow with such gaps
    return torch.cat((data & 15, data >> 4), dim=-1)


def _shifted(data: Tensor, count: int, step: int) -> Tensor:
    """[..., n] bytes -> [..., count, n]: shifted right by 0, ``step``, 2 ``step`` and so on."""
    return torch.stack([data >> (step * each) for each in range(count)], dim=-2)


def _split(data: Tensor, size: int) -> Tensor:
    """[..., n] -> [..., n / size, size]."""
    return data.reshape(*data.shape[:-1], -1, size)


def _bits(blocks: Tensor, place: int) -> Tensor:
    """Four bytes as [..., 32] bits, that of the first number first."""
    data = blocks[..., place : place + 4, None]
    return ((data >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _q4_0(blocks: Tensor) -> _Numbers:
    return _Numbers(_nibbles(blocks[..., 2:]), _half(blocks, 0), 8)


def _q4_1(blocks: Tensor) -> _Numbers:
    return _Numbers(_nibbles(blocks[..., 4:]), _half(blocks, 0), offsets=_half(blocks, 2))


def _q5_0(blocks: Tensor) -> _Numbers:
    values = _nibbles(blocks[..., 6:]) | (_bits(blocks, 2) << 4)
    return _Numbers(values, _half(blocks, 0), 16)


def _q5_1(blocks: Tensor) -> _Numbers:
    values = _nibbles(blocks[..., 8:]) | (_bits(blocks, 4) << 4)
    return _Numbers(values, _half(blocks, 0), offsets=_half(blocks, 2))


def _q8_0(blocks: Tensor) -> _Numbers:
    return _Numbers(_signed(blocks[..., 2:]), _half(blocks, 0))


def _signed(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.int8)


def _q2_k(blocks: Tensor) -> _Numbers:
    """16 groups of 16."""
    pairs = blocks[..., :16]
    values = _shifted(_split(blocks[..., 16:80], 32), 4, 2) & 3
    scales = _half(blocks, 80) * (pairs & 15)
    return _Numbers(values, scales, offsets=-_half(blocks, 82) * (pairs >> 4))


def _q3_k(blocks: Tensor) -> _Numbers:
    """16 groups of 16; the third bits are apart, and so are those of the scales."""
    low = (_shifted(_split(blocks[..., 32:96], 32), 4, 2) & 3).flatten(-3, -2)
    high = _shifted(blocks[..., :32], 8, 1) & 1
    of_scales = _nibbles(blocks[..., 96:104])
    tops = (_shifted(blocks[..., 104:108], 4, 2) & 3).flatten(-2)
    scales = (of_scales | (tops << 4)).to(torch.int8) - 32
    return _Numbers(low | (high << 2), _half(blocks, 108) * scales, 4)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 8] each, of the 12 bytes behind the two float16 of Q4_K and Q5_K."""
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=-1)
    minima = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=-1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minima


def _q4_k(blocks: Tensor) -> _Numbers:
    """8 groups of 32."""
    scales, offsets = _scales_and_minima(blocks)
    values = _nibbles(_split(blocks[..., 16:], 32))
    return _Numbers(values, scales, offsets=offsets)


def _q5_k(blocks: Tensor) -> _Numbers:
    """8 groups of 32; bit i of a byte of the fifth bits is of group i."""
    scales, offsets = _scales_and_minima(blocks)
    low = _split(_nibbles(_split(blocks[..., 48:], 32)), 32).flatten(-3, -2)
    high = _shifted(blocks[..., 16:48], 8, 1) & 1
    return _Numbers(low | (high << 4), scales, offsets=offsets)


def _q6_k(blocks: Tensor) -> _Numbers:
    """16 groups of 16; two halves of 128 columns, four parts of 32 each."""
    low = _split(_nibbles(_split(blocks[..., :128], 64)), 32)
    high = _shifted(_split(blocks[..., 128:192], 32), 4, 2) & 3
    scales = _half(blocks, 208) * _signed(blocks[..., 192:208])
    return _Numbers(low | (high << 4), scales, 32)


_IQ4 = torch.tensor(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=torch.float32
)


def _iq4_nl(blocks: Tensor) -> _Numbers:
    return _Numbers(_nibbles(blocks[..., 2:]), _half(blocks, 0), codebook=_IQ4)


def _iq4_xs(blocks: Tensor) -> _Numbers:
    """8 groups of 32, with scales of 6 bits."""
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), dim=-1).flatten(-2)
    tops = blocks[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8)
    scales = (low | ((tops & 3).flatten(-2) << 4)).to(torch.int8) - 32
    values = _nibbles(_split(blocks[..., 8:], 16))
    return _Numbers(values, _half(blocks, 0) * scales, codebook=_IQ4)


def _mxfp4(blocks: Tensor) -> _Numbers:
    """Scales are powers of two."""
    scales = torch.exp2(blocks[..., :1].float() - 127)
    return _Numbers(_nibbles(blocks[..., 1:]), scales, codebook=E2M1)


_UNPACK: dict[str, Callable[[Tensor], _Numbers]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
