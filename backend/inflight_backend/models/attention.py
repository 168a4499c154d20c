"""The interface of an attention backend, and the backend in plain torch.

A backend writes keys and values into the KV pool and attends over it. It is made once for a pool;
`AttentionBackend.begin` is called once per step with what the step looks like, and returns an
object that runs one layer after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight_backend.models.config import ModelConfig
from inflight_backend.models.kv_cache import KvPool
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
    """The sequences of a step: generations, whose tokens are the first, one each; then chunks.

    On the device: ``block_tables`` [num_sequences, max_blocks] int32, ``context_lengths``
    [num_sequences] int32 (cached plus the tokens of this step), ``query_starts`` [num_chunks + 1]
    int32 (chunk ``c`` has the tokens from ``query_starts[c]`` to ``query_starts[c + 1]``),
    ``positions`` and ``slot_mapping`` [num_tokens] int64. Padding has context length 0 and slot -1.

    The two lengths also lie on the host, so that no backend has to wait for the device to learn
    them; a step that is being captured has none (``host`` is None), since its lengths differ from
    replay to replay.
    """

    num_generations: int
    block_tables: Tensor
    context_lengths: Tensor
    query_starts: Tensor
    positions: Tensor
    slot_mapping: Tensor
    host: HostLengths | None


class AttentionStep(Protocol):
    """One step; layers are run in order, each once."""

    def attend(self, layer: int, heads: Tensor, norms: HeadNorms) -> Tensor:
        """``heads`` [T, H + 2 * KVH, D] are query, key and value. Norm and turn query and key,
        store key and value, then attend: -> [T, H, D]."""


class AttentionBackend(Protocol):
    """Runs on the memory of one `KvPool`."""

    reads_past_the_end: bool
    """True if stale slots of a block are read with weight 0, where a NaN would still count."""

    can_be_captured: bool
    """True if steps need no `HostLengths`, so that a graph can hold them."""

    def begin(self, inputs: AttentionInputs) -> AttentionStep:
        """Prepare what all layers of the step share."""


class TorchAttention:
    """The reference in plain torch: the CPU's path, and an oracle on a GPU."""

    reads_past_the_end = True
    can_be_captured = False

    def __init__(self, pool: KvPool, model: ModelConfig, cos_sin: Tensor) -> None:
        self._pool = pool
        self._cos_sin = cos_sin
        self._eps = model.rms_norm_eps
        self._windows = model.sliding_windows
        self._weighting = reference.Weighting(model.head_dim**-0.5)
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
        return plan.attend(query, keys, values, self._weighting, own=(key, value))


@dataclass(frozen=True, slots=True)
class _TorchStep:
    backend: TorchAttention
    plans: dict[int | None, reference.AttentionPlan]
    angles: tuple[Tensor, Tensor]
    slot_mapping: Tensor

    def attend(self, layer: int, heads: Tensor, norms: HeadNorms) -> Tensor:
        return self.backend.attend(layer, heads, norms, self)
