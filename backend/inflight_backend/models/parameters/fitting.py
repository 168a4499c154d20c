"""The list of parameters beside the headers of a checkpoint: other names, and what is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import INDEX, TensorHeader, list_names
from inflight_backend.models.config import ModelConfig, MoeConfig, WeightNames
from inflight_backend.models.parameters.decoder import decoder_parameters, duplicate_names
from inflight_backend.models.parameters.sources import WEIGHT, Source
from inflight_backend.models.quantization.schemes import GGUF_SCHEMES, HALVES
from inflight_backend.models.quantization.stored import PASSED_OVER, Stored

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
PREFIXES = ("", "model.", "language_model.model.", "model.language_model.", "transformer.")


def fitted(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> ModelConfig:
    """``config`` with the names that the checkpoint has: of a decoder inside a multimodal model, of
    one that was saved without its head, and of experts that are stacked in one tensor; and the
    types of those tensors."""
    config = _with_found_names(config, headers)
    config = replace(config, linear_dtype=_linear_dtype(config, headers))
    if config.encoder is None:
        return config
    return replace(config, encoder=replace(config.encoder, linear_dtype=config.linear_dtype))


def _with_found_names(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> ModelConfig:
    config = replace(config, names=_with_found_place(config.names, headers))
    config = replace(config, table_dtype=_table_dtype(config, headers))
    if config.is_tied is None:
        config = replace(config, is_tied=f"{config.names.head}.weight" not in headers)
    if config.encoder is not None:
        config = _with_fitted_encoder(config, headers)
    if config.quantization is not None:
        quantization = config.quantization.found_in(headers)
        # A head that was quantised beside an embedding that was not is no longer the same.
        is_tied = config.is_tied and config.names.head not in quantization.modules
        kv_scales = _kv_scales(config, headers)
        config = replace(config, quantization=quantization, kv_scales=kv_scales, is_tied=is_tied)
    sparse = ((index, each.mlp) for index, each in enumerate(config.layers))
    found = next(((index, mlp) for index, mlp in sparse if isinstance(mlp, MoeConfig)), None)
    names = config.names
    if found is None:
        return _with_single_experts_beside(config, headers)
    index, moe = found
    folder = f"{names.prefix}{names.layers}{index}.{names.mlp}"
    if names.expert_layout != "each":
        return _with_single_experts(config, folder, headers)
    gate, down = f"{names.experts}gate_up_proj", f"{names.experts}down_proj"
    if folder + gate not in headers or folder + down not in headers:
        return _with_single_experts(config, folder, headers)
    rows = tuple(headers[folder + name].shape[1:2] for name in (gate, down))
    is_stacked = rows == ((2 * moe.size,), (config.hidden_size,))
    layout = "stacked" if is_stacked else "transposed"
    names = replace(names, expert_layout=layout, expert_gate=gate, expert_down=down)
    return replace(config, names=names)


def _table_dtype(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> str:
    """Of embedding and head, where it is one of 16 bits."""
    names = config.names
    tables = (f"{names.prefix}{names.embedding}.weight", f"{names.head}.weight")
    return _half(headers[name] for name in tables if name in headers)


def _linear_dtype(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> str:
    """Of all linears that are not quantised, where it is one of 16 bits."""
    names = (
        source.name
        for spec in decoder_parameters(config)
        if spec.is_linear or spec.num_experts
        for source in spec.sources
        if source.scheme is None
    )
    return _half(headers[name] for name in names if name in headers)


def _half(headers: Iterable[TensorHeader]) -> str:
    found = {each.dtype for each in headers}
    return HALVES.get(found.pop(), "") if len(found) == 1 else ""


def assumed(config: ModelConfig) -> ModelConfig:
    """``config`` as it will be for a checkpoint whose headers are not here: with the linears
    quantised that ``quantization_config`` says are, by the names that a family's tensors have."""
    if config.dtype in HALVES.values():
        config = replace(config, table_dtype=config.dtype, linear_dtype=config.dtype)
    if config.quantization is None:
        return config
    linears = [
        source.module
        for spec in decoder_parameters(config)
        if spec.num_heads or ((spec.is_linear or spec.num_experts) and spec.name.endswith(WEIGHT))
        for source in spec.sources
    ]
    return replace(config, quantization=config.quantization.assumed(linears, config.dtype))


def _with_fitted_encoder(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> ModelConfig:
    """Encoder and decoder lie side by side; a head that was not saved is the embedding, and a bias
    that was not is zeros."""
    assert config.encoder is not None
    names = config.names
    encoder = replace(config.encoder, names=replace(config.encoder.names, prefix=names.prefix))
    has_head, bias = f"{names.head}.weight" in headers, names.head_bias
    return replace(
        config,
        encoder=encoder,
        is_tied=config.is_tied or not has_head,
        has_head_bias=config.has_head_bias and (bias is None or bias in headers),
    )


def _with_single_experts(
    config: ModelConfig, folder: str, headers: Mapping[str, TensorHeader]
) -> ModelConfig:
    """llmcompressor and others take stacked experts apart before they quantise them, and give all
    the same names."""
    usual = WeightNames()
    first = f"{folder}{usual.experts}0.{usual.expert_gate}."
    if not any(name.startswith(first) for name in headers):
        return config
    names = replace(
        config.names,
        expert_layout=usual.expert_layout,
        experts=usual.experts,
        expert_gate=usual.expert_gate,
        expert_up=usual.expert_up,
        expert_down=usual.expert_down,
    )
    return replace(config, names=names)


def _with_single_experts_beside(
    config: ModelConfig, headers: Mapping[str, TensorHeader]
) -> ModelConfig:
    """The same of experts beside a dense layer."""
    names = config.names
    folders = (
        f"{names.prefix}{names.layers}{index}.{names.experts}"
        for index, each in enumerate(config.layers)
        if each.experts_beside is not None
    )
    first = next(folders, None)
    if first is None or not any(name.startswith(f"{first}0.") for name in headers):
        return config
    return replace(config, names=replace(names, beside=replace(names.beside, layout="each")))


def _kv_scales(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> tuple[str, str] | None:
    """Those of all layers, as compressed-tensors, ModelOpt or AutoFP8 name them; None if the
    checkpoint has none, or one for each head."""
    names = config.names
    folders = [
        f"{names.prefix}{names.layers}{index}.{names.attention}"
        for index, each in enumerate(config.layers)
        if each.attention.num_cached == 2
    ]
    for pair in (
        ("k_scale", "v_scale"),
        (f"{names.key}.k_scale", f"{names.value}.v_scale"),
        (f"{names.key}.output_scale", f"{names.value}.output_scale"),
    ):
        found = [headers.get(folder + end) for folder in folders for end in pair]
        if found and all(each is not None and each.shape in ((), (1,)) for each in found):
            return pair
    return None


def _with_found_place(wanted: WeightNames, headers: Mapping[str, TensorHeader]) -> WeightNames:
    if f"{wanted.prefix}{wanted.embedding}.weight" in headers:
        return wanted
    inner = wanted.prefix.removeprefix("model.").removeprefix("transformer.")
    for prefix in PREFIXES:
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
        scheme = source.scheme
        if scheme is None:
            continue
        is_cut = source.part is not None and scheme.layout not in GGUF_SCHEMES
        if len(source.shape) != 2 or is_cut:
            raise CheckpointError(
                f"{source.module} is quantised, which is not supported for linears that "
                f"{config.architecture} keeps like that; give an unquantised checkpoint"
            )


def _check_weight(name: str, wanted: Stored, header: TensorHeader) -> None:
    if wanted.shapes and header.shape not in wanted.shapes:
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
