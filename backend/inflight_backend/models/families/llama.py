"""Llama 1 to 3.x, and families that differ from it by an option or two."""

from dataclasses import replace

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig, NormConfig, WeightNames
from inflight_backend.models.families.registry import (
    layer_norm,
    read_plain,
    register_family,
    windows_by_type,
)
from inflight_backend.models.families.rope import read_rope


@register_family("LlamaForCausalLM", "llama", "internlm3")
@register_family("LLaMAForCausalLM", "llama")
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


@register_family("ArceeForCausalLM", "arcee")
def arcee(reader: JsonReader) -> ModelConfig:
    """No gate, squared ReLU."""
    return read_plain(reader, gated=False)


@register_family("ApertusForCausalLM", "apertus")
def apertus(reader: JsonReader) -> ModelConfig:
    """Norms of heads, no gate, xIELU."""
    names = WeightNames(input_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
    return read_plain(reader, names=names, qk_norm="head", gated=False, activation="xielu")


@register_family("HeliumForCausalLM", "helium")
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


@register_family("CwmForCausalLM", "cwm")
def cwm(reader: JsonReader) -> ModelConfig:
    """Three of four layers slide."""
    windows = windows_by_type(
        reader,
        reader.integer("sliding_window", default=8192),
        lambda layer: "sliding_attention" if layer % 4 else "full_attention",
    )
    return read_plain(reader, windows=windows)


@register_family("SmolLM3ForCausalLM", "smollm3")
def smollm3(reader: JsonReader) -> ModelConfig:
    """Layers with a 0 in ``no_rope_layers`` do not turn."""
    model = read_plain(reader, tied=True)
    turning = reader.integers("no_rope_layers")
    if not turning:
        every = reader.integer("no_rope_layer_interval", default=4)
        turning = [int((layer + 1) % every != 0) for layer in range(model.num_layers)]
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


@register_family("OlmoForCausalLM", "olmo")
def olmo(reader: JsonReader) -> ModelConfig:
    """LayerNorm without weights; ``clip_qkv`` bounds queries, keys and values."""
    model = read_plain(reader, norm=NormConfig("layer", 1e-5, has_weight=False))
    clip = reader.number("clip_qkv") if "clip_qkv" in reader else None
    return model.with_attention(lambda *_: {"clip": clip})


@register_family("Olmo2ForCausalLM", "olmo2")
@register_family("Olmo3ForCausalLM", "olmo3")
def olmo2(reader: JsonReader) -> ModelConfig:
    """Norms behind the branches, and over all heads at once; OLMo 3 has windows, and YaRN for the
    layers without."""
    names = WeightNames(
        attention_output_norm="post_attention_layernorm",
        mlp_output_norm="post_feedforward_layernorm",
    )
    window = reader.integer("sliding_window") if "sliding_window" in reader else None
    windows = windows_by_type(reader, window)
    model = read_plain(reader, names=names, qk_norm="full", windows=windows, rope=False)
    return replace(with_ropes_by_window(reader, model), block="post")


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


@register_family("NemotronForCausalLM", "nemotron")
def nemotron(reader: JsonReader) -> ModelConfig:
    """LayerNorm whose weights have 1 added, no gate, squared ReLU, half of a head turns."""
    norm = replace(layer_norm(reader, "norm_eps"), offset=1.0)
    return read_plain(reader, norm=norm, gated=False, is_partial=True)


@register_family("StableLmForCausalLM", "stablelm")
def stablelm(reader: JsonReader) -> ModelConfig:
    """LayerNorm; 2-12B has parallel branches and a norm for each head."""
    model = read_plain(reader, norm=layer_norm(reader, "layer_norm_eps"), is_partial=True)
    has_bias = reader.boolean("use_qkv_bias", default=False)
    has_head_norms = reader.boolean("qk_layernorm", default=False)
    head_norm = replace(model.norm, has_bias=False)
    model = model.with_attention(
        lambda *_: {
            "has_qkv_bias": has_bias,
            "qk_norm": "per_head_list" if has_head_norms else None,
            "qk_norm_kind": head_norm,
        }
    )
    is_parallel = reader.boolean("use_parallel_residual", default=False)
    names = replace(model.names, query_norm="q_layernorm", key_norm="k_layernorm")
    return replace(model, block="parallel" if is_parallel else "pre", names=names)


@register_family("CohereForCausalLM", "cohere")
def cohere(reader: JsonReader) -> ModelConfig:
    """LayerNorm without bias, parallel branches, neighbours turn together, a scale of logits."""
    norm = layer_norm(reader, "layer_norm_eps", has_bias=False)
    model = read_plain(reader, norm=norm, tied=True, is_interleaved=True)
    has_norm = reader.boolean("use_qk_norm", default=False)
    model = model.with_attention(lambda *_: {"qk_norm": "per_head" if has_norm else None})
    return replace(
        model, block="parallel", logit_scale=reader.number("logit_scale", default=0.0625)
    )


@register_family("Cohere2ForCausalLM", "cohere2")
def cohere2(reader: JsonReader) -> ModelConfig:
    """Cohere whose layers without a window do not turn."""
    every = reader.integer("sliding_window_pattern", default=4)
    windows = windows_by_type(
        reader,
        reader.integer("sliding_window", default=4096),
        lambda layer: "full_attention" if (layer + 1) % every == 0 else "sliding_attention",
    )
    return cohere(reader).with_attention(
        lambda index, attention: {
            "window": windows[index],
            "rope": attention.rope if windows[index] is not None else None,
        }
    )


@register_family("Ernie4_5ForCausalLM", "ernie4_5")
def ernie(reader: JsonReader) -> ModelConfig:
    """Neighbours turn together; ``use_bias`` is for all linears."""
    has_bias = reader.boolean("use_bias", default=False)
    return read_plain(reader, tied=True, bias=has_bias, is_interleaved=True)


@register_family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense")
def hunyuan(reader: JsonReader) -> ModelConfig:
    """Heads are normed after they have turned."""
    names = WeightNames(query_norm="query_layernorm", key_norm="key_layernorm")
    model = read_plain(reader, names=names, qk_norm="head")
    return model.with_attention(lambda *_: {"is_norm_after_rope": True})


@register_family("Exaone4ForCausalLM", "exaone4")
def exaone4(reader: JsonReader) -> ModelConfig:
    """Norms behind the branches and of heads; where some layers have windows, the others do not
    turn."""
    names = WeightNames(
        attention_output_norm="post_attention_layernorm",
        mlp_output_norm="post_feedforward_layernorm",
    )
    model = read_plain(reader, names=names, qk_norm="head")
    return replace(without_rope_outside_windows(reader, model), block="post")


_GLM_NAMES = WeightNames(gate_up="gate_up_proj")


@register_family("GlmForCausalLM", "glm")
def glm(reader: JsonReader) -> ModelConfig:
    """Biases on query, key and value."""
    model = read_plain(reader, names=_GLM_NAMES, is_interleaved=True, is_partial=True)
    return model.with_attention(lambda *_: {"has_output_bias": False})


@register_family("Glm4ForCausalLM", "glm4")
def glm4(reader: JsonReader) -> ModelConfig:
    """Norms before and behind both branches."""
    return replace(glm(reader), block="sandwich")


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
