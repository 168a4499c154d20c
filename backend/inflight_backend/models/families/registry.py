"""The table of model families, and what most of them read from ``config.json`` alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from inflight_backend.errors import CheckpointError
from inflight_backend.gguf_files import GgufFile, find_gguf, open_gguf
from inflight_backend.models.checkpoint_files import JsonReader, find_config, find_file, list_names
from inflight_backend.models.config import (
    AttentionConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
    WeightNames,
)
from inflight_backend.models.families.rope import read_rope
from inflight_backend.models.gguf.architectures import read_config
from inflight_backend.models.gguf.tensors import with_gguf_tensors
from inflight_backend.models.quantization import configs as quantization_configs

_DTYPES = ("float32", "bfloat16", "float16")
_UNREAD_QUANTIZATION = "quantization"
"""As MLX calls it."""
_ACTIVATIONS = (
    "silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_tanh", "gelu_pytorch_tanh", "relu",
    "relu2",
)  # fmt: skip

# Keys that change nothing of what a decoder computes.
_OF_NO_MEANING = re.compile(
    r"architectures|model_type|auto_map|transformers_version|use_cache|initializer_range|\w+_token_id"
    r"|\w+_dropout|dropout|\w+_pdrop|torch_dtype|dtype|pretraining_tp|\w*aux_loss\w*|output_\w+"
)

ReadFamily = Callable[[JsonReader], ModelConfig]


@dataclass(frozen=True, slots=True)
class Family:
    """``model_types`` are those that config.json may have: transformers goes by them, whatever
    ``architectures`` says. ``defaults``: of keys that a file need not have, beside those of a
    Llama."""

    model_types: tuple[str, ...]
    reads: ReadFamily
    defaults: Mapping[str, object] = field(default_factory=dict)

    def read(self, reader: JsonReader) -> ModelConfig:
        """The model of an open config.json."""
        return self.reads(reader.with_defaults(**self.defaults))


FAMILIES: dict[str, Family] = {}
"""By architecture, as ``architectures`` of config.json has it."""


def register_family(
    architecture: str, *model_types: str, **defaults: object
) -> Callable[[ReadFamily], ReadFamily]:
    """Make the decorated function the reader of an architecture's config.json; for the rest see
    `Family`."""

    def register(read: ReadFamily) -> ReadFamily:
        FAMILIES[architecture] = Family(model_types, read, defaults)
        return read

    return register


def read_published_model(gguf: Path) -> ModelConfig:
    """The model of a GGUF file with the names, and the order of rows, that it had before it was
    converted; recurrences that are tiled stay so."""
    file = open_gguf(gguf)
    model = _read_gguf(file)
    layers = with_gguf_tensors(model, file).layers
    return model.with_attention(lambda index, _: {"delta": layers[index].attention.delta})


def _read_gguf(file: GgufFile) -> ModelConfig:
    return read_family(JsonReader(read_config(file), file.name))


def read_model(folder: Path) -> ModelConfig:
    """The model of a checkpoint's ``config.json``, or of the metadata of a GGUF file;
    `CheckpointError` names the key that is missing or unsupported."""
    if (gguf := find_gguf(folder)) is not None:
        file = open_gguf(gguf)
        return with_gguf_tensors(_read_gguf(file), file)
    model = read_family(JsonReader.from_file(find_config(folder)))
    beside = find_file(folder, "generation_config.json")
    if model.encoder is not None and beside is not None:
        model = replace(
            model, start_ids=read_start_ids(JsonReader.from_file(beside), model.start_ids)
        )
    if model.quantization is not None:
        return model
    return replace(model, quantization=quantization_configs.read_beside(folder))


def read_family(reader: JsonReader) -> ModelConfig:
    """The same from an open reader, by the architecture that it names, else by its
    ``model_type``."""
    kind = reader.text("model_type", default="")
    of_kind = [name for name, family in FAMILIES.items() if kind in family.model_types]
    names = reader.texts("architectures") or of_kind
    if not names:
        reader.fail("architectures", f"is missing; supported: {', '.join(FAMILIES)}")
    if names[0] not in FAMILIES:
        _refuse_architecture(reader, names[0])
    family = FAMILIES[names[0]]
    if kind and kind not in family.model_types:
        wanted = " or ".join(map(repr, family.model_types))
        reader.fail("model_type", f"{kind!r} is not that of {names[0]}, which is {wanted}")
    _refuse_unsupported(reader)
    model = _with_quantization(family.read(reader), reader)
    return replace(model, architecture=names[0])


def read_by_type(reader: JsonReader, model_type: str) -> ModelConfig:
    """The decoder of a part of ``config.json`` that has a ``model_type`` and no architecture, by
    the first family that has it."""
    _refuse_unsupported(reader)
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return _with_quantization(family.read(reader), reader)
    reader.fail("model_type", f"{model_type!r} is not supported")


def _with_quantization(model: ModelConfig, reader: JsonReader) -> ModelConfig:
    found = quantization_configs.read_quantization(reader)
    return model if found is None else replace(model, quantization=found)


def _refuse_architecture(reader: JsonReader, name: str) -> NoReturn:
    """Names what is near: what the name looks like, else the plain decoder; and what that family
    says of the file, or which keys of it that family does not read."""
    nearest = get_close_matches(name, FAMILIES, n=1, cutoff=0.5) or ["LlamaForCausalLM"]
    attempt = reader.watched()
    try:
        FAMILIES[nearest[0]].read(attempt)
        differing = [key for key in attempt.unread() if not _OF_NO_MEANING.fullmatch(key)]
        why = "the keys are the same"
        if differing:
            why = f"it has no use for {list_names(differing)}"
    except CheckpointError as error:
        why = f"it says: {error}"
    reader.fail(
        "architectures", f"{name!r} is not supported; the nearest is {nearest[0]}, and {why}"
    )


def read_plain(
    reader: JsonReader,
    *,
    norm: NormConfig | None = None,
    names: WeightNames | None = None,
    tied: bool = False,
    bias: bool | None = None,
    gated: bool = True,
    activation: str | None = None,
    rope: bool = True,
    is_interleaved: bool = False,
    rotary_dim: int | None = None,
    qk_norm: str | None = None,
    windows: tuple[int | None, ...] = (),
    is_partial: bool = False,
    has_own_layers: bool = False,
    needs_kv_heads: bool = False,
    needs_head_dim: bool = False,
) -> ModelConfig:
    """A model of equal layers, by the keys and with the defaults of Llama.

    ``tied``: the default of ``tie_word_embeddings``. ``bias``: of all linears; None:
    ``attention_bias`` and ``mlp_bias`` say. ``windows``: of each layer; none for all if empty.
    ``is_partial``: the family knows ``partial_rotary_factor``; ``has_own_layers``: it knows
    ``per_layer_config``.
    """
    if not has_own_layers and any(reader.section("per_layer_config")):
        reader.fail("per_layer_config", "is not supported: all layers are the same")
    hidden = reader.integer("hidden_size", maximum=2**17)
    num_heads = reader.integer("num_attention_heads", maximum=2**12)
    num_layers = reader.integer("num_hidden_layers", maximum=1024)
    head_dim = _read_head_dim(reader, hidden, num_heads, is_required=needs_head_dim)
    norm = norm or NormConfig(eps=reader.number("rms_norm_eps"))
    has_bias = reader.boolean("attention_bias", default=False) if bias is None else bias
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=_read_num_kv_heads(reader, num_heads, is_required=needs_kv_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=_read_rope(reader, head_dim, is_interleaved, rotary_dim, is_partial) if rope else None,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm=qk_norm,
        qk_norm_kind=norm,
    )
    mlp = MlpConfig(
        reader.integer("intermediate_size", maximum=2**19),
        activation or read_activation(reader),
        is_gated=gated,
        has_bias=reader.boolean("mlp_bias", default=False) if bias is None else bias,
    )
    windows = windows or (None,) * num_layers
    return ModelConfig(
        architecture="",
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        layers=tuple(LayerConfig(replace(attention, window=window), mlp) for window in windows),
        max_position_embeddings=reader.integer("max_position_embeddings"),
        norm=norm,
        is_tied=reader.boolean("tie_word_embeddings", default=tied),
        dtype=_read_dtype(reader),
        names=names or WeightNames(),
    )


def read_start_ids(reader: JsonReader, others: tuple[int, ...]) -> tuple[int, ...]:
    """What the text of a decoder beside an encoder begins with: ``decoder_start_token_id``, and the
    token that its answer must begin with, if there is one. ``others`` where the file does not say.
    """
    start, forced = (
        (reader.integer(key, minimum=0),) if key in reader else other
        for key, other in (
            ("decoder_start_token_id", others[:1]),
            ("forced_bos_token_id", others[1:]),
        )
    )
    return start + forced


def read_activation(reader: JsonReader, key: str = "hidden_act", default: str = "silu") -> str:
    """The name of an activation function that there is."""
    activation = reader.text(key, default=default)
    if activation not in _ACTIVATIONS:
        reader.fail(key, f"{activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return activation


def layer_norm(reader: JsonReader, key: str, *, has_bias: bool = True) -> NormConfig:
    """LayerNorm with the epsilon of ``key``."""
    return NormConfig("layer", reader.number(key, default=1e-5), has_bias=has_bias)


def _read_rope(
    reader: JsonReader,
    head_dim: int,
    is_interleaved: bool,
    rotary_dim: int | None,
    is_partial: bool,
) -> RopeConfig:
    rope = read_rope(reader, head_dim, is_interleaved=is_interleaved, dim=rotary_dim)
    if rope.dim != (rotary_dim or head_dim) and not is_partial:
        reader.fail("partial_rotary_factor", "other than 1 is not supported")
    return rope


def _read_num_kv_heads(reader: JsonReader, num_heads: int, *, is_required: bool) -> int:
    key = "num_key_value_heads"
    if not is_required and key not in reader:
        return num_heads
    num_kv_heads = reader.integer(key, maximum=2**12)
    if num_heads % num_kv_heads:
        reader.fail(key, f"({num_kv_heads}) must divide num_attention_heads ({num_heads})")
    return num_kv_heads


def _read_head_dim(
    reader: JsonReader, hidden_size: int, num_heads: int, *, is_required: bool
) -> int:
    if is_required or "head_dim" in reader:
        head_dim = reader.integer("head_dim", maximum=1024)
    elif hidden_size % num_heads:
        reader.fail("hidden_size", f"must be a multiple of num_attention_heads ({num_heads})")
    else:
        head_dim = hidden_size // num_heads
    return head_dim


def _refuse_unsupported(reader: JsonReader) -> None:
    if _UNREAD_QUANTIZATION in reader:
        supported = f"{quantization_configs.KEY} of {', '.join(quantization_configs.METHODS)}"
        reader.fail(_UNREAD_QUANTIZATION, f"(of MLX) is not supported; supported: {supported}")
    if not reader.boolean("is_causal", default=True):
        reader.fail("is_causal", "false is not supported: a token sees those before it only")
    if reader.value(key := "use_bidirectional_attention") in (True, "all"):  # "vision": of images
        reader.fail(key, "is not supported: a token sees those before it only")
    if "transformers_weights" in reader:
        reader.fail("transformers_weights", "is not supported; name the weights model.safetensors")


def _read_dtype(reader: JsonReader) -> str:
    key = "dtype" if "dtype" in reader else "torch_dtype"
    dtype = reader.text(key, default="float32")
    if dtype not in _DTYPES:
        reader.fail(key, f"{dtype!r} is not supported; supported: {', '.join(_DTYPES)}")
    return dtype


def layer_kinds(
    reader: JsonReader, *kinds: str, default: Callable[[int], str] | None = None
) -> list[str]:
    """``layer_types``, one of ``kinds`` for each layer; without the key ``default`` of its number
    (None: empty)."""
    num_layers = reader.integer("num_hidden_layers", maximum=1024)
    types = reader.texts("layer_types")
    if not types and default is not None:
        return [default(layer) for layer in range(num_layers)]
    if types and len(types) != num_layers:
        reader.fail("layer_types", f"has {len(types)} entries for {num_layers} layers")
    for kind in types:
        if kind not in kinds:
            reader.fail("layer_types", f"holds {kind!r}, which is not supported")
    return types


def windows_by_type(
    reader: JsonReader, window: int | None, default: Callable[[int], str] | None = None
) -> tuple[int | None, ...]:
    """``window`` for each layer that ``layer_types`` lets slide, None for the others.

    Empty without that key and ``default``. ``window`` None: none may slide.
    """
    types = layer_kinds(reader, "full_attention", "sliding_attention", default=default)
    if window is None and "sliding_attention" in types:
        reader.fail("layer_types", "holds 'sliding_attention', and there is no sliding window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def qwen_windows(reader: JsonReader) -> tuple[int | None, ...]:
    """Sliding windows of Qwen: off unless ``use_sliding_window``; the first layers see all.

    ``layer_types`` says it per layer; without it ``max_window_layers`` layers come before the
    first that slides.
    """
    if not reader.boolean("use_sliding_window", default=False):
        return windows_by_type(reader, None)

    def default(layer: int) -> str:
        first = reader.integer("max_window_layers", minimum=0)
        return "full_attention" if layer < first else "sliding_attention"

    return windows_by_type(reader, reader.integer("sliding_window"), default)
