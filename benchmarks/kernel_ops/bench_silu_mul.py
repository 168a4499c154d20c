"""The gated activation, and with FP8 output (K3): microseconds and GB/s."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernel_ops.harness import Row, Setting
from kernel_ops.token_shapes import token_shapes


def rows(setting: Setting) -> Iterator[Row]:
    """Both variants at every shape."""
    # Imported late: a dry run switches the interpreter on before triton is imported.
    from inflight_kernels import reference
    from inflight_kernels.ops.silu_mul import silu_mul, silu_mul_fp8

    for shape in token_shapes(setting):
        size = (shape.num_tokens, 2 * shape.intermediate)
        gate_up = torch.randn(size, dtype=torch.bfloat16, device=setting.device)
        read = gate_up.numel() * gate_up.element_size()
        peer = {"torch": partial(reference.silu_mul, gate_up)}
        labels = shape.parameters
        yield Row({**labels, "op": "silu"}, partial(silu_mul, gate_up), read + read // 2, 0, peer)
        yield Row({**labels, "op": "silu fp8"}, partial(silu_mul_fp8, gate_up), read + read // 4)
