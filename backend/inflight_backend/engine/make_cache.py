"""The memory of KV blocks and the arithmetic on it, made together."""

from __future__ import annotations

from torch import Tensor

from inflight_backend.engine.config import EngineConfig
from inflight_backend.models.attention import AttentionBackend
from inflight_backend.models.attention_backends import ATTENTION_BACKENDS
from inflight_backend.models.kv_pool import CopyBlocks, KvPool
from inflight_backend.models.model_config import ModelConfig


def make_cache(
    config: EngineConfig, model: ModelConfig, cos_sin: Tensor, num_blocks: int
) -> tuple[KvPool, AttentionBackend]:
    """A pool of a resolved configuration, and the attention over it."""
    pool = KvPool(
        model.num_layers,
        num_blocks,
        config.tokens_per_block,
        model.num_kv_heads,
        model.head_dim,
        config.kv_dtype,
        config.device,
        _find_copy(config),
    )
    backend = ATTENTION_BACKENDS[config.attention_backend]
    return pool, backend(pool, model, cos_sin, is_deterministic=config.deterministic_mode)


def _find_copy(config: EngineConfig) -> CopyBlocks | None:
    if config.attention_backend != "triton":
        return None
    from inflight_kernels.copy_blocks import copy_blocks  # needs triton

    return copy_blocks
