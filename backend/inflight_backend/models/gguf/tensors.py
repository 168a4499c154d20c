"""A `ModelConfig` for the tensors of a GGUF file: their names, and what became of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from inflight_backend.gguf_files import GgufFile
from inflight_backend.models.config import AttentionConfig, ModelConfig, NormConfig, WeightNames
from inflight_backend.models.gguf.architectures import architecture_of
from inflight_backend.models.quantization.schemes import GGUF_SCHEMES, Quantization

_NAMES = WeightNames(
    prefix="",
    layers="blk.",
    embedding="token_embd",
    embedding_norm="token_embd_norm",
    positions="position_embd",
    final_norm="output_norm",
    head="output",
    input_norm="attn_norm",
    attention_output_norm="post_attention_norm",
    mlp_norm="ffn_norm",
    mlp_output_norm="post_ffw_norm",
    attention="",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    output="attn_output",
    latent_query=("attn_q_a", "attn_q_a_norm", "attn_q_b"),
    latent_key_value=("attn_kv_a_mqa", "attn_kv_a_norm", "attn_kv_b"),
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    sinks="attn_sinks.weight",
    mlp="",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    router="ffn_gate_inp",
    correction="exp_probs_b.bias",
    expert_gate="ffn_gate_exps",
    expert_up="ffn_up_exps",
    expert_down="ffn_down_exps",
    shared="",
    shared_parts=("ffn_gate_shexp", "ffn_up_shexp"),
    shared_down="ffn_down_shexp",
    shared_gate="ffn_gate_inp_shexp",
    expert_layout="gguf",
)
_FUSED = "attn_qkv"
_TABLES = r"(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight"
"""Of the rotary embedding; they are read with the metadata."""


def with_gguf_tensors(model: ModelConfig, file: GgufFile) -> ModelConfig:
    """``model`` as it is read from the file's metadata, for its tensors.

    The 1 that Gemma's norms add to their weights is in the weights there. Where rows of query and
    key were permuted, neighbours turn together.
    """
    architecture = architecture_of(file)
    names = replace(_NAMES, **architecture.names)
    if f"blk.0.{_FUSED}.weight" in file.tensors:
        names = replace(names, qkv=_FUSED)  # [q; k; v], whatever the family has
    if model.names.gate_up is not None:
        names = replace(names, gate_up=names.up)
    if "blk.0.attn_k_b.weight" in file.tensors:
        names = replace(names, latent_halves=("attn_k_b", "attn_v_b"))
    if model.block == "parallel2":
        names = replace(names, input_norm="attn_norm_2", mlp_norm="attn_norm")

    def change(_: int, attention: AttentionConfig) -> dict[str, Any]:
        rope = attention.rope
        if rope is not None and architecture.is_permuted:
            rope = replace(rope, is_interleaved=True)
        return {"rope": rope, "qk_norm_kind": _without_offset(attention.qk_norm_kind)}

    types = Counter(each.dtype for each in file.tensors.values() if each.dtype in GGUF_SCHEMES)
    quantization = None
    if types:
        [(most, _)] = types.most_common(1)
        quantization = Quantization(f"gguf {most}", ())
    return replace(
        model.with_attention(change),
        names=names,
        norm=_without_offset(model.norm),
        ignored=(_TABLES,),
        quantization=quantization,
    )


def _without_offset(norm: NormConfig) -> NormConfig:
    return replace(norm, offset=0.0)
