"""Rows to FP8 (K3), as wide as what attention finds: microseconds and GB/s."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from inflight_kernels.ops.linear.quantize_fp8 import quantize_fp8
from kernel_ops.harness import Row, Setting
from kernel_ops.token_shapes import token_shapes


def rows(setting: Setting) -> Iterator[Row]:
    """Every shape."""
    for shape in token_shapes(setting):
        size = (shape.num_tokens, shape.heads.num_heads * shape.heads.head_dim)
        x = torch.randn(size, dtype=torch.bfloat16, device=setting.device)
        read = x.numel() * x.element_size()
        yield Row({**shape.parameters, "op": "quantize"}, partial(quantize_fp8, x), read * 3 // 2)
