"""Which implementation a step runs on: the attention backends and the tables of ops by name.

The Triton language is imported only when a backend of it is chosen.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from inflight_backend.models.attention import AttentionBackend, TorchAttention
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.kv_cache import CopyBlocks, KvPool
from inflight_backend.models.ops import FP8_TORCH_OPS, TORCH_OPS, Ops


def _make_triton(
    pool: KvPool, model: ModelConfig, cos_sin: Tensor, *, is_deterministic: bool
) -> AttentionBackend:
    from inflight_backend.models.triton_attention import TritonAttention  # needs triton

    return TritonAttention(pool, model, cos_sin, is_deterministic=is_deterministic)


class _MakeBackend(Protocol):
    def __call__(
        self, pool: KvPool, model: ModelConfig, cos_sin: Tensor, *, is_deterministic: bool
    ) -> AttentionBackend: ...


ATTENTION_BACKENDS: dict[str, _MakeBackend] = {
    "torch": TorchAttention,
    "triton": _make_triton,
}
"""Name -> maker from a pool, a model, its table of cosines and sines (`decoder.make_cos_sin`) and
whether a row's result must not depend on the others;
`EngineConfig.attention_backend` chooses."""


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
    cos_sin: Tensor,
    num_blocks: int,
    *,
    backend: str,
    tokens_per_block: int,
    kv_dtype: torch.dtype,
    device: str,
    is_deterministic: bool,
) -> tuple[KvPool, AttentionBackend]:
    """The KV blocks of a model on ``device``, and the attention over them."""
    pool = KvPool(
        model.num_layers,
        num_blocks,
        tokens_per_block,
        model.num_kv_heads,
        model.head_dim,
        kv_dtype,
        device,
        _find_copy(backend),
    )
    make_backend = ATTENTION_BACKENDS[backend]
    return pool, make_backend(pool, model, cos_sin, is_deterministic=is_deterministic)


def _find_copy(backend: str) -> CopyBlocks | None:
    if backend != "triton":
        return None
    from inflight_kernels.ops.copy_blocks import copy_blocks  # needs triton

    return copy_blocks
