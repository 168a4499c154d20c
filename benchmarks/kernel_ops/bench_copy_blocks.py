"""Copying cache blocks in all layers (K3): microseconds and GB/s, read plus written."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from inflight_kernels.ops.attention.copy_blocks import copy_blocks
from kernel_ops.harness import Row, Setting, num_bytes
from kernel_ops.paged_batch import LLAMA_8B, TINY

_BLOCK = 64


def rows(setting: Setting) -> Iterator[Row]:
    """One block (copy-on-write) to many (a pause), out of a cache larger than the L2."""
    heads, num_layers, counts = LLAMA_8B, 64, [1, 16, 256]
    if setting.is_dry:
        heads, num_layers, counts = TINY, 2, [1]
    for count in counts:
        shape = (num_layers, 2 * count, _BLOCK, heads.num_kv_heads, heads.head_dim)
        cache = torch.randn(shape, device=setting.device).to(torch.bfloat16)
        origins = torch.arange(count, dtype=torch.int32, device=setting.device)
        call = partial(copy_blocks, cache, cache, origins, origins + count)
        yield Row({"shape": heads.name, "blocks": count}, call, num_bytes(cache))
