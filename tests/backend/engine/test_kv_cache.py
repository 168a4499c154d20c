"""The memory of all KV blocks."""

from __future__ import annotations

import pytest
import torch

from inflight_backend.errors import ConfigurationError
from inflight_backend.models.config import CacheLayout
from inflight_backend.models.kv_cache import CopyBlocks, KvPool
from inflight_kernels.ops.attention.copy_blocks import copy_blocks


def make_pool(
    num_layers: int,
    heads: tuple[int, int],
    num_blocks: int,
    tokens_per_block: int,
    dtype: torch.dtype,
    copy_blocks: CopyBlocks | None = None,
) -> KvPool:
    """Layers of one shape, in one group."""
    sizes = [heads[0] * heads[1]] * 2 * num_layers
    places = tuple(((2 * layer, 0), (2 * layer + 1, 0)) for layer in range(num_layers))
    layout = CacheLayout((None,), tuple(sizes), (0,) * num_layers, places)
    return KvPool(
        layout, [heads] * num_layers, num_blocks, tokens_per_block, dtype, "cpu", copy_blocks
    )


def test_pool_larger_than_memory() -> None:
    with pytest.raises(ConfigurationError, match="no memory on cpu for 1099511627776 KV blocks"):
        make_pool(4, (8, 128), 2**40, 64, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_copied_blocks_are_read_before_any_is_written(dtype: torch.dtype) -> None:
    """By the kernel of a GPU, interpreted here, as by torch: 1 goes to 2 and 2 to 0."""
    numbers = 9 * torch.randn(2, 2, 3, 4, 1, 16, generator=torch.Generator().manual_seed(0))
    sources, destinations = torch.tensor([1, 2]).int(), torch.tensor([2, 0]).int()
    for op in (None, copy_blocks):
        pool = make_pool(2, (1, 16), 3, 4, dtype, op)
        for layer in range(2):
            for half, cache in enumerate(pool.layer(layer)):
                cache.copy_(numbers[layer, half])
        pool.copy(sources, destinations)
        for layer in range(2):
            for half, cache in enumerate(pool.layer(layer)):
                expected = numbers[layer, half].to(dtype).float()[[2, 1, 1]]
                assert torch.equal(cache.float(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_cleaning_keeps_numbers(dtype: torch.dtype) -> None:
    pool = make_pool(2, (1, 2), 3, 4, dtype)
    keys, values = pool.layer(1)
    keys[0], keys[2], values[2, 1], values[2, 2] = torch.nan, 5.0, torch.inf, -torch.nan
    pool.clean([2])
    assert keys[0].float().isnan().all()
    assert (keys[2].float() == 5.0).all()
    assert values.float().isfinite().all()


def test_cleaning_leaves_integers() -> None:
    pool = make_pool(1, (1, 2), 1, 4, torch.int8)
    numbers = torch.arange(-4, 4, dtype=torch.int8).view(4, 1, 2)
    pool.layer(0)[0][0] = numbers
    pool.clean([0])
    assert torch.equal(pool.layer(0)[0][0], numbers)
