"""The attention backend in the Triton language; importing this needs triton.

Generations and context chunks of a step are two launches, each of the kernel that suits it;
`docs/gpu.md` gives the figures of the compiled code behind that choice. Nothing that they need is
read from the host, so that a CUDA graph can hold a step; lengths on the host are a hint only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from inflight_backend.models.attention import (
    AttentionInputs,
    AttentionStep,
    HeadParameters,
    RopeTables,
    make_slopes,
)
from inflight_backend.models.config import AttentionConfig, ModelConfig
from inflight_backend.models.kv_cache import KvPool, RecurrentStates
from inflight_kernels.ops.attention.paged_attention_context import paged_attention_context
from inflight_kernels.ops.attention.paged_attention_generation import (
    GenerationWork,
    paged_attention_generation,
    plan_generation,
)
from inflight_kernels.ops.attention.rope_write_kv import rope_write_kv

DETERMINISTIC_SPLITS = 16
"""Splits of a row in the deterministic mode: a row of 2,048 tokens fills 16 programs per KV head,
as many as a batch of 8 of an 8B needs on 132 multiprocessors; a large batch pays for combining."""


class TritonAttention:
    """Kernels on the memory of one pool, whose KV may have 8 bits."""

    reads_past_the_end = False
    can_be_captured = True

    def __init__(
        self,
        pool: KvPool,
        model: ModelConfig,
        tables: RopeTables,
        states: RecurrentStates | None = None,
        *,
        is_deterministic: bool = False,
    ) -> None:
        # A recurrence over a chunk reads its length from the host.
        self._states, self.can_capture_chunks = states, not model.deltas
        # Then splits and tiles depend on a row's own length, not on the batch.
        self._num_splits = DETERMINISTIC_SPLITS if is_deterministic else None
        self._pool = pool
        self._layers = [layer.attention for layer in model.layers]
        self._groups = pool.layout.groups
        self._tables = [tables.get((each.rope, each.head_dim)) for each in self._layers]
        self._slopes = [make_slopes(each, pool.device) for each in self._layers]

    def begin(self, inputs: AttentionInputs) -> AttentionStep:
        """Shared are views, the longest chunk, a hint for the size of tiles (in a captured step any
        chunk may be as long as the step), and which program of the generation attention does
        what."""
        count, longest = inputs.num_generations, len(inputs.positions)
        if inputs.host is not None:
            longest = int(inputs.host.query.max())
        tables, lengths = inputs.block_tables, inputs.context_lengths
        chunks = Chunks(tables[:, count:], lengths[count:], inputs.query_starts, longest)
        attending = [(index, each) for index, each in enumerate(self._layers) if not each.delta]
        kinds = {_kind_of(each): index for index, each in attending} if count else {}
        work = {
            kind: plan_generation(
                self._layers[index].num_heads,
                self._pool.layer(index)[0],
                tables[0, :count],
                lengths[:count],
                self._layers[index].window,
                chunk=self._layers[index].chunk,
                num_splits=self._num_splits,
            )
            for kind, index in kinds.items()
        }
        generations = Generations(tables[:, :count], lengths[:count], work)
        return _TritonStep(inputs, self._states, self, chunks, generations)

    def write(
        self,
        layer: int,
        heads: Tensor,
        parameters: HeadParameters,
        inputs: AttentionInputs,
    ) -> Tensor:
        """Norm and turn, store key and value; the query that is to attend."""
        config, slot_mapping = self._layers[layer], inputs.slot_mapping[self._groups[layer]]
        keys, values = self._caches(layer)
        table = self._tables[layer]
        assert table is not None, "a recurrence turns nothing"
        if config.kv_source is not None:  # any heads will do for what is not kept
            heads = torch.cat((heads, *[heads[:, : config.num_kv_heads]] * 2), dim=1)
            slot_mapping = torch.full_like(slot_mapping, -1)
        sizes = [config.num_heads] + [config.num_kv_heads] * (1 if values is None else 2)
        query, key, *value = torch.split(heads, sizes, dim=1)
        return rope_write_kv(
            query,
            key,
            value[0] if value else None,
            table,
            inputs.positions,
            keys,
            values,
            slot_mapping,
            parameters.query_norm,
            parameters.key_norm,
            config.qk_norm_kind.eps,
            is_norm_after_rope=config.is_norm_after_rope,
            **self._scales(parameters),
        )

    def attend_context(
        self,
        layer: int,
        query: Tensor,
        parameters: HeadParameters,
        chunks: Chunks,
        out: Tensor | None = None,
    ) -> Tensor:
        """The chunks of a step, in their rows of query and ``out`` [num_tokens, H, D]."""
        return paged_attention_context(
            query,
            *self._caches(layer),
            chunks.tables[self._groups[layer]],
            chunks.query_starts,
            chunks.lengths,
            max_query_len=chunks.longest if self._num_splits is None else None,
            out=out,
            **self._options(layer, parameters),
        )

    def attend_generation(
        self,
        layer: int,
        query: Tensor,
        parameters: HeadParameters,
        generations: Generations,
        out: Tensor | None = None,
    ) -> Tensor:
        """The generations of a step: query and ``out`` [num_generations, H, D]."""
        return paged_attention_generation(
            query,
            *self._caches(layer),
            generations.tables[self._groups[layer]],
            generations.lengths,
            work=generations.work.get(_kind_of(self._layers[layer])),
            out=out,
            **self._options(layer, parameters),
        )

    def _caches(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Keys, and values where they are not the keys."""
        keys, values = self._pool.layer(layer)
        return keys, None if self._layers[layer].latent is not None else values

    def _scales(self, parameters: HeadParameters) -> dict[str, float]:
        """Those of a cache of 8 bits; any other holds keys and values as they are."""
        if self._pool.dtype.itemsize > 1:
            return {}
        return {"key_scale": parameters.key_scale, "value_scale": parameters.value_scale}

    def _options(self, layer: int, parameters: HeadParameters) -> dict[str, Any]:
        """What both kernels are told about a layer."""
        config = self._layers[layer]
        return {
            "scale": config.scale,
            "sliding_window": config.window,
            "softcap": config.softcap,
            "chunk": config.chunk,
            "sinks": parameters.sinks,
            "slopes": self._slopes[layer],
            **self._scales(parameters),
        }


_Kind: TypeAlias = tuple[int, int, int, int | None, int | None]


def _kind_of(config: AttentionConfig) -> _Kind:
    """Layers of one kind share the work of a step."""
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    return (*heads, config.window, config.chunk)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Context chunks: block tables [groups, S, max_blocks], lengths [S] and starts [S + 1], int32,
    and the most tokens that one may have."""

    tables: Tensor
    lengths: Tensor
    query_starts: Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class Generations:
    """Single tokens: block tables [groups, B, max_blocks] and lengths [B], int32, and by kind of
    layer which program of the attention does what."""

    tables: Tensor
    lengths: Tensor
    work: dict[_Kind, GenerationWork]


@dataclass(frozen=True, slots=True)
class _TritonStep:
    """Generations first, then chunks, then padding; how many are none only the device knows."""

    inputs: AttentionInputs
    states: RecurrentStates | None
    backend: TritonAttention
    chunks: Chunks
    generations: Generations
    cross: AttentionStep | None = None

    def attend(self, layer: int, heads: Tensor, parameters: HeadParameters) -> Tensor:
        backend, chunks, generations = self.backend, self.chunks, self.generations
        query = backend.write(layer, heads, parameters, self.inputs)
        rows = len(generations.lengths)
        if len(chunks.lengths) == 0:
            return backend.attend_generation(layer, query, parameters, generations)
        if rows == 0:
            return backend.attend_context(layer, query, parameters, chunks)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        # In this order: rows without a generation get zeros, where there may be chunks.
        backend.attend_generation(layer, query[:rows], parameters, generations, out[:rows])
        return backend.attend_context(layer, query, parameters, chunks, out)
