"""A linear layer whose rows do not depend on how many there are; the fastest for few tokens.

    out[t] = x[t] @ weight.T * x_scale[t] * weight_scale + bias

A library picks its tiles, and whether it splits the sum over columns, by the number of rows; so the
same row may come out a last bit different in another batch. Here the columns are summed in one
order, by the same instructions, whatever the tile.

Few tokens only wait for the weight. Its rows are the rows of the product (the tensor cores want 64
of them, but take as few as 16 tokens), so that tiles are small and many read at once: a library's
tile of 128 by 128 leaves most of the GPU idle where the weight has 4,096 rows.

With FP8 both factors are float8_e4m3fn and come with a scale per row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from inflight_kernels import launch
from inflight_kernels.launch import Argument, add_dot_by_rows, narrow

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

_DTYPES = (*launch.FLOAT_DTYPES, torch.float8_e4m3fn)
_FEW_TOKENS = 16  # the fewest that tensor cores take


class Tile(NamedTuple):
    """What a program computes, in tokens and rows of the weight, and the columns of one round."""

    tokens: int
    rows: int
    columns: int
    num_stages: int
    num_warps: int


def few_tokens(dtype: torch.dtype) -> int:
    """Up to how many tokens this is faster than cuBLAS, as measured on Hopper; 0 elsewhere."""
    is_measured = launch.capability() == 90 and not knobs.runtime.interpret
    return _FEW_TOKENS if is_measured and dtype != torch.float32 else 0


def choose_tile(num_tokens: int, dtype: torch.dtype) -> Tile:
    """The tile for few tokens is the fastest of a sweep on an H100. The tensor cores sum FP8 with
    fewer digits than float32 has, so all its tiles have as many columns; float32 is multiplied
    without them: one tile, and a smaller one, or its registers run out."""
    if dtype == torch.float32:
        return Tile(64, 128, 32, 2, 8)
    num_stages = 6 if launch.has_large_shared_memory() else 3
    if num_tokens <= _FEW_TOKENS or dtype == torch.float8_e4m3fn:
        tokens = _FEW_TOKENS if num_tokens <= _FEW_TOKENS else 64
        return Tile(tokens, 64, 256 // dtype.itemsize, num_stages, 4)
    return Tile(64, 128, 64, min(num_stages, 4), 4)


@triton.jit(do_not_specialize=["num_tokens"])
def _invariant_linear_kernel(
    out_ptr,  # [T, ROWS]
    x_ptr,  # [T, COLUMNS]
    weight_ptr,  # [ROWS, COLUMNS]
    x_scales_ptr,  # [T] float32, with SCALED
    weight_scales_ptr,  # [ROWS] float32, with SCALED
    bias_ptr,  # [ROWS], with BIAS
    num_tokens,
    num_rows,
    num_columns,
    stride_x,
    IS_EVEN: tl.constexpr,  # the columns are a multiple of BLOCK_C
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
    # Past the end the last one is read again, and not written: loads without a mask are faster.
    is_written = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
    tokens = tl.minimum(tokens, num_tokens - 1)
    rows = tl.minimum(rows, num_rows - 1)
    columns = tl.arange(0, BLOCK_C)
    x_rows = x_ptr + tokens[:, None] * stride_x + columns[None, :]
    weight_rows = weight_ptr + rows[:, None] * num_columns + columns[None, :]
    acc = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    for first in tl.range(0, num_columns, BLOCK_C, num_stages=STAGES):
        if IS_EVEN:
            weight = tl.load(weight_rows + first)
            x = tl.load(x_rows + first)
        else:
            is_column = (first + columns < num_columns)[None, :]
            weight = tl.load(weight_rows + first, mask=is_column, other=0.0)
            x = tl.load(x_rows + first, mask=is_column, other=0.0)
        acc = add_dot_by_rows(acc, weight, tl.trans(x))
    found = tl.trans(acc)
    if SCALED:
        x_scales, weight_scales = tl.load(x_scales_ptr + tokens), tl.load(weight_scales_ptr + rows)
        found = found * x_scales[:, None] * weight_scales[None, :]
    if BIAS:
        found += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
    out = narrow(found, out_ptr.dtype.element_ty)
    tl.store(out_ptr + tokens[:, None] * num_rows + rows[None, :], out, mask=is_written)


def invariant_linear(
    x: torch.Tensor,  # [T, columns] bfloat16, float16, float32 or float8_e4m3fn
    weight: torch.Tensor,  # [rows, columns] of the same dtype, contiguous
    bias: torch.Tensor | None = None,  # [rows] of any float dtype
    *,
    x_scales: torch.Tensor | None = None,  # [T, 1] float32, with FP8
    weight_scales: torch.Tensor | None = None,  # [rows, 1] float32, with FP8
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,  # for measuring; default: `choose_tile`
) -> torch.Tensor:
    """[T, rows] in ``out_dtype`` (default: that of x); a row is the same whatever T is.

    Raises ValueError naming the argument that does not fit.
    """
    launch.check_arguments(
        Argument("x", x, ("T", "columns"), _DTYPES, launch.check_rows),
        Argument("weight", weight, ("rows", "columns"), (x.dtype,)),
        Argument("bias", bias, ("rows",), launch.FLOAT_DTYPES),
        Argument("x_scales", x_scales, ("T", 1), (torch.float32,)),
        Argument("weight_scales", weight_scales, ("rows", 1), (torch.float32,)),
    )
    is_scaled = x.dtype == torch.float8_e4m3fn
    for name, scales in (("x_scales", x_scales), ("weight_scales", weight_scales)):
        if (scales is None) == is_scaled:
            raise ValueError(f"{name}: must be given with float8_e4m3fn, and only then")
    (num_tokens, columns), num_rows = x.shape, weight.shape[0]
    dtype = out_dtype or (torch.bfloat16 if is_scaled else x.dtype)
    out = torch.empty((num_tokens, num_rows), dtype=dtype, device=x.device)
    if num_tokens == 0:
        return out
    tile = tile or choose_tile(num_tokens, x.dtype)
    grid = (launch.cdiv(num_tokens, tile.tokens), launch.cdiv(num_rows, tile.rows))
    _invariant_linear_kernel[grid](
        out,
        x,
        weight,
        x_scales if x_scales is not None else out,
        weight_scales if weight_scales is not None else out,
        bias if bias is not None else out,
        num_tokens,
        num_rows,
        columns,
        x.stride(0),
        IS_EVEN=columns % tile.columns == 0,
        SCALED=is_scaled,
        BIAS=bias is not None,
        BLOCK_T=tile.tokens,
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **launch.LAUNCH_OPTIONS,
    )
    return out
