"""Linears of heads with weights of few bits against the product with what they stand for."""

from __future__ import annotations

import pytest
import torch
from support.quantized_weights import random_weights

from inflight_kernels import reference
from inflight_kernels.ops.linear.head_linear import head_linear

LIMIT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
ZEROS, ORDER, CODEBOOK = frozenset({"zeros"}), frozenset({"order"}), frozenset({"codebook"})
NUM_HEADS = 3


@pytest.mark.fast(8)
@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize(
    ("kind", "head_rows", "columns", "group_size", "num_tokens", "options"),
    [
        ("int4", 20, 64, 32, 1, frozenset()),
        ("int4", 90, 200, 200, 20, ZEROS),
        ("int4", 70, 128, 64, 3, ZEROS | ORDER),
        ("int4", 36, 192, 16, 3, CODEBOOK),
        ("int8", 20, 72, 40, 3, ZEROS | ORDER),
        ("int8", 20, 100, 100, 70, frozenset()),
        ("float8", 140, 130, 128, 3, frozenset()),
        ("float8", 20, 48, 48, 3, frozenset()),
    ],
)
def test_against_the_wide_weight(
    device: torch.device,
    generator: torch.Generator,
    kind: str,
    head_rows: int,
    columns: int,
    group_size: int,
    num_tokens: int,
    options: frozenset[str],
    dtype: torch.dtype,
) -> None:
    """Some rows of each head by columns and others by rows, of x in a larger tensor."""
    made = random_weights(
        generator, kind, NUM_HEADS * head_rows, columns, group_size, options, dtype
    )
    wide = made.wide
    if made.order is not None:
        wide = torch.empty_like(wide).index_copy_(1, made.order[0].long(), wide)
    wide = wide.view(NUM_HEADS, head_rows, columns)
    values, scales, zeros, order, codebook = (
        None if each is None else each.to(device)
        for each in (made.values, made.scales, made.zeros, made.order, made.codebook)
    )
    assert values is not None
    assert scales is not None
    for by_rows, first, end in ((True, 0, 12), (False, 12, head_rows)):
        size = end - first if by_rows else columns
        x = torch.randn(num_tokens, NUM_HEADS, size + 5, generator=generator).to(dtype)[..., :size]
        expected = reference.head_linear(x.double(), wide[:, first:end].double(), by_rows=by_rows)
        for tile_tokens in (None, 32):
            found = head_linear(
                x.to(device),
                values,
                scales,
                zeros,
                group_size=group_size,
                by_rows=by_rows,
                first_row=first,
                num_rows=end - first,
                order=None if order is None else order[0],
                codebook=codebook,
                tile_tokens=tile_tokens,
            )
            assert found.dtype == dtype
            assert found.shape == expected.shape
            error = (found.cpu().double() - expected).norm() / expected.norm()
            assert error < LIMIT[dtype]
