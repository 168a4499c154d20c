"""The linears of a mixture of experts, beside a loop over experts in torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from inflight_kernels import reference
from kernel_ops.harness import Row, Setting, num_bytes


def rows(setting: Setting) -> Iterator[Row]:
    """Gate and up of Qwen3-30B-A3B: 128 experts of 2,048 columns, 8 for each token."""
    # Imported late: a dry run switches the interpreter on before triton is imported.
    from inflight_kernels.ops.linear.grouped_linear import grouped_linear

    experts, size, columns = (4, 32, 32) if setting.is_dry else (128, 1536, 2048)
    weight = torch.randn(experts, size, columns, dtype=torch.bfloat16, device=setting.device)
    for num_tokens in (2,) if setting.is_dry else (1, 8, 64, 512, 4096):
        num_rows = 8 * num_tokens
        x = torch.randn(num_rows, columns, dtype=torch.bfloat16, device=setting.device)
        chosen = torch.randint(experts, (num_rows,), device=setting.device)
        counts = chosen.bincount(minlength=experts)
        starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
        num_read = int((counts > 0).sum())
        yield Row(
            {"num_tokens": num_tokens, "experts": experts, "experts_read": num_read},
            partial(grouped_linear, x, weight, starts),
            num_bytes(x, weight[:num_read]) + 2 * num_rows * size,
            2 * num_rows * size * columns,
            {"torch": partial(reference.grouped_linear, x, weight, starts)},
        )
