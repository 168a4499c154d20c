"""BART and its like: mBART, M2M-100 and NLLB. LayerNorm and biases everywhere, positions that are
added."""

from __future__ import annotations

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig, NormConfig, WeightNames
from inflight_backend.models.families.encoder_decoder.pair import paired
from inflight_backend.models.families.registry import (
    read_activation,
    read_plain,
    register_family,
)

_POSITION_OFFSET = 2
"""Of the padding token that fairseq counts positions from, and one more."""


@register_family("BartForConditionalGeneration", "bart")
def bart(reader: JsonReader) -> ModelConfig:
    """Norms behind the sums, and one of the embedding."""
    return _read_bart(reader, block="post_add", has_embedding_norm=True)


@register_family("MBartForConditionalGeneration", "mbart")
def mbart(reader: JsonReader) -> ModelConfig:
    """Norms before the branches, one at the end, and one of the embedding."""
    return _read_bart(reader, block="pre", has_embedding_norm=True)


@register_family("M2M100ForConditionalGeneration", "m2m_100")
def m2m_100(reader: JsonReader) -> ModelConfig:
    """mBART with sines for positions, no norm of the embedding and no bias of the head."""
    reader = reader.with_defaults(activation_function="relu", scale_embedding=True)
    model = _read_bart(reader, block="pre", has_embedding_norm=False)
    assert model.encoder is not None
    encoder = replace(model.encoder, has_sinusoids=True)
    return replace(model, has_sinusoids=True, has_head_bias=False, encoder=encoder)


def _read_bart(reader: JsonReader, *, block: str, has_embedding_norm: bool) -> ModelConfig:
    reader = reader.with_names(hidden_size="d_model").with_defaults(activation_function="gelu")

    def read(stack: str) -> ModelConfig:
        is_pre = block == "pre"
        names = WeightNames(
            layers=f"{stack}.layers.",
            embedding="shared",
            embedding_norm=f"{stack}.layernorm_embedding",
            positions=f"{stack}.embed_positions",
            final_norm=f"{stack}.layer_norm",
            input_norm="self_attn_layer_norm",
            attention_output_norm="self_attn_layer_norm",
            mlp_norm="final_layer_norm",
            mlp_output_norm="final_layer_norm",
            output="out_proj",
            mlp="",
            up="fc1",
            down="fc2",
            head_bias="final_logits_bias",
        )
        own = reader.with_names(
            num_hidden_layers=f"{stack}_layers",
            num_attention_heads=f"{stack}_attention_heads",
            intermediate_size=f"{stack}_ffn_dim",
        )
        model = read_plain(
            own,
            norm=NormConfig("layer", 1e-5, has_bias=True),
            names=names,
            tied=True,
            bias=True,
            gated=False,
            activation=read_activation(reader, "activation_function"),
            rope=False,
        )
        is_scaled = reader.boolean("scale_embedding", default=False)
        return replace(
            model,
            block=block,
            has_final_norm=is_pre,
            has_embedding_norm=has_embedding_norm,
            has_head_bias=True,
            position_offset=_POSITION_OFFSET,
            embedding_scale=model.hidden_size**0.5 if is_scaled else 1.0,
            ignored=(r"(model\.)?(encoder|decoder)\.embed_positions\.weights",),
        )

    return paired(read("encoder"), read("decoder"), reader)
