"""Rounds the weights of an unquantised checkpoint while they are loaded: ``quantization`` int8 or
int4 (`schemes.scheme_at_load`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_backend.models.quantization.forms import PackedWeight, pack_zeros
from inflight_backend.models.quantization.schemes import Scheme
from inflight_kernels import reference

_PORTION = 2**24
"""Numbers that are rounded at a time: their float32 forms take memory for a moment."""


def round_weight(scheme: Scheme, weight: Tensor, dtype: torch.dtype) -> PackedWeight:
    """weight: [rows, columns] of any float type, for a model of ``dtype``. Each row for itself, so
    that rows may come in any portions."""
    count = max(_PORTION // weight.shape[1], 1)
    parts = [_round(scheme, part.float(), dtype) for part in torch.split(weight, count)]
    values, scales, zeros = zip(*parts, strict=True)
    return PackedWeight(
        torch.cat(values),
        torch.cat(scales),
        pack_zeros(torch.cat(zeros)) if scheme.has_zeros else None,
        None,
        scheme.group_size or weight.shape[1],
        dtype,
    )


def _round(scheme: Scheme, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """To the nearest numbers under scales that are of ``dtype`` already."""
    groups = weight.view(len(weight), scheme.num_groups(weight.shape[1]), -1)
    if scheme.bits == 8:
        scales = (groups.abs().amax(-1) / 127).to(dtype)
        zeros = torch.zeros_like(scales)
        lowest, highest = -127, 127
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).to(dtype)
        zeros = (-low / _not_zero(scales)).round().clamp(0, 15).to(dtype)
        lowest, highest = 0, 15
    numbers = groups / _not_zero(scales)[..., None] + zeros.float()[..., None]
    numbers = numbers.round().clamp(lowest, highest).flatten(1)
    if scheme.bits == 8:
        return numbers.to(torch.int8), scales, zeros
    return reference.pack_nibbles(numbers.to(torch.uint8)), scales, zeros


def _not_zero(scales: Tensor) -> Tensor:
    """In float32; a group of zeros has no scale."""
    wide = scales.float()
    return torch.where(wide == 0, 1.0, wide)
