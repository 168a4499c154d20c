"""Quantises rows to FP8 with a scale each, where no norm or activation does it.

scale[t] = max_i |x[t, i]| / 448                out[t, i] = round(x[t, i] / scale[t])
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import Argument, store_fp8_row

# mypy: disable-error-code="no-untyped-def, untyped-decorator"


# A row is held in registers until its largest value is known.
_MAX_SIZE = 32768


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


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x as float8_e4m3fn [T, n], scales [T, 1] float32): x = out * scale, for x [T, n].

    Raises ValueError naming the argument that does not fit.
    """
    launch.check_arguments(Argument("x", x, ("T", "n"), launch.FLOAT_DTYPES, launch.check_rows))
    num_tokens, size = x.shape
    if not 0 < size <= _MAX_SIZE:
        raise ValueError(f"x: rows must have 1 to {_MAX_SIZE} elements, got {size}")
    out = torch.empty((num_tokens, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_tokens, 1), dtype=torch.float32, device=x.device)
    if num_tokens:
        block = launch.next_power_of_2(size)
        _quantize_fp8_kernel[(num_tokens,)](
            out,
            scales,
            x,
            x.stride(0),
            SIZE=size,
            BLOCK=block,
            num_warps=min(max(block // 512, 4), 16),
            **launch.LAUNCH_OPTIONS,
        )
    return out, scales
