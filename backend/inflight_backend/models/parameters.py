"""Which parameters a decoder has, and from which tensors of the checkpoint each is assembled.

Fusion is data: a parameter lists its sources, which are concatenated. `check_weights` compares the
list with the headers of a checkpoint; loader and ``inflight plan`` both call it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import DTYPE_TO_BYTES, list_names
from inflight_backend.models.config import ModelConfig


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


class Entry(Protocol):
    """A tensor of a checkpoint as the header of its file describes it."""

    @property
    def file(self) -> str:
        """Name of that file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its dimensions."""

    @property
    def dtype(self) -> str:
        """Its type, by the name that safetensors has for it."""


def check_weights(config: ModelConfig, entries: Mapping[str, Entry], where: str) -> None:
    """`CheckpointError` unless every tensor has one use and every use has its tensor.

    ``entries``: of all files, by name; ``where``: the file to blame if some are missing.
    """
    if packed := next((name for name in entries if name.endswith(_QUANTISED)), None):
        raise CheckpointError(
            f"{entries[packed].file}: {packed} is of quantised weights, which are not supported; "
            "give an unquantised checkpoint"
        )
    specs = decoder_parameters(config)
    sources = {source.name: source for spec in specs for source in spec.sources}
    if missing := [name for name in sources if name not in entries]:
        raise CheckpointError(f"{where}: {_list('missing tensor', missing)}")
    duplicates = duplicate_names(config)
    known = {*sources, *duplicates, *ignorable_names(config)}
    if unused := [name for name in entries if name not in known]:
        raise CheckpointError(f"{entries[unused[0]].file}: {_list('unused tensor', unused)}")
    for source in sources.values():
        _check_weight(source, entries[source.name])
    for name, original in duplicates.items():
        if name in entries:
            _check_weight(Source(name, sources[original].shape), entries[name])


def _check_weight(wanted: Source, entry: Entry) -> None:
    if entry.shape != wanted.shape:
        raise CheckpointError(
            f"{entry.file}: {wanted.name} has shape {list(entry.shape)}, "
            f"config.json asks for {list(wanted.shape)}"
        )
    if entry.dtype not in DTYPE_TO_BYTES:
        raise CheckpointError(
            f"{entry.file}: {wanted.name} is {entry.dtype}, "
            f"supported are {', '.join(DTYPE_TO_BYTES)}"
        )


def _list(what: str, names: Sequence[str]) -> str:
    plural = "s" if len(names) > 1 else ""
    return f"{len(names)} {what}{plural}: {list_names(names)}"
