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

_LISTED = re.compile(r"(.*experts\.|.*layernorm)(?:\.norms\.)?(\d+)(\.\w+)?\.weight")
"""Tensors that become one: of experts, and of norms of heads."""
_KEYS = {
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "block_count": ("num_hidden_layers", "n_layer", "n_layers"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.scale": ("attention_multiplier",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": (
        *("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    ),
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        *("shared_expert_intermediate_size", "shared_intermediate_size"),
    ),
    "expert_shared_count": (
        *("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
        "num_shared_expert",
    ),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "expert_weights_norm": ("norm_topk_prob",),
    "leading_dense_block_count": (
        *("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    ),
    "interleave_moe_layer_step": ("interleave_moe_layer_step", "moe_layer_interval"),
    "use_parallel_residual": ("use_parallel_residual",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
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
    layers: dict[str, list[float]] = {}
    for name, data in _tensors(plain, config, architecture):
        if name.startswith("xielu."):  # of each layer
            layers.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(float(data))
            continue
        kept, dtype = keep(name, data)
        writer.add_tensor(name, kept, raw_dtype=dtype)
    for name, numbers in layers.items():
        writer.add_array(name, numbers)
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
    found = {
        new: config[name]
        for new, names in _KEYS.items()
        for name in names
        if config.get(name) is not None
    }
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if "rope_theta" in rope:
        found["rope.freq_base"] = float(rope["rope_theta"])
    if "partial_rotary_factor" in rope:
        size = int(_head_dim(config) * rope["partial_rotary_factor"])
        found["rope.dimension_count"] = size
    if rope.get("rope_type", "default") in ("linear", "yarn", "longrope"):
        found |= _scaling(rope)
    if architecture in _OF_ARCHITECTURE:
        found |= _OF_ARCHITECTURE[architecture](config)
    return {key: value for key, value in found.items() if value is not None}


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    factor, slope = rope.get("factor"), rope.get("mscale_all_dim")
    scaling = {
        "type": rope["rope_type"],
        "factor": factor and float(factor),
        "original_context_length": rope.get("original_max_position_embeddings"),
        "yarn_log_multiplier": slope and 0.1 * slope,
    }
    return {f"rope.scaling.{key}": each for key, each in scaling.items() if each}


def _head_dim(config: dict[str, Any]) -> int:
    found = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(found)


def _of_deepseek2(config: dict[str, Any]) -> dict[str, Any]:
    """Configurations that `transformers` has saved do not say how experts are scored."""
    nope, turning = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    is_v3 = config["model_type"] == "deepseek_v3"
    return {
        "rope.dimension_count": turning,
        "expert_gating_func": _SIGMOID if is_v3 else _SOFTMAX,
        "attention.head_count_kv": 1,
        "attention.key_length": config["kv_lora_rank"] + turning,
        "attention.value_length": config["kv_lora_rank"],
        "attention.key_length_mla": nope + turning,
        "attention.value_length_mla": config["v_head_dim"],
    }


_SOFTMAX, _SIGMOID = 1, 2


def _of_exaone_moe(config: dict[str, Any]) -> dict[str, Any]:
    return _pattern(config) | {"expert_gating_func": _SIGMOID}


def _of_delta(config: dict[str, Any]) -> dict[str, Any]:
    value_heads = config["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": config["linear_value_head_dim"] * value_heads,
        "full_attention_interval": 4,
        "attention.recurrent_layers": [
            each == "linear_attention" for each in config["layer_types"]
        ],
        "rope.dimension_sections": [11, 11, 10, 0],
    }


def _of_full_layers(config: dict[str, Any]) -> dict[str, Any]:
    """What the configuration says of Gemma 4's layers without a window alone."""
    found: dict[str, Any] = next(iter(config["per_layer_config"].values()))
    return found


def _of_gemma4(config: dict[str, Any]) -> dict[str, Any]:
    pattern = _pattern(config)
    sliding = pattern["attention.sliding_window_pattern"]
    own = _of_full_layers(config)
    size, full = config["head_dim"], own["head_dim"]
    num_layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    width, factor = config["intermediate_size"], 1 + config["use_double_wide_mlp"]
    widths = [width * (1 if each < num_layers - shared else factor) for each in range(num_layers)]
    found = {
        **pattern,
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": size,
        "attention.value_length_swa": size,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"] or 0,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": size,
        "expert_used_count": config.get("top_k_experts"),
    }
    if factor > 1:
        found["feed_forward_length"] = widths
    if (count := own.get("num_key_value_heads")) is not None:
        counts = [config["num_key_value_heads"] if each else count for each in sliding]
        found["attention.head_count_kv"] = counts
    return found


def _heads(config: dict[str, Any]) -> dict[str, Any]:
    """As many for keys as for queries, whatever the configuration says."""
    name = next(each for each in _KEYS["attention.head_count"] if each in config)
    return {"attention.head_count_kv": config[name]}


def _pattern(config: dict[str, Any]) -> dict[str, Any]:
    if "layer_types" not in config:
        return {}
    sliding = [each == "sliding_attention" for each in config["layer_types"]]
    return {"attention.sliding_window_pattern": sliding}


def _of_mistral3(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    if "llama_4_scaling_beta" not in rope:
        return {}
    return {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _of_mistral4(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    temperature = {
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "attention.temperature_length": rope["original_max_position_embeddings"],
    }
    return _of_deepseek2(config) | temperature


def _of_hunyuan(config: dict[str, Any]) -> dict[str, Any]:
    rope, size = config["rope_parameters"], _head_dim(config)
    stretch = rope.get("alpha", 1.0) ** (size / (size - 2))
    return {
        "rope.freq_base": rope["rope_theta"] * stretch,
        "rope.scaling.type": "none",
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_shared_feed_forward_length": config["intermediate_size"],
    }


def _of_mpt(config: dict[str, Any]) -> dict[str, Any]:
    attention = config["attn_config"]
    found = {"attention.max_alibi_bias": float(attention["alibi_bias_max"])}
    found |= {"attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 4 * config["d_model"]}
    return found | _heads(config) | {"attention.clamp_kqv": attention["clip_qkv"] or 0.0}


def _of_dbrx(config: dict[str, Any]) -> dict[str, Any]:
    attention, experts = config["attn_config"], config["ffn_config"]
    return {
        "feed_forward_length": experts["ffn_hidden_size"],
        "attention.head_count_kv": attention["kv_n_heads"],
        "attention.clamp_kqv": attention["clip_qkv"],
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": attention["rope_theta"],
        "expert_count": experts["moe_num_experts"],
        "expert_used_count": experts["moe_top_k"],
    }


def _of_minicpm3(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope.dimension_count": config["qk_rope_head_dim"],
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "attention.value_length": None,
    }


def _of_phi2(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "feed_forward_length": 4 * config["hidden_size"],
        "attention.head_count_kv": config["num_attention_heads"],
    }


_OF_ARCHITECTURE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "gpt-oss": lambda config: {"expert_feed_forward_length": config["intermediate_size"]},
    "minimax-m2": lambda config: {
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": _SIGMOID,
    },
    "afmoe": lambda _: {"expert_weights_norm": True},
    "ernie4_5-moe": lambda config: {
        "expert_shared_feed_forward_length": config["moe_intermediate_size"]
        * config["moe_num_shared_experts"]
    },
    "glm4moe": lambda _: {"expert_gating_func": _SIGMOID},
    "dots1": lambda _: {"expert_gating_func": _SIGMOID},
    "gemma4": _of_gemma4,
    "gptneox": _heads,
    "qwen3next": _of_delta,
    "qwen35": _of_delta,
    "qwen35moe": _of_delta,
    "llama4": lambda config: {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
    },
    "gpt2": lambda config: _heads(config) | {"feed_forward_length": 4 * config["n_embd"]},
    "starcoder": lambda _: {"attention.head_count_kv": 1},
    "bloom": lambda config: {
        **_heads(config),
        "feed_forward_length": 4 * config["hidden_size"],
        "context_length": config.get("seq_length", config["hidden_size"]),
    },
    "falcon": lambda config: {
        "feed_forward_length": config["ffn_hidden_size"],
        "attention.head_count_kv": _kv_heads(config),
    },
    "deepseek2": _of_deepseek2,
    "dbrx": _of_dbrx,
    "exaone4": _pattern,
    "exaone-moe": _of_exaone_moe,
    "hunyuan-dense": _of_hunyuan,
    "hunyuan-moe": _of_hunyuan,
    "minicpm3": _of_minicpm3,
    "mistral3": _of_mistral3,
    "mistral4": _of_mistral4,
    "mpt": _of_mpt,
    "olmo": lambda _: {"attention.layer_norm_epsilon": 1e-5},
    "olmo2": _pattern,
    "phi2": _of_phi2,
    "phi3": lambda config: {"attention.sliding_window": config.get("sliding_window") or 0},
}


def _tensors(plain: Path, config: dict[str, Any], architecture: str) -> Iterator[tuple[str, Array]]:
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    num_layers = next(config[each] for each in _KEYS["block_count"] if each in config)
    names = gguf.get_tensor_name_map(kind, num_layers)
    weights = {
        name: tensor.float().numpy()
        for name, tensor in load_file(plain / "model.safetensors").items()
    }
    for name, data in _rearranged(weights, config, architecture).items():
        known = (
            names.get_name(each, try_suffixes=(".weight", ".bias"))
            for each in (name, name.removeprefix("transformer."))
        )
        found = name if name.startswith(("blk.", "xielu.")) else next(filter(None, known), None)
        assert found is not None, name
        yield found, data
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        for which in ("long", "short"):
            yield f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32)
    if rope.get("full_attention", {}).get("rope_type") == "proportional":
        size = _of_full_layers(config)["head_dim"] // 2
        turning = int(size * rope["full_attention"]["partial_rotary_factor"])
        factors = [1.0] * turning + [1e30] * (size - turning)
        yield "rope_freqs.weight", np.array(factors, np.float32)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _divisors(config, rope)


def _kv_heads(config: dict[str, Any]) -> int:
    if config["model_type"] == "falcon" and not config["new_decoder_architecture"]:
        return 1
    key = "num_kv_heads" if config["model_type"] == "falcon" else "num_key_value_heads"
    return int(config.get(key) or config.get("num_attention_heads") or config["n_head"])


def _divisors(config: dict[str, Any], rope: dict[str, Any]) -> Array:
    size = _head_dim(config)
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
        if match := _LISTED.fullmatch(name):
            whole = f"{match[1].removesuffix('.')}{match[3] or ''}.weight"
            experts.setdefault(whole, {})[int(match[2])] = data
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


def _of_heads(name: str, data: Array, config: dict[str, Any]) -> Arrays:
    """Queries, keys and values of each head -> all queries, all keys, all values."""
    heads = config.get("num_attention_heads") or config["n_head"]
    return {name: data.reshape(heads, 3, -1, *data.shape[1:]).swapaxes(0, 1).reshape(data.shape)}


def _blocks(name: str, **parts: Array) -> Arrays:
    """Parts of a tensor of layer N, by the names that they get."""
    found = re.search(r"\.(\d+)\.", name)
    assert found is not None
    return {f"blk.{found[1]}.{part}.weight": data for part, data in parts.items()}


def _of_granite(name: str, data: Array, _: dict[str, Any]) -> Arrays:
    gate, up = np.split(data, 2, axis=-2)
    if "shared_mlp" in name:
        return _blocks(name, ffn_gate_shexp=gate, ffn_up_shexp=up)
    return _blocks(name, ffn_gate_exps=gate, ffn_up_exps=up)


def _of_xielu(name: str, data: Array, _: dict[str, Any]) -> Arrays:
    """Metadata, one array for all layers."""
    layer, number = name.split(".")[2], name.rpartition(".")[2]
    return {f"xielu.{layer}.{number}": data.reshape(())}


def _of_gemma4_scales(name: str, data: Array, _: dict[str, Any]) -> Arrays:
    part = "ffn_down_exps" if "per_expert" in name else "ffn_gate_inp"
    return {f"blk.{name.split('.')[2]}.{part}.scale": data}


def _shares(config: dict[str, Any]) -> tuple[int, int]:
    """Key heads, and value heads of each."""
    heads = config["linear_num_key_heads"]
    return heads, config["linear_num_value_heads"] // heads


def _of_next(name: str, data: Array, config: dict[str, Any]) -> Arrays:
    """Of a recurrence: the projections of all key heads, one kind after the other."""
    if name.endswith("A_log"):
        return {name: -np.exp(data)}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): data}
    if "conv1d" in name:
        return {name: data[:, 0]}
    if "in_proj_qkvz" not in name:
        return {name: data}
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
    heads, share = _shares(config)
    parts = np.split(
        data.reshape(heads, -1, data.shape[1]), [key, 2 * key, 2 * key + share * value], axis=1
    )
    *rest, gate = (each.reshape(-1, data.shape[1]) for each in parts)
    return _blocks(name, attn_qkv=np.concatenate(rest), attn_gate=gate)


def _of_qwen35(name: str, data: Array, config: dict[str, Any]) -> Arrays:
    """Value heads of a key head do not stay neighbours."""
    heads, share = _shares(config)
    size = config["linear_value_head_dim"]
    rows = 2 * heads * config["linear_key_head_dim"]

    def tiled(part: Array) -> Array:
        return part.reshape(heads, share, -1, *part.shape[1:]).swapaxes(0, 1).reshape(part.shape)

    if "out_proj" in name:
        data = tiled(data.T).T
    elif "in_proj_qkv" in name or "conv1d" in name:
        assert len(data) == rows + heads * share * size
        data = np.concatenate((data[:rows], tiled(data[rows:])))
    elif not name.endswith("norm.weight"):
        data = tiled(data)
    return _of_next(name, data, config)


def _of_llama4(name: str, data: Array, _: dict[str, Any]) -> Arrays:
    data = data.swapaxes(1, 2)
    if "down" in name:
        return _blocks(name, ffn_down_exps=data)
    gate, up = np.split(data, 2, axis=1)
    return _blocks(name, ffn_gate_exps=gate, ffn_up_exps=up)


def _of_dbrx_experts(name: str, data: Array, config: dict[str, Any]) -> Arrays:
    data = data.reshape(config["ffn_config"]["moe_num_experts"], -1, data.shape[-1])
    if name.endswith("w2"):
        return _blocks(name, ffn_down_exps=data.swapaxes(1, 2))
    return _blocks(name, **{"ffn_gate_exps" if name.endswith("w1") else "ffn_up_exps": data})


def _with_one(name: str, data: Array, _: dict[str, Any]) -> Arrays:
    return {name: data + 1}


Rule = Callable[[str, Array, dict[str, Any]], Arrays]
_CORRECTED = ("deepseek2", "glm4moe", "dots1", "minimax-m2", "exaone-moe", "ernie4_5-moe")
_PERMUTED = ("llama", "granite", "granitemoe", "smollm3", "mistral3", "arcee", "olmo")
_RULES: tuple[tuple[tuple[str, ...], str, Rule], ...] = (
    (_PERMUTED, r"[qk]_proj", _permuted),
    (("gemma", "gemma2", "gemma3", "nemotron"), r"norm\.weight$", _with_one),
    (("gpt2",), r"(attn|mlp)\.c_\w+\.weight", lambda name, data, _: {name: data.T}),
    (("gpt-oss",), r"experts\.", _of_gpt_oss),
    (("gpt-oss",), r"sinks$", lambda name, data, _: {f"{name}.weight": data}),
    (("falcon",), "query_key_value", _of_falcon),
    (("gptneox", "bloom"), "query_key_value", _of_heads),
    (("deepseek2", "mistral4"), "kv_b_proj", _of_latents),
    (("mistral4",), r"experts\.\w+$", lambda name, data, _: {f"{name}.weight": data}),
    (("granitemoe",), "input_linear", _of_granite),
    (("gemma4",), r"layer_scalar$|experts\.", lambda name, data, _: {f"{name}.weight": data}),
    (("gemma4",), r"router\.(per_expert_)?scale$", _of_gemma4_scales),
    (("apertus",), r"act_fn\.", _of_xielu),
    (("qwen3next",), r"linear_attn\.", _of_next),
    (("qwen35", "qwen35moe"), r"linear_attn\.", _of_qwen35),
    (("qwen3next", "qwen35", "qwen35moe"), r"norm\.weight$", _with_one),
    (("llama4",), r"experts\.", _of_llama4),
    (("dbrx",), r"experts\.mlp", _of_dbrx_experts),
    (_CORRECTED, "e_score_correction_bias", _of_correction),
    (("afmoe",), "expert_bias", lambda name, data, _: {f"{name}.bias": data}),
)
"""What the conversion does to tensors: of which architectures, with which names."""
