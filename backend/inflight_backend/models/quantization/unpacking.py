"""Makes a `PackedWeight` of the tensors that a file has of a linear."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from inflight_backend.models.quantization.forms import PackedWeight
from inflight_backend.models.quantization.schemes import Scheme


def unpack(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    """``tensors`` by the ends of their names (`stored`), for a weight of ``shape`` in a model of
    ``dtype``; `CheckpointError` says what numbers cannot be."""
    return _LAYOUTS[scheme.layout](scheme, tensors, shape, dtype)


def _float8(
    scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    rows, columns = shape
    scales = tensors[scheme.scales].float()
    if scheme.group_size is None:
        scales = scales.reshape(-1, 1).expand(rows, 1)
    else:
        scales = scales.repeat_interleave(scheme.block_rows, dim=0)[:rows]
    group_size = scheme.group_size or columns
    return PackedWeight(tensors["weight"], scales.contiguous(), None, None, group_size, dtype)


_LAYOUTS = {"float8": _float8}
