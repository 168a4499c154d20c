"""BLOOM and MPT: slopes in place of positions (ALiBi)."""

import math
from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig, WeightNames
from inflight_backend.models.families.classic.gpt2 import num_positions, with_inner
from inflight_backend.models.families.classic.gptj import NEOX_NAMES
from inflight_backend.models.families.registry import (
    layer_norm,
    read_plain,
    register_family,
)


@register_family("BloomForCausalLM", "bloom")
def bloom(reader: JsonReader) -> ModelConfig:
    """ALiBi instead of positions; embeddings are normed."""
    reader = with_inner(
        reader,
        hidden_size=reader.first_of("n_embed", "hidden_size"),
        num_attention_heads=reader.first_of("n_head", "num_attention_heads"),
        num_hidden_layers="n_layer",
        intermediate_size="n_inner",
    )
    if reader.boolean(key := "apply_residual_connection_post_layernorm", default=False):
        reader.fail(key, "true is not supported")
    reader = reader.with_values(max_position_embeddings=num_positions(reader, "seq_length", 2048))
    names = replace(
        NEOX_NAMES, prefix="transformer.", layers="h.", embedding="word_embeddings",
        embedding_norm="word_embeddings_layernorm", final_norm="ln_f", head="lm_head",
        attention="self_attention.",
    )  # fmt: skip
    model = read_plain(
        reader,
        norm=layer_norm(reader, "layer_norm_epsilon"),
        names=names,
        tied=True,
        bias=True,
        gated=False,
        activation="gelu_tanh",
        rope=False,
    )
    slopes = alibi_slopes(num_heads_of(model))
    model = model.with_attention(lambda *_: {"slopes": slopes})
    return replace(model, has_embedding_norm=True)


def num_heads_of(model: ModelConfig) -> int:
    return model.layers[0].attention.num_heads


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Slopes of BLOOM and Falcon (arXiv 2108.12409): powers of two for the largest power of two of
    heads, every other one of twice as many for the rest."""
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    rest = range(num_heads - whole)
    return (*slopes, *(2 ** (-4 * (2 * head + 1) / whole) for head in rest))


def mpt_slopes(num_heads: int, bias_max: float) -> tuple[float, ...]:
    """Slopes of MPT: those of the next power of two of heads, every other one first."""
    whole = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2 ** (-bias_max * (head + 1) / whole) for head in range(whole)]
    if whole == num_heads:
        return tuple(slopes)
    return tuple((slopes[1::2] + slopes[::2])[:num_heads])


@register_family("MptForCausalLM", "mpt")
@register_family("MPTForCausalLM", "mpt")
def mpt(reader: JsonReader) -> ModelConfig:
    """ALiBi, no biases, bounded queries, keys and values."""
    reader = with_inner(
        reader, hidden_size="d_model", num_attention_heads="n_heads", num_hidden_layers="n_layers",
        max_position_embeddings="max_seq_len", intermediate_size="ffn_hidden_size",
    )  # fmt: skip
    names = WeightNames(
        prefix="transformer.",
        layers="blocks.",
        embedding="wte",
        final_norm="norm_f",
        input_norm="norm_1",
        mlp_norm="norm_2",
        attention="attn.",
        qkv="Wqkv",
        output="out_proj",
        mlp="ffn.",
        up="up_proj",
        down="down_proj",
    )
    section = reader.section("attn_config")
    model = read_plain(
        reader,
        norm=layer_norm(reader, "layer_norm_epsilon", has_bias=False),
        names=names,
        tied=True,
        bias=False,
        gated=False,
        activation="gelu",
        rope=False,
    )
    changes: dict[str, object] = {}
    if section.boolean("alibi", default=True):
        bias_max = section.number("alibi_bias_max", default=8.0)
        changes["slopes"] = mpt_slopes(num_heads_of(model), bias_max)
    for key, name in (("clip_qkv", "clip"), ("softmax_scale", "scale")):
        if key in section:
            changes[name] = section.number(key)
    return model.with_attention(lambda *_: changes)
