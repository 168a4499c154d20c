"""GPT-2 and what has its layers: GPT-BigCode, StarCoder2. LayerNorm with biases, no gate."""

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig, WeightNames
from inflight_backend.models.families.registry import (
    layer_norm,
    read_plain,
    register_family,
)

GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "intermediate_size": "n_inner",
}

GPT2_NAMES = WeightNames(
    prefix="transformer.",
    layers="h.",
    embedding="wte",
    positions="wpe",
    final_norm="ln_f",
    input_norm="ln_1",
    mlp_norm="ln_2",
    attention="attn.",
    qkv="c_attn",
    output="c_proj",
    up="c_fc",
    down="c_proj",
)


def with_inner(reader: JsonReader, **keys: str) -> JsonReader:
    """``reader`` by the names of ``keys``, with 4 x hidden_size where there is no inner size. None
    of these families has fewer key heads than query heads but those that say so."""
    named = reader.with_names(**keys)
    if "num_key_value_heads" not in keys:
        named = named.with_values(num_key_value_heads=None)
    if "intermediate_size" in named:
        return named
    size = 4 * named.integer("hidden_size", maximum=2**17)
    return named.with_values(intermediate_size=size)


@register_family("GPT2LMHeadModel", "gpt2", activation_function="gelu_new")
def gpt2(reader: JsonReader) -> ModelConfig:
    """A learned table of positions; weights are [inputs, outputs]."""
    reader = with_inner(reader, **GPT2_KEYS)
    model = read_plain(
        reader,
        norm=layer_norm(reader, "layer_norm_epsilon"),
        names=replace(GPT2_NAMES, is_transposed=True),
        tied=True,
        bias=True,
        gated=False,
        rope=False,
    )
    return replace(_with_scales(reader, model), position_offset=0)


def _with_scales(reader: JsonReader, model: ModelConfig) -> ModelConfig:
    """``model`` whose scores are not divided, or by the number of the layer too, if so said."""
    is_scaled = reader.boolean("scale_attn_weights", default=True)
    by_layer = reader.boolean("scale_attn_by_inverse_layer_idx", default=False)
    return model.with_attention(
        lambda layer, each: {
            "scale": (each.scale if is_scaled else 1.0) / (layer + 1 if by_layer else 1)
        }
    )


@register_family("GPTBigCodeForCausalLM", "gpt_bigcode", activation_function="gelu_pytorch_tanh")
def gpt_bigcode(reader: JsonReader) -> ModelConfig:
    """GPT-2 with one key and value head, or with q, k and v of each head side by side."""
    reader = with_inner(reader, **GPT2_KEYS)
    is_shared = reader.boolean("multi_query", default=True)
    if is_shared:
        reader = reader.with_values(num_key_value_heads=1)
    names = replace(GPT2_NAMES, qkv_layout="rows" if is_shared else "per_head")
    model = read_plain(
        reader,
        norm=layer_norm(reader, "layer_norm_epsilon"),
        names=names,
        tied=True,
        bias=True,
        gated=False,
        rope=False,
    )
    return replace(_with_scales(reader, model), position_offset=0)


@register_family("Starcoder2ForCausalLM", "starcoder2", hidden_act="gelu_pytorch_tanh")
def starcoder2(reader: JsonReader) -> ModelConfig:
    """A Llama with LayerNorm, biases and no gate; all layers slide."""
    window = reader.integer("sliding_window") if "sliding_window" in reader else None
    num_layers = reader.integer("num_hidden_layers", maximum=1024)
    return read_plain(
        reader,
        norm=layer_norm(reader, "norm_epsilon"),
        names=WeightNames(up="c_fc", down="c_proj"),
        tied=True,
        bias=reader.boolean("use_bias", default=True),
        gated=False,
        windows=(window,) * num_layers,
    )


def num_positions(reader: JsonReader, key: str, default: int) -> int:
    """Positions of a model whose files may not bound them."""
    return reader.integer(key, default=default)
