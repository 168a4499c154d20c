"""Linears of many experts in one launch: every group of rows is multiplied by its own weight.

    out[t] = x[t] @ weight[g].T + bias[g]           for ``starts[g] <= t < starts[g + 1]``

The rows of a mixture of experts are sorted by expert first. How many rows an expert has is known on
the device only, so the grid is an upper bound that depends on shapes, each program finds its group
by counting, and programs without rows end at once: nothing is waited for, and a CUDA graph can hold
the launch. Groups without rows read no weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import Argument, dot, find_group, narrow

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

_BLOCK_R, _BLOCK_C = 64, 64  # rows of a weight, columns
MIN_TILE_ROWS, _MAX_TILE_ROWS = 16, 64  # rows of x


@triton.jit(do_not_specialize=["num_groups"], do_not_specialize_on_alignment=["starts_ptr"])
def _grouped_linear_kernel(
    out_ptr,  # [T, ROWS]
    x_ptr,  # [T, COLUMNS]
    weight_ptr,  # [G, ROWS, COLUMNS]
    starts_ptr,  # [G + 1]
    bias_ptr,  # [G, ROWS], with BIAS
    num_groups,
    stride_x,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(0)
    group = find_group(tile, starts_ptr, num_groups, BLOCK_T).to(tl.int64)
    start = tl.load(starts_ptr + group)
    end = tl.load(starts_ptr + group + 1)
    first = start + (tile - start // BLOCK_T - group) * BLOCK_T
    if first >= end:
        return
    tokens = first.to(tl.int64) + tl.arange(0, BLOCK_T)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_token, is_row = tokens < end, rows < ROWS
    x_rows = x_ptr + tokens[:, None] * stride_x
    weight_rows = weight_ptr + (group * ROWS + rows)[:, None] * COLUMNS
    acc = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for column in tl.range(0, COLUMNS, BLOCK_C, num_stages=STAGES):
        offs = column + tl.arange(0, BLOCK_C)
        is_column = (offs < COLUMNS)[None, :]
        x = tl.load(x_rows + offs[None, :], mask=is_token[:, None] & is_column, other=0.0)
        weight = tl.load(weight_rows + offs[None, :], mask=is_row[:, None] & is_column, other=0.0)
        acc += dot(x, tl.trans(weight))
    if BIAS:
        bias = tl.load(bias_ptr + group * ROWS + rows, mask=is_row, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    out_rows = out_ptr + tokens[:, None] * ROWS + rows[None, :]
    tl.store(
        out_rows, narrow(acc, out_ptr.dtype.element_ty), mask=is_token[:, None] & is_row[None, :]
    )


def grouped_linear(
    x: torch.Tensor,  # [T, columns] bfloat16, float16 or float32, sorted by group
    weight: torch.Tensor,  # [G, rows, columns] of the same dtype, contiguous
    starts: torch.Tensor,  # [G + 1] int32, ascending from 0; [-1] at most T
    bias: torch.Tensor | None = None,  # [G, rows] of any float dtype
    *,
    tile_rows: int | None = None,
) -> torch.Tensor:
    """[T, rows] like x; see ``reference.grouped_linear``.

    ``tile_rows`` (a power of two from 16): the rows of x that a program multiplies; None: by the
    mean of the groups. Given, a row of the answer does not depend on the others.

    Starts are not checked against their bounds: they live on the device. Rows of x behind the last
    one get no answer: theirs are any numbers.
    Raises ValueError naming the argument that does not fit.
    """
    launch.check_arguments(
        Argument("x", x, ("T", "columns"), launch.FLOAT_DTYPES, launch.check_rows),
        Argument("weight", weight, ("G", "rows", "columns"), (x.dtype,)),
        Argument("starts", starts, (len(weight) + 1,), (torch.int32,)),
        Argument("bias", bias, ("G", "rows"), launch.FLOAT_DTYPES),
    )
    (num_tokens, columns), (num_groups, num_rows, _) = x.shape, weight.shape
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    mean = launch.next_power_of_2(launch.cdiv(num_tokens, num_groups))
    block_t = tile_rows or min(max(mean, MIN_TILE_ROWS), _MAX_TILE_ROWS)
    is_wide = x.dtype == torch.float32  # multiplied without tensor cores: registers run out
    grid = (num_tokens // block_t + num_groups, launch.cdiv(num_rows, _BLOCK_R))
    _grouped_linear_kernel[grid](
        out,
        x,
        weight,
        starts,
        out if bias is None else bias,
        num_groups,
        x.stride(0),
        ROWS=num_rows,
        COLUMNS=columns,
        BIAS=bias is not None,
        BLOCK_T=block_t,
        BLOCK_R=_BLOCK_R,
        BLOCK_C=32 if is_wide else _BLOCK_C,
        STAGES=2 if is_wide else 4,
        num_warps=4,
        **launch.LAUNCH_OPTIONS,
    )
    return out
