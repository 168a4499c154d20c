"""The attention backend in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_backend.models.attention import AttentionInputs, AttentionStep, HeadNorms
from inflight_backend.models.kv_pool import KvPool
from inflight_backend.models.model_config import ModelConfig
from inflight_kernels import reference


class TorchAttention:
    """The reference in plain torch: the CPU's path, and an oracle on a GPU."""

    reads_past_the_end = True

    def __init__(
        self, pool: KvPool, model: ModelConfig, cos_sin: Tensor, *, is_deterministic: bool
    ) -> None:
        assert not is_deterministic, "resolve() chooses another backend, or refuses"
        self._pool = pool
        self._cos_sin = cos_sin
        self._eps = model.rms_norm_eps
        self._windows = model.sliding_windows
        self._scale = model.head_dim**-0.5
        self._heads = [model.num_heads, model.num_kv_heads, model.num_kv_heads]

    def begin(self, inputs: AttentionInputs) -> AttentionStep:
        """Plan once for every distinct window."""
        assert inputs.host is not None, "this backend cannot be captured"
        plans = {
            window: reference.plan_attention(
                inputs.block_tables,
                inputs.host.query,
                inputs.host.context,
                self._pool.tokens_per_block,
                window,
            )
            for window in set(self._windows)
        }
        keys, _ = self._pool.layer(0)
        angles = reference.rope_angles(self._cos_sin, inputs.positions, keys.dtype)
        return _TorchStep(self, plans, angles, inputs.slot_mapping)

    def attend(self, layer: int, heads: Tensor, norms: HeadNorms, step: _TorchStep) -> Tensor:
        """One layer; ``heads`` [T, H + 2 * KVH, D] are query, key and value."""
        query, key, value = torch.split(heads, self._heads, dim=1)
        keys, values = self._pool.layer(layer)
        if norms is None:  # query and key lie side by side
            turned = reference.rotate(heads[:, : -value.shape[1]], step.angles)
            query, key = torch.split(turned, self._heads[:2], dim=1)
        else:
            query = reference.rms_norm(query, norms[0], self._eps)
            key = reference.rms_norm(key, norms[1], self._eps)
            query, key = (reference.rotate(each, step.angles) for each in (query, key))
        reference.write_kv(key, value, keys, values, step.slot_mapping)
        plan = step.plans[self._windows[layer]]
        return plan.attend(query, keys, values, self._scale, own=(key, value))


@dataclass(frozen=True, slots=True)
class _TorchStep:
    backend: TorchAttention
    plans: dict[int | None, reference.AttentionPlan]
    angles: tuple[Tensor, Tensor]
    slot_mapping: Tensor

    def attend(self, layer: int, heads: Tensor, norms: HeadNorms) -> Tensor:
        return self.backend.attend(layer, heads, norms, self)
