"""Paged caches with known contents, for the attention tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# (absolute, relative) against a float32 oracle of the same rounded inputs. Probabilities are
# rounded to the dtype before the product with V, and the result is rounded once.
_TOLERANCE = {
    torch.float32: (2e-5, 1e-5),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (6e-3, 4e-3),
}


def assert_attention_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with the tolerance of the dtype of ``out``; ``expected`` is float32."""
    absolute, relative = _TOLERANCE[out.dtype]
    torch.testing.assert_close(out.float(), expected, atol=absolute, rtol=relative)


@dataclass(frozen=True)
class PagedCache:
    """K and V of one layer in shuffled blocks, with the tables that find them."""

    key: torch.Tensor  # [num_blocks, tokens_per_block, num_kv_heads, head_dim]
    value: torch.Tensor
    block_tables: torch.Tensor  # [B, max_blocks] int32; unused entries point nowhere
    lengths: torch.Tensor  # [B] int32

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the ops take after the query: both caches and the tables."""
        return self.key, self.value, self.block_tables

    def without_nan(self) -> PagedCache:
        """Zeros in the rows no request owns, for a reader that multiplies them by zero."""
        return PagedCache(
            self.key.nan_to_num(), self.value.nan_to_num(), self.block_tables, self.lengths
        )

    def narrowed(
        self, dtype: torch.dtype, key_scale: float, value_scale: float
    ) -> tuple[PagedCache, PagedCache]:
        """The same in e4m3 or int8, divided by the scales, and what reading that with them
        gives."""
        key, value = self.key / key_scale, self.value / value_scale
        if dtype == torch.int8:
            key, value = (each.round().clamp(-128, 127) for each in (key, value))
        key, value = key.to(dtype), value.to(dtype)
        rest = (self.block_tables, self.lengths)
        read_back = PagedCache(key.float() * key_scale, value.float() * value_scale, *rest)
        return PagedCache(key, value, *rest), read_back


def make_cache(
    generator: torch.Generator,
    lengths: list[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    tokens_per_block: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> PagedCache:
    """Random K and V; cache rows no request owns are NaN, so reading one shows in the result."""
    per_row = [-(-length // tokens_per_block) for length in lengths]
    num_blocks = sum(per_row) + 2
    ids = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    tables = torch.full((len(lengths), max([*per_row, 1]) + 1), -(2**31), dtype=torch.int32)
    shape = (num_blocks, tokens_per_block, num_kv_heads, head_dim)
    key = torch.full(shape, float("nan"))
    value = torch.full(shape, float("nan"))
    used = 0
    for row, length in enumerate(lengths):
        tables[row, : per_row[row]] = ids[used : used + per_row[row]]
        used += per_row[row]
        for token in range(length):
            block = int(tables[row, token // tokens_per_block])
            where = (block, token % tokens_per_block)
            key[where] = torch.randn(num_kv_heads, head_dim, generator=generator)
            value[where] = torch.randn(num_kv_heads, head_dim, generator=generator)
    return PagedCache(
        key.to(device, dtype),
        value.to(device, dtype),
        tables.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def attention_oracle(
    query: torch.Tensor,  # [T, H, D]: the last T tokens of the request
    cache: PagedCache,
    row: int,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of one request written out in float32, token by token and head by head."""
    num_tokens, num_heads, _ = query.shape
    length = int(cache.lengths[row])
    tokens_per_block, num_kv_heads = cache.key.shape[1:3]
    num_blocks = -(-length // tokens_per_block)
    table = cache.block_tables[row, :num_blocks].long()
    keys = cache.key[table].float().flatten(0, 1)[:length]  # [length, KVH, D]
    values = cache.value[table].float().flatten(0, 1)[:length]
    keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
    values = values.repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("thd,shd->hts", query.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(length - num_tokens, length, device=query.device)[:, None]
    others = torch.arange(length, device=query.device)[None, :]
    if slopes is not None:
        scores = scores + slopes[:, None, None] * (others - positions)
    visible = others <= positions
    if chunk is not None:
        visible &= others // chunk == positions // chunk
    if sliding_window is not None:
        visible &= others > positions - sliding_window
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, num_tokens, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return torch.einsum("hts,shd->thd", weights, values)


SLOPES = torch.tensor([0.5, 0.25, 0.0, 0.03125])
SINKS = torch.tensor([2.0, -30.0, 0.0, 60.0])
WEIGHTINGS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0},
    "chunk": {"chunk": 24},
    "chunk in a window": {"chunk": 48, "sliding_window": 40},
    "slopes": {"slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "all": {"sinks": SINKS, "slopes": SLOPES, "softcap": 3.0, "sliding_window": 30},
}
"""What a layer of four heads may ask of attention beside plain scores."""
