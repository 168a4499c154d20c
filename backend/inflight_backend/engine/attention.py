"""Attention backends: who writes keys and values into the pool and attends over it.

A backend is made once for a pool; `AttentionBackend.begin` is called once per step with what the
step looks like, and answers with an object that runs one layer after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from inflight_backend.engine.kv_pool import KvPool
from inflight_backend.engine.model_config import ModelConfig
from inflight_kernels import reference

HeadNorms: TypeAlias = tuple[Tensor, Tensor] | None
"""Weights [head_dim] of the norms of query and key heads, where a model has them."""


@dataclass(frozen=True, slots=True)
class HostLengths:
    """Tokens of this step and tokens in all, of each sequence."""

    query: npt.NDArray[np.int64]
    context: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The sequences of a step: context chunks first, then one token of each generation.

    On the device: ``block_tables`` [num_sequences, max_blocks] int32, ``context_lengths``
    [num_sequences] int32 (cached plus the tokens of this step), ``query_starts``
    [num_context_sequences + 1] int32, ``positions`` and ``slot_mapping`` [num_tokens] int64. A
    padding row has context length 0 and slot -1. The two lengths also lie on the host, so that no
    backend has to wait for the device to learn them; a step that is being captured has none
    (``host`` is None), since its lengths differ from replay to replay.
    """

    num_context_sequences: int
    num_context_tokens: int
    block_tables: Tensor
    context_lengths: Tensor
    query_starts: Tensor
    positions: Tensor
    slot_mapping: Tensor
    host: HostLengths | None


class AttentionStep(Protocol):
    """One step; layers are run in order, each once."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, norms: HeadNorms
    ) -> Tensor:
        """Norm and turn query and key, store key and value [T, KVH, D], then attend:
        query [T, H, D] -> [T, H, D]."""


class AttentionBackend(Protocol):
    """Runs on the memory of one `KvPool`."""

    reads_past_the_end: bool
    """True if stale slots of a block are read with weight 0, where a NaN would still count."""

    is_capturable: bool
    """True if a step of generations needs no `HostLengths`, so that a graph can hold it."""

    def begin(self, inputs: AttentionInputs) -> AttentionStep:
        """Prepare what all layers of the step share."""


class TorchAttention:
    """The reference in plain torch: the CPU's path, and an oracle on a GPU."""

    reads_past_the_end = True
    is_capturable = False

    def __init__(
        self, pool: KvPool, model: ModelConfig, cos_sin: Tensor, *, is_deterministic: bool
    ) -> None:
        assert not is_deterministic, "resolve() chooses another backend, or refuses"
        self._pool = pool
        self._cos_sin = cos_sin
        self._eps = model.rms_norm_eps
        self._windows = model.sliding_windows
        self._scale = model.head_dim**-0.5

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
        return _TorchStep(self, plans, inputs)

    def attend(
        self,
        layer: int,
        heads: tuple[Tensor, Tensor, Tensor],
        norms: HeadNorms,
        plans: dict[int | None, reference.AttentionPlan],
        inputs: AttentionInputs,
    ) -> Tensor:
        """One layer; ``heads`` are query, key and value."""
        query, key, value = heads
        keys, values = self._pool.layer(layer)
        if norms is not None:
            query = reference.rms_norm(query, norms[0], self._eps)
            key = reference.rms_norm(key, norms[1], self._eps)
        query, key = reference.apply_rope(query, key, self._cos_sin, inputs.positions)
        reference.write_kv(key, value, keys, values, inputs.slot_mapping)
        return plans[self._windows[layer]].attend(query, keys, values, self._scale)


@dataclass(frozen=True, slots=True)
class _TorchStep:
    backend: TorchAttention
    plans: dict[int | None, reference.AttentionPlan]
    inputs: AttentionInputs

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, norms: HeadNorms
    ) -> Tensor:
        return self.backend.attend(layer, (query, key, value), norms, self.plans, self.inputs)


def _make_triton(
    pool: KvPool, model: ModelConfig, cos_sin: Tensor, *, is_deterministic: bool
) -> AttentionBackend:
    from inflight_backend.engine.triton_attention import TritonAttention  # needs triton

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
