"""GGUF files made of checkpoints, by what llama.cpp's conversion does to them and by the names of
the package `gguf`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

Array = npt.NDArray[Any]
Keep = Callable[[str, Array], tuple[Array, gguf.GGMLQuantizationType]]
F32 = gguf.GGMLQuantizationType.F32

_EXPERT = re.compile(r"(.*experts\.)(\d+)\.(\w+)\.weight")
_KEYS = {
    "hidden_size": "embedding_length",
    "n_embd": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "n_layer": "block_count",
    "num_attention_heads": "attention.head_count",
    "n_head": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "n_positions": "context_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
}


def keep_float32(_: str, data: Array) -> tuple[Array, gguf.GGMLQuantizationType]:
    """Nothing is quantised."""
    return np.ascontiguousarray(data, np.float32), F32


def write_gguf(
    plain: Path, target: Path, architecture: str, keep: Keep = keep_float32, **options: Any
) -> Path:
    """The checkpoint in ``plain`` as a GGUF file; ``keep`` says how tensors are kept. ``options``:
    of `gguf.GGUFWriter`, and ``values``, further metadata."""
    config = json.loads((plain / "config.json").read_text())
    values = options.pop("values", {})
    writer = gguf.GGUFWriter(target, architecture, **options)
    for key, value in {**_metadata(config, architecture), **values}.items():
        name = key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}"
        _add(writer, name, value)
    for name, data in _tensors(plain, config, architecture):
        kept, dtype = keep(name, data)
        writer.add_tensor(name, kept, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    found = {new: config[old] for old, new in _KEYS.items() if config.get(old) is not None}
    if architecture in _OF_ARCHITECTURE:
        found |= _OF_ARCHITECTURE[architecture](config)
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if "rope_theta" in rope:
        found["rope.freq_base"] = float(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind not in ("linear", "yarn", "longrope"):
        return found
    factor, slope = rope.get("factor"), rope.get("mscale_all_dim")
    scaling = {
        "type": kind,
        "factor": factor and float(factor),
        "original_context_length": rope.get("original_max_position_embeddings"),
        "yarn_log_multiplier": slope and 0.1 * slope,
    }
    return found | {f"rope.scaling.{key}": each for key, each in scaling.items() if each}


def _of_deepseek2(config: dict[str, Any]) -> dict[str, Any]:
    """Configurations that `transformers` has saved do not say that V3 scores by sigmoid."""
    nope, turning = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    return {
        "rope.dimension_count": turning,
        "attention.head_count_kv": 1,
        "attention.key_length": config["kv_lora_rank"] + turning,
        "attention.key_length_mla": nope + turning,
        "attention.value_length_mla": config["v_head_dim"],
    }


def _of_olmo2(config: dict[str, Any]) -> dict[str, Any]:
    if "layer_types" not in config:
        return {}
    sliding = [each == "sliding_attention" for each in config["layer_types"]]
    return {"attention.sliding_window_pattern": sliding}


def _of_phi3(config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    share = config["rope_parameters"].get("partial_rotary_factor", 1)
    window = config.get("sliding_window") or 0
    return {"rope.dimension_count": int(head_dim * share), "attention.sliding_window": window}


_OF_ARCHITECTURE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "gpt-oss": lambda config: {"expert_feed_forward_length": config["intermediate_size"]},
    "gpt2": lambda config: {"feed_forward_length": 4 * config["n_embd"]},
    "falcon": lambda config: {
        "feed_forward_length": config["ffn_hidden_size"],
        "attention.head_count_kv": _kv_heads(config),
    },
    "deepseek2": _of_deepseek2,
    "olmo2": _of_olmo2,
    "phi3": _of_phi3,
}


def _tensors(plain: Path, config: dict[str, Any], architecture: str) -> Iterator[tuple[str, Array]]:
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    num_layers = config.get("num_hidden_layers", config.get("n_layer"))
    names = gguf.get_tensor_name_map(kind, num_layers)
    weights = {
        name: tensor.float().numpy()
        for name, tensor in load_file(plain / "model.safetensors").items()
    }
    for name, data in _rearranged(weights, config, architecture).items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        yield found, data
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        for which in ("long", "short"):
            yield f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _divisors(config, rope)


def _kv_heads(config: dict[str, Any]) -> int:
    if config["model_type"] == "falcon" and not config["new_decoder_architecture"]:
        return 1
    key = "num_kv_heads" if config["model_type"] == "falcon" else "num_key_value_heads"
    return int(config.get(key) or config.get("num_attention_heads") or config["n_head"])


def _divisors(config: dict[str, Any], rope: dict[str, Any]) -> Array:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = (rope["original_max_position_embeddings"] / waves - low) / (high - low)
    share = share.clip(0, 1)
    divisors: Array = 1 / ((1 - share) / rope["factor"] + share)
    return divisors.astype(np.float32)


def _rearranged(
    weights: dict[str, Array], config: dict[str, Any], architecture: str
) -> dict[str, Array]:
    """The tensors under the names that the conversion looks up."""
    found: dict[str, Array] = {}
    experts: dict[str, dict[int, Array]] = {}
    for name, data in weights.items():
        rules = (
            rule
            for architectures, pattern, rule in _RULES
            if architecture in architectures and re.search(pattern, name)
        )
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}{match[3]}.weight", {})[int(match[2])] = data
        elif (rule := next(rules, None)) is not None:
            found |= rule(name, data, config)
        else:
            found[name] = data
    for name, parts in experts.items():
        found[name] = np.stack([parts[each] for each in sorted(parts)])
    return found


Arrays = dict[str, Array]


def _permuted(name: str, data: Array, config: dict[str, Any]) -> Arrays:
    count = config["num_attention_heads"] if "q_proj" in name else _kv_heads(config)
    halves = data.reshape(count, 2, -1, *data.shape[1:])
    return {name: halves.swapaxes(1, 2).reshape(data.shape)}


def _of_falcon(name: str, data: Array, config: dict[str, Any]) -> Arrays:
    kv_heads = _kv_heads(config)
    share = config["num_attention_heads"] // kv_heads
    groups = data.reshape(kv_heads, share + 2, -1, *data.shape[1:])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return {name: np.concatenate([each.reshape(-1, *data.shape[1:]) for each in parts])}


def _of_latents(name: str, data: Array, config: dict[str, Any]) -> Arrays:
    per_head = data.reshape(config["num_attention_heads"], -1, data.shape[1])
    keys, values = np.split(per_head, [config["qk_nope_head_dim"]], axis=1)
    return {name.replace("kv_b", "k_b"): keys.swapaxes(1, 2), name.replace("kv_b", "v_b"): values}


def _of_correction(name: str, data: Array, _: dict[str, Any]) -> Arrays:
    return {name.replace("e_score_correction_bias", "e_score_correction.bias"): data}


def _of_gpt_oss(name: str, data: Array, _: dict[str, Any]) -> Arrays:
    """Gate and up apart, weights not transposed."""
    kind = "bias" if name.endswith("_bias") else "weight"
    stem = name.removesuffix("_bias")
    if kind == "weight":
        data = data.swapaxes(1, 2)
    if "gate_up" not in name:
        return {f"{stem}.{kind}": data}
    return {
        f"{stem.replace('gate_up', part)}.{kind}": data[:, first::2]
        for first, part in enumerate(("gate", "up"))
    }


Rule = Callable[[str, Array, dict[str, Any]], Arrays]
_RULES: tuple[tuple[tuple[str, ...], str, Rule], ...] = (
    (("llama", "granite", "smollm3"), r"[qk]_proj", _permuted),
    (("gemma", "gemma2", "gemma3"), r"norm\.weight$", lambda name, data, _: {name: data + 1}),
    (("gpt2",), r"(attn|mlp)\.c_\w+\.weight", lambda name, data, _: {name: data.T}),
    (("gpt-oss",), r"experts\.", _of_gpt_oss),
    (("gpt-oss",), r"sinks$", lambda name, data, _: {f"{name}.weight": data}),
    (("falcon",), "query_key_value", _of_falcon),
    (("deepseek2",), "kv_b_proj", _of_latents),
    (("deepseek2",), "e_score_correction_bias", _of_correction),
)
"""What the conversion does to tensors: of which architectures, with which names."""
