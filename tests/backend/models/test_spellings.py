"""Keys of config.json as files on the Hub have them, beside those that transformers 5 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.families import FAMILY_VARIANTS, config_values, make_config, read_config, write_family

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.families.registry import read_family

SPELLINGS: dict[str, dict[str, Any]] = {
    "llama-llama3": {
        "rope_parameters": None,
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama-yarn": {
        "rope_parameters": None,
        "rope_theta": 1e4,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "finetuned": True,
        },
    },
    "qwen3_moe": {"num_local_experts": None, "num_experts": 8},
    "gemma2": {"layer_types": None, "rope_parameters": None, "rope_theta": 1e4},
    "gemma3": {
        "layer_types": None,
        "sliding_window_pattern": 6,
        "rope_parameters": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gemma4": {
        "per_layer_config": None,
        "global_head_dim": 32,
        "num_global_key_value_heads": None,
    },
    "gemma4-moe": {
        "per_layer_config": None,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
    },
    "cohere2": {
        "layer_types": None,
        "sliding_window_pattern": 4,
        "rope_parameters": None,
        "rope_theta": 1e4,
    },
    "gpt_neox": {"rope_parameters": None, "rotary_pct": 0.25, "rotary_emb_base": 10_000},
    "exaone4": {"layer_types": None, "sliding_window_pattern": "LLLG"},
    "bloom": {"hidden_size": None, "n_embed": 64, "n_head": None, "num_attention_heads": 4},
    "gpt_neo": {"attention_layers": None},
    "llama4": {"layer_types": None},
    "smollm3-window": {"layer_types": None},
    "smollm3": {"rope_parameters": None, "rope_theta": 2e6, "layer_types": None},
    "phi3-longrope": {
        "rope_parameters": None,
        "rope_theta": 1e4,
        "rope_scaling": {
            "type": "su",
            "short_factor": [1.0 + 0.05 * i for i in range(8)],
            "long_factor": [1.5 + 0.2 * i for i in range(8)],
        },
    },
    "ministral3": {
        "rope_parameters": None,
        "rope_theta": 1e4,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.3,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "falcon-7b": {"num_kv_heads": None, "n_head_kv": 1, "multi_query": True},
    "llama": {"dtype": None, "torch_dtype": "float32"},
}
"""Variant -> the keys that an old file has instead; None: not."""


@pytest.mark.parametrize("name", SPELLINGS)
def test_old_and_new_files_are_one_model(tmp_path: Path, name: str) -> None:
    write_family(tmp_path, name)
    new = json.loads((tmp_path / "config.json").read_text())
    old = {key: value for key, value in {**new, **SPELLINGS[name]}.items() if value is not None}
    old = {key: value for key, value in old.items() if key != "transformers_version"}
    found = [read_family(JsonReader(values, "config.json")) for values in (old, new)]
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_decoder_that_is_only_named(kind: str) -> None:
    """Inside LLaVA, by what transformers takes for its sizes."""
    import transformers

    outer = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    full = config_values(transformers.AutoConfig.for_model(kind))
    found = [
        read_family(JsonReader({**outer, "text_config": each}, "config.json"))
        for each in ({"model_type": kind}, full | {"dtype": None, "tie_word_embeddings": None})
    ]
    assert found[0] == found[1]


NEEDED = {
    "architectures", "model_type", "vocab_size", "hidden_size", "rms_norm_eps", "sliding_window",
    "max_position_embeddings", "num_key_value_heads", "attention_bias", "num_experts_per_tok",
}  # fmt: skip
"""Keys that a file must have, or whose defaults say what tensors there are, so that a wrong one is
refused."""


@pytest.mark.fast(8)
@pytest.mark.parametrize("name", [name for name in FAMILY_VARIANTS if "minimax_m2" not in name])
def test_defaults_are_those_of_transformers(name: str) -> None:
    """A file need not say what is the default of its family. MiniMax-M2's transformers do not know
    the ``rotary_dim`` of its files."""
    import transformers

    model_type = FAMILY_VARIANTS[name][0]
    default = config_values(transformers.AutoConfig.for_model(model_type))
    values = config_values(make_config(name))
    short = {
        key: value
        for key, value in values.items()
        if key in NEEDED | of_other_kinds(values) or default.get(key, ...) != value
    }
    found = read_family(JsonReader(short, "config.json"))
    assert found == read_config(name)


def of_other_kinds(values: dict[str, Any]) -> set[str]:
    """Sections of rotary embeddings that are not plain, and numbers of shared experts: no default
    of theirs goes unseen."""
    kinds = {"rope_parameters"} if '"rope_type": "default"' not in json.dumps(values) else set()
    kinds |= {"rope_parameters"} if "proportional" in json.dumps(values) else set()
    return kinds | {key for key in values if "shared_expert" in key}
