"""The GPT line: GPT-2, GPT-J, CodeGen, GPT-Neo, GPT-NeoX, GPT-BigCode, StarCoder2, OPT, BLOOM, MPT,
Falcon, Persimmon, BioGPT: LayerNorm with biases, and no gate."""

import math
from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig, NormConfig, WeightNames
from inflight_backend.models.families.registry import (
    layer_norm,
    read_plain,
    register_family,
)

_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "intermediate_size": "n_inner",
}
_GPT2_NAMES = WeightNames(
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


def _with_inner(reader: JsonReader, **keys: str) -> JsonReader:
    """``reader`` by the names of ``keys``, with 4 x hidden_size where there is no inner size. None
    of these families has fewer key heads than query heads but those that say so."""
    named = reader.with_names(**keys)
    if "num_key_value_heads" not in keys:
        named = named.with_values(num_key_value_heads=None)
    if "intermediate_size" in named:
        return named
    size = 4 * named.integer("hidden_size", maximum=2**17)
    return named.with_values(intermediate_size=size)


@register_family("GPT2LMHeadModel", "gpt2")
def gpt2(reader: JsonReader) -> ModelConfig:
    """A learned table of positions; weights are [inputs, outputs]."""
    reader = _with_inner(reader, **_GPT2_KEYS)
    model = read_plain(
        reader,
        norm=layer_norm(reader, "layer_norm_epsilon"),
        names=replace(_GPT2_NAMES, is_transposed=True),
        tied=True,
        bias=True,
        gated=False,
        activation="gelu_new",
        rope=False,
    )
    return replace(model, position_offset=0)


@register_family("GPTBigCodeForCausalLM", "gpt_bigcode")
def gpt_bigcode(reader: JsonReader) -> ModelConfig:
    """GPT-2 with one key and value head, or with q, k and v of each head side by side."""
    reader = _with_inner(reader, **_GPT2_KEYS)
    is_shared = reader.boolean("multi_query", default=True)
    if is_shared:
        reader = reader.with_values(num_key_value_heads=1)
    names = replace(_GPT2_NAMES, qkv_layout="rows" if is_shared else "per_head")
    model = read_plain(
        reader,
        norm=layer_norm(reader, "layer_norm_epsilon"),
        names=names,
        tied=True,
        bias=True,
        gated=False,
        rope=False,
    )
    return replace(model, position_offset=0)


@register_family("GPTJForCausalLM", "gptj")
def gptj(reader: JsonReader) -> ModelConfig:
    """Parallel branches, neighbours turn together, biases behind attention and of the head."""
    reader = _with_inner(reader, **_GPT2_KEYS)
    names = replace(
        _GPT2_NAMES, qkv=None, output="out_proj", up="fc_in", down="fc_out",
    )  # fmt: skip
    return _parallel_gpt(reader, names)


@register_family("CodeGenForCausalLM", "codegen")
def codegen(reader: JsonReader) -> ModelConfig:
    """GPT-J with a fused projection in four blocks."""
    reader = _with_inner(reader, **_GPT2_KEYS)
    names = replace(
        _GPT2_NAMES, qkv="qkv_proj", qkv_layout="codegen", output="out_proj", up="fc_in",
        down="fc_out",
    )  # fmt: skip
    return _parallel_gpt(reader, names)


def _parallel_gpt(reader: JsonReader, names: WeightNames) -> ModelConfig:
    model = read_plain(
        reader,
        norm=layer_norm(reader, "layer_norm_epsilon"),
        names=names,
        bias=True,
        gated=False,
        is_interleaved=True,
        rotary_dim=reader.integer("rotary_dim", default=64),
    )
    model = model.with_attention(lambda *_: {"has_qkv_bias": False, "has_output_bias": False})
    return replace(model, block="parallel", has_head_bias=True)


@register_family("GPTNeoForCausalLM", "gpt_neo")
def gpt_neo(reader: JsonReader) -> ModelConfig:
    """Scores are not scaled; some layers see a window."""
    reader = _with_inner(
        reader, num_attention_heads="num_heads", num_hidden_layers="num_layers",
        hidden_act="activation_function",
    )  # fmt: skip
    names = replace(
        _GPT2_NAMES, attention="attn.attention.", qkv=None, output="out_proj", up="c_fc",
        down="c_proj",
    )  # fmt: skip
    kinds, window = reader.texts("attention_layers"), reader.integer("window_size", default=256)
    windows = tuple(window if kind == "local" else None for kind in kinds)
    model = read_plain(
        reader,
        norm=layer_norm(reader, "layer_norm_epsilon"),
        names=names,
        tied=True,
        bias=True,
        gated=False,
        rope=False,
        windows=windows,
    )
    model = model.with_attention(lambda *_: {"scale": 1.0, "has_qkv_bias": False})
    return replace(model, position_offset=0)


_NEOX_NAMES = WeightNames(
    prefix="gpt_neox.",
    embedding="embed_in",
    final_norm="final_layer_norm",
    head="embed_out",
    attention="attention.",
    qkv="query_key_value",
    qkv_layout="per_head",
    output="dense",
    up="dense_h_to_4h",
    down="dense_4h_to_h",
)


@register_family("GPTNeoXForCausalLM", "gpt_neox")
def gpt_neox(reader: JsonReader) -> ModelConfig:
    """Parallel branches with a norm each, a part of a head turns."""
    keys = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
    reader = _with_inner(reader, **keys)
    is_parallel = reader.boolean("use_parallel_residual", default=True)
    model = read_plain(
        reader,
        is_partial=True,
        norm=layer_norm(reader, "layer_norm_eps"),
        names=_NEOX_NAMES,
        bias=True,
        gated=False,
    )
    has_bias = reader.boolean("attention_bias", default=True)
    model = model.with_attention(lambda *_: {"has_qkv_bias": has_bias, "has_output_bias": has_bias})
    return replace(model, block="parallel2" if is_parallel else "pre")


@register_family("PersimmonForCausalLM", "persimmon")
def persimmon(reader: JsonReader) -> ModelConfig:
    """The projections of GPT-NeoX under Llama's names."""
    names = replace(
        _NEOX_NAMES, prefix="model.", embedding="embed_tokens", final_norm="final_layernorm",
        head="lm_head", attention="self_attn.",
    )  # fmt: skip
    names = replace(names, query_norm="q_layernorm", key_norm="k_layernorm")
    has_norms = reader.boolean("qk_layernorm", default=True)
    return read_plain(
        _with_inner(reader),
        is_partial=True,
        norm=layer_norm(reader, "layer_norm_eps"),
        names=names,
        bias=True,
        gated=False,
        qk_norm="biased" if has_norms else None,
    )


@register_family("Starcoder2ForCausalLM", "starcoder2")
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


@register_family("OPTForCausalLM", "opt")
def opt(reader: JsonReader) -> ModelConfig:
    """Positions begin at row 2; the norms of 350m come behind the sums, and its table of tokens is
    narrower than the stream."""
    reader = _with_inner(reader, intermediate_size="ffn_dim", hidden_act="activation_function")
    is_pre = reader.boolean("do_layer_norm_before", default=True)
    first, second = "self_attn_layer_norm", "final_layer_norm"
    names = WeightNames(
        prefix="model.decoder.",
        input_norm=first,
        mlp_norm=second,
        attention_output_norm=first,
        mlp_output_norm=second,
        final_norm="final_layer_norm",
        output="out_proj",
        mlp="",
        up="fc1",
        down="fc2",
    )
    model = read_plain(
        reader,
        norm=NormConfig("layer", 1e-5, has_bias=True),
        names=names,
        tied=True,
        bias=reader.boolean("enable_bias", default=True),
        gated=False,
        rope=False,
    )
    size = reader.integer("word_embed_proj_dim", default=model.hidden_size)
    return replace(
        model,
        block="pre" if is_pre else "post_add",
        position_offset=2,
        embedding_size=size if size != model.hidden_size else None,
        has_final_norm=is_pre and not reader.boolean("_remove_final_layer_norm", default=False),
    )


@register_family("BioGptForCausalLM", "biogpt")
def biogpt(reader: JsonReader) -> ModelConfig:
    """OPT's layers with scaled embeddings."""
    names = WeightNames(
        prefix="biogpt.",
        input_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        final_norm="layer_norm",
        head="output_projection",
        output="out_proj",
        mlp="",
        up="fc1",
        down="fc2",
    )
    model = read_plain(
        _with_inner(reader),
        norm=layer_norm(reader, "layer_norm_eps"),
        names=names,
        tied=True,
        bias=True,
        gated=False,
        rope=False,
    )
    scale = model.hidden_size**0.5 if reader.boolean("scale_embedding", default=True) else 1.0
    return replace(model, position_offset=2, embedding_scale=scale)


@register_family("XGLMForCausalLM", "xglm")
def xglm(reader: JsonReader) -> ModelConfig:
    """BioGPT's layers, whose positions are sines."""
    reader = _with_inner(
        reader, hidden_size="d_model", num_attention_heads="attention_heads",
        num_hidden_layers="num_layers", intermediate_size="ffn_dim",
        hidden_act="activation_function",
    )  # fmt: skip
    model = biogpt(reader.with_values(layer_norm_eps=1e-5))
    return replace(
        model, names=replace(model.names, prefix="model.", head="lm_head"), has_sinusoids=True
    )


@register_family("BloomForCausalLM", "bloom")
def bloom(reader: JsonReader) -> ModelConfig:
    """ALiBi instead of positions; embeddings are normed."""
    reader = _with_inner(
        reader, num_attention_heads="n_head", num_hidden_layers="n_layer",
        intermediate_size="n_inner",
    )  # fmt: skip
    reader = reader.with_values(max_position_embeddings=_positions(reader, "seq_length", 2048))
    names = replace(
        _NEOX_NAMES, prefix="transformer.", layers="h.", embedding="word_embeddings",
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
    slopes = alibi_slopes(_num_heads(model))
    model = model.with_attention(lambda *_: {"slopes": slopes})
    return replace(model, has_embedding_norm=True)


def _positions(reader: JsonReader, key: str, default: int) -> int:
    """Positions of a model whose files may not bound them."""
    return reader.integer(key, default=default)


def _num_heads(model: ModelConfig) -> int:
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
    reader = _with_inner(
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
        changes["slopes"] = mpt_slopes(_num_heads(model), bias_max)
    for key, name in (("clip_qkv", "clip"), ("softmax_scale", "scale")):
        if key in section:
            changes[name] = section.number(key)
    return model.with_attention(lambda *_: changes)


@register_family("FalconForCausalLM", "falcon")
@register_family("RWForCausalLM", "falcon", "RefinedWeb", "RefinedWebModel")
def falcon(reader: JsonReader) -> ModelConfig:
    """7B, 40B and RW: parallel branches with one norm or two, or none parallel with ALiBi."""
    if "num_attention_heads" not in reader:
        reader = reader.with_names(num_attention_heads="n_head", num_hidden_layers="n_layer")
    reader = _with_inner(
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
        max_position_embeddings=_positions(reader, "max_position_embeddings", 2048)
    )
    has_two = is_new and reader.integer("num_ln_in_parallel_attn", default=2) == 2
    names = replace(
        _NEOX_NAMES, prefix="transformer.", layers="h.", embedding="word_embeddings",
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
        slopes = tuple(_to_bfloat16(each) * scale for each in alibi_slopes(_num_heads(model)))
        model = model.with_attention(lambda *_: {"slopes": slopes})
    block = ("parallel2" if has_two else "parallel") if is_new or is_parallel else "pre"
    return replace(model, block=block)


def _to_bfloat16(number: float) -> float:
    """The nearest number of 8 significant bits."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 256) / 256, exponent)
