"""Decoders inside multimodal checkpoints: images and sounds are left out, texts are served."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.families.registry import read_by_type, register_family

WRAPPERS = {
    "Gemma3ForConditionalGeneration": ("gemma3", "gemma3_text"),
    "Gemma3nForConditionalGeneration": ("gemma3n", "gemma3n_text"),
    "Gemma4ForConditionalGeneration": ("gemma4", "gemma4_text"),
    "Llama4ForConditionalGeneration": ("llama4", "llama4_text"),
    "LlavaForConditionalGeneration": ("llava", "llama"),
    "LlavaNextForConditionalGeneration": ("llava_next", "llama"),
    "Mistral3ForConditionalGeneration": ("mistral3", "mistral"),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl", "qwen2"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "qwen2"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "qwen3_5_moe_text"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "qwen3"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", "qwen3_moe"),
}
"""By architecture: its ``model_type``, and that of its decoder where ``text_config`` has none."""
_SAME_AS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
_DEFAULTS: dict[str, dict[str, object]] = {
    # The first Gemma 3 checkpoints write only what differs from the 4B model.
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gemma3n_text": {
        "vocab_size": 262_400,
        "hidden_size": 2048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gemma4_text": {"rms_norm_eps": 1e-6},
    # LLaVA 1.5 and Pixtral name little but the kind of decoder.
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
    },
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
"""What ``text_config`` need not write, by the decoder's ``model_type``."""


def read_wrapped(reader: JsonReader, text_type: str) -> ModelConfig:
    """The decoder of ``text_config``, or of the same file where old ones have its keys beside the
    others. What both levels may say, the outer one decides, as in transformers."""
    inner = reader.section("text_config") if "text_config" in reader else reader
    kind = inner.text("model_type", default=text_type) if inner is not reader else text_type
    for key in ("tie_word_embeddings", "dtype", "torch_dtype"):
        if key in reader:
            inner = inner.with_values(**{key: reader.value(key)})
    inner = inner.with_defaults(**_DEFAULTS.get(kind, {}))
    model = read_by_type(inner, _SAME_AS.get(kind, kind))
    return model if "tie_word_embeddings" in inner else replace(model, is_tied=None)


for _architecture, (_model_type, _text_type) in WRAPPERS.items():
    register_family(_architecture, _model_type)(partial(read_wrapped, text_type=_text_type))
