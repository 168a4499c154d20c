"""Low-rank products of many adapters, added to what a linear has answered.

    y[t] = (y[t] - bias) * scales[p] + bias + sum over its pages: b[page] @ (a[page] @ x[t])

for rows t of the adapter at place p, whose pages ``pages[p]`` names; rows without one stay as they
are. A linear may be made of several, side by side (queries, keys, values): each has an ``a`` of its
own, and each row of ``b`` belongs to one of them. The linears of experts have both for each expert;
their rows are grouped by adapter and expert.

Two launches: *shrink* multiplies by ``a``, split along the columns of x where these are many, into
a float32 buffer; *expand* sums the splits, multiplies by ``b`` and adds. Nothing is summed in an
order that depends on time. Which rows have which adapter is known on the device only (`group_rows`,
once for all linears of a step), so grids are upper bounds that depend on shapes, programs without
rows end at once, and a CUDA graph can hold the launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import Argument, dot, narrow

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

TILE_ROWS = 16
_BLOCK_N, _BLOCK_C = 64, 128  # rows of a linear; columns
_COLUMNS_PER_SPLIT, _MAX_SPLITS = 1024, 8
# Of *expand*: without a bound the compiler spills at some sizes, for one program more.
_REGISTERS: dict[str, Any] = {"maxnreg": 80}


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The rows of a step by adapter, in tiles of up to `TILE_ROWS` with the same one.

    ``order`` [T] int64: rows sorted by adapter. Of each tile [num_tiles] int32: the adapter's
    place (-1: it has no rows), and its first and its end among the sorted rows. With experts a
    place is that of an adapter, times their number, plus the number of the expert.
    """

    order: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor


def group_rows(places: torch.Tensor, num_places: int) -> RowGroups:
    """``places`` [T] int32: of each row's adapter, -1 for none. Nothing is waited for."""
    num_rows, device = len(places), places.device
    keys = torch.where(places < 0, num_places, places).long()
    order = keys.argsort(stable=True)
    counts = torch.zeros(num_places + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    ends = counts.cumsum(0)
    tiles_of = (counts[:num_places] + TILE_ROWS - 1) // TILE_ROWS
    tile_ends = tiles_of.cumsum(0)
    num_tiles = num_rows // TILE_ROWS + min(num_rows, num_places)
    tiles = torch.arange(num_tiles, device=device)
    owner = torch.searchsorted(tile_ends, tiles, right=True)
    is_used = owner < num_places
    owner = owner.clamp(max=num_places - 1)
    number = tiles - (tile_ends[owner] - tiles_of[owner])
    starts = ends[owner] - counts[owner] + number * TILE_ROWS
    stops = torch.minimum(starts + TILE_ROWS, ends[owner])
    return RowGroups(order, torch.where(is_used, owner, -1).int(), starts.int(), stops.int())


@triton.jit
def _shrink_kernel(
    buffer_ptr,  # [SPLITS, T, SLICES, MAX_PAGES, RANK] float32
    x_ptr,  # [T, COLUMNS]
    a_ptr,  # [num_pages, EXPERTS, SLICES, RANK, COLUMNS], pages stride_page apart
    pages_ptr,  # [num_places, MAX_PAGES]
    order_ptr,
    places_ptr,
    starts_ptr,
    ends_ptr,
    num_rows,
    stride_x,
    stride_page,
    stride_expert,
    EXPERTS: tl.constexpr,
    SLICES: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tile = tl.program_id(0)
    place = tl.load(places_ptr + tile)
    if place < 0:
        return
    part = tl.program_id(1)
    slice_index = part // MAX_PAGES
    number = part % MAX_PAGES
    adapter = (place // EXPERTS).to(tl.int64)
    page = tl.load(pages_ptr + adapter * MAX_PAGES + number).to(tl.int64)
    if page < 0:
        return
    split = tl.program_id(2)
    at = tl.load(starts_ptr + tile) + tl.arange(0, BLOCK_T)
    is_row = at < tl.load(ends_ptr + tile)
    rows = tl.load(order_ptr + at, mask=is_row, other=0)
    ranks = tl.arange(0, BLOCK_R)
    is_rank = ranks < RANK
    x_rows = x_ptr + rows[:, None] * stride_x
    a_page = a_ptr + page * stride_page + (place % EXPERTS).to(tl.int64) * stride_expert
    a_rows = a_page + (slice_index * RANK + ranks)[:, None] * COLUMNS
    acc = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for column in range(split * SPLIT, min((split + 1) * SPLIT, COLUMNS), BLOCK_C):
        offs = column + tl.arange(0, BLOCK_C)
        is_column = (offs < COLUMNS)[None, :]
        x = tl.load(x_rows + offs[None, :], mask=is_row[:, None] & is_column, other=0.0)
        a = tl.load(a_rows + offs[None, :], mask=is_rank[:, None] & is_column, other=0.0)
        acc += dot(x, tl.trans(a))
    row_size: tl.constexpr = SLICES * MAX_PAGES * RANK
    out = buffer_ptr + (split.to(tl.int64) * num_rows + rows)[:, None] * row_size
    out += (part * RANK + ranks)[None, :]
    tl.store(out, acc, mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def _expand_kernel(
    y_ptr,  # [T, ROWS]
    buffer_ptr,  # [SPLITS, T, SLICES, MAX_PAGES, RANK] float32
    b_ptr,  # [num_pages, EXPERTS, ROWS, RANK], pages stride_page apart
    scales_ptr,  # [num_places, ROWS], places stride_scales apart
    bias_ptr,  # [ROWS], with BIAS
    column_tiles_ptr,  # [num_column_tiles, 3]: slice, first row, the row behind the last
    pages_ptr,
    order_ptr,
    places_ptr,
    starts_ptr,
    ends_ptr,
    num_rows,
    stride_y,
    stride_page,
    stride_expert,
    stride_scales,
    EXPERTS: tl.constexpr,
    SLICES: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0)
    number = tl.load(places_ptr + tile)
    if number < 0:
        return
    place = (number // EXPERTS).to(tl.int64)
    entry = column_tiles_ptr + tl.program_id(1) * 3
    slice_index = tl.load(entry)
    columns = tl.load(entry + 1) + tl.arange(0, BLOCK_N)
    is_column = columns < tl.load(entry + 2)
    at = tl.load(starts_ptr + tile) + tl.arange(0, BLOCK_T)
    is_row = at < tl.load(ends_ptr + tile)
    rows = tl.load(order_ptr + at, mask=is_row, other=0)
    ranks = tl.arange(0, BLOCK_R)
    is_rank = ranks < RANK
    row_size: tl.constexpr = SLICES * MAX_PAGES * RANK
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for share in range(MAX_PAGES):
        page = tl.load(pages_ptr + place * MAX_PAGES + share).to(tl.int64)
        if page >= 0:
            part = slice_index * MAX_PAGES + share
            inner = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for split in tl.static_range(SPLITS):
                found = buffer_ptr + (split * num_rows + rows)[:, None] * row_size
                found += (part * RANK + ranks)[None, :]
                inner += tl.load(found, mask=is_row[:, None] & is_rank[None, :], other=0.0)
            b = b_ptr + page * stride_page + (number % EXPERTS).to(tl.int64) * stride_expert
            b += columns[:, None] * RANK + ranks[None, :]
            b = tl.load(b, mask=is_column[:, None] & is_rank[None, :], other=0.0)
            acc += dot(narrow(inner, b.dtype), tl.trans(b))
    out = y_ptr + rows[:, None] * stride_y + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    y = tl.load(out, mask=mask, other=0.0).to(tl.float32)
    scales = tl.load(scales_ptr + place * stride_scales + columns, mask=is_column, other=1.0)
    scales = scales.to(tl.float32)[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        y = (y - bias) * scales + bias
    else:
        y = y * scales
    tl.store(out, narrow(y + acc, y_ptr.dtype.element_ty), mask=mask)


def column_tiles(slices: list[int], device: torch.device) -> torch.Tensor:
    """For slices with so many rows each: the tiles of `_expand_kernel`, [num_tiles, 3] int32."""
    tiles, start = [], 0
    for number, size in enumerate(slices):
        end = start + size
        tiles += [(number, first, end) for first in range(start, end, _BLOCK_N)]
        start = end
    return torch.tensor(tiles, dtype=torch.int32, device=device)


def add_lora(
    y: torch.Tensor,  # [T, rows] bfloat16, float16 or float32, changed in place
    x: torch.Tensor,  # [T, columns] of the same dtype
    a: torch.Tensor,  # [num_pages, experts, slices, rank, columns] of it, those of an expert dense
    b: torch.Tensor,  # [num_pages, experts, rows, rank] of it, those of an expert dense
    scales: torch.Tensor,  # [num_places, rows] of the same dtype
    bias: torch.Tensor | None,  # [rows] of any float dtype
    pages: torch.Tensor,  # [num_places, max_pages] int32: those of each adapter, then -1
    groups: RowGroups,
    tiles: torch.Tensor,  # of `column_tiles`
) -> None:
    """See the module; ``reference.add_lora``. Pages and groups are not checked against their
    bounds: they live on the device. Raises ValueError naming the argument that does not fit."""
    dtypes = (y.dtype,)
    launch.check_arguments(
        Argument("y", y, ("T", "rows"), launch.FLOAT_DTYPES, launch.check_rows),
        Argument("x", x, ("T", "columns"), dtypes, launch.check_rows),
        Argument(
            "a",
            a,
            ("num_pages", "experts", "slices", "rank", "columns"),
            dtypes,
            launch.check_rows,
        ),
        Argument("b", b, ("num_pages", "experts", "rows", "rank"), dtypes, launch.check_rows),
        Argument("scales", scales, ("num_places", "rows"), dtypes, launch.check_rows),
        Argument("bias", bias, ("rows",), launch.FLOAT_DTYPES),
        Argument("pages", pages, ("num_places", "max_pages"), (torch.int32,)),
        Argument("tiles", tiles, ("num_tiles", 3), (torch.int32,)),
    )
    num_rows, columns = x.shape
    _, experts, slices, rank, _ = a.shape
    max_pages = pages.shape[1]
    num_tiles = len(groups.places)
    if num_tiles == 0:
        return
    splits = min(launch.cdiv(columns, _COLUMNS_PER_SPLIT), _MAX_SPLITS)
    per_split = launch.cdiv(launch.cdiv(columns, splits), _BLOCK_C) * _BLOCK_C
    splits = launch.cdiv(columns, per_split)
    block_r = max(launch.next_power_of_2(rank), 16)
    buffer = torch.empty(
        (splits, num_rows, slices, max_pages, rank), dtype=torch.float32, device=x.device
    )
    where = (groups.order, groups.places, groups.starts, groups.ends)
    is_wide = x.dtype == torch.float32  # multiplied without tensor cores: registers run out
    _shrink_kernel[(num_tiles, slices * max_pages, splits)](
        buffer,
        x,
        a,
        pages,
        *where,
        num_rows,
        x.stride(0),
        a.stride(0),
        a.stride(1),
        EXPERTS=experts,
        SLICES=slices,
        MAX_PAGES=max_pages,
        RANK=rank,
        COLUMNS=columns,
        SPLIT=per_split,
        BLOCK_T=TILE_ROWS,
        BLOCK_R=block_r,
        BLOCK_C=64 if is_wide else _BLOCK_C,
        num_warps=4,
        **launch.LAUNCH_OPTIONS,
    )
    _expand_kernel[(num_tiles, len(tiles))](
        y,
        buffer,
        b,
        scales,
        y if bias is None else bias,
        tiles,
        pages,
        *where,
        num_rows,
        y.stride(0),
        b.stride(0),
        b.stride(1),
        scales.stride(0),
        EXPERTS=experts,
        SLICES=slices,
        MAX_PAGES=max_pages,
        RANK=rank,
        SPLITS=splits,
        BIAS=bias is not None,
        BLOCK_T=TILE_ROWS,
        BLOCK_R=block_r,
        BLOCK_N=_BLOCK_N,
        num_warps=4,
        **launch.LAUNCH_OPTIONS,
        **({} if is_wide else _REGISTERS),
    )
