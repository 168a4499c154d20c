"""Norms of heads, their turning, and the write of new keys and values into the paged cache.

Rounding is that of `attention`, which does it for steps of generations only; a piece of work is a
token.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from inflight_kernels.cpu.attention.heads import LayerAttention, prepare, write
from inflight_kernels.cpu.intrinsics import FAST, array_at, finish_piece, take_next
from inflight_kernels.cpu.threads import Kernel, Stage


def rope_write_kv(
    layer: LayerAttention,
    heads: Tensor,  # [T, H + 2 * KVH, D]: query, key and value, as far as there are
    keys: Tensor,  # [num_blocks, tokens_per_block, KVH, D], the last two dimensions contiguous
    values: Tensor,  # of the same strides
    positions: Tensor,  # [T] int64
    slot_mapping: Tensor,  # [T] int64; -1: not kept
    query_norm: Tensor | None,
    key_norm: Tensor | None,
) -> Tensor:
    """The queries [T, H, D], normed and turned; keys and values are in the caches."""
    heads = heads.contiguous()
    # Those with an offset in them are float32 in any case.
    query_norm, key_norm = (
        None if each is None else each.float() for each in (query_norm, key_norm)
    )
    query = torch.empty(len(heads), layer.num_heads, layer.head_dim, dtype=heads.dtype)
    step = (positions.data_ptr(), slot_mapping.data_ptr())
    rope_write_kv_stage(layer, heads, keys, values, step, query_norm, key_norm, query).run()
    return query


STEP_COLUMNS = slice(3, 5)
"""Where a `Program` has addresses of positions and slots."""


def rope_write_kv_stage(
    layer: LayerAttention,
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    step: tuple[int, int],
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    query: Tensor,
) -> Stage:
    """`rope_write_kv` into ``query``; it and ``heads`` are contiguous, norms float32. ``step``:
    addresses of positions and slots."""
    width, addresses = heads.itemsize, (layer.cos_sin, query_norm, key_norm)
    numbers = (
        len(heads),
        *step,
        heads.data_ptr(),
        keys.data_ptr(),
        values.data_ptr() if layer.has_values else 0,
        query.data_ptr(),
        *(0 if each is None else each.data_ptr() for each in addresses),
        keys.stride(0) * width,
        keys.stride(1) * width,
        keys.shape[1],
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        heads.shape[1],
        layer.is_norm_after_rope,
        layer.has_own,
    )
    return Stage(_kernel(heads.dtype == torch.bfloat16), numbers, (layer.norm_eps,))


@njit(**FAST)
def _run(pointer, width, like):
    """``width``: bytes of a number like ``like``."""
    n, eps = carray(pointer, 21, types.int64), carray(pointer, 22, types.float64)[21]
    num_tokens, heads, keys, values, query = n[2], n[5], n[6], n[7], n[8]
    cos_sin, query_norm, key_norm = n[9], n[10], n[11]
    block_stride, token_stride, tokens_per_block = n[12], n[13], n[14]
    num_heads, num_kv_heads, size, num_given, is_norm_last, has_own = (
        n[15], n[16], n[17], n[18], n[19], n[20],
    )  # fmt: skip
    head_bytes = size * width
    positions = array_at(n[3], num_tokens, np.int64(0))
    slots = array_at(n[4], num_tokens, np.int64(0))
    row = np.empty(size, np.float32)
    while True:
        token = take_next(n.ctypes.data)
        if token >= num_tokens:
            break
        position, slot = positions[token], slots[token]
        given = heads + token * num_given * head_bytes
        for head in range(num_heads):
            prepare(
                given + head * head_bytes, query_norm, cos_sin, position, eps, is_norm_last, row,
                like,
            )  # fmt: skip
            write(row, query + (token * num_heads + head) * head_bytes, like)
        if has_own and slot >= 0:
            at = slot // tokens_per_block * block_stride + slot % tokens_per_block * token_stride
            for head in range(num_kv_heads):
                key = given + (num_heads + head) * head_bytes
                prepare(key, key_norm, cos_sin, position, eps, is_norm_last, row, like)
                write(row, keys + at + head * head_bytes, like)
                if values != 0:
                    prepare(key + num_kv_heads * head_bytes, 0, 0, 0, eps, 0, row, like)
                    write(row, values + at + head * head_bytes, like)
        finish_piece(n.ctypes.data)
    return num_tokens


def _run_float32(pointer):
    return _run(pointer, 4, np.float32(0))


def _run_bfloat16(pointer):
    return _run(pointer, 2, np.uint16(0))


@cache
def _kernel(is_bfloat16: bool) -> Kernel:
    return Kernel(_run_bfloat16 if is_bfloat16 else _run_float32, 19, 1)
