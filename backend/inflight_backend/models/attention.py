"""The interface of an attention backend, and the backend in plain torch.

A backend writes keys and values into the KV pool and attends over it. It is made once for a pool;
`AttentionBackend.begin` is called once per step with what the step looks like, and returns an
object that runs one layer after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight_backend.models.config import AttentionConfig, ModelConfig, RopeConfig
from inflight_backend.models.kv_cache import KvPool, RecurrentStates
from inflight_kernels import reference

RopeTables: TypeAlias = dict[tuple[RopeConfig | None, int], Tensor]
"""The table of `blocks.rope.make_cos_sin` on the device, for each kind of turning and head_dim."""


_View: TypeAlias = tuple[int | None, int | None, bool]
"""Window and chunk, and whether a token sees those before it only."""


class HeadParameters(NamedTuple):
    """What a layer's attention has of its own: norms of query and key heads [head_dim], a sink for
    each query head [num_heads] float32, what numbers in a KV cache of 8 bits are multiplied
    by, and ``relative_bias`` (`reference.Weighting`)."""

    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    sinks: Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0
    relative_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HostLengths:
    """Tokens of this step and tokens in all, of each sequence; and of an encoder's answer to it."""

    query: npt.NDArray[np.int64]
    context: npt.NDArray[np.int64]
    answers: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The sequences of a step: generations, whose tokens are the first, one each; then chunks.

    On the device: ``block_tables`` [num_groups, num_sequences, max_blocks] int32 (of each group of
    layers, see `CacheLayout`; entries behind a window are not to be read), ``context_lengths``
    [num_sequences] int32 (cached plus the tokens of this step), ``query_starts`` [num_chunks + 1]
    int32 (chunk ``c`` has the tokens from ``query_starts[c]`` to ``query_starts[c + 1]``),
    ``positions`` [num_tokens] and ``slot_mapping`` [num_groups, num_tokens] int64, ``slots``
    [num_sequences] int64. Padding has context length 0, and -1 in ``slot_mapping``.

    The two lengths also lie on the host, so that no backend has to wait for the device to learn
    them; a step that is being captured has none (``host`` is None), since its lengths differ from
    replay to replay.

    ``cross``: the same sequences over the answers of an encoder, where the model has one:
    ``block_tables``, ``context_lengths`` and ``host`` are those of the answers, all of which every
    token sees.
    """

    num_generations: int
    block_tables: Tensor
    context_lengths: Tensor
    query_starts: Tensor
    positions: Tensor
    slot_mapping: Tensor
    slots: Tensor
    host: HostLengths | None
    cross: AttentionInputs | None = None


class AttentionStep(Protocol):
    """One step; layers are run in order, each once."""

    @property
    def inputs(self) -> AttentionInputs:
        """What the step was begun with."""

    @property
    def states(self) -> RecurrentStates | None:
        """Of the slots, for layers that attend to nothing: they read them and carry them on."""

    @property
    def cross(self) -> AttentionStep | None:
        """The step over the answers of an encoder, where the model has one."""

    def attend(self, layer: int, heads: Tensor, parameters: HeadParameters) -> Tensor:
        """``heads`` [T, H + 2 * KVH, D] are query, key and value (without value where latents are
        both; the query alone where another layer's or an encoder's keys and values are read). Norm
        and turn query and key, store key and value, then attend: -> [T, H, D]."""


class AttentionBackend(Protocol):
    """Runs on the memory of one `KvPool`."""

    reads_past_the_end: bool
    """True if stale slots of a block are read with weight 0, where a NaN would still count."""

    can_be_captured: bool
    """True if steps need no `HostLengths`, so that a graph can hold them: at least those of
    generations alone, and mixed ones if ``can_capture_chunks``."""

    can_capture_chunks: bool

    def begin(self, inputs: AttentionInputs) -> AttentionStep:
        """Prepare what all layers of the step share."""


class TorchAttention:
    """The reference in plain torch: the CPU's path, and an oracle on a GPU."""

    reads_past_the_end = True
    can_be_captured = can_capture_chunks = False

    def __init__(
        self,
        pool: KvPool,
        model: ModelConfig,
        tables: RopeTables,
        dtype: torch.dtype,
        states: RecurrentStates | None = None,
    ) -> None:
        """``dtype``: of the heads."""
        self._pool, self._states, self._dtype = pool, states, dtype
        self._tables = tables
        self._layers = [layer.attention for layer in model.layers]
        self._groups = pool.layout.groups
        self._views: dict[_View, list[int]] = {}  # of the past, and the groups of layers with it
        for group, each in zip(self._groups, self._layers, strict=True):
            if each.delta is not None:
                continue
            groups = self._views.setdefault(_view_of(each), [])
            if group not in groups:
                groups.append(group)
        self._slopes = [make_slopes(each, pool.device) for each in self._layers]

    def begin(self, inputs: AttentionInputs) -> AttentionStep:
        """Plan once for every distinct view of the past."""
        assert inputs.host is not None, "this backend cannot be captured"
        plans = {
            view: reference.plan_attention(
                inputs.block_tables[first],
                inputs.host.query,
                inputs.host.context,
                self._pool.tokens_per_block,
                *view,
                further_tables=[inputs.block_tables[group] for group in others],
            )
            for view, (first, *others) in self._views.items()
        }
        dtype = self._dtype
        angles = {
            kind: reference.rope_angles(table, inputs.positions, dtype)
            for kind, table in self._tables.items()
        }
        return _TorchStep(inputs, self._states, self, plans, angles)

    def attend(
        self, layer: int, heads: Tensor, parameters: HeadParameters, step: _TorchStep
    ) -> Tensor:
        """One layer of a step."""
        config, group = self._layers[layer], self._groups[layer]
        angles = step.angles[config.rope, config.head_dim] if config.rope else None
        keys, values = self._pool.layer(layer)
        scales = parameters.key_scale, parameters.value_scale
        weighting = reference.Weighting(
            config.scale,
            config.softcap,
            parameters.sinks,
            self._slopes[layer],
            *scales,
            parameters.relative_bias,
        )
        view = _view_of(config)
        plan, table = step.plans[view], self._views[view].index(group)
        if config.kv_source is not None or config.is_cross:
            query = _prepare(heads, parameters.query_norm, angles, config)
            return plan.attend(query, keys, values, weighting, table=table)
        sizes = [config.num_heads, config.num_kv_heads]
        turning, value = torch.split(heads, [sum(sizes), heads.shape[1] - sum(sizes)], dim=1)
        if parameters.query_norm is None and angles is not None:  # they lie side by side
            query, key = torch.split(reference.rotate(turning, angles), sizes, dim=1)
        else:
            query, key = torch.split(turning, sizes, dim=1)
            query = _prepare(query, parameters.query_norm, angles, config)
            key = _prepare(key, parameters.key_norm, angles, config)
        if config.latent is not None:
            value = key
        slots = step.inputs.slot_mapping[group]
        reference.write_kv(key, value, keys, values, slots, *scales)
        # A cache of 8 bits is read back, so that a prompt in one piece is one in chunks.
        own = None if keys.itemsize == 1 else (key, value)
        return plan.attend(query, keys, values, weighting, own, table)


def _view_of(config: AttentionConfig) -> _View:
    return config.window, config.chunk, not config.is_cross


def make_slopes(config: AttentionConfig, device: torch.device) -> Tensor | None:
    """ALiBi's slopes of a layer [num_heads] float32."""
    return torch.tensor(config.slopes, device=device) if config.slopes else None


def _prepare(
    x: Tensor, weight: Tensor | None, angles: tuple[Tensor, Tensor] | None, config: AttentionConfig
) -> Tensor:
    """Heads x [T, heads, D], normed and turned in the layer's order."""
    if weight is not None and not config.is_norm_after_rope:
        x = reference.rms_norm(x, weight, config.qk_norm_kind.eps)
    if angles is not None:
        x = reference.rotate(x, angles)
    if weight is not None and config.is_norm_after_rope:
        x = reference.rms_norm(x, weight, config.qk_norm_kind.eps)
    return x


@dataclass(frozen=True, slots=True)
class _TorchStep:
    inputs: AttentionInputs
    states: RecurrentStates | None
    backend: TorchAttention
    plans: dict[_View, reference.AttentionPlan]
    angles: dict[tuple[RopeConfig | None, int], tuple[Tensor, Tensor]]
    cross: AttentionStep | None = None

    def attend(self, layer: int, heads: Tensor, parameters: HeadParameters) -> Tensor:
        return self.backend.attend(layer, heads, parameters, self)
