"""Which parameters a decoder has, and from which tensors of the checkpoint each is assembled.

Fusion is data: a parameter lists its sources, which are concatenated. `check_weights` compares the
list with the headers of a checkpoint; loader and ``inflight plan`` both call it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import INDEX, TensorHeader, list_names
from inflight_backend.models.config import ModelConfig

_DTYPES = ("F32", "F16", "BF16")  # that weights may have


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint and the shape it must have."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter of the decoder: its sources, concatenated along the first dimension."""

    name: str
    sources: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        rows = sum(source.shape[0] for source in self.sources)
        return (rows, *self.sources[0].shape[1:])

    @property
    def is_linear(self) -> bool:
        """True for the weight of a linear in a layer: what FP8 quantises. Not the head."""
        return self.name.startswith("layers.") and len(self.shape) == 2


def decoder_parameters(config: ModelConfig) -> list[ParameterSpec]:
    """All parameters of the decoder, in the order in which a step uses them."""
    vocab = (config.vocab_size, config.hidden_size)
    specs = [_single("embedding", "model.embed_tokens.weight", vocab)]
    for layer in range(config.num_layers):
        specs += _layer_parameters(config, layer)
    specs.append(_single("norm", "model.norm.weight", (config.hidden_size,)))
    if not config.is_tied:
        specs.append(_single("lm_head", "lm_head.weight", vocab))
    return specs


def ignorable_names(config: ModelConfig) -> frozenset[str]:
    """Tensors that old checkpoints carry and that are computed here: frequencies of the rope."""
    return frozenset(
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers)
    ) | {"model.rotary_emb.inv_freq"}


def duplicate_names(config: ModelConfig) -> dict[str, str]:
    """Tensor that may repeat another one -> that other: an output head tied to the embedding."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.is_tied else {}


def _layer_parameters(config: ModelConfig, layer: int) -> list[ParameterSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.query_size, config.kv_size
    attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
    prefix = f"layers.{layer}."

    def linear(
        name: str, folder: str, parts: dict[str, int], columns: int, has_bias: bool
    ) -> list[ParameterSpec]:
        specs = [
            ParameterSpec(
                f"{prefix}{name}.weight",
                tuple(Source(f"{folder}{part}.weight", (n, columns)) for part, n in parts.items()),
            )
        ]
        if has_bias:
            biases = tuple(Source(f"{folder}{part}.bias", (n,)) for part, n in parts.items())
            specs.append(ParameterSpec(f"{prefix}{name}.bias", biases))
        return specs

    def norm(name: str, source: str, size: int) -> ParameterSpec:
        return _single(prefix + name, f"{source}.weight", (size,))

    head_norms = [
        norm("query_norm", attention + "q_norm", config.head_dim),
        norm("key_norm", attention + "k_norm", config.head_dim),
    ]
    qkv = {"q_proj": query, "k_proj": kv, "v_proj": kv}
    gate_up = {"gate_proj": inner, "up_proj": inner}
    return [
        norm("input_norm", f"model.layers.{layer}.input_layernorm", hidden),
        *linear("qkv", attention, qkv, hidden, config.has_qkv_bias),
        *(head_norms if config.has_qk_norm else []),
        *linear("output", attention, {"o_proj": hidden}, query, config.has_output_bias),
        norm("post_norm", f"model.layers.{layer}.post_attention_layernorm", hidden),
        *linear("gate_up", mlp, gate_up, hidden, config.has_mlp_bias),
        *linear("down", mlp, {"down_proj": hidden}, inner, config.has_mlp_bias),
    ]


def _single(name: str, source: str, shape: tuple[int, ...]) -> ParameterSpec:
    return ParameterSpec(name, (Source(source, shape),))


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


def check_weights(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> None:
    """`CheckpointError` unless every tensor (by name, of all files) has one use and every use has
    its tensor."""
    if packed := next((name for name in headers if name.endswith(_QUANTISED)), None):
        raise CheckpointError(
            f"{headers[packed].file}: {packed} is of quantised weights, which are not supported; "
            "give an unquantised checkpoint"
        )
    specs = decoder_parameters(config)
    sources = {source.name: source for spec in specs for source in spec.sources}
    if missing := [name for name in sources if name not in headers]:
        files = {header.file for header in headers.values()}
        where = files.pop() if len(files) == 1 else INDEX
        raise CheckpointError(f"{where}: {_list('missing tensor', missing)}")
    duplicates = duplicate_names(config)
    known = {*sources, *duplicates, *ignorable_names(config)}
    if unused := [name for name in headers if name not in known]:
        raise CheckpointError(f"{headers[unused[0]].file}: {_list('unused tensor', unused)}")
    for source in sources.values():
        _check_weight(source, headers[source.name])
    for name, original in duplicates.items():
        if name in headers:
            _check_weight(Source(name, sources[original].shape), headers[name])


def _check_weight(wanted: Source, header: TensorHeader) -> None:
    if header.shape != wanted.shape:
        raise CheckpointError(
            f"{header.file}: {wanted.name} has shape {list(header.shape)}, "
            f"config.json asks for {list(wanted.shape)}"
        )
    if header.dtype not in _DTYPES:
        raise CheckpointError(
            f"{header.file}: {wanted.name} is {header.dtype}, supported are {', '.join(_DTYPES)}"
        )


def _list(what: str, names: Sequence[str]) -> str:
    plural = "s" if len(names) > 1 else ""
    return f"{len(names)} {what}{plural}: {list_names(names)}"
