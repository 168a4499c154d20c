"""Linears of heads whose weight is kept in numbers of 4 or 8 bits, widened in registers.

    by columns  out[t, h] = weight[h] @ x[t, h]
    by rows     out[t, h] = x[t, h] @ weight[h]

for one weight [H * rows of a head, columns], as a checkpoint has it, of whose heads some rows are
taken. Latent attention (DeepSeek) multiplies queries by rows of such a weight and what it finds by
columns of others. Both read the same bytes, so that they lie in memory once; a program widens a
tile to the type of x, rounds each number as a widened weight would be, and multiplies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import Argument, dot, narrow

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

_FP8 = torch.float8_e4m3fn
_KINDS = {torch.uint8: "int4", torch.int8: "int8", _FP8: "float8"}
_FEW_TOKENS, _MANY_TOKENS = 16, 64  # of a tile; loading compiles both
_SIZE, _SMALL_SIZE = 64, 32  # rows or columns of a tile of the weight
_WHOLE_ROW = 2**30  # the group of all columns: a multiple of every tile
_FLOAT8_FACTOR = tl.constexpr(2.0**120)


@triton.jit
def _widened_bytes(values_ptr, codebook_ptr, rows, columns, num_columns, KIND: tl.constexpr):
    """The numbers of rows [R] and columns [C] in float32."""
    if KIND == "float8":
        # Exponent and mantissa move to where float32 has their last bits. (sm_80 has no such type.)
        bits = tl.load(values_ptr + rows[:, None] * num_columns + columns[None, :]).to(tl.int32)
        bits = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
        return bits.to(tl.float32, bitcast=True) * _FLOAT8_FACTOR
    elif KIND == "int8":
        bits = tl.load(values_ptr + rows[:, None] * num_columns + columns[None, :])
        return bits.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        places = rows[:, None] * (num_columns // 2) + (columns // 2)[None, :]
        numbers = (tl.load(values_ptr + places).to(tl.int32) >> ((columns % 2) * 4)[None, :]) & 15
        if KIND == "codebook":
            return tl.load(codebook_ptr + numbers)
        else:
            return numbers.to(tl.float32)


@triton.jit
def _widened(values_ptr, scales_ptr, zeros_ptr, codebook_ptr, rows, column, num_columns,
             GROUP: tl.constexpr, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr,
             BLOCK_C: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """The weight's rows [R] and the columns from ``column`` on in ``dtype``, [R, C]; past the end
    the last one again."""
    columns = tl.minimum(column + tl.arange(0, BLOCK_C), num_columns - 1)
    wide = _widened_bytes(values_ptr, codebook_ptr, rows, columns, num_columns, KIND)
    num_groups = tl.cdiv(num_columns, GROUP)
    if GROUP % BLOCK_C == 0:  # one of a row for the whole tile
        groups = rows[:, None] * num_groups + tl.minimum(column, num_columns - 1) // GROUP
    else:
        groups = rows[:, None] * num_groups + (columns // GROUP)[None, :]
    if HAS_ZEROS:
        wide -= tl.load(zeros_ptr + groups).to(tl.float32)
    elif KIND == "int4":
        wide -= 8.0
    return narrow(wide * tl.load(scales_ptr + groups).to(tl.float32), dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def _head_linear_kernel(
    out_ptr,  # [T, H, rows or columns]
    x_ptr,  # [T, H, columns or rows]
    values_ptr,  # [H * HEAD_ROWS, columns] bytes, of 4 bits [.., columns / 2]
    scales_ptr,  # [H * HEAD_ROWS, groups]
    zeros_ptr,  # [H * HEAD_ROWS, groups], with HAS_ZEROS
    order_ptr,  # [columns] int32, with HAS_ORDER
    codebook_ptr,  # [16] float32, with KIND codebook
    num_tokens,
    first_row,  # of a head
    num_rows,  # of a head
    num_columns,
    stride_x,  # of a token
    stride_x_head,
    HEAD_ROWS: tl.constexpr,
    GROUP: tl.constexpr,  # neighbouring columns that share a scale
    KIND: tl.constexpr,  # "int4", "codebook", "int8" or "float8"
    HAS_ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BY_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Neighbours share a tile of the weight, which then comes out of the L2 cache.
    tokens, head = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(2)
    is_token = (tokens < num_tokens)[:, None]
    tokens = tl.minimum(tokens, num_tokens - 1).to(tl.int64)[:, None]
    x_rows = x_ptr + tokens * stride_x + head * stride_x_head
    place, first = tl.program_id(1), head * HEAD_ROWS + first_row
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK_T, BLOCK_C if BY_ROWS else BLOCK_R], tl.float32)
    # Rows and columns past the end: the last ones are read again, and x is 0 or nothing is written.
    for step in tl.range(0, num_rows if BY_ROWS else num_columns,
                         BLOCK_R if BY_ROWS else BLOCK_C, num_stages=STAGES):  # fmt: skip
        rows = (step if BY_ROWS else place * BLOCK_R) + tl.arange(0, BLOCK_R)
        column = place * BLOCK_C if BY_ROWS else step
        weight = _widened(
            values_ptr, scales_ptr, zeros_ptr, codebook_ptr,
            first + tl.minimum(rows, num_rows - 1), column, num_columns,
            GROUP, KIND, HAS_ZEROS, BLOCK_C, dtype,
        )  # fmt: skip
        if BY_ROWS:
            x = tl.load(x_rows + rows[None, :], mask=(rows < num_rows)[None, :], other=0.0)
            acc += dot(x, weight)
        else:
            columns = column + tl.arange(0, BLOCK_C)
            is_column = columns < num_columns
            if HAS_ORDER:
                columns = tl.load(order_ptr + columns, mask=is_column, other=0)
            x = tl.load(x_rows + columns[None, :], mask=is_column[None, :], other=0.0)
            acc += dot(x, tl.trans(weight))
    numbers = place * BLOCK_C + tl.arange(0, BLOCK_C)
    num_numbers = num_columns
    if not BY_ROWS:
        numbers = place * BLOCK_R + tl.arange(0, BLOCK_R)
        num_numbers = num_rows
    is_written = is_token & (numbers < num_numbers)[None, :]
    if BY_ROWS and HAS_ORDER:
        numbers = tl.load(order_ptr + numbers, mask=numbers < num_columns, other=0)
    out_rows = out_ptr + (tokens * tl.num_programs(2) + head) * num_numbers
    tl.store(out_rows + numbers[None, :], narrow(acc, out_ptr.dtype.element_ty), mask=is_written)


def head_linear(
    x: torch.Tensor,  # [T, H, columns], ``by_rows`` [T, H, rows]; bfloat16, float16 or float32
    values: torch.Tensor,  # [H * n, columns] int8 or float8_e4m3fn, or uint8 [H * n, columns / 2]
    scales: torch.Tensor,  # [H * n, groups] of any float dtype
    zeros: torch.Tensor | None = None,  # like scales
    *,
    group_size: int,
    by_rows: bool,
    first_row: int = 0,
    num_rows: int | None = None,  # default: all from ``first_row`` on
    order: torch.Tensor | None = None,  # [columns] int32
    codebook: torch.Tensor | None = None,  # [16] float32, for uint8
    tile_tokens: int | None = None,
) -> torch.Tensor:
    """[T, H, rows], ``by_rows`` [T, H, columns], like x; see ``reference.head_linear``, of what
    ``reference.dequantize`` makes of the weight.

    Of the n rows of each head those from ``first_row`` on are taken; ``order``: which columns the
    weight's stand for. ``tile_tokens`` (a power of two from 16): the tokens that a program
    multiplies; None: by their number. Given, a token's answer does not depend on the others.
    Raises ValueError naming the argument that does not fit.
    """
    launch.check_dtype("values", values, tuple(_KINDS))
    per_byte = 2 if values.dtype == torch.uint8 else 1
    columns = values.shape[-1] * per_byte
    launch.check_shape("x", x, (None, None, None))
    num_tokens, num_heads, _ = x.shape
    if len(values) % max(num_heads, 1):
        raise ValueError(
            f"values: shape must be [{num_heads} * n, ...] for so many heads of x, got "
            f"{list(values.shape)}"
        )
    head_rows = len(values) // num_heads
    num_rows = head_rows - first_row if num_rows is None else num_rows
    if not 0 <= first_row < first_row + num_rows <= head_rows:
        raise ValueError(
            f"first_row and num_rows: {first_row} and {num_rows} are not rows of a head, which has "
            f"{head_rows}"
        )
    num_groups = launch.cdiv(columns, group_size)
    launch.check_arguments(
        Argument("x", x, ("T", "H", num_rows if by_rows else columns), launch.FLOAT_DTYPES,
                 launch.check_rows),
        Argument("values", values, ("R", "bytes"), tuple(_KINDS)),
        Argument("scales", scales, ("R", num_groups), launch.FLOAT_DTYPES),
        Argument("zeros", zeros, ("R", num_groups), launch.FLOAT_DTYPES),
        Argument("order", order, (columns,), (torch.int32,)),
        Argument("codebook", codebook, (16,), (torch.float32,)),
    )  # fmt: skip
    num_numbers = columns if by_rows else num_rows
    out = torch.empty((num_tokens, num_heads, num_numbers), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    tile_tokens = tile_tokens or (_FEW_TOKENS if num_tokens <= _FEW_TOKENS else _MANY_TOKENS)
    rows = _SIZE
    if x.dtype == torch.float32:  # multiplied without tensor cores: registers run out
        tile_tokens, rows = _FEW_TOKENS, _SMALL_SIZE
    # Few tokens wait for memory: smaller tiles make room for more programs.
    columns_at_once = _SMALL_SIZE if tile_tokens <= _FEW_TOKENS else _SIZE
    size = columns_at_once if by_rows else rows
    grid = (launch.cdiv(num_tokens, tile_tokens), launch.cdiv(num_numbers, size), num_heads)
    _head_linear_kernel[grid](
        out,
        x,
        values.view(torch.uint8),
        scales,
        out if zeros is None else zeros,
        out if order is None else order,
        out if codebook is None else codebook,
        num_tokens,
        first_row,
        num_rows,
        columns,
        x.stride(0),
        x.stride(1),
        HEAD_ROWS=head_rows,
        GROUP=_WHOLE_ROW if num_groups == 1 else group_size,
        KIND=_KINDS[values.dtype] if codebook is None else "codebook",
        HAS_ZEROS=zeros is not None,
        HAS_ORDER=order is not None,
        BY_ROWS=by_rows,
        BLOCK_T=tile_tokens,
        BLOCK_R=rows,
        BLOCK_C=columns_at_once,
        STAGES=3,
        num_warps=4,
        **launch.LAUNCH_OPTIONS,
    )
    return out
