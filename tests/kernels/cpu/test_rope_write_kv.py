"""Compiled turning of heads and writing of the cache, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.cpu.attention.heads import LayerAttention
from inflight_kernels.cpu.attention.rope_write_kv import rope_write_kv

pytestmark = pytest.mark.fast(3)
LIMIT = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
BLOCK, NUM_TOKENS = 16, 50


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size"), [(9, 3, 64), (8, 1, 10)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"has_norms": True},
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

    keys, values = draw(2, 6, BLOCK, num_kv_heads, size).to(dtype).unbind()
    heads = draw(NUM_TOKENS, num_heads + 2 * num_kv_heads, size).to(dtype)
    positions = torch.randint(128, (NUM_TOKENS,), generator=generator)
    slots = torch.randperm(6 * BLOCK, generator=generator)[:NUM_TOKENS]
    slots[3] = -1  # not kept
    angles = 6 * torch.rand(128, size // 2, generator=generator)
    table = None if "is_still" in options else torch.cat((angles.cos(), angles.sin()), dim=1)
    norms = [(1 + 0.3 * draw(size)).to(dtype) if "has_norms" in options else None for _ in "qk"]
    layer = LayerAttention(num_heads, num_kv_heads, size, 1.0, cos_sin=table, norm_eps=1e-5)
    own = ("is_norm_after_rope", "has_values", "has_own")
    layer = replace(layer, **{name: options[name] for name in own if name in options})
    given = heads[:, : num_heads + num_kv_heads * layer.has_own * (1 + layer.has_values)]

    found_keys, found_values = keys.clone(), values.clone()
    found = rope_write_kv(layer, given, found_keys, found_values, positions, slots, *norms)

    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    query, key = (
        _prepare(each, norm, positions, layer)
        for each, norm in zip((query, key), norms, strict=True)
    )
    if layer.has_own:
        reference.write_kv(key, value, keys, values if layer.has_values else values.clone(), slots)
    limit = LIMIT[dtype]
    torch.testing.assert_close(found, query, atol=limit, rtol=limit)
    torch.testing.assert_close(found_keys, keys, atol=limit, rtol=limit)
    assert torch.equal(found_values, values)


def _prepare(
    x: torch.Tensor, norm: torch.Tensor | None, positions: torch.Tensor, layer: LayerAttention
) -> torch.Tensor:
    """Normed and turned in float32, rounded once."""
    wide = x.float()
    if norm is not None and not layer.is_norm_after_rope:
        wide = reference.rms_norm(wide, norm.float(), layer.norm_eps)
    if layer.cos_sin is not None:
        wide = reference.apply_rope(wide, wide, layer.cos_sin, positions)[0]
    if norm is not None and layer.is_norm_after_rope:
        wide = reference.rms_norm(wide, norm.float(), layer.norm_eps)
    return wide.to(x.dtype)
