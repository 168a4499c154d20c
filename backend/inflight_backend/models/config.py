"""`config.json` of a checkpoint, checked and as a `ModelConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from inflight_backend.models.checkpoint_files import JsonReader, find_config
from inflight_backend.models.families.registry import FAMILIES, DecoderOptions

# Keys of one `rope_type`; of other types we would compute wrong positions, so they are refused.
_ROPE_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}
_DTYPES = ("float32", "bfloat16", "float16")
# As transformers, MLX and the first compressed-tensors call it.
_QUANTIZATION_KEYS = ("quantization_config", "quantization", "compression_config")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. The last three fields belong to ``kind`` llama3."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder. ``sliding_windows`` has one entry per layer, None where it sees all."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    is_tied: bool
    dtype: str
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    sliding_windows: tuple[int | None, ...]

    @property
    def query_size(self) -> int:
        """Columns of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read ``config.json``; `CheckpointError` names the key that is missing or unsupported."""
        return cls.from_reader(JsonReader.from_file(find_config(folder)))

    @classmethod
    def from_reader(cls, reader: JsonReader) -> ModelConfig:
        """The same from an open reader."""
        architecture = _read_architecture(reader)
        _refuse_unsupported(reader)
        options = FAMILIES[architecture].read_options(reader)
        hidden_size = reader.integer("hidden_size", maximum=2**17)
        num_heads = reader.integer("num_attention_heads", maximum=2**12)
        num_kv_heads = _read_num_kv_heads(reader, options, num_heads)
        num_layers = reader.integer("num_hidden_layers", maximum=1024)
        max_positions = reader.integer("max_position_embeddings")
        return cls(
            architecture=architecture,
            vocab_size=reader.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.integer("intermediate_size", maximum=2**19),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_read_head_dim(reader, options, hidden_size, num_heads),
            rms_norm_eps=reader.number("rms_norm_eps"),
            max_position_embeddings=max_positions,
            rope=_read_rope(reader, max_positions),
            is_tied=reader.boolean("tie_word_embeddings", default=False),
            dtype=_read_dtype(reader),
            has_qkv_bias=options.has_qkv_bias,
            has_output_bias=options.has_output_bias,
            has_mlp_bias=options.has_mlp_bias,
            has_qk_norm=options.has_qk_norm,
            sliding_windows=options.sliding_windows or (None,) * num_layers,
        )


def _read_architecture(reader: JsonReader) -> str:
    names = reader.texts("architectures")
    supported = ", ".join(FAMILIES)
    if not names:
        reader.fail("architectures", f"is missing; supported: {supported}")
    if names[0] not in FAMILIES:
        reader.fail("architectures", f"{names[0]!r} is not supported; supported: {supported}")
    wanted = FAMILIES[names[0]].model_type
    if (found := reader.text("model_type", default=wanted)) != wanted:
        reader.fail("model_type", f"{found!r} is not that of {names[0]}, which is {wanted!r}")
    return names[0]


def _read_num_kv_heads(reader: JsonReader, options: DecoderOptions, num_heads: int) -> int:
    key = "num_key_value_heads"
    if options.is_num_kv_heads_required or key in reader:
        num_kv_heads = reader.integer(key, maximum=2**12)
    else:
        num_kv_heads = num_heads
    if num_heads % num_kv_heads:
        reader.fail(key, f"({num_kv_heads}) must divide num_attention_heads ({num_heads})")
    return num_kv_heads


def _read_head_dim(
    reader: JsonReader, options: DecoderOptions, hidden_size: int, num_heads: int
) -> int:
    if options.is_head_dim_required or "head_dim" in reader:
        head_dim = reader.integer("head_dim", maximum=1024)
    elif hidden_size % num_heads:
        reader.fail("hidden_size", f"must be a multiple of num_attention_heads ({num_heads})")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        reader.fail("head_dim", f"must be even, not {head_dim}")
    return head_dim


def _refuse_unsupported(reader: JsonReader) -> None:
    activation = reader.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        reader.fail("hidden_act", f"{activation!r} is not supported; supported: silu")
    for key in _QUANTIZATION_KEYS:
        if key in reader:
            reader.fail(key, "is not supported; give an unquantised checkpoint")
    if not reader.boolean("is_causal", default=True):
        reader.fail("is_causal", "false is not supported: a token sees those before it only")
    if any(reader.section("per_layer_config")):
        reader.fail("per_layer_config", "is not supported: all layers are the same")
    if "transformers_weights" in reader:
        reader.fail("transformers_weights", "is not supported; name the weights model.safetensors")


def _read_dtype(reader: JsonReader) -> str:
    key = "dtype" if "dtype" in reader else "torch_dtype"
    dtype = reader.text(key, default="float32")
    if dtype not in _DTYPES:
        reader.fail(key, f"{dtype!r} is not supported; supported: {', '.join(_DTYPES)}")
    return dtype


def _read_rope(reader: JsonReader, max_positions: int) -> RopeConfig:
    """``rope_parameters`` as transformers 5 writes it, or ``rope_scaling`` and ``rope_theta``."""
    section = _rope_section(reader)
    theta = section.number("rope_theta", default=reader.number("rope_theta", default=10_000.0))
    kind = section.text("rope_type", default=section.text("type", default="default"))
    if kind not in _ROPE_KEYS:
        section.fail("rope_type", f"{kind!r} is not supported; supported: {', '.join(_ROPE_KEYS)}")
    for place in (section, reader):
        if place.number("partial_rotary_factor", default=1.0) != 1.0:
            place.fail("partial_rotary_factor", "other than 1 is not supported")
    known = _ROPE_KEYS[kind] | {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    for key in section:
        if key not in known:
            section.fail(key, f"is not supported with rope_type {kind}")
    if kind == "default":
        return RopeConfig(theta)
    factor = section.number("factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        section.fail("high_freq_factor", f"({high}) must be above low_freq_factor ({low})")
    key = "original_max_position_embeddings"
    outside = reader.integer(key, default=max_positions)
    original = section.integer(key, default=outside)
    if key in reader and outside != original:  # releases of transformers differ in which they take
        reader.fail(key, f"({outside}) is not that of the rope ({original})")
    return RopeConfig(theta, kind, factor, low, high, original)


def _rope_section(reader: JsonReader) -> JsonReader:
    """``rope_parameters`` or ``rope_scaling``, whichever says anything.

    A file of transformers 5 to which a user has added the model card's setting for longer
    contexts has both: it takes the second then, and forgets the theta of the first.
    """
    new, old = reader.section("rope_parameters"), reader.section("rope_scaling")
    if not any(old):
        return new
    if any(new) and not new.equals(old):
        reader.fail("rope_scaling", "is given beside rope_parameters and differs; keep one of them")
    return old
