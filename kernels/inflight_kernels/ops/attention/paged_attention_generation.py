"""Attention of one new token per request over its paged cache (split-KV flash decoding).

    out[b, h] = softmax(scale * q[b, h] . K[0:len_b, h // G])  @  V[0:len_b, h // G]

with G query heads per KV head, ``softcap * tanh(s / softcap)`` applied to the scores when a soft
cap is given, and only the last ``sliding_window`` tokens visible when a window is given, and only
those of its own ``chunk`` of positions. ``slopes`` add ``slope[h] * (key - query position)`` to the
scores (ALiBi); ``sinks`` are one more score of each head, which joins the softmax and is dropped.

One program owns one KV head of one request and one *split* of its tokens; the G query heads share
the program, so every cached byte is read once. A row with one split is written straight to the
output; the rest is combined by a second kernel, in the order of the splits.

How many splits a row gets is decided on the device, once per step (`plan_work`). A split is an
*item* of the list that programs take their work from. With ``share`` items to fill the machine
(`PROGRAMS_PER_SM` programs on each multiprocessor) and ``mean`` tokens for each of them, a row gets
``length / mean`` splits, rounded, and at least one: a batch of short rows needs no combining
whatever its tables have room for, a lone long row fills the machine, and so does one beside short
ones. With ``num_splits`` given, the splits of a row depend on its own length only. Rounding gives a
row at most ``length / mean`` items beyond its first, hence all of them at most ``share``. So the
length of the list, and the grid, depend on shapes and never on lengths: a launch can be captured in
a CUDA graph, and programs without an item end at once.

A cache of 8 bits (FP8, int8) is read as words of two numbers, neighbours of one token. V is
multiplied along the tokens, so the matrix units want it transposed on its way from shared memory,
which is done for 16 bits at a time but not for 8: read as bytes, every number would be loaded
alone. A word holds a number of an even column and one of an odd column. Put next to each other
again, they would cross threads; so both products are taken over the even columns and over the odd
ones apart:

    q . K = q_even . K_even + q_odd . K_odd             out = interleave(p @ V_even, p @ V_odd)

Heads wider than 256 (latents) are a block of ``D`` columns and a tail of ``E``, whose products are
added, and the query heads of a group go to several programs. Keys that are values are read once.

A row of length 0 (padding) gives zeros. Compiled code depends on the model and the tile only:
neither on splits nor on the tables' stride, nor on where in a larger tensor tables and lengths lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import dot, narrow, tuned_tile, unpack_bytes
from inflight_kernels.paging import (
    add_tail,
    begin_softmax,
    cache_strides,
    check_attention,
    first_visible,
    head_blocks,
    load_tail,
    make_output,
    score_tail,
    scores_to_log2,
    split_group,
    store_tail,
    tile_rows,
    to_product_dtype,
    zero_tail,
)

# mypy: disable-error-code="no-untyped-def, untyped-decorator"


# Programs of a grid that fills the machine. Three (FP8: four) are resident and share the bandwidth;
# of a few more than that, the last would run alone, and wait for memory.
PROGRAMS_PER_SM = 4
# Query heads of 576 numbers, whose sums then take 36 registers of each of 256 threads.
_MOST_WIDE_HEADS = 16
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
def _num_tiles(lengths, N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """First visible tile, and visible tiles, of rows; tiles are N tokens, N-aligned."""
    first = first_visible(tl.maximum(lengths - 1, 0), WINDOW, CHUNK) // N
    return first, tl.cdiv(lengths, N) - first


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "num_entries", "share", "num_splits"],
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
    N: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CHUNK: tl.constexpr,  # 0: none
    MIN_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program; rows in order, a block at a time."""
    total = 0
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        lengths = tl.load(context_lengths_ptr + rows, mask=rows < num_rows, other=0)
        _, tiles = _num_tiles(lengths, N, WINDOW, CHUNK)
        total += tl.sum(tiles, axis=0)
    mean = tl.maximum(tl.cdiv(total, share), MIN_TILES)
    num_made, num_split = 0, 0
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        is_row = rows < num_rows
        lengths = tl.load(context_lengths_ptr + rows, mask=is_row, other=0)
        first_tile, tiles = _num_tiles(lengths, N, WINDOW, CHUNK)
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
    num_groups: int,
    block_n: int,
    window: int | None = None,
    num_splits: int | None = None,
    chunk: int | None = None,
) -> GenerationWork:
    """The work of a step whose rows have up to ``max_context`` tokens, and ``num_groups`` programs
    for each item."""
    batch_size, device = context_lengths.shape[0], context_lengths.device
    share = max(PROGRAMS_PER_SM * launch.num_sms(device) // num_groups, 1)
    min_tiles = max(_MIN_SPLIT // block_n, 1)
    # A window may lie across one tile more than it has, and so may a chunk.
    most = min([max_context, *(size + block_n for size in (window, chunk) if size)])
    most_splits = launch.cdiv(launch.cdiv(most, block_n), min_tiles)
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
        N=block_n,
        WINDOW=window or 0,
        CHUNK=chunk or 0,
        MIN_TILES=min_tiles,
        BLOCK=_ROWS_AT_A_TIME,
        num_warps=4,
        **launch.LAUNCH_OPTIONS,
    )
    return GenerationWork(items, split_rows, block_n)


@triton.jit
def _weigh(
    scores, peak, total, visible, scale, slopes, distance,
    SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr
):  # fmt: skip
    """Online softmax over a tile of scores [M, N]: their weights, the factor [M] that older results
    take, and the new peak and total [M]. ``slopes`` [M] are in log2, ``distance`` [N] at most 0."""
    scores = scores_to_log2(scores, scale, SOFTCAP)
    if HAS_SLOPES:
        scores += slopes[:, None] * distance.to(tl.float32)[None, :]
    # Finite, so that exp2 never sees inf - inf; every tile holds at least one visible token.
    scores = tl.where(visible[None, :], scores, -1.0e30)
    peak_new = tl.maximum(peak, tl.max(scores, axis=1))
    p = tl.exp2(scores - peak_new[:, None])
    alpha = tl.exp2(peak - peak_new)
    return p, alpha, peak_new, total * alpha + tl.sum(p, axis=1)


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["block_tables_ptr", "context_lengths_ptr"],
)
def _paged_attention_generation_kernel(
    out_ptr,  # [B, H, D]
    partial_ptr,  # [num_items, H, D] float32: normalised output of each split
    log_sum_ptr,  # [num_items, H] float32: log2 of each split's sum of exponentials
    query_ptr,  # [B, H, D]
    key_ptr,  # the cache: numbers of the query's dtype, or with IS_BYTES int16 words of two
    value_ptr,
    block_tables_ptr,  # [B, max_blocks]
    context_lengths_ptr,  # [B]
    items_ptr,  # [num_items, 4], see `GenerationWork`
    sinks_ptr,  # [H] float32, with HAS_SINKS
    slopes_ptr,  # [H] float32, with HAS_SLOPES
    scale,  # softmax scale times the scale of a key cache of 8 bits
    value_scale,
    stride_q_row,
    stride_q_head,
    stride_table,
    stride_k_block,  # these six count numbers, not words
    stride_k_token,
    stride_k_head,
    stride_v_block,
    stride_v_token,
    stride_v_head,
    TOKENS_PER_BLOCK: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # of query heads that share a program
    GROUPS_PER_KV_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_BYTES: tl.constexpr,
    IS_INT8: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,  # 0: none
    STAGES: tl.constexpr,
):
    group, item = tl.program_id(0) % NUM_GROUPS, tl.program_id(0).to(tl.int64) // NUM_GROUPS
    row = tl.load(items_ptr + item * 4).to(tl.int64)
    if row < 0:
        return
    begin = tl.load(items_ptr + item * 4 + 1) * BLOCK_N
    end = tl.load(items_ptr + item * 4 + 2)
    num_splits = tl.load(items_ptr + item * 4 + 3)
    length = end
    if WINDOW > 0 or CHUNK > 0 or HAS_SLOPES:
        length = tl.load(context_lengths_ptr + row)

    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_head = offs_d < HEAD_DIM
    heads = group * GROUP + offs_m
    q_mask = (offs_m < GROUP)[:, None] & in_head[None, :]
    q_rows = query_ptr + row * stride_q_row + heads * stride_q_head
    q = tl.load(q_rows[:, None] + offs_d[None, :], mask=q_mask, other=0.0)
    q = to_product_dtype(q, IS_BYTES)
    q_tail = load_tail(q_rows, offs_m < GROUP, HEAD_DIM, BLOCK_D, BLOCK_E)
    acc_tail = zero_tail(BLOCK_M, BLOCK_E)
    PER_WORD: tl.constexpr = 2 if IS_BYTES else 1
    BLOCK_C: tl.constexpr = BLOCK_D // PER_WORD
    offs_c = tl.arange(0, BLOCK_C)
    if IS_BYTES:  # q, k, v and acc are of the even columns now; each has a twin of the odd ones
        q, q_odd = tl.split(tl.reshape(q, [BLOCK_M, BLOCK_C, 2]))
        acc_odd = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)

    # The sinks of a row with splits join when these are combined.
    peak, total, slopes = begin_softmax(
        sinks_ptr, slopes_ptr, heads, offs_m < GROUP, num_splits == 1, BLOCK_M, HAS_SINKS,
        HAS_SLOPES
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    table_ptr = block_tables_ptr + row * stride_table
    # Strides are halved here, not by the host: of a multiple of 16 the compiler then knows that it
    # is one of 8 words, which a copy of 16 bytes asks for.
    kv_head = (group // GROUPS_PER_KV_HEAD).to(tl.int64)
    key_ptr += kv_head * (stride_k_head // PER_WORD)
    value_ptr += kv_head * (stride_v_head // PER_WORD)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        tokens = first + tl.arange(0, BLOCK_N)
        k_rows = tile_rows(
            table_ptr, first, end, stride_k_block // PER_WORD, stride_k_token // PER_WORD,
            TOKENS_PER_BLOCK, BLOCK_N
        )  # fmt: skip
        v_rows = tile_rows(
            table_ptr, first, end, stride_v_block // PER_WORD, stride_v_token // PER_WORD,
            TOKENS_PER_BLOCK, BLOCK_N
        )  # fmt: skip
        visible = tokens < end
        if WINDOW > 0 or CHUNK > 0:  # a block before those may be another request's by now
            visible &= tokens >= first_visible(length - 1, WINDOW, CHUNK)
        mask = visible[:, None] & (offs_c < HEAD_DIM // PER_WORD)[None, :]
        k = tl.load(key_ptr + k_rows[:, None] + offs_c[None, :], mask=mask, other=0)
        v_ptrs = value_ptr + v_rows[:, None] + offs_c[None, :]
        v = k if KEYS_ARE_VALUES else tl.load(v_ptrs, mask=mask, other=0)
        k_tail = load_tail(key_ptr + k_rows, visible, HEAD_DIM, BLOCK_D, BLOCK_E)
        v_tail = (
            k_tail
            if KEYS_ARE_VALUES
            else load_tail(value_ptr + v_rows, visible, HEAD_DIM, BLOCK_D, BLOCK_E)
        )
        if IS_BYTES:
            k, k_odd = unpack_bytes(k, IS_INT8)
            scores = dot(q, tl.trans(k)) + dot(q_odd, tl.trans(k_odd))  # [M, N]
        else:
            scores = dot(q, tl.trans(k))
        scores = score_tail(scores, q_tail, k_tail, BLOCK_E)
        p, alpha, peak, total = _weigh(
            scores, peak, total, visible, scale, slopes, tokens + 1 - length, SOFTCAP, HAS_SLOPES
        )
        p = narrow(p, q.dtype)
        if IS_BYTES:
            v, v_odd = unpack_bytes(v, IS_INT8)
            acc_odd = acc_odd * alpha[:, None] + dot(p, v_odd)
        acc = acc * alpha[:, None] + dot(p, v)
        acc_tail = add_tail(acc_tail, alpha, p, v_tail, BLOCK_E)

    if IS_BYTES:
        acc = tl.interleave(acc, acc_odd)
    # A padding row has total == 0; its zeros must not become 0 / 0.
    factor = (value_scale / tl.where(total > 0, total, 1.0))[:, None]
    acc = acc * factor
    if num_splits == 1:
        out_rows = out_ptr + (row * NUM_GROUPS * GROUP + heads) * HEAD_DIM
        out = narrow(acc, out_ptr.dtype.element_ty)
        tl.store(out_rows[:, None] + offs_d[None, :], out, mask=q_mask)
        store_tail(out_rows, acc_tail * factor, offs_m < GROUP, HEAD_DIM, BLOCK_D, BLOCK_E)
    else:
        slots = item * NUM_GROUPS * GROUP + heads
        partial_rows = partial_ptr + slots * HEAD_DIM
        tl.store(partial_rows[:, None] + offs_d[None, :], acc, mask=q_mask)
        store_tail(partial_rows, acc_tail * factor, offs_m < GROUP, HEAD_DIM, BLOCK_D, BLOCK_E)
        tl.store(log_sum_ptr + slots, peak + tl.log2(total), mask=offs_m < GROUP)


@triton.jit
def _combine_splits_kernel(
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    split_rows_ptr,  # [n, 3], see `GenerationWork`
    sinks_ptr,  # [H] float32, with HAS_SINKS
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """out = sum_s 2^(log_sum_s) partial_s / sum_s 2^(log_sum_s), rows with one split left alone.
    A sink is one more term of the sum below, with nothing above."""
    head, entry = tl.program_id(0), tl.program_id(1)
    row = tl.load(split_rows_ptr + entry * 3).to(tl.int64)
    if row < 0:
        return
    BLOCK_S: tl.constexpr = 16  # at a time: one compiled kernel for any number of splits
    first_item = tl.load(split_rows_ptr + entry * 3 + 1).to(tl.int64)
    num_used = tl.load(split_rows_ptr + entry * 3 + 2)
    row_head = row * tl.num_programs(0) + head
    offs_d = tl.arange(0, BLOCK_D)
    peak = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks_ptr + head) * 1.4426950408889634  # log2(e)
        total += 1.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_used, BLOCK_S):
        splits = first + tl.arange(0, BLOCK_S)
        used = splits < num_used
        slots = (first_item + splits) * tl.num_programs(0) + head
        log_sums = tl.load(log_sum_ptr + slots, mask=used, other=-float("inf"))
        peak_new = tl.maximum(peak, tl.max(log_sums, axis=0))
        weights = tl.exp2(log_sums - peak_new)
        mask = used[:, None] & (offs_d < HEAD_DIM)[None, :]
        rows = partial_ptr + slots[:, None] * HEAD_DIM
        parts = tl.load(rows + offs_d[None, :], mask=mask, other=0.0)
        alpha = tl.exp2(peak - peak_new)
        peak = peak_new
        total = total * alpha + tl.sum(weights, axis=0)
        acc = acc * alpha + tl.sum(parts * weights[:, None], axis=0)
    out = narrow(acc / total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row_head * HEAD_DIM + offs_d, out, mask=offs_d < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class GenerationTile:
    """Tokens per tile, software-pipelining depth and warps of a program."""

    block_n: int
    stages: int
    num_warps: int


def choose_tile(head_dim: int, cache_dtype: torch.dtype, group: int = 1) -> GenerationTile:
    """The tile for a shape: the one measured to be best (`_tiles`), else by rule.

    Bytes in flight decide the bandwidth reached, so each program has room for two tiles of K and V
    (64 KiB), and two or more programs share a multiprocessor. The pipeliner splits its stages
    between two levels of loads (block id, then K and V), and a tile's room is filled again when it
    has been multiplied: of five stages one tile is under way meanwhile, then two; of three, none.
    Tiles of 8 bits are half as large; where a multiprocessor has 228 KiB (compute capability 9 to
    11) room for a third costs no resident program.
    """
    tuned = tuned_tile(
        "paged_attention_generation", head_dim, group, launch.dtype_name(cache_dtype)
    )
    if tuned is not None:
        return GenerationTile(*tuned)
    if head_dim > 256:
        block_n = 16 if cache_dtype == torch.float32 else 32
        return GenerationTile(block_n, stages=2, num_warps=8)
    # float32 is multiplied in registers: with four warps they run out.
    num_warps = 8 if cache_dtype == torch.float32 else 4
    is_wide = head_dim > 128 or cache_dtype == torch.float32
    is_small = cache_dtype in launch.BYTE_DTYPES and not is_wide
    stages = 7 if is_small and launch.has_large_shared_memory() else 5
    return GenerationTile(block_n=32 if is_wide else 64, stages=stages, num_warps=num_warps)


def _words(name: str, cache: torch.Tensor) -> torch.Tensor:
    """A cache of 8 bits as int16, two neighbours of a token each; ValueError where that cuts."""
    if any(size % 2 for size in (cache.storage_offset(), *cache.stride()[:-1])):
        raise ValueError(
            f"{name}: of 8 bits, its strides but the last, and its offset, must be even, got "
            f"strides {list(cache.stride())} and offset {cache.storage_offset()}"
        )
    return cache.view(torch.int16)


def plan_generation(
    num_heads: int,
    key_cache: torch.Tensor,
    block_tables: torch.Tensor,  # [B, max_blocks] int32
    context_lengths: torch.Tensor,  # [B] int32
    sliding_window: int | None = None,
    *,
    chunk: int | None = None,
    num_splits: int | None = None,
    tile: GenerationTile | None = None,
) -> GenerationWork:
    """Which program does what in `paged_attention_generation` with the same arguments, for all
    layers of a step whose caches are of one shape."""
    tokens_per_block, num_kv_heads, head_dim = key_cache.shape[1:]
    group = num_heads // num_kv_heads
    tile = tile or choose_tile(head_dim, key_cache.dtype, group)
    max_context = block_tables.shape[1] * tokens_per_block
    num_groups = num_kv_heads * split_group(group, head_dim, _MOST_WIDE_HEADS)
    return plan_work(
        context_lengths, max_context, num_groups, tile.block_n, sliding_window, num_splits, chunk
    )


def paged_attention_generation(
    query: torch.Tensor,  # [B, H, D] bfloat16, float16 or float32
    key_cache: torch.Tensor,  # [num_blocks, tokens_per_block, num_kv_heads, D], or of 8 bits
    value_cache: torch.Tensor | None,  # same shape; None: the keys are the values, too
    block_tables: torch.Tensor,  # [B, max_blocks] int32; entries past a row's length are not read
    context_lengths: torch.Tensor,  # [B] int32, the current token included; 0 for padding rows
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,  # [H] float32
    slopes: torch.Tensor | None = None,  # [H] float32
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    num_splits: int | None = None,
    tile: GenerationTile | None = None,
    work: GenerationWork | None = None,
    out: torch.Tensor | None = None,  # [B, H, D], contiguous: written, instead of new memory
) -> torch.Tensor:
    """Attention output [B, H, D] in the query's dtype; the new token's K and V are in the cache.

    ``key_scale`` and ``value_scale`` multiply what a cache of 8 bits holds. With ``num_splits`` the
    split of a row depends on its own length only, so its result is the same in every batch;
    without it splits are chosen to fill the machine. ``work`` is what `plan_generation` made for
    these lengths, window, number of splits and tile; without it that is done here.
    Raises ValueError naming the argument that does not fit.
    """
    check_attention(
        query, key_cache, value_cache, block_tables, context_lengths, scale, sliding_window,
        softcap, chunk, sinks, slopes,
    )  # fmt: skip
    batch_size, num_heads, head_dim = query.shape
    launch.check_shape("context_lengths", context_lengths, (batch_size,))
    launch.check_positive("num_splits", num_splits)
    out = make_output(query, out)
    if batch_size == 0:
        return out
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    tile = tile or choose_tile(head_dim, key_cache.dtype, group)
    if work is None:
        work = plan_generation(
            num_heads,
            key_cache,
            block_tables,
            context_lengths,
            sliding_window,
            chunk=chunk,
            num_splits=num_splits,
            tile=tile,
        )
    elif work.block_n != tile.block_n:
        raise ValueError(f"work: made for tiles of {work.block_n} tokens, not {tile.block_n}")
    num_items, num_split_rows = len(work.items), len(work.split_rows)
    # Partial results of each item, if there may be any, and their log-sums behind them.
    num_partial = num_items * num_heads * head_dim if num_split_rows else 0
    scratch = torch.empty(
        num_partial + num_partial // head_dim, dtype=torch.float32, device=query.device
    )
    partial, log_sum = scratch[:num_partial], scratch[num_partial:]
    cache_dtype, keys_are_values = key_cache.dtype, value_cache is None
    is_bytes = cache_dtype in launch.BYTE_DTYPES
    value_cache = key_cache if value_cache is None else value_cache
    strides = cache_strides(key_cache, value_cache)
    if is_bytes:
        key_cache, value_cache = _words("key_cache", key_cache), _words("value_cache", value_cache)
    capability = launch.capability()
    is_bound = capability >= 120 or (is_bytes and capability < 90)
    block_d, block_e = head_blocks(head_dim)
    # A matrix product is 16 numbers deep at least: of words, half the head must be.
    block_d = max(block_d, 32 if is_bytes else 16)
    sinks_or_any = out if sinks is None else sinks
    parts = split_group(group, head_dim, _MOST_WIDE_HEADS)
    num_groups, group = num_kv_heads * parts, group // parts
    common: dict[str, Any] = {
        "HAS_SINKS": sinks is not None,
        "HEAD_DIM": head_dim,
        **launch.LAUNCH_OPTIONS,
    }
    _paged_attention_generation_kernel[(num_groups * num_items,)](
        out,
        partial,
        log_sum,
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lengths,
        work.items,
        sinks_or_any,
        out if slopes is None else slopes,
        scale * key_scale,
        value_scale,
        stride_q_row=query.stride(0),
        stride_q_head=query.stride(1),
        stride_table=block_tables.stride(0),
        NUM_GROUPS=num_groups,
        GROUPS_PER_KV_HEAD=parts,
        GROUP=group,
        IS_BYTES=is_bytes,
        IS_INT8=cache_dtype == torch.int8,
        KEYS_ARE_VALUES=keys_are_values,
        WINDOW=sliding_window or 0,
        CHUNK=chunk or 0,
        SOFTCAP=softcap or 0.0,
        HAS_SLOPES=slopes is not None,
        **strides,
        # A matrix product has 16 rows at least. Padded even for a single query head it takes a
        # third of the instructions of multiply-adds (345 per warp and 64 keys in sm_90 code).
        BLOCK_M=max(16, launch.next_power_of_2(group)),
        BLOCK_N=tile.block_n,
        BLOCK_D=block_d,
        BLOCK_E=block_e,
        STAGES=tile.stages,
        num_warps=tile.num_warps,
        # There shared memory bounds the resident programs: one or two of heads of 80 to 128.
        **(launch.ALL_REGISTERS if is_bound else {}),
        **common,
    )
    if num_split_rows:
        _combine_splits_kernel[(num_heads, num_split_rows)](
            out,
            partial,
            log_sum,
            work.split_rows,
            sinks_or_any,
            BLOCK_D=launch.next_power_of_2(head_dim),
            **common,
        )
    return out
