"""OPT, BioGPT and XGLM: tables of positions, or sines, that are added."""

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig, NormConfig, WeightNames
from inflight_backend.models.families.classic.gpt2 import with_inner
from inflight_backend.models.families.registry import (
    read_plain,
    register_family,
)


@register_family("OPTForCausalLM", "opt", activation_function="relu")
def opt(reader: JsonReader) -> ModelConfig:
    """Positions begin at row 2; the norms of 350m come behind the sums, and its table of tokens is
    narrower than the stream."""
    reader = with_inner(reader, intermediate_size="ffn_dim", hidden_act="activation_function")
    has_weights = reader.boolean("layer_norm_elementwise_affine", default=True)
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
        norm=NormConfig("layer", 1e-5, has_weight=has_weights, has_bias=has_weights),
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


@register_family("BioGptForCausalLM", "biogpt", hidden_act="gelu")
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
        with_inner(reader),
        norm=NormConfig("layer", 1e-5, has_bias=True),
        names=names,
        tied=True,
        bias=True,
        gated=False,
        rope=False,
    )
    scale = model.hidden_size**0.5 if reader.boolean("scale_embedding", default=True) else 1.0
    return replace(model, position_offset=2, embedding_scale=scale)


@register_family("XGLMForCausalLM", "xglm", activation_function="gelu")
def xglm(reader: JsonReader) -> ModelConfig:
    """BioGPT's layers, whose positions are sines."""
    reader = with_inner(
        reader, hidden_size="d_model", num_attention_heads="attention_heads",
        num_hidden_layers="num_layers", intermediate_size="ffn_dim",
        hidden_act="activation_function",
    )  # fmt: skip
    model = biogpt(reader)
    return replace(
        model, names=replace(model.names, prefix="model.", head="lm_head"), has_sinusoids=True
    )
