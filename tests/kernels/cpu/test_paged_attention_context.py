"""Compiled attention of prompts and chunks, with turning and writing, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.cpu.attention.heads import LayerAttention
from inflight_kernels.cpu.attention.paged_attention_context import paged_attention_context

pytestmark = pytest.mark.fast(3)
LIMIT = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
QUERIES, CONTEXTS = [1, 1, 0, 5, 67, 16, 1, 100], [1, 90, 3, 5, 67, 150, 16, 193]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 37},
    {"chunk": 16},
    {"softcap": 5.0},
    {"sinks": True},
    {"slopes": True, "window": 20},
    {"has_values": False},
]


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("block", [32, 5])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"), [(9, 3, 64), (4, 4, 10), (71, 1, 80)]
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_reference(
    generator: torch.Generator,
    dtype: torch.dtype,
    block: int,
    num_heads: int,
    num_kv_heads: int,
    size: int,
    options: dict[str, Any],
) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tables, num_blocks = _tables(generator, block)
    keys, values = draw(2, num_blocks, block, num_kv_heads, size).to(dtype).unbind()
    query = draw(sum(QUERIES), num_heads, size).to(dtype)
    starts = torch.tensor([0, *QUERIES], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor(CONTEXTS, dtype=torch.int32)
    sinks = draw(num_heads) if "sinks" in options else None
    slopes = torch.rand(num_heads, generator=generator) if "slopes" in options else None
    layer = LayerAttention(num_heads, num_kv_heads, size, size**-0.5, slopes=slopes)
    own = ("window", "chunk", "softcap", "has_values")
    layer = replace(layer, **{name: options[name] for name in own if name in options})
    assert layer.takes(dtype)

    found = paged_attention_context(layer, query, keys, values, tables, starts, lengths, sinks)
    kept = torch.tensor([row for row, count in enumerate(QUERIES) if count])
    expected = reference.paged_attention_context(
        query.float(),
        keys.float(),
        values.float() if layer.has_values else keys.float(),
        tables[kept],
        torch.cat((starts[kept], starts[-1:])),
        lengths[kept],
        layer.scale,
        layer.window,
        layer.softcap,
        chunk=layer.chunk,
        sinks=sinks,
        slopes=slopes,
    )
    torch.testing.assert_close(found.float(), expected, atol=LIMIT[dtype], rtol=LIMIT[dtype])


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("window", [None, 50])
def test_does_not_depend_on_how_a_prompt_is_cut(
    generator: torch.Generator, dtype: torch.dtype, window: int | None
) -> None:
    """So a prompt whose first part was found in the cache answers as one that was not."""
    layer = LayerAttention(6, 2, 32, 0.2, window=window)
    keys, values = torch.randn(2, 12, 16, 2, 32, generator=generator).to(dtype).unbind()
    query = torch.randn(180, 6, 32, generator=generator).to(dtype)
    table = torch.randperm(12, generator=generator, dtype=torch.int32)[None]

    def attend(first: int, end: int) -> torch.Tensor:
        numbers = torch.tensor([0, end - first, end], dtype=torch.int32)
        rows = query[first:end]
        return paged_attention_context(
            layer, rows, keys, values, table, numbers[:2], numbers[2:], None
        )

    cut = [attend(0, 33), attend(33, 34), attend(34, 97), attend(97, 180)]
    assert torch.equal(attend(0, 180), torch.cat(cut))


def _tables(generator: torch.Generator, block: int) -> tuple[torch.Tensor, int]:
    """Shuffled blocks for each sequence, and how many there are; what is behind its own is none."""
    counts = [-(-length // block) for length in CONTEXTS]
    order = torch.randperm(sum(counts), generator=generator, dtype=torch.int32)
    tables = torch.full((len(CONTEXTS), max(counts) + 1), 2**30, dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[first : first + count]
        first += count
    return tables, sum(counts)
