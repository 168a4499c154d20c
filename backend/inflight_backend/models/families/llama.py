"""Llama 1 to 3.x, and families that differ from it by an option or two."""

from dataclasses import replace

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig, WeightNames
from inflight_backend.models.families.registry import (
    read_plain,
    register_family,
    windows_by_type,
)
from inflight_backend.models.families.rope import read_rope


@register_family("LLaMAForCausalLM", "llama", max_position_embeddings=2048)
@register_family("LlamaForCausalLM", "llama", "internlm3")
def llama(reader: JsonReader) -> ModelConfig:
    """The plain decoder, with biases where ``attention_bias`` and ``mlp_bias`` ask for them.

    InternLM3 is saved under this architecture; its biases have names of their own.
    """
    if "qkv_bias" in reader:
        return internlm3(reader)
    return read_plain(reader)


@register_family("InternLM3ForCausalLM", "internlm3")
def internlm3(reader: JsonReader) -> ModelConfig:
    """``qkv_bias`` for query, key and value, ``bias`` for all other linears."""
    has_bias = reader.boolean("bias", default=False)
    model = read_plain(reader, bias=has_bias)
    has_qkv_bias = reader.boolean("qkv_bias", default=False)
    return model.with_attention(lambda *_: {"has_qkv_bias": has_qkv_bias})


@register_family("ArceeForCausalLM", "arcee", hidden_act="relu2")
def arcee(reader: JsonReader) -> ModelConfig:
    """No gate, squared ReLU."""
    return read_plain(reader, gated=False)


@register_family("ApertusForCausalLM", "apertus", rope_theta=1.2e7)
def apertus(reader: JsonReader) -> ModelConfig:
    """Norms of heads, no gate, xIELU."""
    names = WeightNames(input_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
    # Only attention has biases, whatever the file says.
    reader = reader.with_values(mlp_bias=False)
    return read_plain(reader, names=names, qk_norm="head", gated=False, activation="xielu")


@register_family("HeliumForCausalLM", "helium", rope_theta=1e5)
def helium(reader: JsonReader) -> ModelConfig:
    """Neighbours turn together; the output projection has no bias."""
    model = read_plain(reader, is_interleaved=True)
    return model.with_attention(lambda *_: {"has_output_bias": False})


@register_family("SeedOssForCausalLM", "seed_oss")
def seed_oss(reader: JsonReader) -> ModelConfig:
    """``attention_out_bias`` beside ``attention_bias``."""
    model = read_plain(reader)
    has_bias = reader.boolean("attention_out_bias", default=False)
    return model.with_attention(lambda *_: {"has_output_bias": has_bias})


@register_family("CwmForCausalLM", "cwm", rope_theta=1e6)
def cwm(reader: JsonReader) -> ModelConfig:
    """Three of four layers slide."""
    windows = windows_by_type(
        reader,
        reader.integer("sliding_window", default=8192),
        lambda layer: "sliding_attention" if layer % 4 else "full_attention",
    )
    return read_plain(reader, windows=windows)


@register_family("SmolLM3ForCausalLM", "smollm3", rope_theta=2e6)
def smollm3(reader: JsonReader) -> ModelConfig:
    """Layers with a 0 in ``no_rope_layers`` do not turn; where windows are on, they slide."""
    num_layers = reader.integer("num_hidden_layers", maximum=1024)
    turning = reader.integers("no_rope_layers")
    if not turning:
        every = reader.integer("no_rope_layer_interval", default=4)
        turning = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    windows = tuple[int | None, ...]()
    if reader.boolean("use_sliding_window", default=False) and "sliding_window" in reader:
        windows = windows_by_type(
            reader,
            reader.integer("sliding_window"),
            lambda layer: "full_attention" if turning[layer] else "sliding_attention",
        )
    model = read_plain(reader, tied=True, windows=windows)
    return model.with_attention(
        lambda index, attention: {"rope": attention.rope if turning[index] else None}
    )


@register_family("GraniteForCausalLM", "granite")
def granite(reader: JsonReader) -> ModelConfig:
    """Four multipliers."""
    return with_multipliers(reader, read_plain(reader))


def with_multipliers(reader: JsonReader, model: ModelConfig) -> ModelConfig:
    """``model`` with Granite's multipliers of embeddings, scores, branches and logits."""
    scale = reader.number("attention_multiplier", default=1.0)
    model = model.with_attention(lambda *_: {"scale": scale})
    return replace(
        model,
        embedding_scale=reader.number("embedding_multiplier", default=1.0),
        residual_scale=reader.number("residual_multiplier", default=1.0),
        logit_scale=1.0 / reader.number("logits_scaling", default=1.0),
    )


def with_ropes_by_window(
    reader: JsonReader, model: ModelConfig, local_theta: str = "rope_theta"
) -> ModelConfig:
    """``model`` whose layers with and without a window turn in ways of their own. ``local_theta``:
    where old files have the theta of those with one."""
    head_dim = model.head_dim
    full = read_rope(reader, head_dim, kind_of_layer="full_attention")
    local = read_rope(reader, head_dim, kind_of_layer="sliding_attention", theta_key=local_theta)
    return model.with_attention(
        lambda _, attention: {"rope": full if attention.window is None else local}
    )


def without_rope_outside_windows(reader: JsonReader, model: ModelConfig) -> ModelConfig:
    """``model`` with the windows of ``layer_types`` or of a pattern such as "LLLG"; if there are
    any, the layers without do not turn."""
    if "sliding_window" not in reader:
        return model
    default = None
    if "sliding_window_pattern" in reader and "layer_types" not in reader:
        pattern = _pattern(reader)
        default = lambda layer: pattern[layer % len(pattern)]  # noqa: E731
    windows = windows_by_type(reader, reader.integer("sliding_window"), default)
    return model.with_attention(
        lambda index, attention: {
            "window": windows[index],
            "rope": attention.rope if windows[index] is not None else None,
        }
    )


def _pattern(reader: JsonReader) -> list[str]:
    key = "sliding_window_pattern"
    try:
        every = reader.integer(key)
        return ["sliding_attention"] * (every - 1) + ["full_attention"]
    except CheckpointError:
        kinds = {"L": "sliding_attention", "G": "full_attention"}
        return [kinds[letter] for letter in reader.text(key)]
