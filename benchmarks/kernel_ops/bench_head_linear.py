"""Queries to latents and latents to values by a quantised weight, beside torch's in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from inflight_kernels import reference
from inflight_kernels.ops.linear.head_linear import head_linear
from kernel_ops.harness import Row, Setting, num_bytes

_FP8 = torch.float8_e4m3fn
_SCHEMES = {"FP8, groups of 128": (_FP8, 128), "4 bits, groups of 128": (torch.uint8, 128)}


def rows(setting: Setting) -> Iterator[Row]:
    """Of DeepSeek V3: 128 heads of 128 rows for keys and 128 for values, 512 columns."""
    heads, size, columns, counts = 128, 128, 512, [1, 16, 64, 1024]
    if setting.is_dry:
        heads, size, columns, counts = 2, 16, 128, [3]
    shape = (heads, 2 * size, columns)
    wide = torch.randn(shape, dtype=torch.bfloat16, device=setting.device)
    for name, (dtype, group_size) in _SCHEMES.items():
        width = columns // 2 if dtype == torch.uint8 else columns
        bits = torch.randint(0, 120, (heads * 2 * size, width), dtype=torch.uint8)
        values = bits.to(setting.device).view(dtype)
        scales = torch.rand(len(values), columns // group_size, device=setting.device)
        for num_tokens in counts:
            for by_rows in (True, False):
                inner, outer = (size, columns) if by_rows else (columns, size)
                x = torch.randn(
                    num_tokens, heads, inner, dtype=torch.bfloat16, device=setting.device
                )
                first = 0 if by_rows else size
                call = partial(
                    head_linear, x, values, scales, group_size=group_size, by_rows=by_rows,
                    first_row=first, num_rows=size,
                )  # fmt: skip
                own = wide[:, first : first + size]
                peer = partial(reference.head_linear, x, own, by_rows=by_rows)
                yield Row(
                    {"scheme": name, "by": "rows" if by_rows else "columns", "tokens": num_tokens},
                    call,
                    num_bytes(values, scales) // 2 + num_bytes(x) + 2 * num_tokens * heads * outer,
                    2 * num_tokens * heads * size * columns,
                    {"torch, bfloat16": peer},
                )
