"""Copying blocks: bit for bit, and nothing else touched."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels.ops.attention.copy_blocks import copy_blocks


@pytest.mark.parametrize(
    ("dtype", "ids"),
    [
        (torch.float32, torch.int64),
        (torch.bfloat16, torch.int32),
        (torch.float8_e4m3fn, torch.int32),
    ],
)
def test_gather_and_scatter_back(
    device: torch.device, generator: torch.Generator, dtype: torch.dtype, ids: torch.dtype
) -> None:
    """Blocks leave for a staging buffer and come back elsewhere; negative pairs are skipped."""
    cache = torch.randn(3, 7, 16, 2, 80, generator=generator).to(device, dtype)
    before = cache.float()
    staging = torch.zeros(3, 4, 16, 2, 80, device=device).to(dtype)
    origins = torch.tensor([5, -1, 0, 2], dtype=ids, device=device)
    places = torch.tensor([1, 0, 3, -1], dtype=ids, device=device)
    copy_blocks(cache, staging, origins, places)
    assert torch.equal(staging.float()[:, 1], before[:, 5])
    assert torch.equal(staging.float()[:, 3], before[:, 0])
    assert not staging.float()[:, [0, 2]].any()
    copy_blocks(staging, cache, places[[0, 2]], torch.tensor([6, 1], dtype=ids, device=device))
    expected = before.clone()
    expected[:, 6], expected[:, 1] = before[:, 5], before[:, 0]
    assert torch.equal(cache.float(), expected)


def test_copy_on_write_inside_one_cache(device: torch.device, generator: torch.Generator) -> None:
    """A cache whose blocks hold K and V of all layers side by side: layers are not outermost."""
    memory = torch.randn(6, 4, 16, 64, generator=generator).to(device)
    cache = memory.transpose(0, 1)  # [layers, blocks, ...]
    expected = memory.clone()
    expected[4], expected[0] = memory[1], memory[1]
    ids = (torch.tensor([1, 1], device=device), torch.tensor([4, 0], device=device))
    copy_blocks(cache, cache, *ids)
    assert torch.equal(memory, expected)
