"""Which programs of the generation attention do what: decided once per step, on the device.

The tokens of a row are cut into *splits*, and a split is an *item* of the list that programs take
their work from. With ``share`` items to fill the machine (`PROGRAMS_PER_SM` programs on each of its
multiprocessors) and ``mean`` tokens for each of them, a row gets ``length / mean`` splits, rounded,
and at least one: a batch of short rows needs no combining whatever its tables have room for, a lone
long row fills the machine, and so does one beside short ones. With ``num_splits`` given, the splits
of a row depend on its own length only.

Rounding gives a row at most ``length / mean`` items beyond its first, hence all of them at most
``share``. So the length of the list, and the grid, depend on shapes and never on lengths: a launch
can be captured in a CUDA graph, and what is left over leaves at once.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inflight_kernels import _host

# Programs of a grid that fills the machine. Three (FP8: four) are resident and share the bandwidth;
# of a few more than that, the last would run alone, and wait for memory.
PROGRAMS_PER_SM = 4
# Tokens. A shorter split costs more in the combination than it wins.
_MIN_SPLIT = 128
_ROWS_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class GenerationWork:
    """``items`` [num_items, 4] int32: row, first tile, token behind the last, splits of the row.
    ``split_rows`` [n, 3] int32: row of more than one split, its first item, its splits. Both end
    with entries of row -1. A tile has ``block_n`` tokens."""

    items: torch.Tensor
    split_rows: torch.Tensor
    block_n: int


@triton.jit
def _num_tiles(lengths, window, N: tl.constexpr):
    """First visible tile, and visible tiles, of rows; tiles are N tokens, N-aligned."""
    first = tl.where(window > 0, tl.maximum(lengths - window, 0), 0) // N
    return first, tl.cdiv(lengths, N) - first


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "num_entries", "share", "num_splits", "window"],
    do_not_specialize_on_alignment=["context_lengths_ptr"],
)
def _plan_work_kernel(
    items_ptr,
    split_rows_ptr,
    context_lengths_ptr,
    num_rows,
    num_items,
    num_entries,  # of split_rows
    share,
    num_splits,  # 0: fill the machine
    window,  # 0: none
    N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program; rows in order, a block at a time."""
    total = 0
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        lengths = tl.load(context_lengths_ptr + rows, mask=rows < num_rows, other=0)
        _, tiles = _num_tiles(lengths, window, N)
        total += tl.sum(tiles, axis=0)
    mean = tl.maximum(tl.cdiv(total, share), MIN_TILES)
    num_made, num_split = 0, 0
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        is_row = rows < num_rows
        lengths = tl.load(context_lengths_ptr + rows, mask=is_row, other=0)
        first_tile, tiles = _num_tiles(lengths, window, N)
        if num_splits > 0:
            per_split = tl.maximum(tl.cdiv(tiles, num_splits), MIN_TILES)
        else:
            per_split = tl.cdiv(tiles, tl.maximum((tiles + mean // 2) // mean, 1))
        per_split = tl.maximum(per_split, 1)
        splits = tl.where(is_row, tl.maximum(tl.cdiv(tiles, per_split), 1), 0)
        item = num_made + tl.cumsum(splits, axis=0) - splits
        num_made += tl.sum(splits, axis=0)
        for split in range(0, tl.max(splits, axis=0)):
            entry = items_ptr + (item + split).to(tl.int64) * 4
            begin = first_tile + split * per_split
            is_item = split < splits
            tl.store(entry, rows, mask=is_item)
            tl.store(entry + 1, begin, mask=is_item)
            tl.store(entry + 2, tl.minimum((begin + per_split) * N, lengths), mask=is_item)
            tl.store(entry + 3, splits, mask=is_item)
        is_split = (splits > 1).to(tl.int32)
        entry = split_rows_ptr + (num_split + tl.cumsum(is_split, axis=0) - is_split) * 3
        num_split += tl.sum(is_split, axis=0)
        tl.store(entry, rows, mask=splits > 1)
        tl.store(entry + 1, item, mask=splits > 1)
        tl.store(entry + 2, splits, mask=splits > 1)
    for first in range(num_made, num_items, BLOCK):
        left = first + tl.arange(0, BLOCK)
        tl.store(items_ptr + left.to(tl.int64) * 4, -1, mask=left < num_items)
    for first in range(num_split, num_entries, BLOCK):
        left = first + tl.arange(0, BLOCK)
        tl.store(split_rows_ptr + left * 3, -1, mask=left < num_entries)


def plan_work(
    context_lengths: torch.Tensor,  # [B] int32
    max_context: int,
    num_kv_heads: int,
    block_n: int,
    window: int | None = None,
    num_splits: int | None = None,
) -> GenerationWork:
    """The work of a step whose rows have up to ``max_context`` tokens."""
    batch_size, device = context_lengths.shape[0], context_lengths.device
    share = max(PROGRAMS_PER_SM * _host.num_sms(device) // num_kv_heads, 1)
    min_tiles = max(_MIN_SPLIT // block_n, 1)
    # A window may lie across one tile more than it has.
    most = min(max_context, window + block_n) if window else max_context
    most_splits = _host.cdiv(_host.cdiv(most, block_n), min_tiles)
    most_splits = min(most_splits, num_splits) if num_splits else most_splits
    num_more = batch_size * (most_splits - 1)
    num_more = num_more if num_splits else min(num_more, share)
    items = torch.empty((batch_size + num_more, 4), dtype=torch.int32, device=device)
    num_entries = min(batch_size, num_more)
    split_rows = torch.empty((num_entries, 3), dtype=torch.int32, device=device)
    _plan_work_kernel[(1,)](
        items,
        split_rows,
        context_lengths,
        batch_size,
        batch_size + num_more,
        num_entries,
        share,
        num_splits or 0,
        window or 0,
        N=block_n,
        MIN_TILES=min_tiles,
        BLOCK=_ROWS_AT_A_TIME,
        num_warps=4,
        **_host.LAUNCH_OPTIONS,
    )
    return GenerationWork(items, split_rows, block_n)
