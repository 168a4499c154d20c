"""The parameters of attention of every kind, and of recurrences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from inflight_backend.models.config import (
    AttentionConfig,
    DeltaConfig,
    ModelConfig,
    WeightNames,
)
from inflight_backend.models.parameters.linears import (
    joined_parameters,
    linear_parameters,
    linear_source,
)
from inflight_backend.models.parameters.rearranging import (
    added,
    by_distance,
    columns_in_order,
    flat,
    log_of_negative,
    one_row,
    pick,
)
from inflight_backend.models.parameters.sources import (
    Convert,
    ParameterSpec,
    Shape,
    Source,
    single_parameter,
)


def attention_parameters(
    config: ModelConfig, attention: AttentionConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    """Of attention of any kind, or of what stands in its place."""
    names, hidden = config.names, config.hidden_size
    if attention.latent is not None:
        return _latent_parameters(config, attention, prefix, folder)
    order, query = attention.rotary_order, attention.query_size
    parts, specs = _qkv_parts(names, attention, order), []
    for kind in ("weight", "bias") if attention.has_qkv_bias else ("weight",):
        sources = [
            linear_source(config, f"{folder}{name}.{kind}", size, hidden, rows)
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
    specs += linear_parameters(config, f"{prefix}output", folder + names.output, hidden, query,
                     attention.has_output_bias)  # fmt: skip
    if attention.has_sinks:
        sinks = Source(folder + names.sinks, (attention.num_heads,))
        specs.append(ParameterSpec(f"{prefix}sinks", (sinks,), is_wide=True))
    specs += _relative_bias(config, attention, prefix)
    if config.kv_scales is not None:
        if attention.kv_source is not None:  # those of the layer whose cache it reads
            folder = f"{names.prefix}{names.layers}{attention.kv_source}.{names.attention}"
        specs += [
            ParameterSpec(f"{prefix}{role}", (Source(folder + end, (1,), one_row),), is_wide=True)
            for role, end in zip(("key_scale", "value_scale"), config.kv_scales, strict=True)
        ]
    return specs


def _relative_bias(
    config: ModelConfig, attention: AttentionConfig, prefix: str
) -> list[ParameterSpec]:
    bias, names = attention.relative_bias, config.names
    if bias is None:
        return []
    folder = f"{names.prefix}{names.layers}{bias.layer}.{names.attention}"
    heads = attention.num_heads
    table = Source(
        f"{folder}{names.relative_bias}.weight",
        (bias.num_buckets, heads),
        partial(by_distance, bias=bias),
        (heads, 2 * bias.max_distance + 1),
    )
    return [ParameterSpec(f"{prefix}relative_bias", (table,), is_wide=True)]


def cross_parameters(
    config: ModelConfig, attention: AttentionConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    """Queries of the text; keys and values of the encoder's answer."""
    names, hidden, has_bias = config.names, config.hidden_size, attention.has_qkv_bias
    query, kv = attention.query_size, attention.kv_size
    parts = {names.key: kv, names.value: kv}
    return [
        *linear_parameters(config, f"{prefix}query", folder + names.query, query, hidden, has_bias),
        *joined_parameters(config, f"{prefix}key_value", folder, parts, hidden, has_bias),
        *linear_parameters(config, f"{prefix}output", folder + names.output, hidden, query,
                 attention.has_output_bias),
    ]  # fmt: skip


_Part = tuple[str, int, list[int] | None]
"""A linear of the checkpoint, its outputs, and which of them are taken (None: all)."""


def _qkv_parts(
    names: WeightNames, attention: AttentionConfig, order: Sequence[int] | None
) -> list[_Part]:
    """What queries, keys, values and gates come from, in this order."""
    query, kv = attention.query_size, attention.kv_size
    if names.qkv is not None:
        return [(names.qkv, query + 2 * kv, fused_rows(attention, names.qkv_layout, order))]
    parts: list[_Part] = [(names.query, query, head_rows(attention.num_heads, order))]
    gate: _Part | None = None
    if attention.has_gate and names.attention_gate is not None:
        gate = (names.attention_gate, query, None)
    elif attention.has_gate:  # the second half of each query head
        turned, gates = _query_rows(attention, order)
        parts, gate = [(names.query, 2 * query, turned)], (names.query, 2 * query, gates)
    if attention.kv_source is None:
        parts.append((names.key, kv, head_rows(attention.num_kv_heads, order)))
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
        specs = linear_parameters(
            config, f"{prefix}query", folder + names.query, query, hidden, False
        )
    else:
        rank = latent.query_rank
        specs = [
            *linear_parameters(config, f"{prefix}query_a", down, rank, hidden, has_bias),
            single_parameter(f"{prefix}query_a_norm", f"{norm}.weight", (rank,)),
            *linear_parameters(config, f"{prefix}query", up, query, rank, False),
        ]
    down, norm, up = (folder + each for each in names.latent_key_value)
    rank = latent.kv_rank
    expanded = heads * (latent.nope + latent.value)
    expand = {"expand": (up, (expanded, rank))}
    if names.latent_halves is not None:
        keys, values = (folder + each for each in names.latent_halves)
        expand = {
            "expand_keys": (keys, (heads * rank, latent.nope)),
            "expand_values": (values, (heads * latent.value, rank)),
        }
    return [
        *specs,
        *linear_parameters(
            config, f"{prefix}key_value", down, rank + latent.rope, hidden, has_bias
        ),
        single_parameter(f"{prefix}key_value_norm", f"{norm}.weight", (rank,)),
        *(
            replace(single_parameter(prefix + name, f"{source}.weight", shape), num_heads=heads)
            for name, (source, shape) in expand.items()
        ),
        *linear_parameters(
            config, f"{prefix}output", folder + names.output, hidden, heads * latent.value,
            attention.has_output_bias,
        ),
    ]  # fmt: skip


def delta_parameters(
    config: ModelConfig, delta: DeltaConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    """Of a gated delta net."""
    names, hidden, heads = config.names.delta, config.hidden_size, delta.num_value_heads
    linears = [
        tuple(
            linear_source(config, f"{folder}{name}.weight", size, hidden, rows)
            for name, size, rows in (
                zip(parts, sizes, (None, None), strict=True)
                if len(parts) > 1
                else ((parts[0], sum(sizes), joined),)
            )
        )
        for parts, sizes, joined in zip(
            (names.inputs, names.gates),
            ((delta.num_channels, delta.value_size), (heads, heads)),
            _joined_rows(delta),
            strict=True,
        )
    ]
    conv = (delta.num_channels, 1, delta.conv_size)
    channels = Source(f"{folder}{names.conv}.weight", conv, flat, (conv[0], conv[2]))
    if names.is_rate:
        channels = replace(channels, shape=(conv[0], conv[2]), convert=None)
    rate = Source(folder + names.rate, (heads,), log_of_negative if names.is_rate else None)
    return [
        ParameterSpec(f"{prefix}inputs.weight", linears[0], is_linear=True),
        ParameterSpec(f"{prefix}gates.weight", linears[1], is_linear=True),
        ParameterSpec(f"{prefix}conv", (channels,)),
        ParameterSpec(f"{prefix}rate", (rate,), is_wide=True),
        ParameterSpec(
            f"{prefix}step_bias", (Source(folder + names.step_bias, (heads,)),), is_wide=True
        ),
        single_parameter(f"{prefix}norm", f"{folder}{names.norm}.weight", (delta.value_dim,)),
        *linear_parameters(
            config, f"{prefix}output", f"{folder}{names.output}", hidden, delta.value_size, False
        ),
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


def head_rows(num_heads: int, order: Sequence[int] | None) -> list[int] | None:
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


def fused_rows(
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
        shape: Shape = (size,)
        rows = list(order) if order else None
    elif attention.qk_norm == "full":
        shape, rows = (heads * size,), head_rows(heads, order)
    else:
        shape, rows = (heads, size), None
    kind = attention.qk_norm_kind
    if attention.qk_norm == "biased":
        sources = tuple(
            Source(f"{source}.{part}", (size,), columns_in_order(order, True), (1, size))
            for part in ("weight", "bias")
        )
        return ParameterSpec(name, sources)
    if attention.qk_norm == "per_head_list":
        sources = tuple(
            Source(
                f"{source}.norms.{head}.weight", (size,), columns_in_order(order, True), (1, size)
            )
            for head in range(heads)
        )
        return ParameterSpec(name, sources)
    convert: Convert | None = (
        columns_in_order(order) if attention.qk_norm == "per_head" else pick(rows)
    )
    if kind.offset:
        convert = partial(added, amount=kind.offset, then=convert)
    only = Source(f"{source}.weight", shape, convert)
    return ParameterSpec(name, (only,), is_wide=kind.offset != 0)
