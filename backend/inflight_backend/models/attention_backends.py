"""The attention backends by name."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from inflight_backend.models.attention import AttentionBackend
from inflight_backend.models.kv_pool import KvPool
from inflight_backend.models.model_config import ModelConfig
from inflight_backend.models.torch_attention import TorchAttention


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
"""Name -> maker from a pool, a model, its table of cosines and sines (`rope.make_cos_sin`) and
whether a row's result must not depend on the others (`deterministic`);
`EngineConfig.attention_backend` chooses."""
