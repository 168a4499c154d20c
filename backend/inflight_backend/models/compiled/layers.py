"""All layers of a step as one program: threads are called once a step, not once an op, and Python
has nothing to do in between. Long chunks, beside which that is nothing, run by the ops: a program
keeps its memory.

It has the kernels of the ops and of the attention, in their order, so its numbers are theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight_backend.models.attention import AttentionStep
from inflight_backend.models.blocks.attention import Attention
from inflight_backend.models.blocks.mlp import Mlp
from inflight_backend.models.compiled.attention import (
    CompiledAttention,
    ContextStep,
    GenerationStep,
)
from inflight_backend.models.compiled.linears import StagedLinear
from inflight_backend.models.compiled.lora import CompiledAdaptedLinear
from inflight_backend.models.ops import LayerParts
from inflight_kernels.cpu import paged_attention_context as context
from inflight_kernels.cpu import rope_write_kv as rope
from inflight_kernels.cpu.attention import STEP_COLUMNS, StepNumbers, attention_stage
from inflight_kernels.cpu.elementwise import (
    ROWS_COLUMN,
    add_rms_norm_stage,
    rms_norm_stage,
    silu_mul_stage,
    take_rows_stage,
)
from inflight_kernels.cpu.heads import LayerAttention
from inflight_kernels.cpu.lora import STEP_COLUMN, StepRows
from inflight_kernels.cpu.program import Program
from inflight_kernels.cpu.threads import Stage

_LEAST_ROWS = 8
_MOST_INNER = 1 << 23
"""Numbers that the widest linear of a layer gives: a program with more would keep too much memory
for what it saves."""
_FEW_PRODUCTS = 1 << 20
"""Of numbers: one thread is done with them before threads have met at the end of each stage."""


def join_layers(
    layers: Sequence[LayerParts], final_norm: Tensor, eps: float
) -> JoinedLayers | None:
    """Layers of the block "pre" with RMS norms; None if one of them has a part that no kernel
    does."""
    return JoinedLayers(layers, final_norm, eps) if all(map(_can_join, layers)) else None


def _can_join(layer: LayerParts) -> bool:
    attention, mlp = layer.attention, layer.mlp
    if not (isinstance(attention, Attention) and isinstance(mlp, Mlp)):
        return False
    linears = map(_plain, (attention.qkv, attention.output, mlp.up, mlp.down))
    are_staged = all(isinstance(each, StagedLinear) for each in linears)
    return attention.is_plain and mlp.is_silu and are_staged


def _plain(linear: Any) -> Any:
    """Without what adapters do to it."""
    return linear.linear if isinstance(linear, CompiledAdaptedLinear) else linear


class JoinedLayers:
    """See `Ops.join_layers`."""

    def __init__(self, layers: Sequence[LayerParts], final_norm: Tensor, eps: float) -> None:
        self._layers, self._final_norm, self._eps = layers, final_norm, eps
        linears = [
            linear
            for layer in layers
            for linear in (
                layer.attention.qkv, layer.attention.output, layer.mlp.up, layer.mlp.down
            )
        ]  # fmt: skip
        self._widest = max(_plain(each).num_rows for each in linears)
        self._adapted = [each for each in linears if isinstance(each, CompiledAdaptedLinear)]
        self._adapters = self._adapted[0].table if self._adapted else None
        norms = [norm for layer in layers for norm in (layer.input_norm, layer.mlp_norm)]
        self._norm_types = {each.dtype for each in (*norms, final_norm)}
        self._programs: dict[bool, _LayersProgram] = {}  # without chunks, and with
        self._lock = threading.Lock()  # there is one memory between the stages

    def __call__(self, x: Tensor, step: AttentionStep, rows: Tensor | None) -> Tensor | None:
        """See `Ops.join_layers`."""
        has_chunks = isinstance(step, ContextStep)
        if not isinstance(step, GenerationStep | ContextStep) or self._norm_types != {x.dtype}:
            return None
        if not len(x) or (has_chunks and len(x) * self._widest > _MOST_INNER):
            return None
        if any(each.has_others for each in self._adapted):
            return None
        adapters = None if self._adapters is None else self._adapters.tokens
        if adapters is not None and has_chunks:  # its last layer has other rows
            return None
        # A row may be drawn from several times.
        most = len(x) if rows is None else max(len(x), len(rows))
        with self._lock:
            program = self._programs.get(has_chunks)
            if program is None or not program.takes(most, step.backend, adapters):
                num_rows = max(1 << (most - 1).bit_length(), _LEAST_ROWS)
                self._programs.pop(has_chunks, None)  # its memory first
                program = None
                program = self._programs[has_chunks] = _LayersProgram(
                    self._layers, self._final_norm, self._eps, step.backend, x, num_rows,
                    adds_lora=adapters is not None, has_chunks=has_chunks,
                )  # fmt: skip
            return program.run(x, step, rows, adapters)


class _LayersProgram:
    """For up to ``num_rows`` rows like those of x, over one KV pool; with adapters if it
    ``adds_lora``."""

    def __init__(
        self,
        layers: Sequence[LayerParts],
        final_norm: Tensor,
        eps: float,
        backend: CompiledAttention,
        x: Tensor,
        num_rows: int,
        *,
        adds_lora: bool,
        has_chunks: bool,
    ) -> None:
        self._backend, self._num_rows = backend, num_rows
        self._adds_lora, self._has_chunks = adds_lora, has_chunks
        self._memory: dict[tuple[str, int, torch.dtype], Tensor] = {}
        self._dtype = x.dtype
        self._num_products = 0  # of a row
        self._head_norms: list[Tensor | None] = []  # in the type that stages read
        size = x.shape[1]
        self._entered = self._make("entered", size)
        normed, added = self._make("normed", size), self._make("added", size)
        totals = self._make("total", size), self._make("other total", size)
        stages = [rms_norm_stage(self._entered, layers[0].input_norm, eps, normed)]
        residual, self._attending, self._adding = self._entered, list[int](), list[int]()
        self._turning, self._taking = list[int](), list[int]()
        following = [each.input_norm for each in layers[1:]]
        for layer, next_norm in zip(layers, [*following, final_norm], strict=True):
            found = self._attend(layer.attention, normed, stages)
            if has_chunks and layer is layers[-1]:  # only some rows go on
                found = self._take("taken found", found, stages)
                residual = self._take("taken residual", residual, stages)
            self._multiply(layer.attention.output, found, added, stages)
            stages.append(
                add_rms_norm_stage(added, residual, layer.mlp_norm, eps, normed, totals[0])
            )
            inner = self._make("inner", _plain(layer.mlp.up).num_rows)
            gated = self._make("gated", inner.shape[1] // 2)
            self._multiply(layer.mlp.up, normed, inner, stages)
            stages.append(silu_mul_stage(inner, gated))
            self._multiply(layer.mlp.down, gated, added, stages)
            residual = totals[1]
            stages.append(add_rms_norm_stage(added, totals[0], next_norm, eps, normed, residual))
        self._normed = normed
        groups = backend.pool.layout.groups
        self._groups = np.array([groups[each.attention.index] for each in layers])
        self._program = Program(stages)

    def _make(self, name: str, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory of that name for rows of a size, the same one for all layers; of the type of x
        unless another is given."""
        key = name, size, dtype or self._dtype
        if key not in self._memory:
            self._memory[key] = torch.empty(self._num_rows, size, dtype=key[2])
        return self._memory[key]

    def _multiply(self, linear: Any, x: Tensor, out: Tensor, stages: list[Stage]) -> None:
        self._num_products += x.shape[1] * out.shape[1]
        stages += _plain(linear).stages(x, out, self._make)
        if self._adds_lora and isinstance(linear, CompiledAdaptedLinear):
            self._adding.append(len(stages))
            stages.append(linear.stage(x, out))

    def _attend(self, attention: Attention, normed: Tensor, stages: list[Stage]) -> Tensor:
        """The stages up to what heads find."""
        index, backend = attention.index, self._backend
        layer, parameters = backend.layers[index], attention.parameters
        assert layer is not None, "it attends"
        query_norm, key_norm = (
            None if each is None else each.float()
            for each in (parameters.query_norm, parameters.key_norm)
        )
        self._head_norms += (query_norm, key_norm)
        heads = self._make("heads", _plain(attention.qkv).num_rows)
        found = self._make("found", layer.num_heads * layer.head_dim)
        self._multiply(attention.qkv, normed, heads, stages)
        if self._has_chunks:
            self._attend_chunks(
                layer, index, heads, (query_norm, key_norm), parameters.sinks, found, stages
            )
            return found
        self._attending.append(len(stages))
        stages.append(
            attention_stage(
                layer,
                heads.view(self._num_rows, -1, layer.head_dim),
                *backend.pool.layer(index),
                StepNumbers(0, 0, 0, 0),
                query_norm,
                key_norm,
                parameters.sinks,
                found,
            )
        )
        return found

    def _attend_chunks(
        self,
        layer: LayerAttention,
        index: int,
        heads: Tensor,
        norms: tuple[Tensor | None, Tensor | None],
        sinks: Tensor | None,
        found: Tensor,
        stages: list[Stage],
    ) -> None:
        heads = heads.view(self._num_rows, -1, layer.head_dim)
        query = self._make("query", found.shape[1])
        caches = self._backend.pool.layer(index)
        self._turning.append(len(stages))
        stages.append(rope.rope_write_kv_stage(layer, heads, *caches, (0, 0), *norms, query))
        self._attending.append(len(stages))
        query = query.view(self._num_rows, -1, layer.head_dim)
        step = context.ContextNumbers(0, 0, 0, 0, 0)
        stages.append(
            context.paged_attention_context_stage(layer, query, *caches, step, sinks, found)
        )

    def _take(self, name: str, x: Tensor, stages: list[Stage]) -> Tensor:
        taken = self._make(name, x.shape[1])
        self._taking.append(len(stages))
        stages.append(take_rows_stage(x, torch.arange(self._num_rows), taken))
        return taken

    def takes(self, num_rows: int, backend: CompiledAttention, adapters: StepRows | None) -> bool:
        """Whether it has room for so many rows, is over that pool, and adds what adapters do."""
        has_room = backend is self._backend and num_rows <= self._num_rows
        return has_room and (self._adds_lora or adapters is None)

    def run(
        self,
        x: Tensor,
        step: GenerationStep | ContextStep,
        rows: Tensor | None,
        adapters: StepRows | None,
    ) -> Tensor:
        """See `Ops.join_layers`."""
        num_rows = len(x)
        self._entered[:num_rows].copy_(x)
        is_small = num_rows * self._num_products < _FEW_PRODUCTS
        if isinstance(step, ContextStep):
            rows = torch.arange(num_rows) if rows is None else rows.contiguous()
            self._program.run(self._begin_chunks(num_rows, step, rows), is_small=is_small)
            return self._normed[: len(rows)].clone()
        inputs = step.inputs
        by_group = np.array(
            [
                StepNumbers.of(table, inputs.context_lengths, slots)
                for table, slots in zip(inputs.block_tables, inputs.slot_mapping, strict=True)
            ]
        )
        numbers = self._program.numbers
        numbers[self._attending, STEP_COLUMNS] = by_group[self._groups]
        numbers[self._adding, STEP_COLUMN] = 0 if adapters is None else adapters.address
        self._program.run(num_rows, is_small=is_small)
        hidden = self._normed[:num_rows]
        return hidden.clone() if rows is None else hidden[rows]

    def _begin_chunks(
        self, num_rows: int, step: ContextStep, rows: Tensor
    ) -> npt.NDArray[np.int64]:
        """Tell the stages what changes from step to step; how many rows each has."""
        inputs, numbers = step.inputs, self._program.numbers
        turning = [(inputs.positions.data_ptr(), each.data_ptr()) for each in inputs.slot_mapping]
        attending = [
            context.ContextNumbers.of(table, step.starts, inputs.context_lengths)
            for table in inputs.block_tables
        ]
        numbers[self._turning, rope.STEP_COLUMNS] = np.array(turning)[self._groups]
        numbers[self._attending, context.STEP_COLUMNS] = np.array(attending)[self._groups]
        numbers[self._taking, ROWS_COLUMN] = rows.data_ptr()
        counts = np.full(len(numbers), num_rows)
        counts[self._taking[0] :] = len(rows)
        return counts
