"""Attention backends: who writes keys and values into the pool and attends over it.

A backend is made once for a pool; `AttentionBackend.begin` is called once per step with what the
step looks like, and answers with an object that runs one layer after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from inflight_backend.engine.kv_pool import KvPool
from inflight_backend.engine.model_config import ModelConfig
from inflight_kernels import reference


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The sequences of a step: context chunks first, then one token of each generation.

    On the device: ``block_tables`` [num_sequences, max_blocks] int32, ``context_lengths``
    [num_sequences] int32 (cached plus the tokens of this step), ``query_starts``
    [num_context_sequences + 1] int32, ``slot_mapping`` [num_tokens] int64. The two lengths also
    lie on the host, so that no backend has to wait for the device to learn them.
    """

    num_context_sequences: int
    num_context_tokens: int
    block_tables: Tensor
    context_lengths: Tensor
    query_starts: Tensor
    slot_mapping: Tensor
    host_query_lengths: npt.NDArray[np.int64]
    host_context_lengths: npt.NDArray[np.int64]


class AttentionStep(Protocol):
    """One step; layers are run in order, each once."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value [T, KVH, D], then attend: query [T, H, D] -> [T, H, D]."""


class AttentionBackend(Protocol):
    """Runs on the memory of one `KvPool`."""

    reads_past_the_end: bool
    """True if stale slots of a block are read with weight 0, where a NaN would still count."""

    def begin(self, inputs: AttentionInputs) -> AttentionStep:
        """Prepare what all layers of the step share."""


class TorchAttention:
    """The reference in plain torch: the CPU's path, and an oracle on a GPU."""

    reads_past_the_end = True

    def __init__(self, pool: KvPool, model: ModelConfig) -> None:
        self._pool = pool
        self._windows = model.sliding_windows
        self._scale = model.head_dim**-0.5

    def begin(self, inputs: AttentionInputs) -> AttentionStep:
        """Plan once for every distinct window."""
        plans = {
            window: reference.plan_attention(
                inputs.block_tables,
                inputs.host_query_lengths,
                inputs.host_context_lengths,
                self._pool.tokens_per_block,
                window,
            )
            for window in set(self._windows)
        }
        return _TorchStep(self._pool, self._windows, self._scale, plans, inputs.slot_mapping)


@dataclass(frozen=True, slots=True)
class _TorchStep:
    pool: KvPool
    windows: tuple[int | None, ...]
    scale: float
    plans: dict[int | None, reference.AttentionPlan]
    slot_mapping: Tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.pool.layer(layer)
        reference.write_kv(key, value, keys, values, self.slot_mapping)
        return self.plans[self.windows[layer]].attend(query, keys, values, self.scale)


ATTENTION_BACKENDS: dict[str, Callable[[KvPool, ModelConfig], AttentionBackend]] = {
    "torch": TorchAttention,
}
"""Name -> backend; `EngineConfig.attention_backend` chooses."""
