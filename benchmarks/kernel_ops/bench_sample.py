"""Sampling (K3): microseconds and GB/s (logits read once), by what the rows ask for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from inflight_kernels.ops.sampling.sample import sample
from kernel_ops.harness import Row, Setting, num_bytes
from kernel_ops.token_shapes import logits_shapes

_KINDS = {
    "greedy": (0.0, 0, 0.0),
    "temperature": (0.8, 0, 1.0),
    "top-k 50": (0.8, 50, 1.0),
    "top-p 0.9": (0.8, 0, 0.9),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9),
}


def rows(setting: Setting) -> Iterator[Row]:
    """Batches of one kind each. The reference is no baseline: it waits for the host in between."""
    device = setting.device
    for batch, vocabulary in logits_shapes(setting):
        # In the dtype of the model, as an engine draws.
        logits = (4 * torch.randn(batch, vocabulary, device=device)).bfloat16()
        seeds = torch.arange(batch, device=device)
        for kind, (temperature, top_k, top_p) in _KINDS.items():
            arguments = (
                logits,
                torch.full((batch,), temperature, device=device),
                torch.full((batch,), top_k, dtype=torch.int32, device=device),
                torch.full((batch,), top_p, device=device),
                seeds,
                seeds + 17,
            )
            parameters = {"vocabulary": vocabulary, "batch": batch, "kind": kind}
            yield Row(parameters, partial(sample, *arguments), num_bytes(logits))
