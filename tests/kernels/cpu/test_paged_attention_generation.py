"""Compiled generation attention, with turning and writing, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.cpu.attention.heads import LayerAttention
from inflight_kernels.cpu.attention.paged_attention_generation import attend_generations

pytestmark = pytest.mark.fast(3)
BLOCK = 16
LENGTHS = [1, 15, 16, 17, 300]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"), [(9, 3, 64), (4, 4, 16), (6, 1, 80)]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 37},
        {"chunk": 16},
        {"softcap": 5.0},
        {"sinks": True},
        {"slopes": True},
        {"has_norms": True},
        {"has_norms": True, "is_wide": True},
        {"has_norms": True, "is_norm_after_rope": True},
        {"is_still": True},
        {"has_values": False},
        {"has_own": False},
    ],
    ids=str,
)
def test_equals_the_reference(
    generator: torch.Generator,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    size: int,
    options: dict[str, Any],
) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    count = len(LENGTHS)
    tables, num_blocks = _tables(generator)
    keys, values = draw(2, num_blocks, BLOCK, num_kv_heads, size).to(dtype).unbind()
    heads = draw(count, num_heads + 2 * num_kv_heads, size).to(dtype)
    angles = 6 * torch.rand(512, size // 2, generator=generator)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    positions = lengths.long() - 1
    slots = tables.long()[torch.arange(count), positions // BLOCK] * BLOCK + positions % BLOCK
    slots[1] = -1  # not kept
    sinks = draw(num_heads) if "sinks" in options else None
    slopes = torch.rand(num_heads, generator=generator) if "slopes" in options else None
    has_norms = "has_norms" in options
    norm_dtype = torch.float32 if "is_wide" in options else dtype
    norms = [(1 + 0.3 * draw(size)).to(norm_dtype) if has_norms else None for _ in range(2)]
    table = None if "is_still" in options else torch.cat((angles.cos(), angles.sin()), dim=1)
    layer = LayerAttention(
        num_heads, num_kv_heads, size, size**-0.5, cos_sin=table, slopes=slopes, norm_eps=1e-5
    )
    own = ("window", "chunk", "softcap", "is_norm_after_rope", "has_values", "has_own")
    layer = replace(layer, **{name: options[name] for name in own if name in options})

    found_keys, found_values = keys.clone(), values.clone()
    given = heads if layer.has_own else heads[:, :num_heads]
    found = attend_generations(
        layer, given, found_keys, found_values, tables, lengths, slots, norms[0], norms[1], sinks
    )

    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    query, key = (
        _prepare(each, norm, table, positions, layer)
        for each, norm in zip((query, key), norms, strict=True)
    )
    if layer.has_own:
        reference.write_kv(key, value, keys, values, slots)
    if not layer.has_values:
        values = keys
    else:
        assert torch.equal(found_values, values)
    limit = 2e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(found_keys, keys, atol=limit, rtol=limit)
    expected = reference.paged_attention_generation(
        query.float(),
        keys.float(),
        values.float(),
        tables,
        lengths,
        layer.scale,
        layer.window,
        layer.softcap,
        chunk=layer.chunk,
        sinks=sinks,
        slopes=slopes,
    )
    torch.testing.assert_close(found.float(), expected, atol=limit, rtol=limit)


def _tables(generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """Shuffled blocks for each sequence, and how many there are."""
    counts = [-(-length // BLOCK) for length in LENGTHS]
    order = torch.randperm(sum(counts), generator=generator, dtype=torch.int32)
    tables = torch.zeros(len(LENGTHS), max(counts) + 1, dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[first : first + count]
        first += count
    return tables, sum(counts)


def _prepare(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    table: torch.Tensor | None,
    positions: torch.Tensor,
    layer: LayerAttention,
) -> torch.Tensor:
    """Normed and turned in float32, rounded once."""
    dtype, wide = x.dtype, x.float()
    if norm is not None and not layer.is_norm_after_rope:
        wide = reference.rms_norm(wide, norm.float(), layer.norm_eps)
    if table is not None:
        wide = reference.apply_rope(wide, wide, table, positions)[0]
    if norm is not None and layer.is_norm_after_rope:
        wide = reference.rms_norm(wide, norm.float(), layer.norm_eps)
    return wide.to(dtype)
