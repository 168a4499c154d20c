"""A token mask in every row (K3): microseconds and GB/s, all that must be read and written."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from inflight_kernels import reference
from inflight_kernels.ops.sampling.mask_logits import mask_logits
from kernel_ops.harness import Row, Setting, num_bytes
from kernel_ops.token_shapes import logits_shapes


def rows(setting: Setting) -> Iterator[Row]:
    """Batches whose rows are all guided; every second token is allowed."""
    device = setting.device
    for batch, vocabulary in logits_shapes(setting):
        logits = 4 * torch.randn(batch, vocabulary, device=device)
        shape = (batch, 2 + -(-vocabulary // 32))
        masks = torch.full(shape, 0x55555555, dtype=torch.int32, device=device)
        masks[:, 0] = torch.arange(batch)
        masks[:, 1] = -1
        parameters = {"vocabulary": vocabulary, "batch": batch}
        baselines = {"torch": partial(reference.mask_logits, logits, masks)}
        size = 2 * num_bytes(logits) + num_bytes(masks)
        yield Row(parameters, partial(mask_logits, logits, masks), size, 0, baselines)
