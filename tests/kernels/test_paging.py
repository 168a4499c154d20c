"""Where the tokens of a tile lie, for blocks smaller than a tile, as large, and larger."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from inflight_kernels.paging import tile_rows

STRIDE_BLOCK, STRIDE_TOKEN = tl.constexpr(1000), tl.constexpr(7)
_NOT_TO_BE_READ = 2**20


@triton.jit
def _rows_kernel(out_ptr, table_ptr, end_token, P: tl.constexpr, N: tl.constexpr):
    first = tl.program_id(0) * N
    rows = tile_rows(table_ptr, first, end_token, STRIDE_BLOCK, STRIDE_TOKEN, P, N)
    tl.store(out_ptr + first + tl.arange(0, N), rows)


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize("block", [8, 16, 32, 48, 64, 128])
def test_rows_of_a_tile(device: torch.device, block: int, tile: int) -> None:
    """Whatever token is the last; and no entry of the table behind it is read."""
    for end in (1, block - 1, block, block + 1, 2 * block, 3 * block - 1, 3 * block, 300):
        num_blocks, num_tiles = -(-end // block), -(-end // tile)
        ids = [5 + 3 * number for number in range(num_blocks)]
        table = torch.tensor([*ids, *[_NOT_TO_BE_READ] * tile], dtype=torch.int32, device=device)
        out = torch.empty(num_tiles * tile, dtype=torch.int64, device=device)
        _rows_kernel[(num_tiles,)](out, table, end, P=block, N=tile)
        expected = [
            ids[token // block] * STRIDE_BLOCK.value + token % block * STRIDE_TOKEN.value
            for token in range(end)
        ]
        assert out[:end].tolist() == expected
        assert int(out.max()) < _NOT_TO_BE_READ * STRIDE_BLOCK.value
