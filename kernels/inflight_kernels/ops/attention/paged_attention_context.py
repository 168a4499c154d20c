"""Causal attention of ragged query chunks over the paged cache (context phase, mixed batches).

    out[t, h] = softmax(scale * q[t, h] . K[visible(t), h // G])  @  V[visible(t), h // G]

Sequence ``s`` owns query tokens ``query_starts[s] .. query_starts[s + 1]``; they are the last ones
of its ``context_lengths[s]`` tokens, all of which (this chunk included) are in the cache already.
Token at position ``p`` sees positions ``p - sliding_window < j <= p``, and of these the ones of its
own ``chunk`` of positions. Scores get ``softcap * tanh(s / softcap)`` when a soft cap is given;
``slopes`` and ``sinks`` are those of `paged_attention_generation`.

One program owns one KV head and one tile of query rows; a row is a (token, query head of the
group) pair, so a tile of 128 rows is 32 tokens at G = 4 and K and V are read once for all heads of
the group. The grid is an upper bound on the tiles that depends on shapes only; each program finds
its sequence by counting, so nothing is computed on the host. Tiles of keys that no row sees are
not read, tiles that every row sees are not masked. Compiled code depends on the model and the tile
only: neither on the number of sequences nor on the tables' stride, nor on where in a larger tensor
tables, starts and lengths lie.

Heads wider than 256, and keys that are the values: as in `paged_attention_generation`.

Query tokens past ``query_starts[-1]`` (padding) give zeros; those before ``query_starts[0]`` are
other sequences': their rows of ``out`` stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import dot, find_group, int8_to_float16, narrow, tuned_tile
from inflight_kernels.paging import (
    add_tail,
    begin_softmax,
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


@triton.jit
def _find_queries(tile, sequence, starts_ptr, num_tokens, num_sequences, BLOCK_Q: tl.constexpr):
    """Where in the batch the sequence starts, how many query tokens it has, without and with those
    of padding (they count as the last sequence's, to be zeroed), and the first one of the tile.

    Asked again behind the loops, the loads are done again (``volatile``): what comes of the answer,
    64-bit addresses of up to 16 rows in each thread, then need not lie in registers meanwhile.
    None are left for it with wide heads over a cache of 8 bits, nor on sm_80 with heads of 128.
    """
    start = tl.load(starts_ptr + sequence, volatile=True)
    num_queries = tl.load(starts_ptr + sequence + 1, volatile=True) - start
    num_rows = tl.where(sequence == num_sequences - 1, num_tokens - start, num_queries)
    return start, num_queries, num_rows, (tile - start // BLOCK_Q - sequence) * BLOCK_Q


@triton.jit
def _to_products(x, dtype: tl.constexpr):
    """Numbers of the cache in the dtype of the products."""
    if x.dtype == tl.int8:
        return int8_to_float16(x.to(tl.int16))
    else:
        return x.to(dtype)


@triton.jit
def _attend_tiles(
    peak, total, acc, acc_tail, q, q_tail, positions, slopes, begin, end, lowest,
    table_ptr, key_ptr, value_ptr, scale, stride_block, stride_token,
    MASKED: tl.constexpr, P: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys begin .. end. q, acc [M, D]; q_tail, acc_tail [M, E]; positions,
    slopes, peak, total [M].

    No row sees a key before ``lowest``: its block may be another request's by now."""
    offs_d = tl.arange(0, D)
    in_head = (offs_d < HEAD_DIM)[None, :]
    for first in tl.range(begin, end, N, num_stages=STAGES):
        tokens = first + tl.arange(0, N)
        rows = tile_rows(table_ptr, first, end, stride_block, stride_token, P, N)
        in_range = tokens < end
        if WINDOW > 0 or CHUNK > 0:
            in_range &= tokens >= lowest
        mask = in_range[:, None] & in_head if MASKED else in_head
        k = tl.load(key_ptr + rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
        scores = dot(q, tl.trans(_to_products(k, q.dtype)))  # [M, N]
        k_tail = load_tail(key_ptr + rows, in_range, HEAD_DIM, D, E)
        scores = score_tail(scores, q_tail, k_tail, E)
        if MASKED or SOFTCAP > 0 or HAS_SLOPES:
            scores = scores_to_log2(scores, scale, SOFTCAP)
            if HAS_SLOPES:
                scores += slopes[:, None] * (tokens[None, :] - positions[:, None]).to(tl.float32)
            if MASKED:
                visible = tokens[None, :] <= positions[:, None]
                if WINDOW > 0 or CHUNK > 0:
                    visible &= tokens[None, :] >= first_visible(positions, WINDOW, CHUNK)[:, None]
                # Finite: a row's first tiles may lie before its window. What they add is a sum of
                # ones at weight 2^(-1e30 - peak): zero once a visible key has raised the peak.
                scores = tl.where(visible, scores, -1.0e30)
            peak_new = tl.maximum(peak, tl.max(scores, axis=1))
            p = tl.exp2(scores - peak_new[:, None])
        else:  # scale and difference in one multiply-add per score
            factor = scale * 1.4426950408889634
            peak_new = tl.maximum(peak, tl.max(scores, axis=1) * factor)
            p = tl.exp2(scores * factor - peak_new[:, None])
        alpha = tl.exp2(peak - peak_new)
        peak = peak_new
        total = total * alpha + tl.sum(p, axis=1)
        v_ptrs = value_ptr + rows[:, None] + offs_d[None, :]
        v = k if KEYS_ARE_VALUES else tl.load(v_ptrs, mask=mask, other=0.0)
        v_tail = (
            k_tail if KEYS_ARE_VALUES else load_tail(value_ptr + rows, in_range, HEAD_DIM, D, E)
        )
        p = narrow(p, q.dtype)
        acc = acc * alpha[:, None] + dot(p, _to_products(v, q.dtype))
        acc_tail = add_tail(acc_tail, alpha, p, v_tail, E)
    return peak, total, acc, acc_tail


@triton.jit(
    do_not_specialize=["num_tokens", "num_sequences", "stride_table"],
    do_not_specialize_on_alignment=["block_tables_ptr", "starts_ptr", "context_lengths_ptr"],
)
def _paged_attention_context_kernel(
    out_ptr,  # [T, H, D]
    query_ptr,  # [T, H, D]
    key_ptr,
    value_ptr,
    block_tables_ptr,  # [S, max_blocks]
    starts_ptr,  # [S + 1]
    context_lengths_ptr,  # [S]
    sinks_ptr,  # [H] float32, with HAS_SINKS
    slopes_ptr,  # [H] float32, with HAS_SLOPES
    scale,  # softmax scale times the scale of a key cache of 8 bits
    value_scale,
    num_tokens,
    num_sequences,
    stride_q_row,
    stride_q_head,
    stride_table,
    stride_block,  # of both caches
    stride_token,
    stride_head,
    NUM_GROUPS: tl.constexpr,  # of query heads that share a program
    GROUPS_PER_KV_HEAD: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,  # 0: none
    STAGES: tl.constexpr,
):
    IS_LOCAL: tl.constexpr = WINDOW > 0 or CHUNK > 0
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # A grid of one dimension: the others end at 65,535, and wide groups have more tiles.
    group = tl.program_id(0) % NUM_GROUPS
    # Late tiles of a prompt see the most keys: launched first, they do not form the tail.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_GROUPS
    if tile < tl.load(starts_ptr) // BLOCK_Q:
        return
    sequence = find_group(tile, starts_ptr, num_sequences, BLOCK_Q)
    start, num_queries, num_rows, first_query = _find_queries(
        tile, sequence, starts_ptr, num_tokens, num_sequences, BLOCK_Q
    )
    if first_query >= num_rows:
        return
    length = tl.load(context_lengths_ptr + sequence)

    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    queries = first_query + offs_m // GROUP
    heads = group * GROUP + offs_m % GROUP
    in_tile = (offs_m < BLOCK_Q * GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
    is_query = (queries < num_queries)[:, None]
    rows = (start + queries).to(tl.int64)
    q_rows = query_ptr + rows * stride_q_row + heads * stride_q_head
    q = tl.load(q_rows[:, None] + offs_d[None, :], mask=in_tile & is_query, other=0.0)
    q = to_product_dtype(q, key_ptr.dtype.element_ty.primitive_bitwidth == 8)
    is_row = (offs_m < BLOCK_Q * GROUP) & (queries < num_queries)
    q_tail = load_tail(q_rows, is_row, HEAD_DIM, BLOCK_D, BLOCK_E)

    positions = length - num_queries + queries
    first_position = length - num_queries + first_query
    end = tl.minimum(length, first_position + BLOCK_Q)
    lowest, begin = 0, 0
    if IS_LOCAL:
        lowest = first_visible(tl.maximum(first_position, 0), WINDOW, CHUNK)
        begin = lowest // BLOCK_N * BLOCK_N
    end = tl.where(first_query < num_queries, end, begin)
    # Keys up to the first row's own position are visible to all rows, unless a window hides some.
    middle = begin if IS_LOCAL else tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, end)

    peak, total, slopes = begin_softmax(
        sinks_ptr, slopes_ptr, heads, offs_m < BLOCK_Q * GROUP, True, BLOCK_M, HAS_SINKS, HAS_SLOPES
    )
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_tail = zero_tail(BLOCK_M, BLOCK_E)
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * stride_table
    kv_head = (group // GROUPS_PER_KV_HEAD).to(tl.int64)
    key_ptr += kv_head * stride_head
    value_ptr += kv_head * stride_head
    if not IS_LOCAL:
        peak, total, acc, acc_tail = _attend_tiles(
            peak, total, acc, acc_tail, q, q_tail, positions, slopes, begin, middle, lowest,
            table_ptr, key_ptr, value_ptr, scale, stride_block, stride_token,
            False, TOKENS_PER_BLOCK, HEAD_DIM, WINDOW, CHUNK, SOFTCAP, HAS_SLOPES,
            KEYS_ARE_VALUES, BLOCK_N, BLOCK_D, BLOCK_E, STAGES,
        )  # fmt: skip
    peak, total, acc, acc_tail = _attend_tiles(
        peak, total, acc, acc_tail, q, q_tail, positions, slopes, middle, end, lowest,
        table_ptr, key_ptr, value_ptr, scale, stride_block, stride_token,
        True, TOKENS_PER_BLOCK, HEAD_DIM, WINDOW, CHUNK, SOFTCAP, HAS_SLOPES,
        KEYS_ARE_VALUES, BLOCK_N, BLOCK_D, BLOCK_E, STAGES,
    )  # fmt: skip

    # Rows are counted over the batch, so that nothing of them is known before the answer.
    start, num_queries, num_rows, first_query = _find_queries(
        tile, sequence, starts_ptr, num_tokens, num_sequences, BLOCK_Q
    )
    batch_rows = ((start + first_query) * GROUP + offs_m).to(tl.uint32)
    tokens = batch_rows // GROUP
    is_query = (tokens < start + num_queries)[:, None]
    factor = (value_scale / tl.where(total > 0, total, 1.0))[:, None]
    out = narrow(tl.where(is_query, acc * factor, 0.0), out_ptr.dtype.element_ty)
    # token * num_heads + head, where head is group * GROUP + batch_row - token * GROUP.
    other_heads = (NUM_GROUPS - 1) * GROUP
    out_rows = tokens.to(tl.int64) * other_heads + batch_rows + group * GROUP
    is_stored = tokens < start + tl.minimum(num_rows, first_query + BLOCK_Q)
    stored = is_stored[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store((out_ptr + out_rows * HEAD_DIM)[:, None] + offs_d[None, :], out, mask=stored)
    tail = tl.where(is_query, acc_tail * factor, 0.0)
    store_tail(out_ptr + out_rows * HEAD_DIM, tail, is_stored, HEAD_DIM, BLOCK_D, BLOCK_E)


@dataclass(frozen=True, slots=True)
class ContextTile:
    """Query rows and keys per tile, software-pipelining depth and warps of a program."""

    block_m: int
    block_n: int
    stages: int
    num_warps: int


def choose_tile(
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    max_query_len: int | None,
    cache_dtype: torch.dtype | None = None,
) -> ContextTile:
    """128 rows feed two warpgroups of wgmma; 64 feed one; 16 suffice for a few draft tokens.

    Five stages keep two tiles of K and V ahead (the pipeliner splits them between the block id
    and the tile it leads to); where shared memory or registers are short, three keep one. Over a
    cache of 8 bits five take fewer registers than three, and with wide heads unused room.
    Long chunks take the tile that was measured to be best, if one was (`_tiles`).
    """
    smallest = max(16, launch.next_power_of_2(group))
    if head_dim > 256:
        return ContextTile(_wide_rows(dtype), 16, stages=2, num_warps=8)
    if dtype == torch.float32:  # no tensor cores: small tiles, for checking rather than serving
        return ContextTile(max(smallest, 32), 16, stages=2, num_warps=8)
    rows = 128 if max_query_len is None else max_query_len * group
    has_room, is_wide = launch.has_large_shared_memory(), head_dim > 128
    block_n = 32 if is_wide else 64
    if rows <= 16:
        return ContextTile(smallest, block_n, stages=3, num_warps=4)
    if rows <= 64 or (is_wide and not has_room):
        num_warps = 8 if is_wide else 4
        return ContextTile(max(smallest, 64), block_n, stages=3, num_warps=num_warps)
    name = launch.dtype_name(cache_dtype or dtype)
    tuned = tuned_tile("paged_attention_context", head_dim, group, name)
    if tuned is not None:
        return ContextTile(*tuned)
    is_large = is_wide and cache_dtype not in launch.BYTE_DTYPES
    stages = 5 if has_room and not is_large else 3
    return ContextTile(max(smallest, 128), block_n, stages=stages, num_warps=8)


def _wide_rows(dtype: torch.dtype) -> int:
    """Rows of a tile of wide heads: their sums fill the registers of eight warps, as far as these
    multiply from shared memory (wgmma)."""
    if dtype == torch.float32:
        return 16
    return 64 if launch.has_large_shared_memory() else 32


@launch.once_in_a_row
def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    max_query_len: int | None,
    chunk: int | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> None:
    """Raise ValueError, naming the argument, unless all fit one another."""
    check_attention(
        query, key_cache, value_cache, block_tables, context_lengths, scale, sliding_window,
        softcap, chunk, sinks, slopes,
    )  # fmt: skip
    if (
        value_cache is not None and value_cache.stride() != key_cache.stride()
    ):  # one offset finds a token in both
        raise ValueError(
            f"value_cache: must have the strides of key_cache, {key_cache.stride()}, "
            f"got {value_cache.stride()}"
        )
    launch.check_shape("query_starts", query_starts, (context_lengths.shape[0] + 1,))
    launch.check_dtype("query_starts", query_starts, (torch.int32,))
    launch.check_contiguous("query_starts", query_starts)
    launch.check_same_device(query=query, query_starts=query_starts)
    launch.check_positive("max_query_len", max_query_len)


def paged_attention_context(
    query: torch.Tensor,  # [T, H, D] bfloat16, float16 or float32
    key_cache: torch.Tensor,  # [num_blocks, tokens_per_block, num_kv_heads, D], or of 8 bits
    value_cache: torch.Tensor | None,  # same shape and strides; None: the keys are the values, too
    block_tables: torch.Tensor,  # [S, max_blocks] int32; entries past a row's length are not read,
    # and nothing of the blocks of those that no query sees
    query_starts: torch.Tensor,  # [S + 1] int32, ascending; [-1] <= T
    context_lengths: torch.Tensor,  # [S] int32: cached tokens plus this chunk
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    max_query_len: int | None = None,
    *,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,  # [H] float32
    slopes: torch.Tensor | None = None,  # [H] float32
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    tile: ContextTile | None = None,
    out: torch.Tensor | None = None,  # [T, H, D], contiguous: written, instead of new memory
) -> torch.Tensor:
    """Attention output [T, H, D] in the query's dtype; K and V of the chunk are in the cache.

    ``max_query_len`` is a hint: no sequence has more query tokens, so smaller tiles may do; the
    answer does not depend on it. ``key_scale`` and ``value_scale`` multiply what a cache
    of 8 bits holds. Raises ValueError naming the argument that does not fit.
    """
    _check(
        query, key_cache, value_cache, block_tables, query_starts, context_lengths, scale,
        sliding_window, softcap, max_query_len, chunk, sinks, slopes,
    )  # fmt: skip
    num_tokens, num_heads, head_dim = query.shape
    num_sequences = context_lengths.shape[0]
    out = make_output(query, out)
    if num_tokens == 0 or num_sequences == 0:
        return out.zero_()
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    parts = split_group(group, head_dim, _wide_rows(query.dtype))
    num_groups, group = num_kv_heads * parts, group // parts
    tile = tile or choose_tile(group, head_dim, query.dtype, max_query_len, key_cache.dtype)
    num_tiles = num_tokens // (tile.block_m // group) + num_sequences
    block_d, block_e = head_blocks(head_dim)
    _paged_attention_context_kernel[(num_groups * num_tiles,)](
        out,
        query,
        key_cache,
        key_cache if value_cache is None else value_cache,
        block_tables,
        query_starts,
        context_lengths,
        out if sinks is None else sinks,
        out if slopes is None else slopes,
        scale * key_scale,
        value_scale,
        num_tokens,
        num_sequences,
        stride_q_row=query.stride(0),
        stride_q_head=query.stride(1),
        stride_table=block_tables.stride(0),
        NUM_GROUPS=num_groups,
        GROUPS_PER_KV_HEAD=parts,
        GROUP=group,
        HEAD_DIM=head_dim,
        WINDOW=sliding_window or 0,
        CHUNK=chunk or 0,
        SOFTCAP=softcap or 0.0,
        HAS_SINKS=sinks is not None,
        HAS_SLOPES=slopes is not None,
        KEYS_ARE_VALUES=value_cache is None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=block_d,
        BLOCK_E=block_e,
        STAGES=tile.stages,
        num_warps=tile.num_warps,
        stride_block=key_cache.stride(0),
        stride_token=key_cache.stride(1),
        stride_head=key_cache.stride(2),
        TOKENS_PER_BLOCK=key_cache.shape[1],
        **(launch.ALL_REGISTERS if query.dtype == torch.float32 else {}),
        **launch.LAUNCH_OPTIONS,
    )
    return out
