"""The memory of all KV blocks."""

from __future__ import annotations

import pytest
import torch

from inflight_backend.errors import ConfigurationError
from inflight_backend.models.kv_cache import KvPool
from inflight_kernels.ops.copy_blocks import copy_blocks


def test_pool_larger_than_memory() -> None:
    with pytest.raises(ConfigurationError, match="no memory on cpu for 1099511627776 KV blocks"):
        KvPool([(2, 8, 128)] * 4, 2**40, 64, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_copied_blocks_are_read_before_any_is_written(dtype: torch.dtype) -> None:
    """By the kernel of a GPU, interpreted here, as by torch: 1 goes to 2 and 2 to 0."""
    numbers = torch.randn(2, 2, 3, 4, 1, 16, generator=torch.Generator().manual_seed(0))
    sources, destinations = torch.tensor([1, 2]).int(), torch.tensor([2, 0]).int()
    for op in (None, copy_blocks):
        pool = KvPool([(2, 1, 16)] * 2, 3, 4, dtype, "cpu", op)
        for layer in range(2):
            for half, cache in enumerate(pool.layer(layer)):
                cache.copy_(numbers[layer, half])
        pool.copy(sources, destinations)
        for layer in range(2):
            for half, cache in enumerate(pool.layer(layer)):
                expected = numbers[layer, half].to(dtype).float()[[2, 1, 1]]
                assert torch.equal(cache.float(), expected)


def test_cleaning_keeps_numbers() -> None:
    pool = KvPool([(2, 1, 2)] * 2, 3, 4, torch.float32, "cpu")
    keys, values = pool.layer(1)
    keys[0], keys[2], values[2, 1] = torch.nan, 5.0, torch.inf
    pool.clean([2])
    assert keys[0].isnan().all()
    assert (keys[2] == 5.0).all()
    assert values.isfinite().all()
