"""A linear layer whose rows do not depend on how many there are: answers repeat bit by bit.

    out[t] = x[t] @ weight.T * x_scale[t] * weight_scale + bias

A library picks its tiles, and whether it splits the sum over columns, by the number of rows; so the
same row may come out a last bit different in another batch. Here one tile shape serves every number
of rows and the columns are summed in one order. That costs speed where another shape would suit
better: few rows still fill a tile of 64, many rows use no larger one.

With FP8 both factors are float8_e4m3fn and come with a scale per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import dot_by_rows, narrow

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

_DTYPES = (*launch.FLOAT_DTYPES, torch.float8_e4m3fn)
_BLOCK_T, _BLOCK_R, _BLOCK_C = 64, 128, 64  # tokens, rows of the weight, columns


@triton.jit(do_not_specialize=["num_tokens"])
def _invariant_linear_kernel(
    out_ptr,  # [T, ROWS]
    x_ptr,  # [T, COLUMNS]
    weight_ptr,  # [ROWS, COLUMNS]
    x_scales_ptr,  # [T] float32, with SCALED
    weight_scales_ptr,  # [ROWS] float32, with SCALED
    bias_ptr,  # [ROWS], with BIAS
    num_tokens,
    stride_x,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Neighbours share rows of the weight, which then come out of the L2 cache.
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_token, is_row = tokens < num_tokens, rows < ROWS
    columns = tl.arange(0, BLOCK_C)
    x_rows = x_ptr + tokens[:, None] * stride_x
    weight_rows = weight_ptr + rows[:, None] * COLUMNS
    acc = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for first in tl.range(0, COLUMNS, BLOCK_C, num_stages=STAGES):
        offs = first + columns
        is_column = (offs < COLUMNS)[None, :]
        x = tl.load(x_rows + offs[None, :], mask=is_token[:, None] & is_column, other=0.0)
        weight = tl.load(weight_rows + offs[None, :], mask=is_row[:, None] & is_column, other=0.0)
        acc += dot_by_rows(x, tl.trans(weight))
    if SCALED:
        x_scales = tl.load(x_scales_ptr + tokens, mask=is_token, other=0.0)
        weight_scales = tl.load(weight_scales_ptr + rows, mask=is_row, other=0.0)
        acc = acc * x_scales[:, None] * weight_scales[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + rows, mask=is_row, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    out = narrow(acc, out_ptr.dtype.element_ty)
    out_rows = out_ptr + tokens[:, None] * ROWS + rows[None, :]
    tl.store(out_rows, out, mask=is_token[:, None] & is_row[None, :])


def invariant_linear(
    x: torch.Tensor,  # [T, columns] bfloat16, float16, float32 or float8_e4m3fn
    weight: torch.Tensor,  # [rows, columns] of the same dtype, contiguous
    bias: torch.Tensor | None = None,  # [rows] of any float dtype
    *,
    x_scales: torch.Tensor | None = None,  # [T, 1] float32, with FP8
    weight_scales: torch.Tensor | None = None,  # [rows, 1] float32, with FP8
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """[T, rows] in ``out_dtype`` (default: that of x); a row is the same whatever T is.

    Raises ValueError naming the argument that does not fit.
    """
    launch.check_shape("x", x, (None, None))
    num_tokens, columns = x.shape
    launch.check_shape("weight", weight, (None, columns))
    num_rows = weight.shape[0]
    launch.check_dtype("x", x, _DTYPES)
    launch.check_dtype("weight", weight, (x.dtype,))
    launch.check_rows("x", x)
    launch.check_contiguous("weight", weight)
    is_scaled = x.dtype == torch.float8_e4m3fn
    for name, scales, count in (
        ("x_scales", x_scales, num_tokens),
        ("weight_scales", weight_scales, num_rows),
    ):
        if (scales is None) == is_scaled:
            raise ValueError(f"{name}: must be given with float8_e4m3fn, and only then")
        if scales is not None:
            launch.check_shape(name, scales, (count, 1))
            launch.check_dtype(name, scales, (torch.float32,))
            launch.check_contiguous(name, scales)
    if bias is not None:
        launch.check_shape("bias", bias, (num_rows,))
        launch.check_contiguous("bias", bias)
    launch.check_same_device(x=x, weight=weight, bias=bias)
    dtype = out_dtype or (torch.bfloat16 if is_scaled else x.dtype)
    out = torch.empty((num_tokens, num_rows), dtype=dtype, device=x.device)
    if num_tokens == 0:
        return out
    grid = (launch.cdiv(num_tokens, _BLOCK_T), launch.cdiv(num_rows, _BLOCK_R))
    # float32 is multiplied without tensor cores: smaller tiles, or its registers run out.
    is_wide = x.dtype == torch.float32
    _invariant_linear_kernel[grid](
        out,
        x,
        weight,
        x_scales if x_scales is not None else out,
        weight_scales if weight_scales is not None else out,
        bias if bias is not None else out,
        num_tokens,
        x.stride(0),
        ROWS=num_rows,
        COLUMNS=columns,
        SCALED=is_scaled,
        BIAS=bias is not None,
        BLOCK_T=_BLOCK_T,
        BLOCK_R=_BLOCK_R,
        BLOCK_C=32 if is_wide else _BLOCK_C,
        STAGES=2 if is_wide else 4,
        num_warps=8 if is_wide else 4,
        **launch.LAUNCH_OPTIONS,
    )
    return out
