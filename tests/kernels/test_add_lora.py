"""Products of adapters against torch: ranks, numbers of adapters, slices, empty groups."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.ops.linear.add_lora import add_lora, column_tiles, group_rows

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.fast(1)
@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize(
    ("rank", "num_places", "num_rows", "slices", "columns", "experts"),
    [
        (8, 3, 21, [40, 12, 12], 48, 1),
        (16, 64, 70, [96], 33, 1),
        (64, 1, 5, [70, 70], 2100, 1),
        (5, 9, 0, [8], 8, 1),
        (8, 4, 1, [130], 64, 1),
        (8, 4, 40, [24, 24], 32, 5),
    ],
    ids=["slices", "64 adapters", "splits", "no rows", "one row", "experts"],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_against_torch(
    device: torch.device,
    generator: torch.Generator,
    rank: int,
    num_places: int,
    num_rows: int,
    slices: list[int],
    columns: int,
    experts: int,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    """Adapters have one to three pages, in any order; some have no row, some rows no
    adapter."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    rows, num_pages = sum(slices), 3 * num_places
    y, x = random(num_rows, rows), random(num_rows, columns)
    size, width = len(slices) * rank * columns, len(slices) * rank * columns + rows * rank
    memory = random(num_pages, experts * width)  # as in the engine, where a page has all linears
    memory = torch.unflatten(memory, 1, (experts, width))
    a = torch.unflatten(memory[..., :size], 2, (len(slices), rank, columns))
    b = torch.unflatten(memory[..., size:], 2, (rows, rank))
    scales, bias = random(num_places, rows), random(rows) if has_bias else None
    pages = torch.randperm(num_pages, generator=generator).view(num_places, 3)
    pages[::2, 1:] = -1
    places = torch.randint(-1, num_places, (num_rows,), generator=generator)
    places[places == num_places // 2] = -1 if num_places > 1 else 0
    chosen = torch.randint(0, experts, (num_rows,), generator=generator)
    places = torch.where(places < 0, -1, places * experts + chosen)
    pages, places = pages.int().to(device), places.int().to(device)
    expected = reference.add_lora(y, x, a, b, scales, bias, pages, places, slices)
    before = y.clone()
    groups, tiles = group_rows(places, num_places * experts), column_tiles(slices, device)
    add_lora(y, x, a, b, scales, bias, pages, groups, tiles)
    assert torch.equal(y[places < 0], before[places < 0])
    assert float((y - expected).float().norm()) <= LIMIT[dtype] * float(expected.float().norm())
