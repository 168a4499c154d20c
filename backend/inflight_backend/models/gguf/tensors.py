"""A `ModelConfig` for the tensors of a GGUF file: their names, and what became of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container
from dataclasses import replace
from typing import Any

from inflight_backend.gguf_files import GgufFile
from inflight_backend.models.config import (
    AttentionConfig,
    BesideNames,
    DeltaNames,
    LayerInputNames,
    ModelConfig,
    NormConfig,
    WeightNames,
)
from inflight_backend.models.gguf.architectures import architecture_of, num_extra_layers
from inflight_backend.models.quantization.schemes import GGUF_SCHEMES, Quantization

_DELTA = DeltaNames(
    folder="",
    inputs=("attn_qkv", "attn_gate"),
    gates=("ssm_beta", "ssm_alpha"),
    conv="ssm_conv1d",
    rate="ssm_a",
    step_bias="ssm_dt.bias",
    norm="ssm_norm",
    output="ssm_out",
    is_rate=True,
)
_LAYER_INPUT = LayerInputNames(
    embedding="per_layer_token_embd",
    projection="per_layer_model_proj",
    projection_norm="per_layer_proj_norm",
    gate="inp_gate",
    output="proj",
    norm="post_norm",
)
_BOTH = "ffn_gate_up_exps"
_BESIDE = BesideNames(
    router="ffn_gate_inp",
    layout="gguf",
    gate_up=_BOTH,
    down="ffn_down_exps",
    input_norm="pre_ffw_norm_2",
    output_norm="post_ffw_norm_2",
    dense_norm="post_ffw_norm_1",
)
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
    router_scale="ffn_gate_inp.scale",
    expert_scales="ffn_down_exps.scale",
    scalar="layer_output_scale.weight",
    delta=_DELTA,
    layer_input=_LAYER_INPUT,
    beside=_BESIDE,
    expert_layout="gguf",
)
"""What most call their tensors."""
_LAYER = re.compile(r"^blk\.\d+\.")
_FUSED = "attn_qkv"
_NORMS_BETWEEN = ("post_attention_norm", "attn_output_norm")
"""What the norm before the feed-forward layer may be called, too."""
_TABLES = r"(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight"
"""Of the rotary embedding; they are read with the metadata."""


def with_gguf_tensors(model: ModelConfig, file: GgufFile) -> ModelConfig:
    """``model`` as it is read from the file's metadata, for its tensors.

    The 1 that Gemma's norms add to their weights is in the weights there. Where rows of query and
    key were permuted, neighbours turn together.
    """
    architecture = architecture_of(file)
    has = {_LAYER.sub("", name) for name in file.tensors}
    names = _names(replace(_NAMES, **architecture.names), model, has)

    def change(_: int, attention: AttentionConfig) -> dict[str, Any]:
        rope, delta, kind = attention.rope, attention.delta, attention.qk_norm
        if rope is not None and architecture.is_permuted:
            rope = replace(rope, is_interleaved=True)
        if delta is not None:
            is_shared = delta.num_value_heads > delta.num_key_heads
            delta = replace(delta, is_tiled=is_shared and names.delta == _DELTA)
        return {
            "rope": rope,
            "delta": delta,
            "qk_norm": "per_head" if kind == "per_head_list" else kind,
            "qk_norm_kind": _without_offset(attention.qk_norm_kind),
            "has_output_bias": f"{names.output}.bias" in has,
        }

    types = Counter(each.dtype for each in file.tensors.values() if each.dtype in GGUF_SCHEMES)
    quantization = None
    if types:
        [(most, _)] = types.most_common(1)
        quantization = Quantization(f"gguf {most}", ())
    return replace(
        model.with_attention(change),
        names=names,
        norm=_without_offset(model.norm),
        ignored=(_TABLES, *_unread(model, file)),
        quantization=quantization,
    )


def _names(names: WeightNames, model: ModelConfig, has: Container[str]) -> WeightNames:
    """``names`` as far as not all files have them: what one layer or another ``has`` tells."""
    changes: dict[str, Any] = {}
    if f"{_BOTH}.weight" in has:
        changes |= {"expert_gate": _BOTH, "expert_up": _BOTH}
    if "ssm_ba.weight" in has:
        changes["delta"] = replace(_DELTA, gates=("ssm_ba",))
    if f"{_FUSED}.weight" in has and not model.deltas:
        changes["qkv"] = _FUSED  # [q; k; v], whatever the family has
    if model.names.gate_up is not None and f"{names.gate}.weight" not in has:
        changes["gate_up"] = names.up
    if "attn_k_b.weight" in has:
        changes["latent_halves"] = ("attn_k_b", "attn_v_b")
    if "attn_norm_2.weight" in has:
        changes |= {"input_norm": "attn_norm_2", "mlp_norm": "attn_norm"}
    elif f"{names.mlp_norm}.weight" not in has and model.block == "pre":
        found = [each for each in _NORMS_BETWEEN if f"{each}.weight" in has]
        changes["mlp_norm"] = found[0] if found else names.mlp_norm
    return replace(names, **changes)


def _unread(model: ModelConfig, file: GgufFile) -> tuple[str, ...]:
    """Patterns of the tensors of layers behind the last one, and of keys and values of those that
    read another layer's."""
    first = model.num_layers
    behind = range(first, first + num_extra_layers(file))
    reading = (
        index for index, each in enumerate(model.layers) if each.attention.kv_source is not None
    )
    return (
        *(rf"blk\.{each}\..*" for each in behind),
        *(rf"blk\.{each}\.attn_(k|v|k_norm)\..*" for each in reading),
    )


def _without_offset(norm: NormConfig) -> NormConfig:
    return replace(norm, offset=0.0)
