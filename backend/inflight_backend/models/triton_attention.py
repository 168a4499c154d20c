"""The attention backend in the Triton language; importing this needs triton.

Generations and context chunks of a step are two launches, each of the kernel that suits it;
`docs/gpu.md` gives the figures of the compiled code behind that choice. Nothing that they need is
read from the host, so that a CUDA graph can hold a step; lengths on the host are a hint only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_backend.models.attention import AttentionInputs, AttentionStep, HeadNorms
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.kv_cache import KvPool
from inflight_kernels.ops.paged_attention_context import paged_attention_context
from inflight_kernels.ops.paged_attention_generation import (
    GenerationWork,
    paged_attention_generation,
    plan_generation,
)
from inflight_kernels.ops.rope_write_kv import rope_write_kv

DETERMINISTIC_SPLITS = 16
"""Splits of a row in the deterministic mode: a row of 2,048 tokens fills 16 programs per KV head,
as many as a batch of 8 of an 8B needs on 132 multiprocessors; a large batch pays for combining."""


class TritonAttention:
    """Kernels on the memory of one pool, whose KV may be FP8."""

    reads_past_the_end = False
    can_be_captured = True

    def __init__(
        self, pool: KvPool, model: ModelConfig, cos_sin: Tensor, *, is_deterministic: bool = False
    ) -> None:
        # Then splits and tiles depend on a row's own length, not on the batch.
        self._num_splits = DETERMINISTIC_SPLITS if is_deterministic else None
        self._pool = pool
        self._cos_sin = cos_sin
        self._eps = model.rms_norm_eps
        self._windows = model.sliding_windows
        self._num_heads = model.num_heads
        self._heads = [model.num_heads, model.num_kv_heads, model.num_kv_heads]
        self._scale = model.head_dim**-0.5

    def begin(self, inputs: AttentionInputs) -> AttentionStep:
        """Shared are views, the longest chunk, a hint for the size of tiles (in a captured step any
        chunk may be as long as the step), and which program of the generation attention does
        what."""
        count, longest = inputs.num_generations, len(inputs.positions)
        if inputs.host is not None:
            longest = int(inputs.host.query.max())
        tables, lengths = inputs.block_tables, inputs.context_lengths
        chunks = Chunks(tables[count:], lengths[count:], inputs.query_starts, longest)
        windows = set(self._windows) if count else ()
        work = {
            window: plan_generation(
                self._num_heads,
                self._pool.layer(0)[0],
                tables[:count],
                lengths[:count],
                window,
                num_splits=self._num_splits,
            )
            for window in windows
        }
        generations = Generations(tables[:count], lengths[:count], work)
        return _TritonStep(self, inputs.positions, inputs.slot_mapping, chunks, generations)

    def write(
        self,
        layer: int,
        heads: Tensor,
        norms: HeadNorms,
        positions: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Norm and turn, store key and value; the query that is to attend."""
        query_norm, key_norm = norms or (None, None)
        query, key, value = torch.split(heads, self._heads, dim=1)
        return rope_write_kv(
            query,
            key,
            value,
            self._cos_sin,
            positions,
            *self._pool.layer(layer),
            slot_mapping,
            query_norm,
            key_norm,
            self._eps,
        )

    def attend_context(
        self, layer: int, query: Tensor, chunks: Chunks, out: Tensor | None = None
    ) -> Tensor:
        """The chunks of a step, in their rows of query and ``out`` [num_tokens, H, D]."""
        return paged_attention_context(
            query,
            *self._pool.layer(layer),
            chunks.tables,
            chunks.query_starts,
            chunks.lengths,
            self._scale,
            self._windows[layer],
            max_query_len=chunks.longest if self._num_splits is None else None,
            out=out,
        )

    def attend_generation(
        self, layer: int, query: Tensor, generations: Generations, out: Tensor | None = None
    ) -> Tensor:
        """The generations of a step: query and ``out`` [num_generations, H, D]."""
        return paged_attention_generation(
            query,
            *self._pool.layer(layer),
            generations.tables,
            generations.lengths,
            self._scale,
            self._windows[layer],
            work=generations.work.get(self._windows[layer]),
            out=out,
        )


@dataclass(frozen=True, slots=True)
class Chunks:
    """Context chunks: block tables [S, max_blocks], lengths [S] and starts [S + 1], int32, and the
    most tokens that one may have."""

    tables: Tensor
    lengths: Tensor
    query_starts: Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class Generations:
    """Single tokens: block tables [B, max_blocks] and lengths [B], int32, and by sliding window
    (None: without one) which program of the attention does what."""

    tables: Tensor
    lengths: Tensor
    work: dict[int | None, GenerationWork]


@dataclass(frozen=True, slots=True)
class _TritonStep:
    """Generations first, then chunks, then padding; how many are none only the device knows."""

    backend: TritonAttention
    positions: Tensor
    slot_mapping: Tensor
    chunks: Chunks
    generations: Generations

    def attend(self, layer: int, heads: Tensor, norms: HeadNorms) -> Tensor:
        backend, chunks, generations = self.backend, self.chunks, self.generations
        query = backend.write(layer, heads, norms, self.positions, self.slot_mapping)
        rows = len(generations.lengths)
        if len(chunks.lengths) == 0:
            return backend.attend_generation(layer, query, generations)
        if rows == 0:
            return backend.attend_context(layer, query, chunks)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        # In this order: rows without a generation get zeros, where there may be chunks.
        backend.attend_generation(layer, query[:rows], generations, out[:rows])
        return backend.attend_context(layer, query, chunks, out)
