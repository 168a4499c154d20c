"""A token of each text through a gated delta rule: microseconds and GB/s of states."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from inflight_kernels import reference
from inflight_kernels.ops.attention.delta_step import delta_step
from kernel_ops.harness import Row, Setting, num_bytes


def rows(setting: Setting) -> Iterator[Row]:
    """Heads of Qwen3-Next 80B, of one text to many."""
    key_heads, heads, size, batches = 16, 32, 128, [1, 8, 64]
    if setting.is_dry:
        key_heads, heads, size, batches = 1, 2, 16, [2]
    for batch in batches:
        query, key, value = (
            torch.randn(batch, count, size, device=setting.device).to(torch.bfloat16)
            for count in (key_heads, key_heads, heads)
        )
        decay, strength = torch.rand(2, batch, heads, device=setting.device).unbind()
        states = torch.zeros(batch, heads, size, size, device=setting.device)
        slots = torch.arange(batch, device=setting.device)
        arguments = (query, key, value, -decay, strength, states, slots, 1e-6)
        peer = {"torch": partial(reference.delta_step, *arguments)}
        call = partial(delta_step, *arguments)
        yield Row({"shape": "Qwen3-Next", "batch": batch}, call, 2 * num_bytes(states), 0, peer)
