"""Which parameters a decoder has, and from which tensors of the checkpoint each is assembled.

Fusion is data: a parameter lists its sources, which are concatenated; a source may be rearranged on
its way (`Source.convert`). `check_weights` compares the list with the headers of a checkpoint;
loader and ``inflight plan`` both call it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import INDEX, TensorHeader, list_names
from inflight_backend.models.config import (
    NORMS_OF_BLOCK,
    AttentionConfig,
    DeltaConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    WeightNames,
)
from inflight_backend.models.quantization.schemes import Scheme
from inflight_backend.models.quantization.stored import (
    PASSED_OVER,
    Stored,
    stored_tensors,
)

if TYPE_CHECKING:  # ``inflight plan`` reads this page without torch
    from torch import Tensor

_WEIGHT = ".weight"
_ORDER_BYTES = 4
_Shape = tuple[int, ...]
_Convert = Callable[["Tensor"], "Tensor"]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, the shape it must have there, and what becomes of it.

    ``convert`` makes of it a tensor of shape ``result`` (None: of the same shape). ``part``: only
    these rows of it are read, from the first to the one behind the last. ``scheme``: of a quantised
    linear, which has other tensors in its place.
    """

    name: str
    shape: _Shape
    convert: _Convert | None = None
    result: _Shape | None = None
    part: tuple[int, int] | None = None
    scheme: Scheme | None = None

    @property
    def module(self) -> str:
        """The linear of the checkpoint that it is the weight of."""
        return self.name.removesuffix(_WEIGHT)

    @property
    def tensors(self) -> dict[str, Stored]:
        """What the checkpoint has for it, by name."""
        if self.scheme is None:
            return {self.name: Stored((self.shape,))}
        rows, columns = self.shape
        stored = stored_tensors(self.scheme, rows, columns)
        return {f"{self.module}.{end}": each for end, each in stored.items()}

    @property
    def rows(self) -> int:
        """Of the parameter that it fills."""
        return (self.result or self.shape)[0]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter of the decoder: its sources, concatenated along the first dimension.

    ``is_wide``: kept in float32 whatever the model's dtype is. ``is_of_experts``: the rows are
    those of linears of experts, one after the other.
    """

    name: str
    sources: tuple[Source, ...]
    is_linear: bool = False
    is_wide: bool = False
    is_of_experts: bool = False

    @property
    def shape(self) -> _Shape:
        """Shape of the whole parameter."""
        first = self.sources[0].result or self.sources[0].shape
        return (sum(source.rows for source in self.sources), *first[1:])

    @property
    def is_packed(self) -> bool:
        """True if it stays quantised in memory: where no more is needed than a linear's product."""
        is_linear = self.is_linear or self.is_of_experts
        return is_linear and any(source.scheme is not None for source in self.sources)


def decoder_parameters(config: ModelConfig) -> list[ParameterSpec]:
    """All parameters of the decoder, in the order in which a step uses them."""
    names, hidden = config.names, config.hidden_size
    prefix, size = names.prefix, config.embedding_size or hidden
    specs = [_single("embedding", f"{prefix}{names.embedding}.weight", (config.vocab_size, size))]
    if config.position_offset is not None and not config.has_sinusoids:
        rows = config.max_position_embeddings + config.position_offset
        specs.append(_single("positions", f"{prefix}{names.positions}.weight", (rows, hidden)))
    if config.has_embedding_norm:
        specs += _norm(config, "embedding_norm", prefix + names.embedding_norm)
    if config.embedding_size is not None:
        specs.append(_single("project_in.weight", f"{prefix}project_in.weight", (hidden, size)))
    if config.layer_input_size:
        specs += _layer_inputs(config)
    for index, layer in enumerate(config.layers):
        specs += _layer_parameters(config, index, layer)
    if config.has_final_norm:
        specs += _norm(config, "final_norm", prefix + names.final_norm)
    if config.embedding_size is not None:
        specs.append(_single("project_out.weight", f"{prefix}project_out.weight", (size, hidden)))
    if not config.is_tied:
        shape = (config.vocab_size, hidden)
        specs.append(_single("head.weight", f"{names.head}.weight", shape))
    if config.has_head_bias:
        specs.append(_single("head.bias", f"{names.head}.bias", (config.vocab_size,)))
    return specs if config.quantization is None else [_quantised(config, spec) for spec in specs]


def _quantised(config: ModelConfig, spec: ParameterSpec) -> ParameterSpec:
    """``spec`` with the schemes of those sources that the checkpoint has quantised."""
    assert config.quantization is not None
    modules = config.quantization.modules
    sources = tuple(
        replace(source, scheme=modules[source.module])
        if source.name.endswith(_WEIGHT) and source.module in modules
        else source
        for source in spec.sources
    )
    return replace(spec, sources=sources)


def packed_bytes(spec: ParameterSpec, dtype_bytes: int) -> int:
    """Bytes in memory of a parameter with ``is_packed``, in a model whose numbers take
    ``dtype_bytes``. Neighbours with one input have one order of columns."""
    columns = spec.shape[1]
    orders = groupby(
        source.module.rpartition(".")[0]
        if source.scheme is not None and source.scheme.has_order
        else None
        for source in spec.sources
    )
    num_bytes = sum(place is not None for place, _ in orders) * columns * _ORDER_BYTES
    for source in spec.sources:
        if source.scheme is None:
            num_bytes += source.rows * columns * dtype_bytes
        else:
            num_bytes += source.scheme.num_bytes(source.rows, columns, dtype_bytes)
    return num_bytes


def duplicate_names(config: ModelConfig) -> dict[str, str]:
    """Tensor that may repeat another one -> that other: an output head tied to the embedding."""
    names = config.names
    embedding = f"{names.prefix}{names.embedding}.weight"
    return {f"{names.head}.weight": embedding} if config.is_tied else {}


def _layer_parameters(config: ModelConfig, index: int, layer: LayerConfig) -> list[ParameterSpec]:
    names, prefix, hidden = config.names, f"layers.{index}.", config.hidden_size
    folder = f"{names.prefix}{names.layers}{index}."
    specs = []
    for norm in NORMS_OF_BLOCK[config.block]:
        specs += _norm(config, prefix + norm, folder + getattr(names, norm))
    if layer.attention.delta is not None:
        specs += _delta_parameters(
            config, layer.attention.delta, f"{prefix}delta.", f"{folder}linear_attn."
        )
    else:
        specs += _attention_parameters(config, layer.attention, prefix, folder + names.attention)
    if config.layer_input_size:
        size = config.layer_input_size
        place = f"{prefix}layer_input."
        specs += [
            *_linear(config, f"{place}gate", f"{folder}per_layer_input_gate", size, hidden, False),
            *_linear(
                config, f"{place}projection", f"{folder}per_layer_projection", hidden, size, False
            ),
            *_norm(config, f"{place}norm", f"{folder}post_per_layer_input_norm"),
        ]
    if layer.experts_beside is not None:
        place, norm = f"{prefix}beside.", "feedforward_layernorm"
        beside = replace(config, names=replace(names, **NAMES_BESIDE))
        specs += _moe_parameters(beside, layer.experts_beside, place, folder)
        specs += _norm(config, f"{place}input_norm", f"{folder}pre_{norm}_2")
        specs += _norm(config, f"{place}output_norm", f"{folder}post_{norm}_2")
        specs += _norm(config, f"{place}dense_norm", f"{folder}post_{norm}_1")
    if layer.has_scalar:
        specs.append(_single(f"{prefix}scalar", f"{folder}layer_scalar", (1,)))
    if isinstance(layer.mlp, MlpConfig):
        return specs + _mlp_parameters(config, layer.mlp, prefix, folder + names.mlp)
    return specs + _moe_parameters(config, layer.mlp, prefix, folder + names.mlp)


NAMES_BESIDE: dict[str, Any] = {
    "router": "router.proj",
    "expert_layout": "stacked",
    "expert_gate": "experts.gate_up_proj",
    "expert_down": "experts.down_proj",
}
"""Of experts beside a dense layer (Gemma 4)."""


def _layer_inputs(config: ModelConfig) -> list[ParameterSpec]:
    prefix, size = config.names.prefix, config.layer_input_size
    rows = config.num_layers * size
    source = f"{prefix}per_layer_projection_norm"
    return [
        _single(
            "layer_inputs.embedding",
            f"{prefix}embed_tokens_per_layer.weight",
            (config.vocab_size, rows),
        ),
        *_linear(
            config,
            "layer_inputs.projection",
            f"{prefix}per_layer_model_projection",
            rows,
            config.hidden_size,
            False,
        ),
        *_norm(config, "layer_inputs.norm", source, size),
    ]


def _attention_parameters(
    config: ModelConfig, attention: AttentionConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    names, hidden = config.names, config.hidden_size
    if attention.latent is not None:
        return _latent_parameters(config, attention, prefix, folder)
    order, query = attention.rotary_order, attention.query_size
    parts, specs = _qkv_parts(names, attention, order), []
    for kind in ("weight", "bias") if attention.has_qkv_bias else ("weight",):
        sources = [
            _linear_source(config, f"{folder}{name}.{kind}", size, hidden, rows)
            for name, size, rows in parts
        ]
        specs.append(ParameterSpec(f"{prefix}qkv.{kind}", tuple(sources), kind == "weight"))
    if attention.qk_norm not in (None, "plain"):
        for role, name, heads in (
            ("query_norm", names.query_norm, attention.num_heads),
            ("key_norm", names.key_norm, attention.num_kv_heads),
        ):
            if role == "key_norm" and attention.kv_source is not None:
                continue
            specs.append(_head_norm(attention, prefix + role, folder + name, heads, order))
    specs += _linear(config, f"{prefix}output", folder + names.output, hidden, query,
                     attention.has_output_bias)  # fmt: skip
    if attention.has_sinks:
        sinks = Source(folder + names.sinks, (attention.num_heads,))
        specs.append(ParameterSpec(f"{prefix}sinks", (sinks,), is_wide=True))
    return specs


_Part = tuple[str, int, list[int] | None]
"""A linear of the checkpoint, its outputs, and which of them are taken (None: all)."""


def _qkv_parts(
    names: WeightNames, attention: AttentionConfig, order: Sequence[int] | None
) -> list[_Part]:
    """What queries, keys, values and gates come from, in this order."""
    query, kv = attention.query_size, attention.kv_size
    if names.qkv is not None:
        return [(names.qkv, query + 2 * kv, _fused_rows(attention, names.qkv_layout, order))]
    parts: list[_Part] = [(names.query, query, _head_rows(attention.num_heads, order))]
    gate: _Part | None = None
    if attention.has_gate and names.attention_gate is not None:
        gate = (names.attention_gate, query, None)
    elif attention.has_gate:  # the second half of each query head
        turned, gates = _query_rows(attention, order)
        parts, gate = [(names.query, 2 * query, turned)], (names.query, 2 * query, gates)
    if attention.kv_source is None:
        parts.append((names.key, kv, _head_rows(attention.num_kv_heads, order)))
        parts.append((names.key if attention.is_value_key else names.value, kv, None))
    return parts if gate is None else [*parts, gate]


def _latent_parameters(
    config: ModelConfig, attention: AttentionConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    names, hidden, latent = config.names, config.hidden_size, attention.latent
    assert latent is not None
    heads, has_bias = attention.num_heads, attention.has_qkv_bias
    query = heads * (latent.nope + latent.rope)
    down, norm, up = (folder + each for each in names.latent_query)
    if latent.query_rank is None:
        specs = _linear(config, f"{prefix}query", folder + names.query, query, hidden, False)
    else:
        rank = latent.query_rank
        specs = [
            *_linear(config, f"{prefix}query_a", down, rank, hidden, has_bias),
            _single(f"{prefix}query_a_norm", f"{norm}.weight", (rank,)),
            *_linear(config, f"{prefix}query", up, query, rank, False),
        ]
    down, norm, up = (folder + each for each in names.latent_key_value)
    rank = latent.kv_rank
    expanded = heads * (latent.nope + latent.value)
    return [
        *specs,
        *_linear(config, f"{prefix}key_value", down, rank + latent.rope, hidden, has_bias),
        _single(f"{prefix}key_value_norm", f"{norm}.weight", (rank,)),
        _single(f"{prefix}expand", f"{up}.weight", (expanded, rank)),
        *_linear(config, f"{prefix}output", folder + names.output, hidden, heads * latent.value,
                 attention.has_output_bias),
    ]  # fmt: skip


def _delta_parameters(
    config: ModelConfig, delta: DeltaConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    hidden, heads = config.hidden_size, delta.num_value_heads
    inputs: tuple[Source, ...]
    gates: tuple[Source, ...]
    if delta.is_joined:
        sizes = (delta.num_channels + delta.value_size, 2 * heads)
        inputs, gates = (
            (_linear_source(config, f"{folder}in_proj_{name}.weight", size, hidden, rows),)
            for name, size, rows in zip(("qkvz", "ba"), sizes, _joined_rows(delta), strict=True)
        )
    else:
        inputs, gates = (
            tuple(Source(f"{folder}in_proj_{name}.weight", (size, hidden)) for name, size in parts)
            for parts in (
                (("qkv", delta.num_channels), ("z", delta.value_size)),
                (("b", heads), ("a", heads)),
            )
        )
    conv = (delta.num_channels, 1, delta.conv_size)
    channels = Source(f"{folder}conv1d.weight", conv, _flat, (conv[0], conv[2]))
    wide = {"rate": "A_log", "step_bias": "dt_bias"}
    return [
        ParameterSpec(f"{prefix}inputs.weight", inputs, is_linear=True),
        ParameterSpec(f"{prefix}gates.weight", gates, is_linear=True),
        ParameterSpec(f"{prefix}conv", (channels,)),
        *(
            ParameterSpec(prefix + name, (Source(folder + source, (heads,)),), is_wide=True)
            for name, source in wide.items()
        ),
        _single(f"{prefix}norm", f"{folder}norm.weight", (delta.value_dim,)),
        *_linear(config, f"{prefix}output", f"{folder}out_proj", hidden, delta.value_size, False),
    ]


def _joined_rows(delta: DeltaConfig) -> tuple[list[int], list[int]]:
    """Rows of [queries; keys; values; gates] and of [strengths; steps], where the checkpoint has
    those of each key head side by side."""
    share = delta.num_value_heads // delta.num_key_heads
    rows = []
    for sizes in ([delta.key_dim] * 2 + [share * delta.value_dim] * 2, [share] * 2):
        starts = [sum(sizes[:part]) for part in range(len(sizes))]
        rows.append(
            [
                head * sum(sizes) + start + each
                for start, size in zip(starts, sizes, strict=True)
                for head in range(delta.num_key_heads)
                for each in range(size)
            ]
        )
    return rows[0], rows[1]


def _head_rows(num_heads: int, order: Sequence[int] | None) -> list[int] | None:
    """Rows of a projection with the dimensions of each head in ``order``."""
    if order is None:
        return None
    return [head * len(order) + each for head in range(num_heads) for each in order]


def _query_rows(
    attention: AttentionConfig, order: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Rows of a query projection with gates in it: those of queries and those of their gates."""
    size = attention.head_dim
    order = order or range(size)
    heads = range(attention.num_heads)
    queries = [head * 2 * size + each for head in heads for each in order]
    return queries, [head * 2 * size + size + each for head in heads for each in range(size)]


def _fused_rows(
    attention: AttentionConfig, layout: str, order: Sequence[int] | None
) -> list[int] | None:
    """For each row of [queries; keys; values] the row of the fused tensor."""
    size, heads, groups = attention.head_dim, attention.num_heads, attention.num_kv_heads
    if layout == "rows" and order is None:
        return None
    order = order or range(size)
    plain = range(size)
    if layout == "rows":
        firsts = [head * size for head in range(heads + 2 * groups)]
    elif layout == "per_head":  # q, k, v of each head
        firsts = [(3 * head + part) * size for part in range(3) for head in range(heads)]
    elif layout == "per_group":  # the queries of a group, its key, its value
        share = heads // groups
        places = [
            *((head // share) * (share + 2) + head % share for head in range(heads)),
            *(group * (share + 2) + share for group in range(groups)),
            *(group * (share + 2) + share + 1 for group in range(groups)),
        ]
        firsts = [place * size for place in places]
    else:  # codegen: four blocks of [q, v, k]
        share = heads // 4
        firsts = [
            ((head // share) * 3 * share + part * share + head % share) * size
            for part in (0, 2, 1)
            for head in range(heads)
        ]
    turned = heads + groups
    return [
        first + each
        for number, first in enumerate(firsts)
        for each in (order if number < turned else plain)
    ]


def _head_norm(
    attention: AttentionConfig, name: str, source: str, heads: int, order: Sequence[int] | None
) -> ParameterSpec:
    size = attention.head_dim
    if attention.qk_norm == "head":
        shape: _Shape = (size,)
        rows = list(order) if order else None
    elif attention.qk_norm == "full":
        shape, rows = (heads * size,), _head_rows(heads, order)
    else:
        shape, rows = (heads, size), None
    kind = attention.qk_norm_kind
    if attention.qk_norm == "biased":
        sources = tuple(
            Source(f"{source}.{part}", (size,), _columns(order, True), (1, size))
            for part in ("weight", "bias")
        )
        return ParameterSpec(name, sources)
    if attention.qk_norm == "per_head_list":
        sources = tuple(Source(f"{source}.norms.{head}.weight", (size,), _columns(order, True),
                               (1, size)) for head in range(heads))  # fmt: skip
        return ParameterSpec(name, sources)
    convert: _Convert | None = _columns(order) if attention.qk_norm == "per_head" else _pick(rows)
    if kind.offset:
        convert = partial(_add, amount=kind.offset, then=convert)
    only = Source(f"{source}.weight", shape, convert)
    return ParameterSpec(name, (only,), is_wide=kind.offset != 0)


def _mlp_parameters(
    config: ModelConfig, mlp: MlpConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    names, hidden, size = config.names, config.hidden_size, mlp.size
    if not mlp.is_gated:
        up = _linear(config, f"{prefix}up", folder + names.up, size, hidden, mlp.has_bias)
    else:
        fused = names.gate_up
        parts = {fused: 2 * size} if fused else {names.gate: size, names.up: size}
        up = _joined(config, f"{prefix}gate_up", folder, parts, hidden, mlp.has_bias)
    down = _linear(config, f"{prefix}down", folder + names.down, hidden, size, mlp.has_bias)
    if mlp.activation == "xielu":
        sources = tuple(
            Source(f"{folder}act_fn.{name}", shape, _one_row, (1,))
            for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))
        )
        up = [*up, ParameterSpec(f"{prefix}activation", sources, is_wide=True)]
    return up + down


def _moe_parameters(
    config: ModelConfig, moe: MoeConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    names, hidden, experts = config.names, config.hidden_size, moe.num_experts
    specs = [_single(f"{prefix}router.weight", f"{folder}{names.router}.weight", (experts, hidden))]
    if moe.has_router_bias:
        specs.append(_single(f"{prefix}router.bias", f"{folder}{names.router}.bias", (experts,)))
    if moe.routing.has_correction:
        shape = (1, experts) if names.is_correction_row else (experts,)
        source = Source(folder + names.correction, shape)
        specs.append(ParameterSpec(f"{prefix}router.correction", (source,), is_wide=True))
    if moe.routing.has_input_norm:
        scaled = partial(_multiplied, factor=hidden**-0.5)
        source = Source(f"{folder}router.scale", (hidden,), scaled)
        specs.append(ParameterSpec(f"{prefix}router.scale", (source,), is_wide=True))
    if moe.routing.has_expert_scales:
        source = Source(f"{folder}router.per_expert_scale", (experts,))
        specs.append(ParameterSpec(f"{prefix}router.expert_scales", (source,), is_wide=True))
    specs += _EXPERTS[names.expert_layout](config, moe, f"{prefix}experts.", folder)
    if moe.shared is not None:
        shared = replace(config.names, gate_up=names.shared_gate_up, down=names.shared_down)
        specs += _mlp_parameters(
            replace(config, names=shared), moe.shared, f"{prefix}shared.", folder + names.shared
        )
    if moe.has_shared_gate:
        shape = (1, hidden)
        specs.append(
            _single(f"{prefix}shared_gate.weight", f"{folder}{names.shared_gate}.weight", shape)
        )
    return specs


def _experts_each(
    config: ModelConfig, moe: MoeConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    """A tensor for each expert and part."""
    names, hidden, size = config.names, config.hidden_size, moe.size
    gate_up, down = [], []
    for expert in range(moe.num_experts):
        place = f"{folder}{names.experts}{expert}."
        gate_up += [
            Source(f"{place}{part}.weight", (size, hidden))
            for part in (names.expert_gate, names.expert_up)
        ]
        down.append(Source(f"{place}{names.expert_down}.weight", (hidden, size)))
    return [
        ParameterSpec(f"{prefix}gate_up.weight", tuple(gate_up), is_of_experts=True),
        ParameterSpec(f"{prefix}down.weight", tuple(down), is_of_experts=True),
    ]


def _experts_stacked(
    config: ModelConfig, moe: MoeConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    """[E, 2 * size, hidden] and [E, hidden, size]."""
    names, hidden, size, count = config.names, config.hidden_size, moe.size, moe.num_experts
    shapes = ((names.expert_gate, 2 * size, hidden), (names.expert_down, hidden, size))
    return [
        ParameterSpec(
            prefix + part,
            (Source(folder + name, (count, rows, columns), _flat, (count * rows, columns)),),
        )
        for part, (name, rows, columns) in zip(
            ("gate_up.weight", "down.weight"), shapes, strict=True
        )
    ]


def _experts_transposed(
    config: ModelConfig, moe: MoeConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    """[E, hidden, 2 * size] and [E, size, hidden]; "interleaved": gate and up take turns."""
    names, hidden, size, count = config.names, config.hidden_size, moe.size, moe.num_experts
    is_interleaved = names.expert_layout == "interleaved"
    flat_rows = partial(_transposed_flat, is_interleaved=is_interleaved)
    specs = [
        ParameterSpec(
            f"{prefix}gate_up.weight",
            (Source(folder + names.expert_gate, (count, hidden, 2 * size), flat_rows,
                    (count * 2 * size, hidden)),),
        ),
        ParameterSpec(
            f"{prefix}down.weight",
            (Source(folder + names.expert_down, (count, size, hidden), _transposed_flat,
                    (count * hidden, size)),),
        ),
    ]  # fmt: skip
    if moe.has_bias:
        gates_first = partial(_gates_first, is_interleaved=is_interleaved)
        specs += [
            ParameterSpec(
                f"{prefix}gate_up.bias",
                (Source(f"{folder}{names.expert_gate}_bias", (count, 2 * size), gates_first),),
            ),
            ParameterSpec(
                f"{prefix}down.bias",
                (Source(f"{folder}{names.expert_down}_bias", (count, hidden)),),
            ),
        ]
    return specs


def _experts_joined(
    config: ModelConfig, moe: MoeConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    """DBRX: gate and up [E * size, hidden], down [E * size, hidden] used untransposed."""
    names, hidden, size, count = config.names, config.hidden_size, moe.size, moe.num_experts
    shape = (count * size, hidden)
    # Gate and up of an expert must lie together: the loader fills rows in order, so each expert's
    # rows of both tensors are sources of their own.
    gate_up = tuple(
        Source(folder + name, shape, None, (size, hidden), (expert * size, (expert + 1) * size))
        for expert in range(count)
        for name in (names.expert_gate, names.expert_up)
    )
    down = Source(
        folder + names.expert_down,
        shape,
        partial(_down_of_dbrx, count=count),
        (count * hidden, size),
    )
    return [
        ParameterSpec(f"{prefix}gate_up.weight", gate_up),
        ParameterSpec(f"{prefix}down.weight", (down,)),
    ]


_EXPERTS: dict[str, Callable[[ModelConfig, MoeConfig, str, str], list[ParameterSpec]]] = {
    "each": _experts_each,
    "stacked": _experts_stacked,
    "transposed": _experts_transposed,
    "interleaved": _experts_transposed,
    "joined": _experts_joined,
}


def _norm(
    config: ModelConfig, name: str, source: str, size: int | None = None
) -> list[ParameterSpec]:
    norm, shape = config.norm, (size or config.hidden_size,)
    specs = []
    if norm.has_weight:
        convert = partial(_add, amount=norm.offset, then=None) if norm.offset else None
        weight = Source(f"{source}.weight", shape, convert)
        specs.append(ParameterSpec(f"{name}.weight", (weight,), is_wide=norm.offset != 0))
    if norm.has_bias:
        specs.append(_single(f"{name}.bias", f"{source}.bias", shape))
    return specs


def _linear(
    config: ModelConfig, name: str, source: str, rows: int, columns: int, has_bias: bool
) -> list[ParameterSpec]:
    return _joined(config, name, "", {source: rows}, columns, has_bias)


def _joined(
    config: ModelConfig, name: str, folder: str, parts: Mapping[str, int], columns: int,
    has_bias: bool,
) -> list[ParameterSpec]:  # fmt: skip
    """A linear whose rows are those of ``parts``, one after the other."""
    return [
        ParameterSpec(
            f"{name}.{kind}",
            tuple(
                _linear_source(config, f"{folder}{part}.{kind}", rows, columns, None)
                for part, rows in parts.items()
            ),
            kind == "weight",
        )
        for kind in (("weight", "bias") if has_bias else ("weight",))
    ]


def _linear_source(
    config: ModelConfig, name: str, size: int, columns: int, rows: Sequence[int] | None
) -> Source:
    """``rows`` (None: all) of a linear's weight or bias with ``size`` outputs."""
    count = size if rows is None else len(rows)
    if name.endswith(".bias"):
        return Source(name, (size,), _pick(rows), (count,))
    if config.names.is_transposed:
        return Source(name, (columns, size), partial(_transposed, rows=rows), (count, columns))
    return Source(name, (size, columns), _pick(rows), (count, columns))


def _single(name: str, source: str, shape: _Shape) -> ParameterSpec:
    return ParameterSpec(name, (Source(source, shape),))


# Conversions of tensors on their way.


def _pick(rows: Sequence[int] | None) -> _Convert | None:
    return None if rows is None else partial(_picked, rows=rows)


def _picked(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    return tensor[list(rows)]


def _columns(order: Sequence[int] | None, is_row: bool = False) -> _Convert | None:
    return None if order is None and not is_row else partial(_in_order, order=order, is_row=is_row)


def _in_order(tensor: Tensor, order: Sequence[int] | None, is_row: bool) -> Tensor:
    tensor = tensor if order is None else tensor[..., list(order)]
    return tensor[None] if is_row else tensor


def _add(tensor: Tensor, amount: float, then: _Convert | None) -> Tensor:
    tensor = tensor.float() + amount
    return tensor if then is None else then(tensor)


def _multiplied(tensor: Tensor, factor: float) -> Tensor:
    return tensor.float() * factor


def _transposed(tensor: Tensor, rows: Sequence[int] | None) -> Tensor:
    return tensor.t() if rows is None else tensor.t()[list(rows)]


def _one_row(tensor: Tensor) -> Tensor:
    return tensor.reshape(1)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, 1)


def _transposed_flat(tensor: Tensor, is_interleaved: bool = False) -> Tensor:
    return _gates_first(tensor.transpose(1, 2), is_interleaved).flatten(0, 1)


def _gates_first(tensor: Tensor, is_interleaved: bool) -> Tensor:
    """[E, 2 * size, ...] with gate and up taking turns to gates, then ups."""
    if not is_interleaved:
        return tensor
    count, size, *rest = tensor.shape
    return tensor.reshape(count, size // 2, 2, *rest).transpose(1, 2).flatten(1, 2)


def _down_of_dbrx(tensor: Tensor, count: int) -> Tensor:
    return tensor.reshape(count, -1, tensor.shape[1]).transpose(1, 2).flatten(0, 1)


# What tools lay beside or instead of a weight that they quantise (GPTQ and AWQ, ModelOpt and
# compressed-tensors, bitsandbytes, MLX), some without a word of it in config.json.
_QUANTISED = (
    ".qweight",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight.absmax",
    ".SCB",
    ".scales",
)
# Computed here, or other parts of a model: frequencies of the rope and masks that old checkpoints
# carry, the towers of multimodal models, heads that predict several tokens.
_IGNORED = (
    r".*rotary_emb\.inv_freq",
    r".*\.(attn|attention)\.(bias|masked_bias)",
    r"(model\.)?(vision_tower|visual|vision_model|audio_tower|embed_vision|embed_audio)\..*",
    r"(model\.)?(multi_modal_projector\..*|image_newline)",
    r"(model\.)?mtp\..*",
)
# Where a decoder may lie, in the order of the search.
_PREFIXES = ("", "model.", "language_model.model.", "model.language_model.", "transformer.")


def fitted(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> ModelConfig:
    """``config`` with the names that the checkpoint has: of a decoder inside a multimodal model, of
    one that was saved without its head, and of experts that are stacked in one tensor."""
    config = replace(config, names=_with_found_place(config.names, headers))
    if config.quantization is not None:
        config = replace(config, quantization=config.quantization.found_in(headers))
    sparse = ((index, each.mlp) for index, each in enumerate(config.layers))
    found = next(((index, mlp) for index, mlp in sparse if isinstance(mlp, MoeConfig)), None)
    names = config.names
    if found is None or names.expert_layout != "each":
        return config
    index, moe = found
    gate, down = f"{names.experts}gate_up_proj", f"{names.experts}down_proj"
    folder = f"{names.prefix}{names.layers}{index}.{names.mlp}"
    if folder + gate not in headers or folder + down not in headers:
        return config
    is_stacked = headers[folder + down].shape == (moe.num_experts, config.hidden_size, moe.size)
    layout = "stacked" if is_stacked else "transposed"
    names = replace(names, expert_layout=layout, expert_gate=gate, expert_down=down)
    return replace(config, names=names)


def _with_found_place(wanted: WeightNames, headers: Mapping[str, TensorHeader]) -> WeightNames:
    if f"{wanted.prefix}{wanted.embedding}.weight" in headers:
        return wanted
    inner = wanted.prefix.removeprefix("model.").removeprefix("transformer.")
    for prefix in _PREFIXES:
        if f"{prefix}{inner}{wanted.embedding}.weight" in headers:
            heads = (wanted.head, f"language_model.{wanted.head}")
            head = next((each for each in heads if f"{each}.weight" in headers), wanted.head)
            return replace(wanted, prefix=prefix + inner, head=head)
    return wanted


def check_weights(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> list[str]:
    """`CheckpointError` unless every tensor (by name, of all files) has one use and every use has
    its tensor, but for the tensors that are returned: they belong to other parts of a model, or are
    computed here."""
    packed = next((name for name in headers if name.endswith(_QUANTISED)), None)
    if packed is not None and config.quantization is None:
        raise CheckpointError(
            f"{headers[packed].file}: {packed} is of quantised weights, and config.json has no "
            "quantization_config that says how they are to be read"
        )
    specs = decoder_parameters(config)
    sources = [source for spec in specs for source in spec.sources]
    _check_quantised(config, sources)
    wanted = {name: each for source in sources for name, each in source.tensors.items()}
    if missing := [
        name for name, each in wanted.items() if name not in headers and not each.is_optional
    ]:
        files = {header.file for header in headers.values()}
        where = files.pop() if len(files) == 1 else INDEX
        raise CheckpointError(f"{where}: {_list('missing tensor', missing)}")
    duplicates = duplicate_names(config)
    known = PASSED_OVER if config.quantization is not None else ()
    ignored = re.compile("|".join((*_IGNORED, *known, *config.ignored)))
    others = [name for name in headers if name not in wanted and name not in duplicates]
    empty = empty_biases(config, others)
    if unused := [name for name in others if not ignored.fullmatch(name) and name not in empty]:
        raise CheckpointError(f"{headers[unused[0]].file}: {_list('unused tensor', unused)}")
    for name, each in wanted.items():
        if name in headers:
            _check_weight(name, each, headers[name])
    for name, original in duplicates.items():
        if name in headers:
            _check_weight(name, wanted[original], headers[name])
    return others


def empty_biases(config: ModelConfig, names: Iterable[str]) -> set[str]:
    """Those of ``names``, which have no use, that must be zeros: GPTQ's writers gave every linear a
    bias for years."""
    found = config.quantization
    if found is None or found.name != "gptq":
        return set()
    return {name for name in names if name.removesuffix(".bias") in found.modules}


def _check_quantised(config: ModelConfig, sources: Sequence[Source]) -> None:
    """`CheckpointError` for a quantised linear that is kept in a way that no method writes."""
    for source in sources:
        if source.scheme is not None and (config.names.is_transposed or len(source.shape) != 2):
            raise CheckpointError(
                f"{source.module} is quantised, which is not supported for linears that "
                f"{config.architecture} keeps transposed or stacked; give an unquantised checkpoint"
            )


def _check_weight(name: str, wanted: Stored, header: TensorHeader) -> None:
    if header.shape not in wanted.shapes:
        raise CheckpointError(
            f"{header.file}: {name} has shape {list(header.shape)}, "
            f"config.json asks for {list(wanted.shapes[0])}"
        )
    if header.dtype not in wanted.dtypes:
        raise CheckpointError(
            f"{header.file}: {name} is {header.dtype}, supported are {', '.join(wanted.dtypes)}"
        )


def _list(what: str, names: Sequence[str]) -> str:
    plural = "s" if len(names) > 1 else ""
    return f"{len(names)} {what}{plural}: {list_names(names)}"
