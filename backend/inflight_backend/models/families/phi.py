"""Phi 1 to 4, dense and the mixture of Phi-3.5-MoE."""

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig, MoeConfig, RoutingConfig, WeightNames
from inflight_backend.models.families.qwen import mixtral_names
from inflight_backend.models.families.registry import (
    layer_norm,
    read_activation,
    read_plain,
    register_family,
)


@register_family("PhiForCausalLM", "phi", hidden_act="gelu_new", partial_rotary_factor=0.5)
def phi(reader: JsonReader) -> ModelConfig:
    """LayerNorm, parallel branches, biases everywhere, a part of a head turns."""
    names = WeightNames(
        output="dense", up="fc1", down="fc2", final_norm="final_layernorm",
        query_norm="q_layernorm", key_norm="k_layernorm",
    )  # fmt: skip
    has_norms = reader.boolean("qk_layernorm", default=False)
    model = read_plain(
        reader,
        norm=layer_norm(reader, "layer_norm_eps"),
        names=names,
        bias=True,
        gated=False,
        is_partial=True,
        qk_norm="biased" if has_norms else None,
    )
    return replace(model, block="parallel", has_head_bias=True)


@register_family("Phi3ForCausalLM", "phi3")
def phi3(reader: JsonReader) -> ModelConfig:
    """Fused projections, windows, longrope."""
    names = WeightNames(qkv="qkv_proj", gate_up="gate_up_proj")
    window = reader.integer("sliding_window") if "sliding_window" in reader else None
    num_layers = reader.integer("num_hidden_layers", maximum=1024)
    return read_plain(
        reader, names=names, bias=False, windows=(window,) * num_layers, is_partial=True
    )


@register_family("PhimoeForCausalLM", "phimoe", rope_theta=1e6)
@register_family("PhiMoEForCausalLM", "phimoe", rope_theta=1e6)
def phimoe(reader: JsonReader) -> ModelConfig:
    """LayerNorm, biases, two experts chosen one after the other."""
    window = reader.integer("sliding_window") if "sliding_window" in reader else None
    num_layers = reader.integer("num_hidden_layers", maximum=1024)
    model = read_plain(
        reader, norm=layer_norm(reader, "rms_norm_eps"), windows=(window,) * num_layers
    )
    jitter = reader.number("router_jitter_noise", default=0.01)
    moe = MoeConfig(
        reader.integer("num_local_experts"),
        2,
        reader.integer("intermediate_size"),
        RoutingConfig("sparsemixer", jitter=jitter),
        activation=read_activation(reader),
    )
    return replace(
        model.with_layers(lambda _, layer: replace(layer, mlp=moe)),
        names=mixtral_names(model.names),
        has_head_bias=reader.boolean("lm_head_bias", default=False),
    )
