"""The attention backend in the Triton language; importing this needs triton.

Context chunks and generations of a mixed step are two launches, each of the kernel that suits it;
`docs/gpu.md` gives the figures of the compiled code behind that choice. A step of generations alone
reads nothing from the host, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_backend.engine.attention import AttentionInputs, HeadNorms
from inflight_backend.engine.kv_pool import KvPool
from inflight_backend.engine.model_config import ModelConfig
from inflight_kernels.paged_attention_context import paged_attention_context
from inflight_kernels.paged_attention_generation import paged_attention_generation
from inflight_kernels.rope_write_kv import rope_write_kv

DETERMINISTIC_SPLITS = 16
"""Splits of a row in the deterministic mode: a row of 2,048 tokens fills 16 programs per KV head,
as many as a batch of 8 of an 8B needs on 132 multiprocessors; a large batch pays for combining."""


class TritonAttention:
    """Kernels on the memory of one pool, whose KV may be FP8."""

    reads_past_the_end = False
    is_capturable = True

    def __init__(
        self, pool: KvPool, model: ModelConfig, cos_sin: Tensor, *, is_deterministic: bool = False
    ) -> None:
        # Then splits and tiles depend on a row's own length, not on the batch.
        self._num_splits = DETERMINISTIC_SPLITS if is_deterministic else None
        self._pool = pool
        self._cos_sin = cos_sin
        self._eps = model.rms_norm_eps
        self._windows = model.sliding_windows
        self._scale = model.head_dim**-0.5

    def begin(self, inputs: AttentionInputs) -> _TritonStep:
        """Nothing is shared but the longest chunk, a hint for the size of tiles."""
        longest = 1
        if inputs.num_context_sequences:
            assert inputs.host is not None, "only steps of generations can be captured"
            longest = int(inputs.host.query[: inputs.num_context_sequences].max())
        return _TritonStep(self, inputs, longest)

    def write(
        self,
        layer: int,
        heads: tuple[Tensor, Tensor, Tensor],
        norms: HeadNorms,
        inputs: AttentionInputs,
    ) -> Tensor:
        """Norm and turn, store key and value; the query that is to attend."""
        query_norm, key_norm = norms or (None, None)
        return rope_write_kv(
            *heads,
            self._cos_sin,
            inputs.positions,
            *self._pool.layer(layer),
            inputs.slot_mapping,
            query_norm,
            key_norm,
            self._eps,
        )

    def attend_context(
        self,
        layer: int,
        query: Tensor,
        inputs: AttentionInputs,
        longest: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """The chunks of a step: query and ``out`` [num_context_tokens, H, D]."""
        count = inputs.num_context_sequences
        return paged_attention_context(
            query,
            *self._pool.layer(layer),
            inputs.block_tables[:count],
            inputs.query_starts,
            inputs.context_lengths[:count],
            self._scale,
            self._windows[layer],
            max_query_len=longest if self._num_splits is None else None,
            out=out,
        )

    def attend_generation(
        self, layer: int, query: Tensor, inputs: AttentionInputs, out: Tensor | None = None
    ) -> Tensor:
        """The generations of a step: query and ``out`` [num_generations, H, D]."""
        first = inputs.num_context_sequences
        return paged_attention_generation(
            query,
            *self._pool.layer(layer),
            inputs.block_tables[first:],
            inputs.context_lengths[first:],
            self._scale,
            self._windows[layer],
            num_splits=self._num_splits,
            out=out,
        )


@dataclass(frozen=True, slots=True)
class _TritonStep:
    backend: TritonAttention
    inputs: AttentionInputs
    longest: int

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, norms: HeadNorms
    ) -> Tensor:
        backend, inputs = self.backend, self.inputs
        query = backend.write(layer, (query, key, value), norms, inputs)
        num_context = inputs.num_context_tokens
        if num_context == 0:
            return backend.attend_generation(layer, query, inputs)
        if num_context == len(query):
            return backend.attend_context(layer, query, inputs, self.longest)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        chunks, rest = query[:num_context], query[num_context:]
        backend.attend_context(layer, chunks, inputs, self.longest, out[:num_context])
        backend.attend_generation(layer, rest, inputs, out[num_context:])
        return out
