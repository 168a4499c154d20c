"""Products of adapters on a linear of an 8B, beside a loop over adapters in torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernel_ops.harness import Row, Setting, num_bytes


def rows(setting: Setting) -> Iterator[Row]:
    """Queries, keys and values, 64 rows, adapters of rank 16 in two pages of rank 8."""
    # Imported late: a dry run switches the interpreter on before triton is imported.
    from inflight_kernels.ops.linear.add_lora import add_lora, column_tiles, group_rows

    slices, columns = ([64, 32, 32], 64) if setting.is_dry else ([4096, 1024, 1024], 4096)
    num_rows = 4 if setting.is_dry else 64
    device = setting.device

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    y, x = random(num_rows, sum(slices)), random(num_rows, columns)
    tiles = column_tiles(slices, torch.device(device))
    for num_adapters in (2,) if setting.is_dry else (1, 8, 64):
        a = random(2 * num_adapters, 1, 3, 8, columns)
        b = random(2 * num_adapters, 1, sum(slices), 8)
        scales = torch.ones(num_adapters, sum(slices), dtype=torch.bfloat16, device=device)
        pages = torch.arange(2 * num_adapters, dtype=torch.int32, device=device).view(-1, 2)
        places = torch.arange(num_rows, dtype=torch.int32, device=device) % num_adapters
        groups = group_rows(places.sort().values, num_adapters)
        segments = places.sort().values.bincount(minlength=num_adapters).cumsum(0).tolist()

        yield Row(
            {"num_rows": num_rows, "adapters": num_adapters, "rank": 16},
            partial(add_lora, y, x, a, b, scales, None, pages, groups, tiles),
            num_bytes(x, a, b) + 2 * y.nbytes,
            2 * num_rows * 16 * (3 * columns + sum(slices)),
            {"torch": partial(_loop, y, x, a, b, segments, slices)},
        )


def _loop(y: Tensor, x: Tensor, a: Tensor, b: Tensor, ends: list[int], slices: list[int]) -> None:
    """What a loop over adapters costs: three launches for each part of each."""
    start = 0
    for number, end in enumerate(ends):
        first = 0
        for part, size in enumerate(slices):
            pages = slice(2 * number, 2 * number + 2)
            inner = x[start:end] @ a[pages, 0, part].flatten(0, 1).t()
            rows = b[pages, 0, first : first + size].permute(1, 0, 2).flatten(1)
            y[start:end, first : first + size].addmm_(inner, rows.t())
            first += size
        start = end
