"""GLM, and the dense models of lines with mixtures: ERNIE 4.5, Hunyuan, EXAONE 4."""

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig, WeightNames
from inflight_backend.models.families.llama import without_rope_outside_windows
from inflight_backend.models.families.registry import (
    read_plain,
    register_family,
)


@register_family("Ernie4_5ForCausalLM", "ernie4_5", rope_theta=5e5)
def ernie(reader: JsonReader) -> ModelConfig:
    """Neighbours turn together; ``use_bias`` is for all linears."""
    has_bias = reader.boolean("use_bias", default=False)
    return read_plain(reader, tied=True, bias=has_bias, is_interleaved=True)


@register_family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense")
def hunyuan(reader: JsonReader) -> ModelConfig:
    """Heads are normed after they have turned."""
    names = WeightNames(query_norm="query_layernorm", key_norm="key_layernorm")
    model = read_plain(reader, names=names, qk_norm="head")
    return model.with_attention(lambda *_: {"is_norm_after_rope": True})


@register_family("Exaone4ForCausalLM", "exaone4")
def exaone4(reader: JsonReader) -> ModelConfig:
    """Norms behind the branches and of heads; where some layers have windows, the others do not
    turn."""
    names = WeightNames(
        attention_output_norm="post_attention_layernorm",
        mlp_output_norm="post_feedforward_layernorm",
    )
    model = read_plain(reader, names=names, qk_norm="head")
    return replace(without_rope_outside_windows(reader, model), block="post")


_GLM_NAMES = WeightNames(gate_up="gate_up_proj")


@register_family("GlmForCausalLM", "glm", partial_rotary_factor=0.5)
def glm(reader: JsonReader) -> ModelConfig:
    """Biases on query, key and value."""
    model = read_plain(reader, names=_GLM_NAMES, is_interleaved=True, is_partial=True)
    return model.with_attention(lambda *_: {"has_output_bias": False})


@register_family("Glm4ForCausalLM", "glm4", partial_rotary_factor=0.5)
def glm4(reader: JsonReader) -> ModelConfig:
    """Norms before and behind both branches."""
    return replace(glm(reader), block="sandwich")
