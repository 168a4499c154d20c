"""Rotary embedding of query and key, and the new K and V written to the paged cache: one launch.

    x'[i]         = x[i] * cos[p, i] - x[i + D/2] * sin[p, i]         i < D/2
    x'[i + D/2]   = x[i + D/2] * cos[p, i] + x[i] * sin[p, i]

for token position p. Optionally query and key heads are first RMS-normed over the head with a
weight each (qk-norm), or after they have turned. Token t goes to slot ``slot_mapping[t] = block *
tokens_per_block + row`` of both caches; -1 writes nothing. A cache of FP8 or int8 holds
K / key_scale and V / value_scale. Without a value (latents, whose keys are the values) K alone is
written.

A program handles one token and up to 8 query heads, or up to 8 KV heads; of wide heads fewer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import Argument, narrow, to_fp8, to_int8

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

_MAX_HEADS_PER_PROGRAM, _MAX_PAIRS_PER_PROGRAM = 8, 1024


@triton.jit
def _norm_halves(low, high, weight_ptr, offs, mask, eps, HEAD_DIM: tl.constexpr):
    """RMS norm of heads given as two halves [heads, BLOCK] each; rounded as `rms_norm` does."""
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM
    inverse = tl.rsqrt(mean + eps)[:, None]
    w_low = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    w_high = tl.load(weight_ptr + HEAD_DIM // 2 + offs, mask=mask, other=0.0).to(tl.float32)
    low = narrow(low * inverse, dtype).to(tl.float32) * w_low[None, :]
    high = narrow(high * inverse, dtype).to(tl.float32) * w_high[None, :]
    return narrow(low, dtype), narrow(high, dtype)


@triton.jit
def _rotate(
    x_ptr, stride_head, heads, num_heads, weight_ptr, eps, cos, sin, NORM: tl.constexpr,
    NORM_LAST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Both rotated halves of some heads of one token, float32 [heads, BLOCK], and their mask."""
    offs = tl.arange(0, BLOCK)
    in_half = offs < HEAD_DIM // 2
    mask = (heads < num_heads)[:, None] & in_half[None, :]
    ptrs = x_ptr + heads[:, None] * stride_head + offs[None, :]
    low = tl.load(ptrs, mask=mask, other=0.0)
    high = tl.load(ptrs + HEAD_DIM // 2, mask=mask, other=0.0)
    dtype = low.dtype
    if NORM and not NORM_LAST:
        low, high = _norm_halves(low, high, weight_ptr, offs, in_half, eps, HEAD_DIM)
    low, high = low.to(tl.float32), high.to(tl.float32)
    low, high = low * cos - high * sin, high * cos + low * sin
    if NORM and NORM_LAST:
        low, high = _norm_halves(
            narrow(low, dtype), narrow(high, dtype), weight_ptr, offs, in_half, eps, HEAD_DIM
        )
        low, high = low.to(tl.float32), high.to(tl.float32)
    return low, high, mask


@triton.jit
def _to_cache(x, scale, cache_ptr):
    """float32 to the dtype of the cache, divided by its scale if that has 8 bits."""
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        return to_fp8(x / scale)
    elif cache_ptr.dtype.element_ty == tl.int8:
        return to_int8(x / scale)
    else:
        return narrow(x, cache_ptr.dtype.element_ty)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_write_kv_kernel(
    out_ptr,  # [T, H, D]
    query_ptr,
    key_ptr,
    value_ptr,
    cos_sin_ptr,  # [max_positions, D]
    positions_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    key_scale,
    value_scale,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_kc_block,
    stride_kc_token,
    stride_kc_head,
    stride_vc_block,
    stride_vc_token,
    stride_vc_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    NORM_LAST: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    QUERY_PROGRAMS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = tl.arange(0, BLOCK)
    table = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * HEAD_DIM + offs
    cos = tl.load(table, mask=offs < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(table + HALF, mask=offs < HALF, other=0.0).to(tl.float32)[None, :]

    if part < QUERY_PROGRAMS:
        heads = part * HEADS + tl.arange(0, HEADS)
        low, high, mask = _rotate(
            query_ptr + token * stride_q_row, stride_q_head, heads, NUM_HEADS, q_weight_ptr, eps,
            cos, sin, NORM_Q, NORM_LAST, HEAD_DIM, BLOCK,
        )  # fmt: skip
        ptrs = out_ptr + (token * NUM_HEADS + heads[:, None]) * HEAD_DIM + offs[None, :]
        tl.store(ptrs, narrow(low, out_ptr.dtype.element_ty), mask=mask)
        tl.store(ptrs + HALF, narrow(high, out_ptr.dtype.element_ty), mask=mask)
        return

    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    block, row = slot // TOKENS_PER_BLOCK, slot % TOKENS_PER_BLOCK
    heads = (part - QUERY_PROGRAMS) * HEADS + tl.arange(0, HEADS)
    low, high, mask = _rotate(
        key_ptr + token * stride_k_row, stride_k_head, heads, NUM_KV_HEADS, k_weight_ptr, eps,
        cos, sin, NORM_K, NORM_LAST, HEAD_DIM, BLOCK,
    )  # fmt: skip
    ptrs = key_cache_ptr + block * stride_kc_block + row * stride_kc_token
    ptrs += heads[:, None].to(tl.int64) * stride_kc_head + offs[None, :]
    tl.store(ptrs, _to_cache(low, key_scale, key_cache_ptr), mask=mask)
    tl.store(ptrs + HALF, _to_cache(high, key_scale, key_cache_ptr), mask=mask)
    if HAS_VALUE:
        values = value_ptr + token * stride_v_row + heads[:, None] * stride_v_head + offs[None, :]
        low = tl.load(values, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(values + HALF, mask=mask, other=0.0).to(tl.float32)
        ptrs = value_cache_ptr + block * stride_vc_block + row * stride_vc_token
        ptrs += heads[:, None].to(tl.int64) * stride_vc_head + offs[None, :]
        tl.store(ptrs, _to_cache(low, value_scale, value_cache_ptr), mask=mask)
        tl.store(ptrs + HALF, _to_cache(high, value_scale, value_cache_ptr), mask=mask)


@launch.once_in_a_row
def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    query_norm_weight: torch.Tensor | None,
    key_norm_weight: torch.Tensor | None,
) -> None:
    """Raise ValueError, naming the argument, unless all fit one another."""
    head_dim = query.shape[-1]
    if head_dim % 16:
        raise ValueError(f"query: head_dim must be a multiple of 16, got {head_dim}")
    if (value is None) != (value_cache is None):
        raise ValueError("value: must be given with value_cache, or neither")
    rows, own_dtype = launch.check_rows, (query.dtype,)
    cache_shape, cache_dtypes = ("B", "P", "KVH", "D"), (query.dtype, *launch.BYTE_DTYPES)
    launch.check_arguments(
        Argument("query", query, ("T", "H", "D"), launch.FLOAT_DTYPES, rows),
        Argument("key", key, ("T", "KVH", "D"), own_dtype, rows),
        Argument("value", value, ("T", "KVH", "D"), own_dtype, rows),
        Argument("cos_sin", cos_sin, ("max_positions", "D"), launch.FLOAT_DTYPES),
        Argument("positions", positions, ("T",), (torch.int32, torch.int64)),
        Argument("key_cache", key_cache, cache_shape, cache_dtypes, rows),
        Argument("value_cache", value_cache, cache_shape, cache_dtypes, rows),
        Argument("slot_mapping", slot_mapping, ("T",), (torch.int64,)),
        Argument("query_norm_weight", query_norm_weight, ("D",), launch.FLOAT_DTYPES),
        Argument("key_norm_weight", key_norm_weight, ("D",), launch.FLOAT_DTYPES),
    )


def rope_write_kv(
    query: torch.Tensor,  # [T, H, D]; query, key, value may be views of one fused projection
    key: torch.Tensor,  # [T, num_kv_heads, D]
    value: torch.Tensor | None,  # [T, num_kv_heads, D]; None: K alone is written
    cos_sin: torch.Tensor,  # [max_positions, D]: cosines of the D/2 frequencies, then sines
    positions: torch.Tensor,  # [T] int32 or int64, below max_positions
    key_cache: torch.Tensor,  # [num_blocks, tokens_per_block, num_kv_heads, D], or of 8 bits
    value_cache: torch.Tensor | None,  # same shape
    slot_mapping: torch.Tensor,  # [T] int64; -1: the token's K and V are not kept
    query_norm_weight: torch.Tensor | None = None,  # [D]
    key_norm_weight: torch.Tensor | None = None,  # [D]
    norm_eps: float = 1e-6,
    *,
    is_norm_after_rope: bool = False,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """The rotated query [T, H, D], contiguous; both caches are written in place.

    Positions and slots are not checked against their bounds: they live on the device.
    Raises ValueError naming the argument that does not fit.
    """
    _check(
        query, key, value, cos_sin, positions, key_cache, value_cache, slot_mapping,
        query_norm_weight, key_norm_weight,
    )  # fmt: skip
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    has_value = value is not None
    if value is None or value_cache is None:  # not read
        value, value_cache = key, key_cache
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    block = launch.next_power_of_2(head_dim // 2)
    most = max(_MAX_PAIRS_PER_PROGRAM // block, 1)
    heads = min(launch.next_power_of_2(num_heads), _MAX_HEADS_PER_PROGRAM, most)
    num_programs = launch.cdiv(num_heads, heads) + launch.cdiv(num_kv_heads, heads)
    _rope_write_kv_kernel[(num_tokens, num_programs)](
        out,
        query,
        key,
        value,
        cos_sin,
        positions,
        key_cache,
        value_cache,
        slot_mapping,
        query if query_norm_weight is None else query_norm_weight,
        query if key_norm_weight is None else key_norm_weight,
        norm_eps,
        key_scale,
        value_scale,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        TOKENS_PER_BLOCK=key_cache.shape[1],
        NORM_Q=query_norm_weight is not None,
        NORM_K=key_norm_weight is not None,
        NORM_LAST=is_norm_after_rope,
        HAS_VALUE=has_value,
        HEADS=heads,
        BLOCK=block,
        num_warps=2,  # 8 heads of 64 pairs: one 16-byte access per thread and half
        **launch.LAUNCH_OPTIONS,
    )
    return out
