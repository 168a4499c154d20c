"""GPT-J, CodeGen, GPT-Neo, GPT-NeoX and Persimmon: most have parallel branches."""

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig, WeightNames
from inflight_backend.models.families.classic.gpt2 import GPT2_KEYS, GPT2_NAMES, with_inner
from inflight_backend.models.families.registry import (
    layer_norm,
    read_plain,
    register_family,
)


@register_family("GPTJForCausalLM", "gptj", activation_function="gelu_new")
def gptj(reader: JsonReader) -> ModelConfig:
    """Parallel branches, neighbours turn together, biases behind attention and of the head."""
    reader = with_inner(reader, **GPT2_KEYS)
    names = replace(
        GPT2_NAMES, qkv=None, output="out_proj", up="fc_in", down="fc_out",
    )  # fmt: skip
    return _parallel_gpt(reader, names)


@register_family("CodeGenForCausalLM", "codegen", activation_function="gelu_new")
def codegen(reader: JsonReader) -> ModelConfig:
    """GPT-J with a fused projection in four blocks."""
    reader = with_inner(reader, **GPT2_KEYS)
    names = replace(
        GPT2_NAMES, qkv="qkv_proj", qkv_layout="codegen", output="out_proj", up="fc_in",
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


@register_family("GPTNeoForCausalLM", "gpt_neo", activation_function="gelu_new")
def gpt_neo(reader: JsonReader) -> ModelConfig:
    """Scores are not scaled; some layers see a window."""
    reader = with_inner(
        reader, num_attention_heads="num_heads", num_hidden_layers="num_layers",
        hidden_act="activation_function",
    )  # fmt: skip
    names = replace(
        GPT2_NAMES, attention="attn.attention.", qkv=None, output="out_proj", up="c_fc",
        down="c_proj",
    )  # fmt: skip
    kinds, window = reader.texts("attention_layers"), reader.integer("window_size", default=256)
    if not kinds:
        num_layers = reader.integer("num_hidden_layers", maximum=1024)
        kinds = [("global", "local")[layer % 2] for layer in range(num_layers)]
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


NEOX_NAMES = WeightNames(
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


@register_family("GPTNeoXForCausalLM", "gpt_neox", hidden_act="gelu", rotary_pct=0.25)
def gpt_neox(reader: JsonReader) -> ModelConfig:
    """Parallel branches with a norm each, a part of a head turns."""
    keys = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
    reader = with_inner(reader, **keys)
    is_parallel = reader.boolean("use_parallel_residual", default=True)
    model = read_plain(
        reader,
        is_partial=True,
        norm=layer_norm(reader, "layer_norm_eps"),
        names=NEOX_NAMES,
        bias=True,
        gated=False,
    )
    has_bias = reader.boolean("attention_bias", default=True)
    model = model.with_attention(lambda *_: {"has_qkv_bias": has_bias, "has_output_bias": has_bias})
    return replace(model, block="parallel2" if is_parallel else "pre")


@register_family("PersimmonForCausalLM", "persimmon", hidden_act="relu2", partial_rotary_factor=0.5)
def persimmon(reader: JsonReader) -> ModelConfig:
    """The projections of GPT-NeoX under Llama's names."""
    names = replace(
        NEOX_NAMES, prefix="model.", embedding="embed_tokens", final_norm="final_layernorm",
        head="lm_head", attention="self_attn.",
    )  # fmt: skip
    names = replace(names, query_norm="q_layernorm", key_norm="k_layernorm")
    has_norms = reader.boolean("qk_layernorm", default=True)
    return read_plain(
        with_inner(reader),
        is_partial=True,
        norm=layer_norm(reader, "layer_norm_eps"),
        names=names,
        bias=True,
        gated=False,
        qk_norm="biased" if has_norms else None,
    )
