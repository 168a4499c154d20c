"""Bias and penalties in every row (K3): microseconds and GB/s of all that is read and written."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from inflight_kernels import reference
from inflight_kernels.ops.sampling.adjust_logits import adjust_logits
from kernel_ops.harness import Row, Setting, num_bytes
from kernel_ops.token_shapes import logits_shapes


def rows(setting: Setting) -> Iterator[Row]:
    """Batches whose rows ask for everything."""
    device = setting.device
    for batch, vocabulary in logits_shapes(setting):
        logits = 4 * torch.randn(batch, vocabulary, device=device)
        bias = torch.zeros(batch, vocabulary, device=device)
        counts = torch.zeros(batch, vocabulary, dtype=torch.int32, device=device)
        arguments = (
            logits,
            torch.arange(batch, device=device),
            torch.ones(batch, device=device),
            bias,
            counts,
            torch.tensor([[1.2, 0.1, 0.1]], device=device).repeat(batch, 1),
        )
        parameters = {"vocabulary": vocabulary, "batch": batch}
        baselines = {"torch": partial(reference.adjust_logits, *arguments)}
        size = 2 * num_bytes(logits) + num_bytes(bias) + num_bytes(counts)
        yield Row(parameters, partial(adjust_logits, *arguments), size, 0, baselines)
