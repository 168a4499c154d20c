"""Quantises rows to int8 with a scale each.

scale[t] = max_i |x[t, i]| / 127                out[t, i] = round(x[t, i] / scale[t])
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch

# mypy: disable-error-code="no-untyped-def, untyped-decorator"


@triton.jit
def _quantize_int8_kernel(
    out_ptr,  # [T, SIZE] int8
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
    # The floor keeps a row of zeros finite.
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / 127.0
    tl.store(scales_ptr + row, scale)
    # A number of 2^23 and more has no digits behind the point: adding it rounds to the nearest
    # integer, to an even one between two.
    rounded = (x / scale + 12582912.0) - 12582912.0
    tl.store(out_ptr + row * SIZE + offs, rounded.to(tl.int8), mask=mask)


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x as int8 [T, n], scales [T, 1] float32): x = out * scale, for x [T, n].

    Raises ValueError naming the argument that does not fit.
    """
    return launch.quantize_rows(_quantize_int8_kernel, x, torch.int8)
