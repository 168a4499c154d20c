"""Attention on a CPU, compiled: steps of generations only by one kernel, others by two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_backend.models.attention import (
    AttentionInputs,
    AttentionStep,
    HeadParameters,
    RopeTables,
    TorchAttention,
    make_slopes,
)
from inflight_backend.models.config import AttentionConfig, ModelConfig
from inflight_backend.models.kv_cache import KvPool, RecurrentStates
from inflight_kernels.cpu.attention.heads import LayerAttention
from inflight_kernels.cpu.attention.paged_attention_context import paged_attention_context
from inflight_kernels.cpu.attention.paged_attention_generation import attend_generations
from inflight_kernels.cpu.attention.rope_write_kv import rope_write_kv


class CompiledAttention(TorchAttention):
    """Over the same pool."""

    reads_past_the_end = True  # where it is torch's

    def __init__(
        self,
        pool: KvPool,
        model: ModelConfig,
        tables: RopeTables,
        dtype: torch.dtype,
        states: RecurrentStates | None = None,
    ) -> None:
        """``dtype``: of the heads and the pool."""
        super().__init__(pool, model, tables, dtype, states)
        self.layers = [
            _layer(layer.attention, tables, pool) if layer.attention.delta is None else None
            for layer in model.layers
        ]
        self.pool, self.states = pool, states
        self._takes_heads = all(each is None or each.takes(dtype) for each in self.layers)

    def begin(self, inputs: AttentionInputs) -> AttentionStep:
        """There is nothing to plan, unless torch has to do it."""
        if not self._takes_heads:
            return super().begin(inputs)
        num_generations = inputs.num_generations
        if num_generations == len(inputs.context_lengths):
            return GenerationStep(inputs, self.states, self)
        ones = torch.arange(num_generations, dtype=torch.int32)
        starts = torch.cat((ones, inputs.query_starts.int()))
        return ContextStep(inputs, self.states, self, starts)


def _layer(config: AttentionConfig, tables: RopeTables, pool: KvPool) -> LayerAttention:
    return LayerAttention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.scale,
        window=config.window,
        chunk=config.chunk,
        softcap=config.softcap,
        cos_sin=tables[config.rope, config.head_dim] if config.rope else None,
        slopes=make_slopes(config, pool.device),
        norm_eps=config.qk_norm_kind.eps,
        is_norm_after_rope=config.is_norm_after_rope,
        has_values=config.latent is None,
        has_own=config.kv_source is None,
    )


@dataclass(frozen=True, slots=True)
class GenerationStep:
    """A step of generations only."""

    inputs: AttentionInputs
    states: RecurrentStates | None
    backend: CompiledAttention
    cross: AttentionStep | None = None

    def attend(self, layer: int, heads: Tensor, parameters: HeadParameters) -> Tensor:
        backend, inputs = self.backend, self.inputs
        config, group = backend.layers[layer], backend.pool.layout.groups[layer]
        assert config is not None, "a recurrence does not attend"
        return attend_generations(
            config,
            heads,
            *backend.pool.layer(layer),
            inputs.block_tables[group],
            inputs.context_lengths,
            inputs.slot_mapping[group],
            parameters.query_norm,
            parameters.key_norm,
            parameters.sinks,
        )


@dataclass(frozen=True, slots=True)
class ContextStep:
    """A step with chunks; ``starts`` [num_sequences + 1] int32: where the tokens of each begin."""

    inputs: AttentionInputs
    states: RecurrentStates | None
    backend: CompiledAttention
    starts: Tensor
    cross: AttentionStep | None = None

    def attend(self, layer: int, heads: Tensor, parameters: HeadParameters) -> Tensor:
        backend, inputs = self.backend, self.inputs
        config, group = backend.layers[layer], backend.pool.layout.groups[layer]
        assert config is not None, "a recurrence does not attend"
        caches = backend.pool.layer(layer)
        query = rope_write_kv(
            config,
            heads,
            *caches,
            inputs.positions,
            inputs.slot_mapping[group],
            parameters.query_norm,
            parameters.key_norm,
        )
        return paged_attention_context(
            config,
            query,
            *caches,
            inputs.block_tables[group],
            self.starts,
            inputs.context_lengths,
            parameters.sinks,
        )
