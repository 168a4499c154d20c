"""Bias and penalties in every row (K3): microseconds and GB/s of all that is read and written."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernel_ops.harness import Row, Setting, num_bytes


def rows(setting: Setting) -> Iterator[Row]:
    """Batches whose rows ask for everything."""
    # Imported late: a dry run switches the interpreter on before triton is imported.
    from inflight_kernels import reference
    from inflight_kernels.ops.adjust_logits import adjust_logits

    device = setting.device
    for vocabulary in [100] if setting.is_dry else [32000, 128256]:
        for batch in [2] if setting.is_dry else [1, 8, 64, 256]:
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
