"""T5 and its like: Flan-T5, mT5, UMT5. RMS norms, no biases, and numbers for distances in place of
positions."""

from __future__ import annotations

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig, NormConfig, RelativeBias, WeightNames
from inflight_backend.models.families.encoder_decoder.pair import NO_LIMIT, paired
from inflight_backend.models.families.registry import (
    read_activation,
    read_plain,
    register_family,
)

_KEYS = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "head_dim": "d_kv",
    "intermediate_size": "d_ff",
    "max_position_embeddings": "n_positions",
}
_NAMES = WeightNames(
    prefix="",
    embedding="shared",
    attention="layer.0.SelfAttention.",
    query="q",
    key="k",
    value="v",
    output="o",
    input_norm="layer.0.layer_norm",
    cross="layer.1.EncDecAttention.",
    cross_norm="layer.1.layer_norm",
    gate="wi_0",
    down="wo",
)


@register_family("T5ForConditionalGeneration", "t5")
def t5(reader: JsonReader) -> ModelConfig:
    """The distances of the first layer are those of all. The first release scales what goes to its
    head, which is the embedding; later ones say that it is not, and do not scale."""
    model = _read_t5(reader.with_defaults(feed_forward_proj="relu"))
    key = reader.first_of("scale_decoder_outputs", "tie_word_embeddings")  # later files say both
    if reader.boolean(key, default=True):
        model = replace(model, logit_scale=model.hidden_size**-0.5)
    return model


@register_family("MT5ForConditionalGeneration", "mt5")
def mt5(reader: JsonReader) -> ModelConfig:
    """A T5 of many languages, which never scales."""
    return _read_t5(reader.with_defaults(feed_forward_proj="gated-gelu"))


@register_family("UMT5ForConditionalGeneration", "umt5")
def umt5(reader: JsonReader) -> ModelConfig:
    """Each layer has distances of its own."""
    model = _read_t5(reader.with_defaults(feed_forward_proj="gated-gelu"), has_own_bias=True)
    if reader.boolean("tie_word_embeddings", default=True):
        model = replace(model, logit_scale=model.hidden_size**-0.5)
    return model


def _read_t5(reader: JsonReader, *, has_own_bias: bool = False) -> ModelConfig:
    reader = reader.with_names(**_KEYS).with_defaults(max_position_embeddings=512)
    num_layers = reader.integer("num_layers", maximum=1024)
    num_own = reader.integer("num_decoder_layers", default=num_layers, maximum=1024)
    gate, _, kind = reader.text("feed_forward_proj").rpartition("-")
    if gate not in ("", "gated"):
        reader.fail("feed_forward_proj", "must be the name of an activation, or gated- and it")
    activation = "gelu_new" if (gate, kind) == ("gated", "gelu") else kind
    reader = reader.with_values(hidden_act=activation)
    activation = read_activation(reader)
    is_gated = gate == "gated"

    def read(stack: str, mlp: int, count: int) -> ModelConfig:
        names = replace(
            _NAMES,
            layers=f"{stack}.block.",
            final_norm=f"{stack}.final_layer_norm",
            mlp_norm=f"layer.{mlp}.layer_norm",
            mlp=f"layer.{mlp}.DenseReluDense.",
            up="wi_1" if is_gated else "wi",
        )
        model = read_plain(
            reader.with_values(num_hidden_layers=count, tie_word_embeddings=False),
            norm=NormConfig(eps=reader.number("layer_norm_epsilon", default=1e-6)),
            names=names,
            bias=False,
            gated=is_gated,
            activation=activation,
            rope=False,
            needs_head_dim=True,
        )
        bias = RelativeBias(
            reader.integer("relative_attention_num_buckets", default=32, minimum=4),
            reader.integer("relative_attention_max_distance", default=128, maximum=2**16),
            is_bidirectional=stack == "encoder",
        )
        if bias.max_distance <= bias.num_buckets // 2:
            reader.fail(
                "relative_attention_max_distance",
                f"must be above half of the {bias.num_buckets} buckets, not {bias.max_distance}",
            )
        model = model.with_attention(
            lambda layer, _: {
                "scale": 1.0,
                "relative_bias": replace(bias, layer=layer if has_own_bias else 0),
            }
        )
        ignored = (
            r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        )
        return replace(model, ignored=ignored)

    encoder = replace(read("encoder", 1, num_layers), max_position_embeddings=NO_LIMIT)
    return paired(encoder, read("decoder", 2, num_own), reader)
