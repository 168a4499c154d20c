"""All layers of a step as one program: threads are called once a step, not once an op, and Python
has nothing to do in between. Long chunks, beside which that is nothing, run by the ops: a program
keeps its memory.

It has the kernels of the ops and of the attention, in their order, so its numbers are theirs. A
decoder is joined if its layers have nothing but attention (`Attention.is_plain`), a feed-forward
layer whose activation has a kernel, or experts (`Moe.is_plain`), and norms, wherever these stand;
and if all linears are staged.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight_backend.models.attention import AttentionStep
from inflight_backend.models.blocks.attention import Attention
from inflight_backend.models.blocks.mlp import Mlp, Moe, PlainExperts
from inflight_backend.models.blocks.norms import Norm
from inflight_backend.models.compiled.attention import (
    CompiledAttention,
    ContextStep,
    GenerationStep,
)
from inflight_backend.models.compiled.linears import CompiledExperts, StagedLinear
from inflight_backend.models.compiled.lora import CompiledAdaptedLinear
from inflight_backend.models.config import RoutingConfig
from inflight_backend.models.ops import DecoderParts, LayerParts
from inflight_kernels.cpu.attention import paged_attention_context as context
from inflight_kernels.cpu.attention import rope_write_kv as rope
from inflight_kernels.cpu.attention.heads import LayerAttention
from inflight_kernels.cpu.attention.paged_attention_generation import (
    STEP_COLUMNS,
    StepNumbers,
    attention_stage,
)
from inflight_kernels.cpu.elementwise import (
    ROWS_COLUMN,
    NormWeights,
    activate_stage,
    add_norm_stage,
    norm_stage,
    take_rows_stage,
)
from inflight_kernels.cpu.program import Program
from inflight_kernels.cpu.routed.experts import (
    SortedRows,
    add_experts_stage,
    choose_experts_stage,
    sort_rows_stage,
    widen_stage,
)
from inflight_kernels.cpu.routed.lora import STEP_COLUMN, StepRows
from inflight_kernels.cpu.threads import Stage

_LEAST_ROWS = 8
_MOST_INNER = 1 << 23
"""Numbers that the widest linear of a layer gives: a program with more would keep too much memory
for what it saves."""
_FEW_PRODUCTS = 1 << 20
"""Of numbers: one thread is done with them before threads have met at the end of each stage."""


def join_layers(parts: DecoderParts) -> JoinedLayers | None:
    """None if a layer has a part that no kernel does."""
    can_join = all(map(_can_join, parts.layers)) and _has_kernel(parts.final_norm)
    return JoinedLayers(parts) if can_join else None


def _can_join(layer: LayerParts) -> bool:
    attention, mlp, *norms = layer
    if not (isinstance(attention, Attention) and attention.is_plain):
        return False
    dense = _dense(mlp)
    has_kernels = (dense is None or dense.kind is not None) and all(map(_has_kernel, norms))
    has_stages = all(isinstance(_plain(each), StagedLinear) for each in _linears(layer))
    return has_kernels and has_stages and (isinstance(mlp, Mlp) or _has_stages(mlp))


def _dense(mlp: Mlp | Moe) -> Mlp | None:
    """What all tokens pass."""
    return mlp.shared if isinstance(mlp, Moe) else mlp


def _has_stages(moe: Moe) -> bool:
    """Whether there are stages for all that is not a linear of its tokens."""
    are_compiled = all(
        isinstance(each, PlainExperts) and isinstance(each.multiply, CompiledExperts)
        for each in (moe.gate_up, moe.down)
    )
    is_staged = are_compiled and isinstance(moe.router, StagedLinear)
    return is_staged and moe.is_plain and moe.kind is not None


def _compiled(experts: Any) -> CompiledExperts:
    """Linears of experts of which `_has_stages` is true."""
    multiply: CompiledExperts = experts.multiply
    return multiply


def _has_kernel(norm: Norm | None) -> bool:
    return norm is None or norm.weight is not None or norm.config.kind == "layer"


def _linears(layer: LayerParts) -> list[Any]:
    """Those that all tokens pass, but for a router."""
    dense = _dense(layer.mlp)
    own = [] if dense is None else [dense.up, dense.down]
    return [layer.attention.qkv, layer.attention.output, *own]


def _width(layer: LayerParts) -> int:
    """Numbers that the widest linear gives for a token."""
    found = [_plain(each).num_rows for each in _linears(layer)]
    if isinstance(layer.mlp, Moe):
        found.append(layer.mlp.config.top_k * _compiled(layer.mlp.gate_up).num_rows)
    return int(max(found))


def _plain(linear: Any) -> Any:
    """Without what adapters do to it."""
    return linear.linear if isinstance(linear, CompiledAdaptedLinear) else linear


def softmax_options(routing: RoutingConfig) -> dict[str, Any]:
    """Of `choose_experts`, for a plain routing."""
    if routing.score == "softmax_of_chosen":
        return {"is_normalized": True, "norm_eps": 0.0, "scale": 1.0}
    return {
        "is_normalized": routing.is_normalized,
        "norm_eps": routing.norm_eps,
        "scale": routing.scale,
    }


class JoinedLayers:
    """See `Ops.join_layers`."""

    def __init__(self, parts: DecoderParts) -> None:
        self._parts = parts
        linears = [each for layer in parts.layers for each in _linears(layer)]
        self._widest = max(map(_width, parts.layers))
        self._types = {
            dtype
            for dtype in (torch.float32, torch.bfloat16)
            if all(_plain(each).reads(dtype) for each in linears)
        }
        self._adapted = [each for each in linears if isinstance(each, CompiledAdaptedLinear)]
        self._adapters = self._adapted[0].table if self._adapted else None
        self._programs: dict[bool, _LayersProgram] = {}  # without chunks, and with
        self._memory = _Memory(0, torch.float32)  # between the stages of both
        self._norms: dict[int, NormWeights] = {}  # by the identity of their norms, for both
        self._lock = threading.Lock()

    def __call__(self, x: Tensor, step: AttentionStep, rows: Tensor | None) -> Tensor | None:
        """See `Ops.join_layers`."""
        has_chunks = isinstance(step, ContextStep)
        if not isinstance(step, GenerationStep | ContextStep) or x.dtype not in self._types:
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
                if most > self._memory.num_rows:
                    program = None  # their memory first
                    self._programs.clear()
                    num_rows = max(1 << (most - 1).bit_length(), _LEAST_ROWS)
                    self._memory = _Memory(num_rows, x.dtype)
                program = self._programs[has_chunks] = _LayersProgram(
                    self._parts, step.backend, x, self._memory, self._norms,
                    adds_lora=adapters is not None, has_chunks=has_chunks,
                )  # fmt: skip
            return program.run(x, step, rows, adapters)


class _Memory:
    """For ``num_rows`` rows: the same of a name, a size and a type, for all layers and programs,
    which do not run side by side."""

    def __init__(self, num_rows: int, dtype: torch.dtype) -> None:
        self.num_rows, self._dtype = num_rows, dtype
        self._held: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def __call__(self, name: str, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Of ``dtype``, or else of the type of what comes in."""
        key = name, size, dtype or self._dtype
        if key not in self._held:
            self._held[key] = torch.empty(self.num_rows, size, dtype=key[2])
        return self._held[key]


class _Stream:
    """The hidden states that branches read and add to, and the stages that do it."""

    def __init__(
        self,
        size: int,
        scale: float,
        make: _Memory,
        stages: list[Stage],
        norms: dict[int, NormWeights],
    ) -> None:
        """``scale``: see `DecoderParts`; ``norms``: what stages have addresses of."""
        self._scale, self._stages, self._norms = scale, stages, norms
        self.x, self._other = make("stream", size), make("other stream", size)
        self._normed = make("normed", size)

    def read(self, norm: Norm | None) -> Tensor:
        """What a branch behind this norm reads."""
        if norm is None:
            return self.x
        self._stages.append(norm_stage(self.x, self._weights_of(norm), self._normed))
        return self._normed

    def add(
        self, found: Tensor, own_norm: Norm | None, norm: Norm | None, beside: Tensor | None = None
    ) -> Tensor:
        """Add what a branch has found, and another beside it, normed; what one behind ``norm``
        reads."""
        own, following = (
            None if each is None else self._weights_of(each) for each in (own_norm, norm)
        )
        self._stages.append(
            add_norm_stage(
                found, self.x, following, self._normed, self._other,
                beside=beside, own_norm=own, scale=self._scale,
            )
        )  # fmt: skip
        self.x, self._other = self._other, self.x
        return self.x if norm is None else self._normed

    def take(self, rows: Tensor) -> int:
        """Go on with rows of it, whose numbers a step tells; the stage that takes them."""
        self._stages.append(take_rows_stage(self.x, rows, self._other))
        self.x, self._other = self._other, self.x
        return len(self._stages) - 1

    def _weights_of(self, norm: Norm) -> NormWeights:
        config, is_layer = norm.config, norm.config.kind == "layer"
        if id(norm) not in self._norms:
            self._norms[id(norm)] = NormWeights.of(
                norm.weight, norm.bias, config.eps, is_layer=is_layer, size=self.x.shape[1]
            )
        return self._norms[id(norm)]


class _LayersProgram:
    """For rows like those of x, up to as many as ``memory`` has, over one KV pool; with adapters if
    it ``adds_lora``."""

    def __init__(
        self,
        parts: DecoderParts,
        backend: CompiledAttention,
        x: Tensor,
        memory: _Memory,
        norms: dict[int, NormWeights],
        *,
        adds_lora: bool,
        has_chunks: bool,
    ) -> None:
        self._backend, self._num_rows, self._size = backend, memory.num_rows, x.shape[1]
        self._adds_lora, self._has_chunks = adds_lora, has_chunks
        self._make, self._stages = memory, list[Stage]()
        self._num_products = 0  # of a row
        self._kept = list[Any]()  # what stages have addresses of, beside weights of linears
        self._attending, self._adding = list[int](), list[int]()
        self._turning, self._taking = list[int](), list[int]()
        self._multiples = dict[int, int]()  # stages that have several rows for a token
        layers = parts.layers
        self._stream = _Stream(self._size, parts.scale, self._make, self._stages, norms)
        self._entered = self._stream.x
        read = self._stream.read(layers[0].input_norm)
        following = [each.input_norm for each in layers[1:]]
        run = self._run_side_by_side if parts.is_parallel else self._run_in_turn
        for layer, next_norm in zip(layers, [*following, parts.final_norm], strict=True):
            read = run(layer, read, next_norm, is_last=layer is layers[-1])
        self._answer = read
        groups = backend.pool.layout.groups
        self._groups = np.array([groups[each.attention.index] for each in layers])
        self._program = Program(self._stages)
        self._rows_of_token = np.ones(len(self._stages), np.int64)
        self._rows_of_token[list(self._multiples)] = list(self._multiples.values())
        self._stages.clear()  # their numbers are in the program

    def _run_in_turn(
        self, layer: LayerParts, x: Tensor, next_norm: Norm | None, *, is_last: bool
    ) -> Tensor:
        """The stages of a layer that reads x; what the norm behind it makes of it."""
        found = self._attend(layer.attention, x)
        if is_last:
            (found,) = self._go_on(found)
        attended = self._multiply(layer.attention.output, found, "branch")
        x = self._stream.add(attended, layer.attention_output_norm, layer.mlp_norm)
        return self._stream.add(self._feed(layer.mlp, x), layer.mlp_output_norm, next_norm)

    def _run_side_by_side(
        self, layer: LayerParts, x: Tensor, next_norm: Norm | None, *, is_last: bool
    ) -> Tensor:
        """The same of a layer whose branches both read what comes in."""
        found = self._attend(layer.attention, x)
        if is_last:
            found, x = self._go_on(found, x)
        attended = self._multiply(layer.attention.output, found, "attended")
        if layer.mlp_norm is not None:
            x = self._stream.read(layer.mlp_norm)
        return self._stream.add(attended, None, next_norm, beside=self._feed(layer.mlp, x))

    def _go_on(self, *given: Tensor) -> list[Tensor]:
        """These, and the stream from here on, with those rows only that leave the last layer."""
        if not self._has_chunks:
            return list(given)
        self._taking.append(self._stream.take(torch.arange(self._num_rows)))
        names = "query", "taken"  # queries are not read any more
        return [self._take(name, each) for name, each in zip(names, given, strict=False)]

    def _feed(self, mlp: Mlp | Moe, x: Tensor) -> Tensor:
        if isinstance(mlp, Moe):
            return self._feed_experts(mlp, x)
        assert mlp.kind is not None
        inner = self._multiply(mlp.up, x, "inner")
        active = self._make("active", inner.shape[1] // (1 + mlp.is_gated))
        self._stages.append(activate_stage(inner, mlp.kind, active))
        return self._multiply(mlp.down, active, "branch")

    def _feed_experts(self, moe: Moe, x: Tensor) -> Tensor:
        assert moe.kind is not None
        weights, rows = self._route(moe, x)
        top_k, gate_up, down = moe.config.top_k, _compiled(moe.gate_up), _compiled(moe.down)

        def make(name: str, size: int) -> Tensor:
            """Memory for a row of each token and expert."""
            return self._make(name, top_k * size).view(-1, size)

        given, inner = (
            make("given", self._size),
            make("expert inner", gate_up.num_rows),
        )
        active, found = make("expert active", inner.shape[1] // 2), make("expert found", self._size)
        stages = (
            take_rows_stage(x, rows.tokens, given),
            gate_up.stage(given, rows, inner),
            activate_stage(inner, moe.kind, active),
            down.stage(active, rows, found),
        )
        self._multiples.update(
            dict.fromkeys(range(len(self._stages), len(self._stages) + 4), top_k)
        )
        self._stages += stages
        self._num_products += top_k * self._size * (inner.shape[1] + active.shape[1])
        answer = self._make("answer", self._size)
        self._stages.append(add_experts_stage(found, weights, rows.places, answer))
        if moe.shared is None:
            return answer
        both, shared = self._make("both", self._size), self._feed(moe.shared, x)
        self._stages.append(add_norm_stage(answer, shared, None, answer, both))
        return both

    def _route(self, moe: Moe, x: Tensor) -> tuple[Tensor, SortedRows]:
        """The stages that choose experts; the weights of each token's, and its rows."""
        config = moe.config
        if x.dtype != torch.float32:
            wide = self._make("wide", self._size, torch.float32)
            self._stages.append(widen_stage(x, wide))
            x = wide
        router: Any = moe.router
        logits = self._make("scores", router.num_rows, torch.float32)
        self._stages += router.stages(x, logits, self._make)
        experts = self._make("experts", config.top_k, torch.int32)
        weights = self._make("weights", config.top_k, torch.float32)
        options = softmax_options(config.routing)
        self._stages.append(
            choose_experts_stage(logits, experts, weights, config.num_experts, **options)
        )
        rows = SortedRows.empty(self._num_rows, config.top_k, config.num_experts)
        self._kept.append(rows)
        self._stages.append(sort_rows_stage(experts, rows))
        return weights, rows

    def _multiply(self, linear: Any, x: Tensor, name: str) -> Tensor:
        """What a linear makes of x, in memory of that name."""
        plain = _plain(linear)
        out = self._make(name, plain.num_rows)
        self._num_products += x.shape[1] * out.shape[1]
        self._stages += plain.stages(x, out, self._make)
        if self._adds_lora and isinstance(linear, CompiledAdaptedLinear):
            self._adding.append(len(self._stages))
            self._stages.append(linear.stage(x, out))
        return out

    def _attend(self, attention: Attention, x: Tensor) -> Tensor:
        """The stages up to what heads find."""
        index, backend = attention.index, self._backend
        layer, parameters = backend.layers[index], attention.parameters
        assert layer is not None, "it attends"
        query_norm, key_norm = (
            None if each is None else each.float()
            for each in (parameters.query_norm, parameters.key_norm)
        )
        self._kept += (query_norm, key_norm)
        heads = self._multiply(attention.qkv, x, "heads")
        if attention.full_norms is not None:
            self._norm_heads(heads, *attention.full_norms)
        found = self._make("found", layer.num_heads * layer.head_dim)
        if self._has_chunks:
            self._attend_chunks(
                layer, index, heads, (query_norm, key_norm), parameters.sinks, found
            )
            return found
        self._attending.append(len(self._stages))
        self._stages.append(
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

    def _norm_heads(self, heads: Tensor, weights: tuple[Tensor, Tensor], eps: float) -> None:
        """Over all queries, and over all keys, where they lie."""
        norms = [NormWeights.of(each, None, eps) for each in weights]
        self._kept += norms
        sizes = [len(each) for each in weights]
        parts = heads[:, : sum(sizes)].split_with_sizes(sizes, dim=1)
        self._stages += (
            norm_stage(part, norm, part) for part, norm in zip(parts, norms, strict=True)
        )

    def _attend_chunks(
        self,
        layer: LayerAttention,
        index: int,
        heads: Tensor,
        norms: tuple[Tensor | None, Tensor | None],
        sinks: Tensor | None,
        found: Tensor,
    ) -> None:
        heads, stages = heads.view(self._num_rows, -1, layer.head_dim), self._stages
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

    def _take(self, name: str, x: Tensor) -> Tensor:
        taken = self._make(name, x.shape[1])
        self._taking.append(len(self._stages))
        self._stages.append(take_rows_stage(x, torch.arange(self._num_rows), taken))
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
            return self._answer[: len(rows)].clone()
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
        self._program.run(num_rows * self._rows_of_token, is_small=is_small)
        hidden = self._answer[:num_rows]
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
        return counts * self._rows_of_token
