"""OLMo 1 to 3, and NanoChat: norms without weights, or behind the branches."""

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig, NormConfig, WeightNames
from inflight_backend.models.families.llama import with_ropes_by_window
from inflight_backend.models.families.registry import (
    read_plain,
    register_family,
    windows_by_type,
)
from inflight_backend.models.families.rope import without_scale


@register_family("OlmoForCausalLM", "olmo")
def olmo(reader: JsonReader) -> ModelConfig:
    """LayerNorm without weights; ``clip_qkv`` bounds queries, keys and values."""
    model = read_plain(reader, norm=NormConfig("layer", 1e-5, has_weight=False))
    clip = reader.number("clip_qkv") if "clip_qkv" in reader else None
    return model.with_attention(lambda *_: {"clip": clip})


@register_family("Olmo2ForCausalLM", "olmo2")
@register_family("Olmo3ForCausalLM", "olmo3", rope_theta=5e5)
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


@register_family("NanoChatForCausalLM", "nanochat", hidden_act="relu2")
def nanochat(reader: JsonReader) -> ModelConfig:
    """Norms without weights, of embeddings and heads too; heads turn backwards; no gate, squared
    ReLU; a soft cap of the logits."""
    norm = NormConfig(eps=reader.number("rms_norm_eps", default=1e-6), has_weight=False)
    names = WeightNames(up="fc1", down="fc2")
    model = read_plain(reader, norm=norm, names=names, qk_norm="plain", gated=False, bias=False)
    has_bias = reader.boolean("attention_bias", default=False)
    model = model.with_attention(
        lambda _, attention: {
            "rope": (rope := without_scale(attention.rope)) and replace(rope, is_backwards=True),
            "has_qkv_bias": has_bias,
            "has_output_bias": has_bias,
        }
    )
    key = "final_logit_softcapping"
    cap = None if reader.is_null(key) else reader.number(key, default=15.0)
    return replace(model, has_embedding_norm=True, final_softcap=cap)
