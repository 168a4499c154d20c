"""Reads tiles of the paged cache: device code and checks that both attention kernels share.

A cache of one layer is ``[num_blocks, tokens_per_block, num_kv_heads, head_dim]`` in any memory
order whose last dimension is contiguous. Token ``t`` of a request lies in block
``block_table[t // tokens_per_block]`` at row ``t % tokens_per_block``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import dot, narrow

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

MAX_HEAD_DIM = 576
"""Of latents: 512 numbers, and 64 that turn."""
MAX_FP8_HEAD_DIM = 256
MAX_BLOCKS_OF_TILE = tl.constexpr(4)


@triton.jit
def tile_rows(
    table_ptr, first_token, end_token, stride_block, stride_token, P: tl.constexpr, N: tl.constexpr
):
    """Offsets (int64, [N]) of tokens first_token .. first_token + N - 1 in one head's cache.

    ``first_token`` is a multiple of N. Of a tile inside one block (P % N == 0) the id is a scalar;
    of one that spans a few whole blocks each id is, and which of them a row belongs to is known
    when the kernel is compiled. Else every token looks its own up: nearly twice the instructions.
    Tokens from ``end_token`` on get an offset that must not be read.
    """
    in_tile = tl.arange(0, N)
    if P % N == 0:
        block = tl.load(table_ptr + first_token // P).to(tl.int64)
        first_row = 0 if P == N else first_token % P  # 0 for the compiler too
        return block * stride_block + (first_row + in_tile) * stride_token
    elif N % P == 0 and N // P <= MAX_BLOCKS_OF_TILE:
        first_block = table_ptr + first_token // P
        blocks = tl.load(first_block) + tl.zeros_like(in_tile)
        for number in tl.static_range(1, N // P):
            is_there = first_token + number * P < end_token
            block = tl.load(first_block + number, mask=is_there, other=0)
            blocks = tl.where(in_tile < number * P, blocks, block)
        return blocks.to(tl.int64) * stride_block + (in_tile % P) * stride_token
    else:
        tokens = first_token + in_tile
        blocks = tl.load(table_ptr + tokens // P, mask=tokens < end_token, other=0).to(tl.int64)
        return blocks * stride_block + (tokens % P) * stride_token


@triton.jit
def to_product_dtype(q, IS_BYTES: tl.constexpr):
    """The query in the dtype of the matrix products. For a cache of FP8 or int8 that is float16,
    which holds all their numbers and is one conversion away; by way of bfloat16 the conversions
    alone would take longer than the loads. A query beyond float16's range is clamped to it."""
    if IS_BYTES:
        return tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    else:
        return q


@triton.jit
def load_tail(rows, is_row, HEAD_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """Columns D to HEAD_DIM at pointers to rows [N]: [N, E]. Without E anything: it is not read."""
    if E > 0:
        offs = D + tl.arange(0, E)
        mask = is_row[:, None] & (offs < HEAD_DIM)[None, :]
        return tl.load(rows[:, None] + offs[None, :], mask=mask, other=0.0)
    else:
        return is_row


@triton.jit
def zero_tail(M: tl.constexpr, E: tl.constexpr):
    """Sums for `add_tail`."""
    return tl.zeros([M, E if E > 0 else 1], tl.float32)


@triton.jit
def score_tail(scores, q, k, E: tl.constexpr):
    """scores [M, N] and what the tails of q [M, E] and k [N, E] add to them."""
    if E > 0:
        scores += dot(q, tl.trans(k))
    return scores


@triton.jit
def add_tail(acc, alpha, p, v, E: tl.constexpr):
    """The tail [M, E] of ``acc * alpha + p @ v``."""
    if E > 0:
        acc = acc * alpha[:, None] + dot(p, v)
    return acc


@triton.jit
def store_tail(rows, acc, is_row, HEAD_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """acc [M, E] to columns D to HEAD_DIM at pointers to rows [M]."""
    if E > 0:
        offs = D + tl.arange(0, E)
        mask = is_row[:, None] & (offs < HEAD_DIM)[None, :]
        out = narrow(acc, rows.dtype.element_ty)
        tl.store(rows[:, None] + offs[None, :], out, mask=mask)


@triton.jit
def first_visible(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that a token at ``position`` sees: of its window, and of its chunk."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, first)
    if CHUNK > 0:
        first = tl.maximum(position // CHUNK * CHUNK, first)
    return first


@triton.jit
def begin_softmax(
    sinks_ptr, slopes_ptr, heads, in_heads, is_whole, M: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr
):  # fmt: skip
    """Peak and total [M] of rows that have seen nothing but, where ``is_whole``, their sinks; and
    their slopes. ``heads`` [M] are those of the rows; peak and slopes are in log2."""
    LOG2E: tl.constexpr = 1.4426950408889634
    peak = tl.full([M], -1.0e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    slopes = total
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=in_heads, other=0.0) * LOG2E
        peak = tl.where(is_whole, sinks, peak)
        total += tl.where(is_whole, 1.0, 0.0)
    if HAS_SLOPES:
        slopes = tl.load(slopes_ptr + heads, mask=in_heads, other=0.0) * LOG2E
    return peak, total, slopes


@triton.jit
def scores_to_log2(scores, scale, SOFTCAP: tl.constexpr):
    """Scaled and, if asked, soft-capped scores times log2(e), so that exp2 replaces exp."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1): exact limits when exp overflows or vanishes.
        x = scores * (scale / SOFTCAP)
        tanh = 1.0 - 2.0 / (tl.exp2(2.0 * LOG2E * x) + 1.0)
        return tanh * (SOFTCAP * LOG2E)
    else:
        return scores * (scale * LOG2E)


def head_blocks(head_dim: int) -> tuple[int, int]:
    """Powers of two that hold a head between them: a wide one that is none in two, else (n, 0)."""
    whole = launch.next_power_of_2(head_dim)
    if whole <= 256 or whole == head_dim:
        return max(whole, 16), 0
    return whole // 2, max(launch.next_power_of_2(head_dim - whole // 2), 16)


def split_group(group: int, head_dim: int, most: int) -> int:
    """Into how many equal parts the ``group`` query heads of a KV head go, a program each: wide
    heads fill the registers, so up to ``most`` of them share a program."""
    if head_dim <= 256:
        return 1
    return next(
        parts for parts in range(1, group + 1) if group % parts == 0 and group <= most * parts
    )


@launch.once_in_a_row
def check_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    block_tables: torch.Tensor,
    context_lengths: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    chunk: int | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> None:
    """Raise ValueError, naming the argument, unless the paged arguments fit one another."""
    launch.check_shape("query", query, (None, None, None))
    launch.check_dtype("query", query, launch.FLOAT_DTYPES)
    num_heads, head_dim = query.shape[1:]
    if head_dim % 16 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"query: head_dim must be a multiple of 16 up to {MAX_HEAD_DIM}, got {head_dim}"
        )
    launch.check_shape("key_cache", key_cache, (None, None, None, head_dim))
    launch.check_dtype("key_cache", key_cache, (query.dtype, *launch.BYTE_DTYPES))
    launch.check_rows("key_cache", key_cache)
    if value_cache is not None:
        launch.check_shape("value_cache", value_cache, key_cache.shape)
        launch.check_dtype("value_cache", value_cache, (key_cache.dtype,))
        launch.check_rows("value_cache", value_cache)
        launch.check_same_device(query=query, value_cache=value_cache)
    if num_heads % key_cache.shape[2]:
        raise ValueError(
            f"query: num_heads must be a multiple of the cache's {key_cache.shape[2]} KV heads, "
            f"got {num_heads}"
        )
    launch.check_rows("query", query)
    launch.check_shape("context_lengths", context_lengths, (block_tables.shape[0],))
    launch.check_shape("block_tables", block_tables, (context_lengths.shape[0], None))
    launch.check_dtype("block_tables", block_tables, (torch.int32,))
    launch.check_dtype("context_lengths", context_lengths, (torch.int32,))
    launch.check_rows("block_tables", block_tables)
    launch.check_contiguous("context_lengths", context_lengths)
    launch.check_positive("scale", scale)
    launch.check_positive("sliding_window", sliding_window)
    launch.check_positive("softcap", softcap)
    launch.check_positive("chunk", chunk)
    for name, per_head in (("sinks", sinks), ("slopes", slopes)):
        if per_head is not None:
            launch.check_shape(name, per_head, (num_heads,))
            launch.check_dtype(name, per_head, (torch.float32,))
            launch.check_contiguous(name, per_head)
            launch.check_same_device(**{"query": query, name: per_head})
    if key_cache.dtype == torch.float8_e4m3fn:
        if head_dim > MAX_FP8_HEAD_DIM:
            raise ValueError(
                f"key_cache: in FP8 head_dim must be at most {MAX_FP8_HEAD_DIM}, got {head_dim}"
            )
        launch.check_fp8_device()
    launch.check_same_device(
        query=query,
        key_cache=key_cache,
        block_tables=block_tables,
        context_lengths=context_lengths,
    )


def make_output(query: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """``out``, if it can hold the answer for ``query`` [T, H, D], or new memory; ValueError."""
    if out is None:
        return torch.empty(query.shape, dtype=query.dtype, device=query.device)
    launch.check_shape("out", out, query.shape)
    launch.check_dtype("out", out, (query.dtype,))
    launch.check_contiguous("out", out)
    launch.check_same_device(query=query, out=out)
    return out


def cache_strides(key_cache: torch.Tensor, value_cache: torch.Tensor) -> dict[str, Any]:
    """Kernel arguments: strides over block, token and head of both caches, and the block size."""
    return {
        "stride_k_block": key_cache.stride(0),
        "stride_k_token": key_cache.stride(1),
        "stride_k_head": key_cache.stride(2),
        "stride_v_block": value_cache.stride(0),
        "stride_v_token": value_cache.stride(1),
        "stride_v_head": value_cache.stride(2),
        "TOKENS_PER_BLOCK": key_cache.shape[1],
    }
