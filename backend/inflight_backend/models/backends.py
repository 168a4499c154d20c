"""Which implementation a step runs on: attention backends and tables of ops by name ("torch",
"compiled", "triton"); `EngineConfig.attention_backend` chooses.

The Triton language and numba are imported only when a backend of them is chosen.
"""

from __future__ import annotations

import torch

from inflight_backend.models.attention import AttentionBackend, RopeTables, TorchAttention
from inflight_backend.models.config import CacheLayout, ModelConfig
from inflight_backend.models.kv_cache import KvPool, RecurrentStates
from inflight_backend.models.ops import FP8_TORCH_OPS, TORCH_OPS, Ops


def make_ops(
    backend: str, quantization: str, *, is_deterministic: bool = False, packed_backend: str = ""
) -> Ops:
    """The table for an attention backend and quantization ("none", "fp8");
    ``is_deterministic`` (triton only): with linears whose rows do not depend on the batch.
    ``packed_backend``: of what multiplies by quantised weights, if there are any.

    `ConfigurationError` if compiled kernels would lie where others can write.
    """
    if backend == "triton":
        from inflight_backend.models.triton_ops import make_triton_ops  # needs triton

        return make_triton_ops(quantization, is_deterministic=is_deterministic)
    if backend == "compiled":
        from inflight_backend.models.compiled.ops import COMPILED_OPS  # needs numba

        return COMPILED_OPS
    if packed_backend == "triton":
        from inflight_backend.models.triton_ops import with_packed_products  # needs triton

        return with_packed_products(TORCH_OPS)
    return FP8_TORCH_OPS if quantization == "fp8" else TORCH_OPS


def make_cache(
    model: ModelConfig,
    layout: CacheLayout,
    tables: RopeTables,
    num_blocks: int,
    *,
    backend: str,
    tokens_per_block: int,
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
    device: str,
    is_deterministic: bool,
    states: RecurrentStates | None = None,
) -> tuple[KvPool, AttentionBackend]:
    """The KV blocks of a model on ``device``, and the attention over them.

    ``dtype``: of what attends. ``states``: of the slots, where the model has recurrences.
    ``is_deterministic``: the result of a row must not depend on the others.
    """
    heads = [(each.attention.num_kv_heads, each.attention.head_dim) for each in model.layers]
    shape = (layout, heads, num_blocks, tokens_per_block)
    if backend == "triton":
        from inflight_backend.models.triton_attention import TritonAttention  # needs triton
        from inflight_kernels.ops.attention.copy_blocks import copy_blocks

        pool = KvPool(*shape, kv_dtype, device, copy_blocks)
        return pool, TritonAttention(pool, model, tables, states, is_deterministic=is_deterministic)
    assert not is_deterministic, "resolve() chooses another backend, or refuses"
    pool = KvPool(*shape, kv_dtype, device)
    if backend == "compiled" and kv_dtype == dtype:  # numbers of 8 bits have no kernel
        from inflight_backend.models.compiled.attention import CompiledAttention  # needs numba

        return pool, CompiledAttention(pool, model, tables, dtype, states)
    return pool, TorchAttention(pool, model, tables, dtype, states)
