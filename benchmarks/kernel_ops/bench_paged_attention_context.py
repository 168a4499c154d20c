"""Context attention (K2): TFLOP/s of whole prompts, many prompts, and a mixed batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from inflight_kernels.ops.attention.paged_attention_context import (
    ContextTile,
    choose_tile,
    paged_attention_context,
)
from kernel_ops.harness import Call, Row, Setting, num_bytes
from kernel_ops.paged_batch import (
    HEAD_512,
    LATENTS,
    LLAMA_8B,
    LLAMA_13B,
    TINY,
    Heads,
    PagedBatch,
    make_batch,
)

_BLOCK = 64
# What a sweep tries beside the chosen tile, most promising first by the code compiled for sm_90
# (docs/gpu.md): rows, keys, stages, warps. Tiles of 64 rows and 128 keys, and of 256 rows, spill.
RANKED = ((64, 64, 3, 4), (128, 128, 3, 8), (128, 32, 5, 8), (128, 64, 3, 8), (64, 64, 5, 4))


@dataclass(frozen=True)
class _Work:
    name: str
    query_lens: list[int]
    context_lens: list[int]


_WORKS = (
    _Work("1x2k", [2048], [2048]),
    _Work("1x8k", [8192], [8192]),
    _Work("8x1k", [1024] * 8, [1024] * 8),
    _Work("2k after 14k", [2048], [16384]),
    _Work("512 + 64 decode", [512] + [1] * 64, [512] + [1024] * 64),
)
_TINY_WORKS = (_Work("1x70", [70], [70]), _Work("20 after 30 + 1", [20, 1], [50, 9]))


def rows(setting: Setting) -> Iterator[Row]:
    """Every piece of work at both shapes, bfloat16 and FP8 cache."""
    shapes = [TINY] if setting.is_dry else [LLAMA_8B, LLAMA_13B, LATENTS, HEAD_512]
    for heads in shapes:
        for dtype in heads.cache_types:
            works = _TINY_WORKS if setting.is_dry else _WORKS
            for work in works[:1] if heads.head_dim > 256 else works:
                yield from _variants(setting, heads, work, dtype)


def _variants(setting: Setting, heads: Heads, work: _Work, dtype: torch.dtype) -> Iterator[Row]:
    batch = make_batch(
        heads,
        work.query_lens,
        work.context_lens,
        tokens_per_block=_BLOCK,
        cache_dtype=dtype,
        device=setting.device,
    )
    group = heads.num_heads // heads.num_kv_heads
    longest = max(work.query_lens)
    chosen = choose_tile(group, heads.head_dim, torch.bfloat16, longest, dtype)
    ranked = RANKED if setting.has_sweep else ()
    for tile in dict.fromkeys((chosen, *(ContextTile(*fields) for fields in ranked))):
        call = partial(
            paged_attention_context,
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_tables,
            batch.query_starts,
            batch.context_lengths,
            heads.head_dim**-0.5,
            tile=tile,
        )
        parameters = {
            "shape": heads.name,
            "work": work.name,
            "cache": str(dtype).removeprefix("torch."),
            "tile": (tile.block_m, tile.block_n, tile.stages, tile.num_warps),
            "chosen": tile == chosen,
        }
        is_prompt = work.query_lens == work.context_lens and len(set(work.query_lens)) == 1
        wants_peer = tile == chosen and is_prompt and dtype == torch.bfloat16
        baselines = {"sdpa": _sdpa(batch, heads, work)} if wants_peer else {}
        caches = [batch.key_cache, *([] if batch.value_cache is None else [batch.value_cache])]
        size = num_bytes(batch.query, batch.query, *caches)
        yield Row(parameters, call, size, _flops(heads, work), baselines)


def _flops(heads: Heads, work: _Work) -> int:
    """Two products over the keys each query token sees."""
    pairs = sum(
        new * (total - new) + new * (new + 1) // 2
        for new, total in zip(work.query_lens, work.context_lens, strict=True)
    )
    return 4 * pairs * heads.num_heads * heads.head_dim


def _sdpa(batch: PagedBatch, heads: Heads, work: _Work) -> Call:
    """torch's causal attention on contiguous tensors of the same size."""
    count, length = len(work.query_lens), work.query_lens[0]
    query = batch.query.reshape(count, length, heads.num_heads, heads.head_dim).transpose(1, 2)
    shape = (count, length, heads.num_kv_heads, heads.head_dim)
    size = (count, -1, heads.num_kv_heads, heads.head_dim)
    values = batch.key_cache if batch.value_cache is None else batch.value_cache
    key, value = (
        cache.reshape(size)[:, :length].reshape(shape).transpose(1, 2)
        for cache in (batch.key_cache, values)
    )
    is_gqa = heads.num_heads != heads.num_kv_heads
    return partial(
        functional.scaled_dot_product_attention,
        query,
        key,
        value,
        is_causal=True,
        enable_gqa=is_gqa,
    )
