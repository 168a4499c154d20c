"""Falcon 7B, 40B and RW, by the names that each generation of files has."""

import math
from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.families.classic.alibi import alibi_slopes, num_heads_of
from inflight_backend.models.families.classic.gpt2 import num_positions, with_inner
from inflight_backend.models.families.classic.gptj import NEOX_NAMES
from inflight_backend.models.families.registry import (
    layer_norm,
    read_plain,
    register_family,
)


@register_family("FalconForCausalLM", "falcon")
@register_family("RWForCausalLM", "falcon", "RefinedWeb", "RefinedWebModel")
def falcon(reader: JsonReader) -> ModelConfig:
    """7B, 40B and RW: parallel branches with one norm or two, or none parallel with ALiBi."""
    if "num_attention_heads" not in reader:
        reader = reader.with_names(num_attention_heads="n_head", num_hidden_layers="n_layer")
    reader = with_inner(
        reader,
        num_key_value_heads=reader.first_of("num_kv_heads", "n_head_kv"),
        hidden_act="activation",
        intermediate_size="ffn_hidden_size",
    )
    is_new = reader.boolean("new_decoder_architecture", default=False)
    is_parallel = reader.boolean("parallel_attn", default=True)
    has_alibi = reader.boolean("alibi", default=False)
    if not is_new:
        is_shared = reader.boolean("multi_query", default=True)
        num_heads = reader.integer("num_attention_heads")
        reader = reader.with_values(num_key_value_heads=1 if is_shared else num_heads)
    reader = reader.with_values(
        max_position_embeddings=num_positions(reader, "max_position_embeddings", 2048)
    )
    has_two = is_new and reader.integer("num_ln_in_parallel_attn", default=2) == 2
    names = replace(
        NEOX_NAMES, prefix="transformer.", layers="h.", embedding="word_embeddings",
        final_norm="ln_f", head="lm_head", attention="self_attention.", qkv_layout="per_group",
        input_norm="ln_attn" if has_two else "input_layernorm",
        mlp_norm="ln_mlp" if has_two else "post_attention_layernorm",
    )  # fmt: skip
    model = read_plain(
        reader,
        norm=layer_norm(reader, "layer_norm_epsilon"),
        names=names,
        tied=True,
        bias=reader.boolean("bias", default=False),
        gated=False,
        activation=reader.text("hidden_act", default="gelu"),
        rope=not has_alibi,
    )
    if has_alibi:  # of 16 bits, and scaled with the scores
        scale = model.layers[0].attention.scale
        slopes = tuple(_to_bfloat16(each) * scale for each in alibi_slopes(num_heads_of(model)))
        model = model.with_attention(lambda *_: {"slopes": slopes})
    block = ("parallel2" if has_two else "parallel") if is_new or is_parallel else "pre"
    return replace(model, block=block)


def _to_bfloat16(number: float) -> float:
    """The nearest number of 8 significant bits."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 256) / 256, exponent)
