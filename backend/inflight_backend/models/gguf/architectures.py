"""The architectures of GGUF, and what their metadata is in ``config.json``.

Facts: the constants of the package `gguf`, and what llama.cpp's conversion does to tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inflight_backend.errors import CheckpointError
from inflight_backend.gguf_files import GgufFile

_KEYS = {
    ".embedding_length": "hidden_size",
    ".feed_forward_length": "intermediate_size",
    ".block_count": "num_hidden_layers",
    ".attention.head_count": "num_attention_heads",
    ".attention.head_count_kv": "num_key_value_heads",
    ".attention.key_length": "head_dim",
    ".context_length": "max_position_embeddings",
    ".rope.freq_base": "rope_theta",
    ".attention.sliding_window": "sliding_window",
    ".attn_logit_softcapping": "attn_logit_softcapping",
    ".final_logit_softcapping": "final_logit_softcapping",
    ".attention.clamp_kqv": "clip_qkv",
    ".expert_used_count": "num_experts_per_tok",
    ".expert_feed_forward_length": "moe_intermediate_size",
    ".expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
}
"""Of all architectures; a key that begins with a dot is below the architecture's name."""

_EPSILONS = (".attention.layer_norm_rms_epsilon", ".attention.layer_norm_epsilon")
_OF_EPSILON = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
"""A family reads one of them."""

_Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """``name`` and ``model_type``: those of config.json. ``keys`` and ``values`` are beside those
    of all; ``read`` finds what else the file says. ``is_permuted``: rows of query and key stand so
    that neighbours turn together. ``names``: tensors that are called in another way than
    elsewhere, by the fields of `WeightNames`.
    """

    name: str
    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[GgufFile, _Values], _Values] | None = None
    is_permuted: bool = False
    names: Mapping[str, Any] = field(default_factory=dict)


def architecture_of(file: GgufFile) -> Architecture:
    """That of an open file; `CheckpointError` names one that is not supported, and those that
    are."""
    name = file.value("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.name}: general.architecture {name!r} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def read_config(file: GgufFile) -> _Values:
    """What ``config.json`` of the model would say. `CheckpointError` where the file does not say
    enough for that."""
    architecture = architecture_of(file)
    try:
        return _read(file, architecture)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(
            f"{file.name}: its metadata lacks a key, or has one of another type ({error!r})"
        ) from None


def _read(file: GgufFile, architecture: Architecture) -> _Values:
    found: _Values = {"rope_theta": 10_000.0}  # of a file that does not say, whatever its family
    for key, name in {**_KEYS, **architecture.keys}.items():
        if (value := file.value(key)) is not None:
            found[name] = _same_in_all_layers(file, key, value)
    if not found.get("sliding_window"):  # Phi-3's is 0 where there is none
        found.pop("sliding_window", None)
    epsilon = next((file.value(key) for key in _EPSILONS if file.value(key) is not None), None)
    found |= dict.fromkeys(_OF_EPSILON, epsilon)
    if "token_embd.weight" in file.tensors:
        found["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    for name, tensor in (
        ("attention_bias", "attn_q"),
        ("mlp_bias", "ffn_down"),
        ("use_bias", "ffn_down"),
    ):
        found[name] = f"blk.0.{tensor}.bias" in file.tensors
    found |= {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "bfloat16",
        "rope_scaling": _read_scaling(file),
        **architecture.values,
    }
    if architecture.read is not None:
        found |= architecture.read(file, found)
    return found


def _same_in_all_layers(file: GgufFile, key: str, value: Any) -> Any:
    """Some keys may have a value for each layer."""
    if not isinstance(value, list) or not value:
        return value
    if any(each != value[0] for each in value):
        raise CheckpointError(f"{file.name}: {key[1:]} differs by layer, which is not supported")
    return value[0]


def _numbers(file: GgufFile, name: str) -> list[float]:
    """A tensor of float32."""
    if file.tensors[name].dtype != "F32":
        raise CheckpointError(f"{file.name}: {name} is {file.tensors[name].dtype}, not F32")
    values: list[float] = file.rows(name).reshape(-1).view(np.float32).astype(float).tolist()
    return values


def _read_scaling(file: GgufFile) -> _Values | None:
    """``rope_scaling``. Divisors of each frequency are in tensors: what "llama3" comes to, and
    those of longrope."""
    prefix = ".rope.scaling."
    original = file.value(f"{prefix}original_context_length")
    if "rope_freqs.weight" in file.tensors:
        divisors = _numbers(file, "rope_freqs.weight")
        same = {"short_factor": divisors, "long_factor": divisors}
        return {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, **same}
    kind = file.value(f"{prefix}type", "none")
    section: _Values = {"rope_type": kind, "factor": file.value(f"{prefix}factor")}
    if "rope_factors_long.weight" in file.tensors:
        section = {
            "rope_type": "longrope",
            "short_factor": _numbers(file, "rope_factors_short.weight"),
            "long_factor": _numbers(file, "rope_factors_long.weight"),
            "attention_factor": file.value(f"{prefix}attn_factor"),
        }
    elif kind == "none":
        return None
    elif kind == "yarn":
        section["beta_fast"] = file.value(f"{prefix}yarn_beta_fast")
        section["beta_slow"] = file.value(f"{prefix}yarn_beta_slow")
        if (slope := file.value(f"{prefix}yarn_log_multiplier")) is not None:
            section["mscale"] = section["mscale_all_dim"] = slope * 10  # it is a tenth
    if kind != "linear":
        section["original_max_position_embeddings"] = original
    return section


def _read_llama(file: GgufFile, _: _Values) -> _Values:
    """Mixtral is a Llama with experts there."""
    if not file.value(".expert_count"):
        return {}
    experts = {"num_local_experts": file.value(".expert_count")}
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **experts}


_WIDE_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Layers of those that scale queries by the width of a head in the stream, not by its own."""


def _read_gemma(file: GgufFile, found: _Values) -> _Values:
    scalar = found.get("head_dim")
    if found.get("num_hidden_layers") == _WIDE_GEMMAS[file.value("general.architecture")]:
        scalar = found["hidden_size"] // found["num_attention_heads"]
    local = file.value(".rope.freq_base_swa", 10_000.0)
    return {"query_pre_attn_scalar": scalar, "rope_local_base_freq": local}


def _read_phi3(file: GgufFile, found: _Values) -> _Values:
    """A part of a head may turn."""
    head_dim = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
    turning = file.value(".rope.dimension_count", head_dim)
    return {"partial_rotary_factor": turning / head_dim}


def _read_olmo2(file: GgufFile, found: _Values) -> _Values:
    """OLMo 3 is one with windows."""
    if "sliding_window" not in found:
        return {}
    pattern = file.value(".attention.sliding_window_pattern")
    if pattern is None:
        pattern = [(layer + 1) % 4 != 0 for layer in range(found["num_hidden_layers"])]
    types = ["sliding_attention" if each else "full_attention" for each in pattern]
    names = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return {**names, "layer_types": types}


def _read_falcon(file: GgufFile, found: _Values) -> _Values:
    kv_heads = found.get("num_key_value_heads", 1)
    return {
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": found.get("intermediate_size"),
        "new_decoder_architecture": kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in file.tensors else 1,
        "bias": "blk.0.attn_qkv.bias" in file.tensors,
    }


def _read_cohere(file: GgufFile, _: _Values) -> _Values:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}


_SIGMOID = 2


def _read_deepseek2(file: GgufFile, found: _Values) -> _Values:
    """V3 scores by sigmoid."""
    turning = file.value(".rope.dimension_count")
    key_length = file.value(".attention.key_length_mla", file.value(".attention.key_length"))
    value_length = file.value(".attention.value_length_mla", file.value(".attention.value_length"))
    num_groups = file.value(".expert_group_count", 1)
    values = {
        "head_dim": None,
        "num_key_value_heads": found.get("num_attention_heads"),
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": key_length - turning if key_length and turning else None,
        "v_head_dim": value_length,
        "n_group": num_groups,
        "topk_group": file.value(".expert_group_used_count", 1),
        "topk_method": "group_limited_greedy" if num_groups > 1 else "greedy",
    }
    has_corrections = any("exp_probs_b" in name for name in file.tensors)
    if file.value(".expert_gating_func", _SIGMOID if has_corrections else None) == _SIGMOID:
        values |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return values


def _read_gpt2(_: GgufFile, found: _Values) -> _Values:
    names = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
    }
    return {new: found.get(old) for old, new in names.items()}


_EXPERTS = {".expert_count": "num_experts"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", read=_read_llama, is_permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM", "qwen2_moe", keys=_EXPERTS, values={"norm_topk_prob": False}
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", keys=_EXPERTS, values={"norm_topk_prob": True}
    ),
    "gemma": Architecture("GemmaForCausalLM", "gemma"),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", read=_read_gemma),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", read=_read_gemma),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", read=_read_phi3),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        keys={
            ".expert_count": "num_local_experts",
            ".expert_feed_forward_length": "intermediate_size",
        },
        read=lambda _, found: {
            "rope_scaling": found["rope_scaling"] and {**found["rope_scaling"], "truncate": False}
        },
        names={"mlp_norm": "post_attention_norm"},
    ),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        keys={
            ".attention.q_lora_rank": "q_lora_rank",
            ".attention.kv_lora_rank": "kv_lora_rank",
            ".leading_dense_block_count": "first_k_dense_replace",
            ".expert_count": "n_routed_experts",
            ".expert_shared_count": "n_shared_experts",
            ".expert_weights_scale": "routed_scaling_factor",
            ".expert_weights_norm": "norm_topk_prob",
        },
        read=_read_deepseek2,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", "starcoder2", values={"hidden_act": "gelu_pytorch_tanh"}
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", is_permuted=True),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", read=_read_olmo2),
    "granite": Architecture(
        "GraniteForCausalLM",
        "granite",
        keys={
            ".attention.scale": "attention_multiplier",
            ".embedding_scale": "embedding_multiplier",
            ".residual_scale": "residual_multiplier",
            ".logit_scale": "logits_scaling",
        },
        is_permuted=True,
    ),
    "command-r": Architecture(
        "CohereForCausalLM", "cohere", keys={".logit_scale": "logit_scale"}, read=_read_cohere
    ),
    "falcon": Architecture(
        "FalconForCausalLM",
        "falcon",
        read=_read_falcon,
    ),
    "gpt2": Architecture("GPT2LMHeadModel", "gpt2", read=_read_gpt2),
}
"""By ``general.architecture``."""
