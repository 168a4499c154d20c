"""Linears of experts against torch, with groups of every size."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.ops.linear.grouped_linear import grouped_linear

LIMIT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.mark.fast(4)
@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize(
    ("sizes", "rows", "columns"),
    [([0, 3, 0, 17, 1, 0], 40, 48), ([200, 0, 33], 70, 33), ([0] * 299 + [5], 16, 16), ([0], 8, 8)],
    ids=["few", "many", "300 groups", "none"],
)
def test_against_torch(
    device: torch.device,
    generator: torch.Generator,
    sizes: list[int],
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, weight, bias = random(sum(sizes), columns), random(len(sizes), rows, columns), None
    if rows == 40:
        bias = random(len(sizes), rows)
    starts = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)
    expected = torch.einsum("tc,trc->tr", x.float(), weight.float()[groups])
    expected = expected if bias is None else expected + bias.float()[groups]
    longer = torch.cat((x, torch.full((21, columns), torch.nan).to(x)))  # what belongs to no group
    for out in (
        grouped_linear(longer, weight, starts, bias)[: len(x)],
        reference.grouped_linear(x, weight, starts, bias),
    ):
        assert out.dtype == dtype
        assert out.shape == (len(x), rows)
        assert float((out.float() - expected).norm()) <= LIMIT[dtype] * float(expected.norm())
