"""Shapes and random paged batches for the attention benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Heads:
    """The attention shape of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    keys_are_values: bool = False

    @property
    def cache_types(self) -> tuple[torch.dtype, ...]:
        """What the kernels read: wide heads in bfloat16 alone."""
        plain = (torch.bfloat16,)
        return plain if self.head_dim > 256 else (*plain, torch.float8_e4m3fn)

    @property
    def numbers_per_token(self) -> int:
        """In the cache of a layer."""
        return (1 if self.keys_are_values else 2) * self.num_kv_heads * self.head_dim


LLAMA_8B = Heads("8B", 32, 8, 128)
LLAMA_13B = Heads("13B", 40, 40, 128)
LATENTS = Heads("latents", 128, 1, 576, keys_are_values=True)  # DeepSeek V3
HEAD_512 = Heads("head 512", 8, 2, 512)  # full layers of Gemma 4
TINY = Heads("tiny", 4, 2, 64)


@dataclass(frozen=True)
class PagedBatch:
    """Random queries and a cache in shuffled blocks."""

    query: torch.Tensor  # [T, H, D]
    key_cache: torch.Tensor
    value_cache: torch.Tensor | None
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lengths: torch.Tensor


def make_batch(
    heads: Heads,
    query_lens: list[int],
    context_lens: list[int],
    *,
    tokens_per_block: int,
    cache_dtype: torch.dtype,
    device: torch.device,
    has_heads_first: bool = False,
) -> PagedBatch:
    """A batch whose requests own distinct blocks in random order; bfloat16 queries. With heads
    first the tokens of a block lie together in memory for each head, else those of all heads."""
    per_row = [-(-length // tokens_per_block) for length in context_lens]
    order = torch.randperm(sum(per_row), dtype=torch.int32)
    tables = torch.zeros(len(per_row), max(per_row), dtype=torch.int32)
    for row, blocks in enumerate(order.split(per_row)):  # type: ignore[no-untyped-call]
        tables[row, : len(blocks)] = blocks
    shape = (sum(per_row), tokens_per_block, heads.num_kv_heads, heads.head_dim)
    if has_heads_first:
        shape = (shape[0], shape[2], shape[1], shape[3])
    caches = (_random(shape, cache_dtype, device) for _ in range(2))
    key_cache, value_cache = (
        cache.transpose(1, 2) if has_heads_first else cache for cache in caches
    )
    query = torch.randn(
        sum(query_lens), heads.num_heads, heads.head_dim, dtype=torch.bfloat16, device=device
    )
    return PagedBatch(
        query,
        key_cache,
        None if heads.keys_are_values else value_cache,
        tables.to(device),
        torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
        torch.tensor(context_lens, dtype=torch.int32, device=device),
    )


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal numbers, drawn part by part: all of a large FP8 cache in bfloat16 would take twice its
    own memory. (Zeros would run faster than real numbers do: fewer bits change.)"""
    made = torch.empty(shape, dtype=dtype, device=device)
    for part in made.view(-1).split(2**28):  # type: ignore[no-untyped-call]
        part.copy_(torch.randn(len(part), dtype=torch.bfloat16, device=device))
    return made
