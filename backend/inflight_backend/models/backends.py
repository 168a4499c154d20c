"""Which implementation a step runs on: attention backends and tables of ops by name ("torch",
"triton"); `EngineConfig.attention_backend` chooses.

The Triton language is imported only when a backend of it is chosen.
"""

from __future__ import annotations

import torch

from inflight_backend.models.attention import AttentionBackend, RopeTables, TorchAttention
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.kv_cache import KvPool, RecurrentStates
from inflight_backend.models.ops import FP8_TORCH_OPS, TORCH_OPS, Ops


def make_ops(backend: str, quantization: str, *, is_deterministic: bool = False) -> Ops:
    """The table for an attention backend ("torch", "triton") and quantization ("none", "fp8");
    ``is_deterministic`` (triton only): with linears whose rows do not depend on the batch.

    `ConfigurationError` if compiled kernels would lie where others can write.
    """
    if backend == "triton":
        from inflight_backend.models.triton_ops import make_triton_ops  # needs triton

        return make_triton_ops(quantization, is_deterministic=is_deterministic)
    return FP8_TORCH_OPS if quantization == "fp8" else TORCH_OPS


def make_cache(
    model: ModelConfig,
    tables: RopeTables,
    num_blocks: int,
    *,
    backend: str,
    tokens_per_block: int,
    kv_dtype: torch.dtype,
    device: str,
    is_deterministic: bool,
    states: RecurrentStates | None = None,
) -> tuple[KvPool, AttentionBackend]:
    """The KV blocks of a model on ``device``, and the attention over them.

    ``states``: of the slots, where the model has recurrences.
    ``is_deterministic``: the result of a row must not depend on the others.
    """
    kinds = [each.attention for each in model.layers]
    shapes = [
        (each.num_cached, each.num_kv_heads, each.head_dim)
        if each.kv_source is None
        else each.kv_source
        for each in kinds
    ]
    shape = (shapes, num_blocks, tokens_per_block)
    if backend == "triton":
        from inflight_backend.models.triton_attention import TritonAttention  # needs triton
        from inflight_kernels.ops.copy_blocks import copy_blocks

        pool = KvPool(*shape, kv_dtype, device, copy_blocks)
        return pool, TritonAttention(pool, model, tables, states, is_deterministic=is_deterministic)
    assert not is_deterministic, "resolve() chooses another backend, or refuses"
    pool = KvPool(*shape, kv_dtype, device)
    return pool, TorchAttention(pool, model, tables, states)
