"""Tiny random checkpoints of every family that is served, written by transformers.

Weights are spread so that each option of a family shows in the logits (norms, biases and buffers
are random too), windows and chunks are shorter than a prompt, and rotary embeddings are scaled from
lengths that a prompt passes.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.families.registry import FAMILIES, read_family

VOCAB_SIZE = 97
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_MOE = {"moe_intermediate_size": 24}
_DELTA: dict[str, Any] = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _types(count: int, every: int) -> list[str]:
    """Every ``every``-th layer sees everything."""
    return [
        "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(count)
    ]


FAMILY_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN, "max_position_embeddings": 128}),
    "llama-dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "max_position_embeddings": 256,
        },
    ),
    "llama-linear": (
        "llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 10}),
    "ministral": ("ministral", {"sliding_window": 7, "head_dim": 20, "layer_types": _types(3, 2)}),
    "ministral3": (
        "ministral3",
        {
            "sliding_window": None,
            "head_dim": 20,
            "rope_parameters": dict(
                _YARN,
                llama_4_scaling_beta=0.3,
                beta_fast=32,
                beta_slow=1,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        dict(num_experts=6, num_experts_per_tok=2, shared_expert_intermediate_size=40, **_MOE),
    ),
    "qwen2_moe-mixed": (
        "qwen2_moe",
        dict(
            num_experts=6,
            num_experts_per_tok=2,
            shared_expert_intermediate_size=40,
            mlp_only_layers=[1],
            norm_topk_prob=True,
            **_MOE,
        ),
    ),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3_moe": (
        "qwen3_moe",
        dict(
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            head_dim=20,
            decoder_sparse_step=1,
            **_MOE,
        ),
    ),
    "qwen3_moe-sparse": (
        "qwen3_moe",
        dict(
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            head_dim=20,
            decoder_sparse_step=2,
            **_MOE,
        ),
    ),
    "qwen3_next": (
        "qwen3_next",
        dict(
            _DELTA,
            num_experts=6,
            num_experts_per_tok=2,
            shared_expert_intermediate_size=40,
            mlp_only_layers=[1],
            **_MOE,
        ),
    ),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        dict(
            _DELTA,
            num_experts=8,
            num_experts_per_tok=2,
            shared_expert_intermediate_size=40,
            **_MOE,
        ),
    ),
    "gemma": ("gemma", {"head_dim": 24}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 24,
            "sliding_window": 6,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 20,
            "num_hidden_layers": 4,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 24,
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "num_hidden_layers": 7,
            "layer_types": _types(7, 6),
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "layer_types": _types(4, 2),
            "final_logit_softcapping": 3.0,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    ),
    "gemma4-keqv": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "layer_types": _types(4, 2),
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    ),
    "gemma4-e2b": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 6,
            "num_hidden_layers": 7,
            "layer_types": [*_types(7, 3)[:6], "full_attention"],
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "num_hidden_layers": 6,
            "layer_types": [*_types(4, 2), "sliding_attention", "full_attention"],
            "intermediate_size": [112, 112, 96, 112, 112, 80],
            "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0, 0.0, 0.9],
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_kv_shared_layers": 2,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "laurel_rank": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4-moe": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 6,
            "layer_types": _types(3, 3),
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "phi": ("phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "phi-qk": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-window": ("phi3", {"sliding_window": 7, "partial_rotary_factor": 0.5}),
    "phi3-longrope": (
        "phi3",
        {
            "sliding_window": None,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + 0.05 * i for i in range(8)],
                "long_factor": [1.5 + 0.2 * i for i in range(8)],
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "phimoe-longrope": (  # whose transformers never take the factors of long contexts
        "phimoe",
        {
            "num_local_experts": 4,
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + 0.2 * i for i in range(8)],
                "long_factor": [1.0 + 0.2 * i for i in range(8)],
                "original_max_position_embeddings": 16,
                "short_mscale": 1.2,
                "long_mscale": 1.3,
            },
        },
    ),
    "phimoe": (
        "phimoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "intermediate_size": 96,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "rope_parameters": dict(_YARN, truncate=False, beta_fast=32.0, beta_slow=1.0),
        },
    ),
    "gpt2": (
        "gpt2",
        {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256, "n_inner": None},
    ),
    "gpt2-scaled": (
        "gpt2",
        {
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 3,
            "n_positions": 256,
            "activation_function": "relu",
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "gptj": (
        "gptj",
        {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256, "rotary_dim": 8},
    ),
    "gpt_neo": (
        "gpt_neo",
        {
            "num_layers": 4,
            "num_hidden_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 6,
            "intermediate_size": 112,
        },
    ),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25}),
    "gpt_neox-seq": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "gpt_bigcode": (
        "gpt_bigcode",
        {
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 3,
            "n_positions": 256,
            "n_inner": 112,
            "multi_query": True,
        },
    ),
    "gpt_bigcode-mha": (
        "gpt_bigcode",
        {
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 3,
            "n_positions": 256,
            "n_inner": 112,
            "multi_query": False,
        },
    ),
    "opt": ("opt", {"ffn_dim": 112, "word_embed_proj_dim": 64}),
    "opt-350m": ("opt", {"ffn_dim": 112, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "opt-bare": ("opt", {"ffn_dim": 112, "layer_norm_elementwise_affine": False}),
    "falcon-7b": (
        "falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
        },
    ),
    "falcon-40b": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False, "alibi": False},
    ),
    "falcon-rw": (
        "falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "alibi": True,
        },
    ),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 3}),
    "mpt": (
        "mpt",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 256,
            "attn_config": {"alibi": True, "clip_qkv": 0.8},
        },
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "olmo": ("olmo", {"clip_qkv": 0.8}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "layer_types": _types(4, 4),
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 2.0}),
    "granite4": (
        "granitemoehybrid",
        {
            "layer_types": ["attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
        },
    ),
    "granite4-experts": (
        "granitemoehybrid",
        {
            "layer_types": ["attention"] * 3,
            "num_local_experts": 4,
            "shared_intermediate_size": 80,
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    "granitemoe": (
        "granitemoe",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "granitemoeshared": (
        "granitemoeshared",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
        },
    ),
    "cohere": ("cohere", {"logit_scale": 0.25, "use_qk_norm": False}),
    "cohere-qk": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": (
        "cohere2",
        {
            "logit_scale": 0.25,
            "sliding_window": 6,
            "num_hidden_layers": 5,
            "layer_types": _types(5, 4),
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 6},
    ),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "stablelm-12b": (
        "stablelm",
        {"partial_rotary_factor": 0.25, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "glm": ("glm", {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm4": ("glm4", {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm4_moe": (
        "glm4_moe",
        dict(
            head_dim=16,
            partial_rotary_factor=0.5,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            **_MOE,
        ),
    ),
    "deepseek_v2": (
        "deepseek_v2",
        dict(
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=10,
            num_key_value_heads=4,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            topk_method="group_limited_greedy",
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            **_MOE,
        ),
    ),
    "deepseek_v2-lite": (
        "deepseek_v2",
        dict(
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=10,
            num_key_value_heads=4,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=3,
            topk_method="greedy",
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            **_MOE,
        ),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        dict(
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=10,
            num_key_value_heads=4,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            rope_parameters=dict(_YARN, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1),
            **_MOE,
        ),
    ),
    "cwm": (
        "cwm",
        {"sliding_window": 6, "head_dim": 20, "rope_parameters": _LLAMA3, "bos_token_id": 1},
    ),
    "solar_open": (
        "solar_open",
        dict(
            head_dim=16,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.5,
            **_MOE,
        ),
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        dict(
            q_lora_rank=24,
            kv_lora_rank=24,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=10,
            num_key_value_heads=4,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            mlp_layer_types=["sparse", "dense", "sparse"],
            routed_scaling_factor=1.5,
            **_MOE,
        ),
    ),
    "mistral4": (
        "mistral4",
        dict(
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=10,
            num_key_value_heads=4,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            rope_parameters=dict(
                _YARN,
                llama_4_scaling_beta=0.3,
                original_max_position_embeddings=8,
                mscale=1.0,
                mscale_all_dim=1.0,
                beta_fast=32,
                beta_slow=1,
            ),
            **_MOE,
        ),
    ),
    "nanochat": ("nanochat", {}),
    "nanochat-uncapped": (
        "nanochat",
        {"final_logit_softcapping": None, "hidden_act": "gelu", "rope_parameters": _YARN},
    ),
    "youtu": (
        "youtu",
        {
            "q_lora_rank": 24,
            "kv_lora_rank": 264,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "num_key_value_heads": 4,
            "mlp_bias": True,
        },
    ),
    "exaone4": (
        "exaone4",
        {"sliding_window": 6, "num_hidden_layers": 4, "layer_types": _types(4, 4)},
    ),
    "exaone4-full": (
        "exaone4",
        {"sliding_window": None, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
    ),
    "exaone_moe": (
        "exaone_moe",
        dict(
            sliding_window=6,
            num_hidden_layers=4,
            layer_types=_types(4, 4),
            num_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
            num_shared_experts=1,
            **_MOE,
        ),
    ),
    "exaone_moe-first": (
        "exaone_moe",
        dict(
            sliding_window=6,
            num_hidden_layers=4,
            layer_types=_types(4, 4),
            num_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            mlp_layer_types=["dense", *["sparse"] * 3],
            first_k_dense_replace=1,
            num_shared_experts=1,
            **_MOE,
        ),
    ),
    "nemotron": ("nemotron", {"partial_rotary_factor": 0.5, "head_dim": 16}),
    "ernie4_5": ("ernie4_5", {"use_bias": True, "head_dim": 16}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        dict(
            use_bias=True,
            moe_num_experts=6,
            moe_k=2,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
            moe_layer_end_index=-1,
            moe_layer_interval=1,
            **_MOE,
        ),
    ),
    "hunyuan": (
        "hunyuan_v1_dense",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "alpha": 4.0,
                "factor": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "hunyuan_moe": (
        "hunyuan_v1_moe",
        {"head_dim": 16, "num_experts": 6, "moe_topk": 2, "num_shared_expert": 1},
    ),
    "seed_oss": ("seed_oss", {"head_dim": 20, "attention_bias": True, "attention_out_bias": False}),
    "apertus": ("apertus", {"mlp_bias": True}),
    "arcee": ("arcee", {}),
    "helium": ("helium", {"head_dim": 16}),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 80,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 1, 1, 0],
            "floor_scale": 4,
            "attn_scale": 0.3,
            "attn_temperature_tuning": True,
        },
    ),
    "llama4-kinds": (
        "llama4_text",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 80,
            "num_local_experts": 4,
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 1, 0],
            "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
            "rope_parameters": _YARN,
        },
    ),
    "dots1": (
        "dots1",
        dict(
            head_dim=16,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            sliding_window=6,
            layer_types=_types(3, 2),
            **_MOE,
        ),
    ),
    "dots1-full": (
        "dots1",
        dict(
            head_dim=16,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            **_MOE,
        ),
    ),
    "afmoe": (
        "afmoe",
        dict(
            head_dim=20,
            num_hidden_layers=4,
            layer_types=_types(4, 4),
            sliding_window=6,
            num_experts=8,
            num_experts_per_tok=2,
            num_shared_experts=1,
            num_dense_layers=1,
            route_scale=1.5,
            mup_enabled=True,
            **_MOE,
        ),
    ),
    "minimax_m2": (
        "minimax_m2",
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "minicpm3": (
        "minicpm3",
        {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "num_key_value_heads": 4,
            "scale_emb": 3.0,
            "scale_depth": 1.4,
            "dim_model_base": 32,
        },
    ),
    "dbrx": (
        "dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
            "ffn_config": {
                "ffn_hidden_size": 24,
                "moe_num_experts": 6,
                "moe_top_k": 2,
                "hidden_size": 64,
            },
        },
    ),
    "dbrx-plain": (
        "dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 1, "clip_qkv": 2.0, "rope_theta": 1e4},
            "ffn_config": {
                "ffn_act_fn": {"name": "gelu"},
                "ffn_hidden_size": 24,
                "moe_num_experts": 6,
                "moe_top_k": 2,
                "moe_normalize_expert_weights": None,
                "hidden_size": 64,
            },
        },
    ),
    "biogpt": ("biogpt", {}),
    "xglm": (
        "xglm",
        {
            "d_model": 64,
            "ffn_dim": 112,
            "num_layers": 3,
            "attention_heads": 4,
            "scale_embedding": True,
            "pad_token_id": 1,
        },
    ),
    "persimmon": ("persimmon", {"partial_rotary_factor": 0.5}),
    "codegen": (
        "codegen",
        {
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 3,
            "n_positions": 256,
            "n_ctx": 256,
            "rotary_dim": 8,
        },
    ),
}
"""Name -> ``model_type`` and what its configuration adds to the small one."""


_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 6, "layer_types": _types(3, 3), "rope_theta": 1e4},
    "mistral3": {"sliding_window": None},
    "llama4": {"intermediate_size_mlp": 80, "num_local_experts": 4, "attention_chunk_size": 8},
    "llava": {},
    "gemma4": {"sliding_window": 6, "hidden_size_per_layer_input": 12, "pad_token_id": 0},
    "qwen2_vl": {"rope_parameters": _MROPE},
    "qwen2_5_vl": {"rope_parameters": _MROPE},
    "qwen3_vl": {},
    "qwen3_5": _DELTA | {"rope_parameters": _MROPE | {"partial_rotary_factor": 0.5}},
    "qwen3_5_moe": _DELTA
    | {
        "rope_parameters": _MROPE | {"partial_rotary_factor": 0.5},
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "llava_next": {},
    "qwen3_vl_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
"""``model_type`` of a multimodal model -> what its ``text_config`` adds to the small one."""


@cache
def write_wrapped(folder: Path, model_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Write a multimodal checkpoint whose images are tiny; what `write_family` returns."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type)
    inner = {  # those of Gemma 4 are None before they are given
        name: getattr(getattr(config, f"{name}_config"), "model_type", f"{model_type}_{name}")
        for name in ("text", "vision")
    }
    text = {**_SMALL, "head_dim": 16, **WRAPPERS[model_type], "model_type": inner["text"]}
    text["vocab_size_per_layer_input"] = VOCAB_SIZE
    vision = {**_SMALL_VISION, "model_type": inner["vision"]}
    if model_type == "gemma4":
        vision |= {"num_key_value_heads": 2, "head_dim": 16}
    config = type(config)(text_config=text, vision_config=vision, tie_word_embeddings=False)
    make = transformers.AutoModelForImageTextToText.from_config
    return _write(folder, make(config, attn_implementation="eager"))


_SMALL_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def make_config(name: str, *, has_whole_groups: bool = False, **settings: Any) -> Any:
    """The configuration of a variant in transformers; ``settings`` are beside those of the
    variant. ``has_whole_groups``: what linears read has sizes that 64 divides."""
    import transformers

    model_type, changes = FAMILY_VARIANTS[name]
    values = {**_SMALL, **changes, **settings}
    if has_whole_groups:
        values = {key: _in_groups(key, each) for key, each in values.items()}
    return transformers.AutoConfig.for_model(model_type, **values)


_SIZE = re.compile(
    r"(.*_|\b)(intermediate_size(_mlp)?|ffn_dim|n_inner|ffn_hidden_size|lora_rank|laurel_rank"
    r"|hidden_size_per_layer_input)"
)
"""Names of sizes that are inputs of a linear, of which those of a head are one of four."""
_HEAD_SIZE = re.compile(r"(v_|linear_value_)?head_dim")


def _in_groups(key: str, value: Any) -> Any:
    """A setting, rounded up if it is such a size."""
    if isinstance(value, dict):
        return {name: _in_groups(name, each) for name, each in value.items()}
    if isinstance(value, list):
        return [_in_groups(key, each) for each in value]
    unit = 64 if _SIZE.fullmatch(key) else 16 if _HEAD_SIZE.fullmatch(key) else 1
    return value if unit == 1 or not value else -(-value // unit) * unit


def read_config(name: str) -> ModelConfig:
    """What is read of a variant's configuration, with all keys that transformers knows."""
    return read_family(JsonReader(config_values(make_config(name)), "config.json"))


def config_values(config: Any) -> dict[str, Any]:
    """All that config.json may say of it."""
    architectures = {kind: name for name, each in FAMILIES.items() for kind in each.model_types}
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values | {"architectures": [architectures[config.model_type]]}


@cache
def write_family(folder: Path, name: str, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the checkpoint of a variant; tokens [40] and the logits [40, vocab] of transformers.
    ``settings``: of `make_config`."""
    import transformers

    model_type, config = FAMILY_VARIANTS[name][0], make_config(name, **settings)
    torch.manual_seed(0)
    # transformers' eager Falcon adds ALiBi twice; others have no fused attention.
    attention = "sdpa" if model_type == "falcon" else "eager"
    make = transformers.AutoModelForCausalLM.from_config
    if model_type == "mistral4":  # known to the Auto class as a part of Mistral 3 only
        make = transformers.Mistral4ForCausalLM._from_config
    return _write(folder, make(config, attn_implementation=attention))


def _write(folder: Path, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Save a model with spread weights; tokens [40] and its logits [40, vocab]."""
    model = model.float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each, tensor in [*model.named_parameters(), *_random_buffers(model)]:
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() <= 1 or tensor.shape[-1] == 1 or "bias" in each:
                tensor.add_(0.2 * noise)
            elif "embed" in each or "wte" in each or "wpe" in each:
                tensor.copy_(0.5 * noise)
            else:
                tensor.copy_(1.5 * noise / tensor.shape[-1] ** 0.5)
        tokens = torch.randint(0, VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(2))
        logits = model(tokens).logits[0]
    model.save_pretrained(folder)
    return tokens[0], logits


def _random_buffers(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Corrections of routers and numbers of layers; not what is computed or stands for a scale."""
    names = ("e_score_correction_bias", "layer_scalar")
    return [(name, each) for name, each in model.named_buffers() if name.endswith(names)]
