"""Rotary embedding fused with the cache write (K3): microseconds and GB/s."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from inflight_kernels.ops.attention.rope_write_kv import rope_write_kv
from kernel_ops.harness import Row, Setting, num_bytes
from kernel_ops.token_shapes import token_shapes

_BLOCK = 64
_MAX_POSITIONS = 8192


def rows(setting: Setting) -> Iterator[Row]:
    """bfloat16 and FP8 caches, without and with qk-norm, at every shape."""
    device = setting.device
    for shape in token_shapes(setting):
        heads, num_tokens = shape.heads, shape.num_tokens
        widths = (heads.num_heads, heads.num_heads + heads.num_kv_heads)
        total = heads.num_heads + 2 * heads.num_kv_heads
        fused = torch.randn(num_tokens, total, heads.head_dim, dtype=torch.bfloat16, device=device)
        query, key, value = fused.tensor_split(widths, dim=1)
        table = torch.randn(_MAX_POSITIONS, heads.head_dim, device=device)
        positions = torch.randint(0, _MAX_POSITIONS, (num_tokens,), device=device)
        num_blocks = -(-num_tokens // _BLOCK)
        slots = torch.randperm(num_blocks * _BLOCK, device=device)[:num_tokens]
        cache_shape = (num_blocks, _BLOCK, heads.num_kv_heads, heads.head_dim)
        weight = torch.randn(heads.head_dim, dtype=torch.bfloat16, device=device)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            key_cache, value_cache = (
                torch.zeros(cache_shape, dtype=dtype, device=device) for _ in range(2)
            )
            moved = num_bytes(fused, query)
            moved += 2 * key.numel() * dtype.itemsize
            arguments = (query, key, value, table, positions, key_cache, value_cache, slots)
            for name, weights in (("rope", ()), ("norm + rope", (weight, weight))):
                parameters = {
                    **shape.parameters,
                    "op": name,
                    "cache": str(dtype).removeprefix("torch."),
                }
                yield Row(parameters, partial(rope_write_kv, *arguments, *weights), moved)
