"""The linear of the deterministic mode beside the library's: what the mode costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from kernel_ops.harness import Row, Setting, num_bytes
from kernel_ops.token_shapes import token_shapes


def rows(setting: Setting) -> Iterator[Row]:
    """Down projections of both models in bfloat16."""
    # Imported late: a dry run switches the interpreter on before triton is imported.
    from inflight_kernels.ops.invariant_linear import invariant_linear

    for shape in token_shapes(setting):
        size = (shape.hidden, shape.intermediate)
        weight = torch.randn(size, dtype=torch.bfloat16, device=setting.device)
        x = torch.randn(
            shape.num_tokens, shape.intermediate, dtype=torch.bfloat16, device=setting.device
        )
        yield Row(
            shape.parameters,
            partial(invariant_linear, x, weight),
            num_bytes(x, weight) + 2 * shape.num_tokens * shape.hidden,
            2 * shape.num_tokens * shape.hidden * shape.intermediate,
            {"torch": partial(functional.linear, x, weight)},
        )
