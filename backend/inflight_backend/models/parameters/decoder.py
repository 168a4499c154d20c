"""The parameters of a whole decoder, layer by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from inflight_backend.models.config import (
    NORMS_OF_BLOCK,
    AltUpConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
)
from inflight_backend.models.parameters.attentions import (
    attention_parameters,
    cross_parameters,
    delta_parameters,
)
from inflight_backend.models.parameters.feed_forward import mlp_parameters, moe_parameters
from inflight_backend.models.parameters.linears import linear_parameters, norm_parameters
from inflight_backend.models.parameters.rearranging import flat
from inflight_backend.models.parameters.sources import (
    WEIGHT,
    ParameterSpec,
    Source,
    single_parameter,
)

if TYPE_CHECKING:  # ``inflight plan`` reads this page without torch
    pass


ENCODER = "encoder."
"""How names of an encoder's parameters begin."""


def decoder_parameters(config: ModelConfig) -> list[ParameterSpec]:
    """All parameters of the decoder, in the order in which a step uses them, and of its encoder."""
    names, hidden = config.names, config.hidden_size
    prefix, size = names.prefix, config.embedding_size or hidden
    embedding = single_parameter(
        "embedding", f"{prefix}{names.embedding}.weight", (config.vocab_size, size)
    )
    embedding = replace(embedding, file_dtype=config.table_dtype)
    specs = [replace(embedding, table="both" if config.is_tied else "rows")]
    if config.position_offset is not None and not config.has_sinusoids:
        rows = config.max_position_embeddings + config.position_offset
        table = single_parameter("positions", f"{prefix}{names.positions}.weight", (rows, hidden))
        specs.append(replace(table, table="positions"))
    if config.has_embedding_norm:
        specs += norm_parameters(config, "embedding_norm", prefix + names.embedding_norm)
    if config.embedding_size is not None:
        place = f"{prefix}project_in"
        specs += linear_parameters(config, "project_in", place, hidden, size, False)
    if config.layer_input_size:
        specs += _layer_inputs(config)
    if config.altup is not None:
        specs += _streams(config)
    for index, layer in enumerate(config.layers):
        specs += _layer_parameters(config, index, layer)
    if config.has_final_norm:
        specs += norm_parameters(config, "final_norm", prefix + names.final_norm)
    if config.embedding_size is not None:
        place = f"{prefix}project_out"
        specs += linear_parameters(config, "project_out", place, size, hidden, False)
    specs += _head(config)
    if config.encoder is not None:
        inner = (spec for spec in decoder_parameters(config.encoder) if spec.name != "embedding")
        specs += [replace(spec, name=ENCODER + spec.name) for spec in inner]
    return [_as_written(config, spec) for spec in specs]


def _head(config: ModelConfig) -> list[ParameterSpec]:
    """The output head, unless it is the embedding, and its bias."""
    names, rows, specs = config.names, config.vocab_size, []
    if not config.is_tied:
        head = single_parameter("head.weight", f"{names.head}.weight", (rows, config.hidden_size))
        specs.append(replace(head, table="head", file_dtype=config.table_dtype))
    if config.has_head_bias and names.head_bias is not None:
        bias = Source(names.head_bias, (1, rows), flat, (rows,))
        specs.append(ParameterSpec("head.bias", (bias,)))
    elif config.has_head_bias:
        specs.append(single_parameter("head.bias", f"{names.head}.bias", (rows,)))
    return specs


def _as_written(config: ModelConfig, spec: ParameterSpec) -> ParameterSpec:
    """``spec`` with the type that linears have in the files, and the schemes of those sources that
    the checkpoint has quantised."""
    if spec.is_linear or spec.num_experts:
        spec = replace(spec, file_dtype=config.linear_dtype)
    if config.quantization is None:
        return spec
    modules = config.quantization.modules
    sources = tuple(
        replace(source, scheme=modules[source.module])
        if source.name.endswith(WEIGHT) and source.module in modules
        else source
        for source in spec.sources
    )
    return replace(spec, sources=sources)


def duplicate_names(config: ModelConfig) -> dict[str, str]:
    """Tensor that may repeat another one -> that other: an output head tied to the embedding, the
    embeddings of an encoder and its decoder."""
    names = config.names
    embedding = f"{names.prefix}{names.embedding}.weight"
    found = {f"{names.head}.weight": embedding} if config.is_tied else {}
    if config.encoder is not None:
        for each in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
            found[names.prefix + each] = embedding
    return found


def kv_scale_names(config: ModelConfig) -> list[str]:
    """Tensors with a scale of a KV cache of 8 bits."""
    return [
        spec.sources[0].name
        for spec in decoder_parameters(config)
        if spec.name.endswith((".key_scale", ".value_scale"))
    ]


def _layer_parameters(config: ModelConfig, index: int, layer: LayerConfig) -> list[ParameterSpec]:
    names, prefix, hidden = config.names, f"layers.{index}.", config.hidden_size
    folder = f"{names.prefix}{names.layers}{index}."
    specs = []
    for norm in NORMS_OF_BLOCK[config.block]:
        specs += norm_parameters(config, prefix + norm, folder + getattr(names, norm))
    if layer.attention.delta is not None:
        specs += delta_parameters(
            config, layer.attention.delta, f"{prefix}delta.", folder + names.delta.folder
        )
    else:
        specs += attention_parameters(config, layer.attention, prefix, folder + names.attention)
    if layer.cross is not None:
        specs += norm_parameters(config, f"{prefix}cross_norm", folder + names.cross_norm)
        specs += cross_parameters(config, layer.cross, f"{prefix}cross.", folder + names.cross)
    if config.layer_input_size:
        size, own = config.layer_input_size, names.layer_input
        place = f"{prefix}layer_input."
        specs += [
            *linear_parameters(config, f"{place}gate", folder + own.gate, size, hidden, False),
            *linear_parameters(
                config, f"{place}projection", folder + own.output, hidden, size, False
            ),
            *norm_parameters(config, f"{place}norm", folder + own.norm),
        ]
    if config.altup is not None:
        specs += _altup_parameters(config, config.altup, prefix, folder)
    if layer.experts_beside is not None:
        place, norms = f"{prefix}beside.", names.beside
        beside = replace(config, names=names.of_experts_beside())
        specs += moe_parameters(beside, layer.experts_beside, place, folder)
        specs += norm_parameters(config, f"{place}input_norm", folder + norms.input_norm)
        specs += norm_parameters(config, f"{place}output_norm", folder + norms.output_norm)
        specs += norm_parameters(config, f"{place}dense_norm", folder + norms.dense_norm)
    if layer.has_scalar:
        specs.append(single_parameter(f"{prefix}scalar", folder + names.scalar, (1,)))
    if isinstance(layer.mlp, MlpConfig):
        return specs + mlp_parameters(config, layer.mlp, prefix, folder + names.mlp)
    return specs + moe_parameters(config, layer.mlp, prefix, folder + names.mlp)


def _altup_parameters(
    config: ModelConfig, altup: AltUpConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    hidden, streams, rank = config.hidden_size, altup.num_streams, altup.laurel_rank
    place, source = f"{prefix}altup.", f"{folder}altup."
    left, right = (f"{folder}laurel.linear_{side}" for side in ("left", "right"))
    mixing = (
        ("router", "modality_router", (streams, hidden)),
        ("predictions", "prediction_coefs", (streams**2, streams)),
        ("corrections", "correction_coefs", (streams, streams)),
    )
    return [
        *(
            replace(
                single_parameter(f"{place}{name}.weight", f"{source}{there}.weight", shape),
                is_mixing=True,
            )
            for name, there, shape in mixing
        ),
        *norm_parameters(config, f"{place}router_norm", f"{source}router_norm"),
        single_parameter(f"{place}scale", f"{source}correct_output_scale", (hidden,)),
        *linear_parameters(config, f"{prefix}laurel.left", left, rank, hidden, False),
        *linear_parameters(config, f"{prefix}laurel.right", right, hidden, rank, False),
        *norm_parameters(config, f"{prefix}laurel.norm", f"{folder}laurel.post_laurel_norm"),
    ]


def _streams(config: ModelConfig) -> list[ParameterSpec]:
    """The linears into the streams and out of them, one for each but the first."""
    assert config.altup is not None
    hidden, prefix, specs = config.hidden_size, config.names.prefix, []
    for name, source in (("open", "altup_projections"), ("close", "altup_unembed_projections")):
        for index in range(config.altup.num_streams - 1):
            place = f"{prefix}{source}.{index}"
            specs += linear_parameters(
                config, f"streams.{name}{index}", place, hidden, hidden, False
            )
    return specs


def _layer_inputs(config: ModelConfig) -> list[ParameterSpec]:
    prefix, size, names = config.names.prefix, config.layer_input_size, config.names.layer_input
    rows = config.num_layers * size
    source = prefix + names.projection_norm
    embedding = single_parameter(
        "layer_inputs.embedding",
        f"{prefix}{names.embedding}.weight",
        (config.layer_input_rows or config.vocab_size, rows),
    )
    return [
        replace(embedding, table="rows"),
        *linear_parameters(
            config,
            "layer_inputs.projection",
            prefix + names.projection,
            rows,
            config.hidden_size,
            False,
        ),
        *norm_parameters(config, "layer_inputs.norm", source, size),
    ]
