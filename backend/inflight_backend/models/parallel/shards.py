"""The part of a model that a rank holds, by the traits of its layers; no torch.

Columns of a layer are cut where its inner numbers begin (rows of ``qkv`` by heads, rows of
``gate_up``) and joined where they end: ``output`` and ``down`` hold the columns of the same heads
and numbers, and what they answer is summed over the ranks (arXiv 1909.08053). Their biases are the
first rank's. Embedding and head are cut by tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from inflight_backend.errors import ConfigurationError
from inflight_backend.models.config import (
    AttentionConfig,
    DeltaConfig,
    LatentConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
)
from inflight_backend.models.parallel.place import WHOLE_EXPERTS, Place, ranges_of
from inflight_backend.models.parameters import (
    Cut,
    ParameterSpec,
    Ranges,
    Source,
    decoder_parameters,
    num_in,
)

WHOLE = Cut()
_LAYERS = "layers."
_OF_FIRST_STAGE = ("embedding", "positions", "embedding_norm.", "project_in.", "head.")
_OF_LAST_STAGE = ("final_norm.", "project_out.")


def local_model(model: ModelConfig, place: Place) -> ModelConfig:
    """What the decoder of a rank is made of: the layers of its stage, with its part of each.

    The vocabulary and sizes of hidden states are those of ``model``. `ConfigurationError` names
    what cannot be divided.
    """
    if place.size == 1:
        return model
    if model.encoder is not None:
        raise ConfigurationError(
            "tensor_parallel_size and pipeline_parallel_size must be 1 for a model with an encoder"
        )
    if place.pipeline_size > 1 and model.altup is not None:
        raise ConfigurationError(
            "pipeline_parallel_size must be 1 for a model with several streams of hidden states "
            "(AltUp)"
        )
    layers = place.layers_of(model.num_layers)
    if place.pipeline_size > 1 and model.layer_input_size:
        raise ConfigurationError(
            "pipeline_parallel_size must be 1 for a model whose layers have embeddings of tokens "
            "of their own"
        )
    kept = [_local_layer(model.layers[index], place, layers.start, index) for index in layers]
    if all(each.attention.delta is not None for each in kept):
        raise ConfigurationError(
            f"pipeline_parallel_size is {place.pipeline_size}, which leaves a stage without any "
            "layer of attention; use a smaller one"
        )
    # Linears are as in the decoder, whatever order the checkpoint has.
    names = replace(model.names, qkv_layout="rows")
    return replace(model, layers=tuple(kept), names=names)


def local_parameters(model: ModelConfig, place: Place) -> list[ParameterSpec]:
    """The parameters of `local_model` of a rank, and which part of the checkpoint each reads."""
    specs = decoder_parameters(model)
    if place.size == 1:
        return specs
    layers = place.layers_of(model.num_layers)
    found = []
    for spec in specs:
        if (name := _local_name(spec.name, place, layers)) is None:
            continue
        cut = cut_of(model, spec, place)
        if cut is not None:
            found.append(replace(_cut(spec, cut), name=name))
    return found


def cut_of(model: ModelConfig, spec: ParameterSpec, place: Place) -> Cut | None:
    """What a rank of its stage holds of a parameter of ``model``; None: nothing."""
    name = spec.name
    if place.tensor_size == 1:
        return WHOLE
    if name == "embedding" or name.startswith("head."):
        return Cut(rows=ranges_of(place.vocabulary_of(model.vocab_size)))
    if not name.startswith(_LAYERS):
        return WHOLE
    number, _, rest = name.removeprefix(_LAYERS).partition(".")
    return _cut_in_layer(model.layers[int(number)], rest, spec.shape, place)


def local_name(model: ModelConfig, name: str, place: Place) -> str | None:
    """How the rank's decoder calls the parameter or linear ``name`` of ``model``; None: it is
    another stage's."""
    return _local_name(name, place, place.layers_of(model.num_layers))


def _cut(spec: ParameterSpec, cut: Cut) -> ParameterSpec:
    """``spec`` with what ``cut`` leaves of each source."""
    if cut == WHOLE:
        return spec
    sources, first = list[Source](), 0
    for source in spec.sources:
        rows = cut.rows
        if rows is not None:
            rows = _within(rows, first, first + source.rows)
        if rows is None or num_in(rows):
            sources.append(replace(source, cut=Cut(rows, cut.columns)))
        first += source.rows
    return replace(spec, sources=tuple(sources))


def _within(ranges: Ranges, first: int, end: int) -> Ranges:
    """What of ``ranges`` lies there, counted from ``first``."""
    kept = ((max(start, first), min(stop, end)) for start, stop in ranges)
    return tuple((start - first, stop - first) for start, stop in kept if start < stop)


def _local_name(name: str, place: Place, layers: range) -> str | None:
    if name.startswith(_LAYERS):
        number, _, rest = name.removeprefix(_LAYERS).partition(".")
        return f"{_LAYERS}{int(number) - layers.start}.{rest}" if int(number) in layers else None
    if name.startswith(_OF_FIRST_STAGE):
        return name if place.is_first_stage else None
    if name.startswith(_OF_LAST_STAGE):
        return name if place.is_last_stage else None
    return name


# Layers.


def _local_layer(layer: LayerConfig, place: Place, first: int, index: int) -> LayerConfig:
    attention = _local_attention(layer.attention, place)
    if (source := attention.kv_source) is not None:
        if source < first:
            raise ConfigurationError(
                f"pipeline_parallel_size is {place.pipeline_size}, which parts layer {index} from "
                f"layer {source}, whose keys and values it reads; use a smaller one"
            )
        attention = replace(attention, kv_source=source - first)
    mlp = layer.mlp
    return replace(
        layer,
        attention=attention,
        mlp=_local_mlp(mlp, place) if isinstance(mlp, MlpConfig) else _local_moe(mlp, place),
        experts_beside=None
        if layer.experts_beside is None
        else _local_moe(layer.experts_beside, place),
    )


def _local_attention(attention: AttentionConfig, place: Place) -> AttentionConfig:
    if (delta := attention.delta) is not None:
        keys, values = _delta_heads(delta, place)
        local = replace(delta, num_key_heads=len(keys), num_value_heads=len(values))
        return replace(attention, delta=local)
    heads = _heads(attention, place)
    if attention.latent is not None:
        return replace(attention, num_heads=len(heads))
    return replace(
        attention,
        num_heads=len(heads),
        num_kv_heads=len(place.kv_heads_of(attention.num_kv_heads)),
        slopes=attention.slopes[heads.start : heads.stop],
    )


def _local_mlp(mlp: MlpConfig, place: Place) -> MlpConfig:
    return replace(mlp, size=len(place.part_of(mlp.size, "inner numbers (intermediate_size)")))


def _local_moe(moe: MoeConfig, place: Place) -> MoeConfig:
    shared = None if moe.shared is None else _local_mlp(moe.shared, place)
    if place.splits_experts:
        experts = place.part_of(moe.num_experts, "experts")
        return replace(moe, shared=shared, held_experts=(experts.start, experts.stop))
    size = len(place.part_of(moe.size, "inner numbers of an expert", f", or {WHOLE_EXPERTS}"))
    return replace(moe, shared=shared, size=size)


def _heads(attention: AttentionConfig, place: Place) -> range:
    return place.part_of(attention.num_heads, "heads of queries")


def _delta_heads(delta: DeltaConfig, place: Place) -> tuple[range, range]:
    """Heads of keys, and those of values, of which each key head has equally many."""
    keys = place.part_of(delta.num_key_heads, "key heads of a recurrence")
    share = delta.num_value_heads // delta.num_key_heads
    return keys, range(keys.start * share, keys.stop * share)


# Parameters of layers, by their names behind the number of the layer.


def _cut_in_layer(
    layer: LayerConfig, rest: str, shape: tuple[int, ...], place: Place
) -> Cut | None:
    name, _, kind = rest.rpartition(".")
    attention, mlp = layer.attention, layer.mlp
    if attention.delta is not None and rest.startswith("delta."):
        return _cut_of_delta(attention.delta, rest.removeprefix("delta."), place)
    if rest.startswith("beside."):
        assert layer.experts_beside is not None
        return _cut_of_moe(layer.experts_beside, rest.removeprefix("beside."), shape, place)
    if name in ("gate_up", "up", "down"):
        assert isinstance(mlp, MlpConfig)
        return _cut_of_mlp(mlp, name, kind, place)
    if name.startswith(("experts.", "shared.")):
        assert isinstance(mlp, MoeConfig)
        return _cut_of_moe(mlp, rest, shape, place)
    if attention.latent is not None:
        return _cut_of_latent(attention, attention.latent, rest, place)
    return _cut_of_attention(attention, rest, place)


def _cut_of_attention(attention: AttentionConfig, rest: str, place: Place) -> Cut | None:
    size, heads = attention.head_dim, _heads(attention, place)
    kv_heads = place.kv_heads_of(attention.num_kv_heads)
    if rest in ("qkv.weight", "qkv.bias"):
        parts = [(attention.num_heads, heads)]
        if attention.kv_source is None:
            parts += [(attention.num_kv_heads, kv_heads)] * 2
        if attention.has_gate:
            parts.append((attention.num_heads, heads))
        return Cut(
            rows=_side_by_side((count * size, ranges_of(each, size)) for count, each in parts)
        )
    if rest == "output.weight":
        return Cut(columns=ranges_of(heads, size))
    if rest == "output.bias":
        return _of_first_rank(place)
    if rest == "sinks":
        return Cut(rows=ranges_of(heads))
    if rest in ("query_norm", "key_norm") and attention.qk_norm not in ("head", "biased"):
        own = heads if rest == "query_norm" else kv_heads
        return Cut(rows=ranges_of(own, size if attention.qk_norm == "full" else 1))
    return WHOLE


def _cut_of_latent(
    attention: AttentionConfig, latent: LatentConfig, rest: str, place: Place
) -> Cut | None:
    heads = _heads(attention, place)
    if rest in ("query.weight", "query.bias"):
        return Cut(rows=ranges_of(heads, latent.nope + latent.rope))
    if rest == "expand":
        return Cut(rows=ranges_of(heads, latent.nope + latent.value))
    if rest == "expand_keys":
        return Cut(rows=ranges_of(heads, latent.kv_rank))
    if rest == "expand_values":
        return Cut(rows=ranges_of(heads, latent.value))
    if rest == "output.weight":
        return Cut(columns=ranges_of(heads, latent.value))
    return _of_first_rank(place) if rest == "output.bias" else WHOLE


def _cut_of_delta(delta: DeltaConfig, rest: str, place: Place) -> Cut | None:
    keys, values = _delta_heads(delta, place)
    key_part = (delta.key_size, ranges_of(keys, delta.key_dim))
    value_part = (delta.value_size, ranges_of(values, delta.value_dim))
    if rest == "inputs.weight":
        return Cut(rows=_side_by_side([key_part, key_part, value_part, value_part]))
    if rest == "conv":
        return Cut(rows=_side_by_side([key_part, key_part, value_part]))
    if rest == "gates.weight":
        return Cut(rows=_side_by_side([(delta.num_value_heads, ranges_of(values))] * 2))
    if rest in ("rate", "step_bias"):
        return Cut(rows=ranges_of(values))
    if rest == "output.weight":
        return Cut(columns=ranges_of(values, delta.value_dim))
    return WHOLE


def _cut_of_mlp(mlp: MlpConfig, name: str, kind: str, place: Place) -> Cut | None:
    part = ranges_of(place.part_of(mlp.size, "inner numbers (intermediate_size)"))
    if name == "down":
        return Cut(columns=part) if kind == "weight" else _of_first_rank(place)
    return Cut(rows=_side_by_side([(mlp.size, part)] * (2 if name == "gate_up" else 1)))


def _cut_of_moe(moe: MoeConfig, rest: str, shape: tuple[int, ...], place: Place) -> Cut | None:
    name, _, kind = rest.rpartition(".")
    if name.startswith("shared."):
        assert moe.shared is not None
        return _cut_of_mlp(moe.shared, name.removeprefix("shared."), kind, place)
    if not name.startswith("experts."):
        return WHOLE
    if place.splits_experts:
        size = shape[0] // moe.num_experts  # a bias may be one row for each
        return Cut(rows=ranges_of(place.part_of(moe.num_experts, "experts"), size))
    part = ranges_of(place.part_of(moe.size, "inner numbers of an expert"))
    if name == "experts.down":
        return Cut(columns=part) if kind == "weight" else _of_first_rank(place)
    halves = [(moe.size, part)] * 2
    if kind == "bias" and len(shape) == 2:
        return Cut(columns=_side_by_side(halves))
    return Cut(rows=_side_by_side(halves * moe.num_experts))


def _of_first_rank(place: Place) -> Cut | None:
    """What is added after the sum over ranks, or by one of them."""
    return WHOLE if place.tensor_rank == 0 else None


def _side_by_side(parts: Iterable[tuple[int, Ranges]]) -> Ranges:
    """Ranges of parts with so many rows each, which follow one another."""
    found: list[tuple[int, int]] = []
    first = 0
    for count, ranges in parts:
        found += [(first + start, first + end) for start, end in ranges]
        first += count
    return tuple(found)
