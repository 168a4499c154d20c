"""Quantises rows to FP8 with a scale each, where no norm or activation does it.

scale[t] = max_i |x[t, i]| / 448                out[t, i] = round(x[t, i] / scale[t])

With a ``group_size`` so many neighbours have a scale of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import FP8_MAX, Argument, store_fp8_row, to_fp8

# mypy: disable-error-code="no-untyped-def, untyped-decorator"


_GROUPS_AT_ONCE = 8


@triton.jit
def _quantize_fp8_kernel(
    out_ptr,  # [T, SIZE] float8_e4m3fn
    scales_ptr,  # [T] float32
    x_ptr,  # [T, SIZE]
    stride_x,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < SIZE
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    store_fp8_row(out_ptr, scales_ptr, x, row, offs, mask, SIZE)


@triton.jit
def _quantize_groups_kernel(
    out_ptr,  # [T, size] float8_e4m3fn
    scales_ptr,  # [T, groups] float32
    x_ptr,  # [T, size]
    size,
    num_groups,
    stride_x,
    GROUP: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,  # groups
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = offs < size
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    scales = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-12) / FP8_MAX
    tl.store(scales_ptr + row * num_groups + groups, scales, mask=groups < num_groups)
    tl.store(out_ptr + row * size + offs, to_fp8(x / scales[:, None]), mask=mask)


def quantize_fp8(
    x: torch.Tensor, group_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x as float8_e4m3fn [T, n], scales [T, 1] float32): x = out * scale, for x [T, n]. With
    ``group_size`` (a power of two) scales [T, groups], the last of which may not be full.

    Raises ValueError naming the argument that does not fit.
    """
    if group_size is None:
        return launch.quantize_rows(_quantize_fp8_kernel, x, torch.float8_e4m3fn)
    launch.check_arguments(Argument("x", x, ("T", "n"), launch.FLOAT_DTYPES, launch.check_rows))
    return _quantize_groups(x, group_size)


def _quantize_groups(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    if launch.next_power_of_2(group_size) != group_size:
        raise ValueError(f"group_size: must be a power of two, not {group_size}")
    num_tokens, size = x.shape
    num_groups = launch.cdiv(size, group_size)
    out = torch.empty((num_tokens, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_tokens, num_groups), dtype=torch.float32, device=x.device)
    if num_tokens and size:
        _quantize_groups_kernel[num_tokens, launch.cdiv(num_groups, _GROUPS_AT_ONCE)](
            out,
            scales,
            x,
            size,
            num_groups,
            x.stride(0),
            GROUP=group_size,
            BLOCK=_GROUPS_AT_ONCE,
            num_warps=4,
            **launch.LAUNCH_OPTIONS,
        )
    return out, scales
