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

_KEYS: dict[str, tuple[str, ...]] = {
    ".embedding_length": ("hidden_size", "n_embd", "d_model"),
    ".feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    ".block_count": ("num_hidden_layers", "n_layer", "n_layers"),
    ".attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    ".attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    ".attention.key_length": ("head_dim",),
    ".context_length": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    ".rope.freq_base": ("rope_theta", "rotary_emb_base"),
    ".attention.sliding_window": ("sliding_window",),
    ".attn_logit_softcapping": ("attn_logit_softcapping",),
    ".final_logit_softcapping": ("final_logit_softcapping",),
    ".attention.clamp_kqv": ("clip_qkv",),
    ".attention.scale": ("attention_multiplier",),
    ".embedding_scale": ("embedding_multiplier",),
    ".residual_scale": ("residual_multiplier",),
    ".logit_scale": ("logit_scale", "logits_scaling"),
    ".use_parallel_residual": ("use_parallel_residual",),
    ".attention.q_lora_rank": ("q_lora_rank",),
    ".attention.kv_lora_rank": ("kv_lora_rank",),
    ".expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ".expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk"),
    ".expert_feed_forward_length": ("moe_intermediate_size",),
    ".expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    ".expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    ".expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    ".expert_weights_norm": ("norm_topk_prob",),
    ".expert_group_count": ("n_group",),
    ".expert_group_used_count": ("topk_group",),
    ".leading_dense_block_count": (
        "first_k_dense_replace",
        "num_dense_layers",
        "moe_layer_start_index",
    ),
    ".interleave_moe_layer_step": ("interleave_moe_layer_step", "moe_layer_interval"),
    "tokenizer.ggml.bos_token_id": ("bos_token_id",),
    "tokenizer.ggml.eos_token_id": ("eos_token_id",),
}
"""What families call a key; one that begins with a dot is below the architecture's name."""

_EPSILONS = (".attention.layer_norm_rms_epsilon", ".attention.layer_norm_epsilon")
_OF_EPSILON = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
"""A family reads one of them."""

_SWITCHES = {
    "attention_bias": ("attn_q.bias", "attn_qkv.bias"),
    "use_qkv_bias": ("attn_q.bias", "attn_qkv.bias"),
    "mlp_bias": ("ffn_down.bias",),
    "use_bias": ("ffn_down.bias",),
    "use_qk_norm": ("attn_q_norm.weight",),
    "qk_layernorm": ("attn_q_norm.weight",),
}
"""True where the first layer has one of these tensors."""

_Values = dict[str, Any]
_Read = Callable[[GgufFile, _Values], _Values]


@dataclass(frozen=True, slots=True)
class Architecture:
    """``name`` and ``model_type``: those of config.json. ``values`` are beside what all read;
    ``read`` finds what else the file says. ``is_permuted``: rows of query and key stand so that
    neighbours turn together. ``names``: tensors that are called in another way than elsewhere, by
    the fields of `WeightNames`. ``by_layer``: keys that may have a value for each layer, of which
    `_read` takes the first.
    """

    name: str
    model_type: str
    values: Mapping[str, Any] = field(default_factory=dict)
    read: _Read | None = None
    is_permuted: bool = False
    names: Mapping[str, Any] = field(default_factory=dict)
    by_layer: tuple[str, ...] = ()


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
    for key, names in _KEYS.items():
        value = file.value(key)
        if value is not None and not (key == ".expert_count" and value == 0):
            if key in architecture.by_layer and isinstance(value, list):
                value = value[0]
            found |= dict.fromkeys(names, _same_in_all_layers(file, key, value))
    num_layers = found["num_hidden_layers"] - num_extra_layers(file)
    found |= dict.fromkeys(_KEYS[".block_count"], num_layers)
    if not found.get("sliding_window"):  # Phi-3's is 0 where there is none
        found.pop("sliding_window", None)
    elif pattern := file.value(".attention.sliding_window_pattern"):
        found["layer_types"] = _layer_types(pattern, num_layers)
    epsilon = next((file.value(key) for key in _EPSILONS if file.value(key) is not None), None)
    found |= dict.fromkeys(_OF_EPSILON, epsilon)
    if "token_embd.weight" in file.tensors:
        found["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    for name, tensors in _SWITCHES.items():
        found[name] = any(f"blk.0.{each}" in file.tensors for each in tensors)
    head_dim = found.get("head_dim") or found["hidden_size"] / found["num_attention_heads"]
    turning = file.value(".rope.dimension_count", head_dim) / head_dim
    found |= {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "lm_head_bias": "output.bias" in file.tensors,
        "dtype": "bfloat16",
        "rope_scaling": _read_scaling(file),
        **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), turning),
        **architecture.values,
    }
    if architecture.read is not None:
        found |= architecture.read(file, found)
    return found


def num_extra_layers(file: GgufFile) -> int:
    """Layers behind the last one, which predict a token more; nothing is done with them."""
    count: int = file.value(".nextn_predict_layers", 0)
    return count


def _layer_types(pattern: Any, num_layers: int) -> list[str]:
    """``pattern``: whether each layer has a window, or which one of so many, the last, has none."""
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    kinds = ("full_attention", "sliding_attention")
    return [kinds[bool(each)] for each in pattern[:num_layers]]


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


_COUNTS, _SIZES = ".attention.head_count_kv", ".feed_forward_length"


def _read_gemma4(file: GgufFile, found: _Values) -> _Values:
    """What the file says of layers without a window are the keys of all in config.json, or those of
    ``global_``; the first layer has a window."""
    types = found["layer_types"]
    full = types.index("full_attention")
    turning = _numbers(file, "rope_freqs.weight")
    counts, sizes = file.value(_COUNTS), file.value(_SIZES)
    return {
        "head_dim": file.value(".attention.key_length_swa"),
        "global_head_dim": file.value(".attention.key_length"),
        "num_global_key_value_heads": counts[full] if isinstance(counts, list) else None,
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "hidden_size_per_layer_input": file.value(".embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": file.value(".attention.shared_kv_layers", 0),
        "use_double_wide_mlp": isinstance(sizes, list) and sizes[-1] > sizes[0],
        "enable_moe_block": "num_experts" in found,
        "top_k_experts": found.get("num_experts_per_tok"),
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": found["rope_theta"],
                "partial_rotary_factor": turning.count(1.0) / len(turning),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.value(".rope.freq_base_swa", 10_000.0),
                "partial_rotary_factor": 1.0,
            },
        },
    }


def _read_olmo2(file: GgufFile, found: _Values) -> _Values:
    """OLMo 3 is one with windows."""
    if "sliding_window" not in found:
        return {}
    types = found.get("layer_types") or _layer_types(4, found["num_hidden_layers"])
    names = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return {**names, "layer_types": types}


def _read_falcon(file: GgufFile, found: _Values) -> _Values:
    kv_heads = found.get("num_key_value_heads", 1)
    return {
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in file.tensors else 1,
        "bias": "blk.0.attn_qkv.bias" in file.tensors,
    }


def _read_mpt(file: GgufFile, found: _Values) -> _Values:
    bias_max = file.value(".attention.max_alibi_bias", 8.0)
    section = {"alibi": bias_max > 0, "alibi_bias_max": bias_max, "clip_qkv": found.get("clip_qkv")}
    return {"attn_config": section}


def _read_dbrx(_: GgufFile, found: _Values) -> _Values:
    return {
        "attn_config": {
            "kv_n_heads": found.get("num_key_value_heads"),
            "rope_theta": found["rope_theta"],
            "clip_qkv": found.get("clip_qkv"),
        },
        "ffn_config": {
            "ffn_hidden_size": found.get("intermediate_size"),
            "moe_num_experts": found.get("num_experts"),
            "moe_top_k": found.get("num_experts_per_tok"),
        },
    }


def _read_llama4(_: GgufFile, found: _Values) -> _Values:
    """What is not in the file is the same for all models; that of 128 experts has no norms."""
    return {
        "intermediate_size_mlp": found.get("intermediate_size"),
        "intermediate_size": found.get("moe_intermediate_size"),
        "use_qk_norm": found.get("num_experts") != 128,
    }


def _read_mistral3(file: GgufFile, found: _Values) -> _Values:
    """Mistral Small 3 is a Llama with this name; Ministral 3's queries grow."""
    beta = file.value(".attention.temperature_scale")
    if beta is None or found["rope_scaling"] is None:
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    slope = file.value(".rope.scaling.yarn_log_multiplier", 1.0)
    section = {"llama_4_scaling_beta": beta, "mscale": slope, "mscale_all_dim": slope}
    return {"rope_scaling": found["rope_scaling"] | section}


def _read_minicpm3(file: GgufFile, found: _Values) -> _Values:
    """Its multipliers are not in the file."""
    turning = file.value(".rope.dimension_count")
    outputs = file.tensors["blk.0.attn_output.weight"].shape[1]
    return {
        "head_dim": None,
        "partial_rotary_factor": 1.0,
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": file.value(".attention.key_length") - turning,
        "v_head_dim": outputs // found["num_attention_heads"],
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


def _read_delta(file: GgufFile, found: _Values) -> _Values:
    """Heads of a recurrence are as wide as its state, or share what it is wide in all."""
    num_value_heads = file.value(".ssm.time_step_rank")
    values = {
        "linear_num_key_heads": file.value(".ssm.group_count"),
        "linear_num_value_heads": num_value_heads,
        "linear_key_head_dim": file.value(".ssm.state_size"),
        "linear_value_head_dim": file.value(".ssm.inner_size") // num_value_heads,
        "linear_conv_kernel_dim": file.value(".ssm.conv_kernel"),
        "full_attention_interval": file.value(".full_attention_interval", 4),
        "norm_topk_prob": True,
    }
    if recurrent := file.value(".attention.recurrent_layers"):
        kinds = ("full_attention", "linear_attention")
        types = [kinds[bool(each)] for each in recurrent[: found["num_hidden_layers"]]]
        values["layer_types"] = types
    return values


_SIGMOID = 2


def _read_deepseek2(file: GgufFile, found: _Values) -> _Values:
    """V3 scores by sigmoid."""
    turning = file.value(".rope.dimension_count")
    key_length = file.value(".attention.key_length_mla", file.value(".attention.key_length"))
    value_length = file.value(".attention.value_length_mla", file.value(".attention.value_length"))
    num_groups = file.value(".expert_group_count", 1)
    values = {
        "head_dim": None,
        "partial_rotary_factor": 1.0,
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


def _read_mistral4(file: GgufFile, found: _Values) -> _Values:
    """DeepSeek V3's keys; queries grow."""
    values = _read_deepseek2(file, found)
    beta = file.value(".attention.temperature_scale")
    if beta is not None and found["rope_scaling"] is not None:
        values["rope_scaling"] = found["rope_scaling"] | {"llama_4_scaling_beta": beta}
    names = {"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4"}
    return values | names


def _read_gpt_oss(file: GgufFile, found: _Values) -> _Values:
    scaling = found["rope_scaling"]
    return {
        "intermediate_size": file.value(".expert_feed_forward_length"),
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


def _of_family(
    name: str, model_type: str, read: _Read | None = None, **values: Any
) -> Architecture:
    """One whose rows are not permuted, by the names that most have."""
    return Architecture(name, model_type, values, read)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", read=_read_llama, is_permuted=True),
    "llama4": _of_family("Llama4ForCausalLM", "llama4_text", _read_llama4),
    "mistral3": Architecture(
        "Ministral3ForCausalLM", "ministral3", read=_read_mistral3, is_permuted=True
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", is_permuted=True),
    "arcee": Architecture("ArceeForCausalLM", "arcee", is_permuted=True),
    "apertus": _of_family("ApertusForCausalLM", "apertus"),
    "seed_oss": _of_family("SeedOssForCausalLM", "seed_oss"),
    "granite": Architecture("GraniteForCausalLM", "granite", is_permuted=True),
    "granitemoe": Architecture("GraniteMoeForCausalLM", "granitemoe", is_permuted=True),
    "qwen2": _of_family("Qwen2ForCausalLM", "qwen2"),
    "qwen2vl": _of_family("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": _of_family("Qwen2MoeForCausalLM", "qwen2_moe", norm_topk_prob=False),
    "qwen3": _of_family("Qwen3ForCausalLM", "qwen3"),
    "qwen3vl": _of_family("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": _of_family("Qwen3MoeForCausalLM", "qwen3_moe", norm_topk_prob=True),
    "qwen3vlmoe": _of_family("Qwen3MoeForCausalLM", "qwen3_moe", norm_topk_prob=True),
    "qwen3next": _of_family("Qwen3NextForCausalLM", "qwen3_next", _read_delta),
    "qwen35": _of_family("Qwen3_5ForCausalLM", "qwen3_5_text", _read_delta),
    "qwen35moe": _of_family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _read_delta),
    "gemma": _of_family("GemmaForCausalLM", "gemma"),
    "gemma2": _of_family("Gemma2ForCausalLM", "gemma2", _read_gemma),
    "gemma3": _of_family("Gemma3ForCausalLM", "gemma3_text", _read_gemma),
    "gemma4": Architecture(
        "Gemma4ForCausalLM", "gemma4_text", read=_read_gemma4, by_layer=(_COUNTS, _SIZES)
    ),
    "phi2": _of_family("PhiForCausalLM", "phi"),
    "phi3": _of_family("Phi3ForCausalLM", "phi3"),
    "phimoe": _of_family("PhimoeForCausalLM", "phimoe"),
    "gpt-oss": _of_family("GptOssForCausalLM", "gpt_oss", _read_gpt_oss),
    "deepseek2": _of_family("DeepseekV2ForCausalLM", "deepseek_v2", _read_deepseek2),
    "mistral4": _of_family("Mistral4ForCausalLM", "mistral4", _read_mistral4),
    "minicpm3": _of_family("MiniCPM3ForCausalLM", "minicpm3", _read_minicpm3),
    "glm4": _of_family("Glm4ForCausalLM", "glm4"),
    "glm4moe": _of_family("Glm4MoeForCausalLM", "glm4_moe"),
    "chatglm": _of_family("GlmForCausalLM", "glm"),
    "ernie4_5": _of_family("Ernie4_5ForCausalLM", "ernie4_5"),
    "ernie4_5-moe": _of_family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    "hunyuan-dense": _of_family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "hunyuan-moe": _of_family("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe"),
    "exaone4": _of_family("Exaone4ForCausalLM", "exaone4"),
    "exaone-moe": _of_family("ExaoneMoeForCausalLM", "exaone_moe"),
    "dots1": _of_family("Dots1ForCausalLM", "dots1"),
    "afmoe": Architecture(
        "AfmoeForCausalLM",
        "afmoe",
        values={"mup_enabled": True},
        names={"attention_gate": "attn_gate"},
    ),
    "minimax-m2": _of_family("MiniMaxM2ForCausalLM", "minimax_m2"),
    "olmo": Architecture("OlmoForCausalLM", "olmo", is_permuted=True),
    "olmo2": _of_family("Olmo2ForCausalLM", "olmo2", _read_olmo2),
    "olmoe": _of_family("OlmoeForCausalLM", "olmoe", norm_topk_prob=False),
    "command-r": _of_family("CohereForCausalLM", "cohere"),
    "cohere2": _of_family("Cohere2ForCausalLM", "cohere2"),
    "nemotron": _of_family("NemotronForCausalLM", "nemotron"),
    "stablelm": _of_family("StableLmForCausalLM", "stablelm"),
    "starcoder": _of_family("GPTBigCodeForCausalLM", "gpt_bigcode"),
    "starcoder2": _of_family("Starcoder2ForCausalLM", "starcoder2", hidden_act="gelu_pytorch_tanh"),
    "falcon": _of_family("FalconForCausalLM", "falcon", _read_falcon),
    "gpt2": _of_family("GPT2LMHeadModel", "gpt2"),
    "gptneox": _of_family("GPTNeoXForCausalLM", "gpt_neox"),
    "bloom": _of_family("BloomForCausalLM", "bloom"),
    "mpt": _of_family("MptForCausalLM", "mpt", _read_mpt),
    "dbrx": _of_family("DbrxForCausalLM", "dbrx", _read_dbrx),
}
"""By ``general.architecture``."""
