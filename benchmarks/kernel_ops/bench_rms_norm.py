"""RMS norm, with residual and with FP8 output (K3): microseconds and GB/s."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernel_ops.harness import Row, Setting
from kernel_ops.token_shapes import token_shapes


def rows(setting: Setting) -> Iterator[Row]:
    """The four variants at every shape."""
    # Imported late: a dry run switches the interpreter on before triton is imported.
    from inflight_kernels import reference
    from inflight_kernels.ops.rms_norm import add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8

    for shape in token_shapes(setting):
        size = (shape.num_tokens, shape.hidden)
        x = torch.randn(size, dtype=torch.bfloat16, device=setting.device)
        residual, weight = torch.randn_like(x), torch.randn_like(x[0])
        one = x.numel() * x.element_size()
        norm, add = (x, weight, 1e-5), (x, residual, weight, 1e-5)
        peer = {"torch": partial(reference.rms_norm, *norm)}
        add_peer = {"torch": partial(reference.add_rms_norm, *add)}
        labels = shape.parameters
        yield Row({**labels, "op": "norm"}, partial(rms_norm, *norm), 2 * one, 0, peer)
        yield Row({**labels, "op": "add"}, partial(add_rms_norm, *add), 4 * one, 0, add_peer)
        yield Row({**labels, "op": "norm fp8"}, partial(rms_norm_fp8, *norm), one + one // 2)
        yield Row({**labels, "op": "add fp8"}, partial(add_rms_norm_fp8, *add), 3 * one + one // 2)
