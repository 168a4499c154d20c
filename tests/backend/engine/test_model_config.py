"""`config.json`: what transformers and older tools write, and what is refused, by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight_backend.errors import CheckpointError
from inflight_backend.models.blocks.rope import make_cos_sin
from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import AttentionConfig, ModelConfig, RopeConfig
from inflight_backend.models.families.registry import (
    FAMILIES,
    read_family,
    read_model,
    read_plain,
    register_family,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
QWEN = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 8}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(values: dict[str, Any], **changes: Any) -> ModelConfig:
    """The configuration with some keys changed; ``...`` removes a key."""
    merged = {**values, **changes}
    return read_family(JsonReader({k: v for k, v in merged.items() if v is not ...}, "config.json"))


def attention(config: ModelConfig) -> AttentionConfig:
    """Of the first layer."""
    return config.layers[0].attention


def rope(values: dict[str, Any], **changes: Any) -> RopeConfig:
    """Of the first layer of a configuration."""
    found = attention(read(values, **changes)).rope
    assert found is not None
    return found


def refusal(values: dict[str, Any], **changes: Any) -> str:
    """What is said about it."""
    with pytest.raises(CheckpointError) as caught:
        read(values, **changes)
    return str(caught.value)


def test_llama_1_writes_little() -> None:
    config = read(LLAMA)
    first = attention(config)
    assert (first.num_kv_heads, first.head_dim) == (32, 128)
    assert first.rope == RopeConfig(128, 10_000.0)
    assert not config.is_tied
    assert not first.has_qkv_bias
    assert first.window is None
    assert config.num_layers == 4
    assert config.dtype == "float32"


def test_old_and_new_names() -> None:
    old = read(LLAMA, torch_dtype="bfloat16", rope_theta=5e5, rope_scaling=None)
    new = read(LLAMA, dtype="bfloat16", rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert old == new
    assert old.dtype == "bfloat16"
    assert rope(LLAMA, rope_theta=5e5).theta == 5e5


def test_rope_of_llama_3() -> None:
    expected = RopeConfig(128, 5e5, False, "llama3", 8.0, 1.0, 4.0, 8192)
    old = rope(LLAMA, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    new = rope(LLAMA, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old == new == expected
    linear = rope(LLAMA, rope_scaling={"type": "linear", "factor": 2})
    assert linear == RopeConfig(128, 10_000.0, False, "linear", 2.0)


def test_rope_is_said_once() -> None:
    """Of two that differ transformers 5 takes ``rope_scaling``: no theta of the other one."""
    new = {"rope_type": "default", "rope_theta": 5e5}
    old = {"rope_type": "llama3", **LLAMA3}
    text = "config.json: rope_scaling is given beside rope_parameters and differs"
    assert text in refusal(LLAMA, rope_parameters=new, rope_scaling=old)
    assert rope(LLAMA, rope_parameters=new, rope_scaling=new) == RopeConfig(128, 5e5)
    for nothing in ({}, None, {"type": None}):
        assert rope(LLAMA, rope_parameters=new, rope_scaling=nothing) == RopeConfig(128, 5e5)
        assert rope(LLAMA, rope_parameters=nothing, rope_scaling=old).kind == "llama3"


def test_positions_that_the_rope_was_trained_for() -> None:
    """Phi-3 as a Llama has the key outside, and a plain rope."""
    key = "original_max_position_embeddings"
    assert rope(LLAMA, **{key: 1024}) == RopeConfig(128, 10_000.0)
    scaling = {"rope_type": "llama3", **LLAMA3}
    assert rope(LLAMA, rope_scaling=scaling, **{key: 8192}).original_max_positions == 8192
    text = refusal(LLAMA, rope_scaling=scaling, **{key: 1024})
    assert text == f"config.json: {key} (1024) is not that of the rope (8192)"
    del scaling[key]
    assert rope(LLAMA, rope_scaling=scaling, **{key: 1024}).original_max_positions == 1024
    assert rope(LLAMA, rope_scaling=scaling).original_max_positions == 4096


@pytest.mark.parametrize(
    "config",
    [
        RopeConfig(64, 5e5, False, "llama3", 8.0, 1.0, 4.0, 128),
        RopeConfig(64, 1e4, False, "linear", 3.0),
    ],
)
def test_rope_angles_equal_transformers(config: RopeConfig) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters: dict[str, Any] = {"rope_type": config.kind, "rope_theta": config.theta}
    parameters["factor"] = config.factor
    if config.kind == "llama3":
        parameters |= {**LLAMA3, "original_max_position_embeddings": 128}
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=parameters)
    )
    cos, sin = rotary(torch.zeros(1), torch.arange(500)[None])
    ours = make_cos_sin(config, 64, 500)
    torch.testing.assert_close(ours[:, :32], cos[0, :, :32], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours[:, 32:], sin[0, :, :32], atol=2e-5, rtol=1e-4)


def test_longrope_takes_the_factors_of_the_served_length() -> None:
    """Those for short contexts where nothing longer than the original is served."""
    factors = {"short_factor": [1.0] * 64, "long_factor": [4.0] * 64, "rope_type": "longrope"}
    found = rope(LLAMA, rope_scaling={**factors, "original_max_position_embeddings": 32})
    tables = [make_cos_sin(found, 128, length) for length in (32, 33)]
    plain = make_cos_sin(RopeConfig(128), 128, 33)
    scale = found.attention_factor
    torch.testing.assert_close(tables[0], plain[:32] * scale)
    torch.testing.assert_close(tables[1][4], plain[1] * scale)


TYPES = ["full_attention", "sliding_attention"] * 2
SLIDING = {"use_sliding_window": True, "sliding_window": 64}
MISTRAL = {**QWEN, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}


@pytest.mark.parametrize(
    ("values", "changes", "windows"),
    [
        (QWEN, {}, (None,) * 4),
        (QWEN, {**SLIDING, "use_sliding_window": False}, (None,) * 4),
        (QWEN, {**SLIDING, "max_window_layers": 3}, (None, None, None, 64)),
        (QWEN, {**SLIDING, "max_window_layers": 9}, (None,) * 4),
        (QWEN, {**SLIDING, "layer_types": TYPES}, (None, 64, None, 64)),
        (MISTRAL, {}, (4096,) * 4),
        (MISTRAL, {"sliding_window": None}, (None,) * 4),
        (MISTRAL, {"sliding_window": 9}, (9,) * 4),
        # `AutoConfig` takes a Mistral with ``layer_types`` for a Ministral.
        (MISTRAL, {"sliding_window": 9, "layer_types": TYPES}, (None, 9, None, 9)),
    ],
)
def test_sliding_windows(
    values: dict[str, Any], changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = read(values, **changes)
    assert tuple(layer.attention.window for layer in config.layers) == windows
    assert attention(config).has_qkv_bias == (values is QWEN)
    assert not attention(config).has_output_bias


@pytest.mark.parametrize("key", [*QWEN])
def test_missing_key(key: str) -> None:
    assert refusal(QWEN, **{key: ...}).startswith(f"config.json: {key} is missing")


def test_qwen3_needs_its_head_dim() -> None:
    values = {**QWEN, "architectures": ["Qwen3ForCausalLM"]}
    assert refusal(values) == "config.json: head_dim is missing"
    assert attention(read(values, head_dim=64)).qk_norm == "head"


def test_unknown_architecture() -> None:
    """What is nearest to it, and what that one would make of the file."""
    text = refusal(LLAMA, architectures=["Qwen9ForCausalLM", "LlamaForCausalLM"], num_leaves=3)
    assert text.startswith("config.json: architectures 'Qwen9ForCausalLM' is not supported; ")
    assert "the nearest is Qwen" in text
    assert text.endswith("and it says: config.json: head_dim is missing")
    text = refusal(LLAMA, architectures=["Lama7ForCausalLM"], num_leaves=3, use_cache=True)
    assert text.endswith("the nearest is LlamaForCausalLM, and it has no use for num_leaves")
    assert "LlamaForCausalLM" in refusal(LLAMA, architectures=[])


def test_model_type_is_that_of_the_architecture() -> None:
    """transformers goes by it: a Mistral's layers slide, a Llama's do not."""
    assert read(LLAMA, model_type="llama") == read(LLAMA)
    assert read(LLAMA, model_type="llama", architectures=...) == read(LLAMA)
    text = refusal(LLAMA, model_type="mistral")
    assert "model_type 'mistral' is not that of LlamaForCausalLM, which is 'llama' or" in text


def test_a_family_of_ones_own_reads_its_options() -> None:
    """Without it the error lists the families that are known."""

    @register_family("OwnForCausalLM", "own")
    def read_own(reader: JsonReader) -> ModelConfig:
        return read_plain(reader, bias=reader.boolean("biases", default=False))

    own = {**QWEN, "architectures": ["OwnForCausalLM"], "model_type": "own"}
    try:
        assert attention(read(own, biases=True)).has_qkv_bias
    finally:
        del FAMILIES["OwnForCausalLM"]
    assert "'OwnForCausalLM' is not supported" in refusal(own)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "4096"}, "hidden_size must be an integer"),
        ({"hidden_size": 4096.0}, "hidden_size must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be between 1 and 1024"),
        ({"vocab_size": -1}, "vocab_size must be between"),
        ({"vocab_size": 10**30}, "vocab_size must be between"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be finite"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be finite"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be finite and above 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"num_key_value_heads": 5}, "num_key_value_heads (5) must divide"),
        ({"num_attention_heads": 33}, "hidden_size must be a multiple"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quant_method is missing"),
        ({"quantization": {"bits": 4}}, "quantization (of MLX) is not supported"),
        (
            {"compression_config": {"format": "dense"}},
            "compression_config: quant_method is missing",
        ),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"is_causal": False}, "is_causal false is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"per_layer_config": {"1": {"sliding_window": 5}}}, "per_layer_config is not supported"),
        ({"transformers_weights": "a.safetensors"}, "transformers_weights is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported"),
        ({"rope_theta": -1.0}, "rope_theta must be finite and above 0"),
        ({"rope_scaling": {"rope_type": "magic", "factor": 4}}, "rope_type 'magic' is not supp"),
        ({"rope_scaling": {"type": "yarn", "factr": 4}}, "factr is not supported with rope_type"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention is not supported"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1}},
            "high_freq_factor (1.0) must be above low_freq_factor",
        ),
    ],
)
@pytest.mark.case(103)
def test_values_that_are_refused(changes: dict[str, Any], named: str) -> None:
    text = refusal(LLAMA, **changes)
    assert named in text
    assert len(text) < 200


@pytest.mark.parametrize(
    ("values", "changes", "named"),
    [
        (QWEN, {"use_sliding_window": True, "max_window_layers": 1}, "sliding_window is missing"),
        (QWEN, SLIDING, "max_window_layers is missing"),
        (QWEN, {**SLIDING, "layer_types": TYPES[:1]}, "layer_types has 1 entries for 4 layers"),
        (QWEN, {**SLIDING, "layer_types": ["linear"] * 4}, "layer_types holds 'linear'"),
        (QWEN, {"layer_types": TYPES}, "holds 'sliding_attention', and there is no sliding window"),
        (MISTRAL, {"sliding_window": None, "layer_types": TYPES}, "there is no sliding window"),
    ],
)
def test_windows_that_are_refused(
    values: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    assert named in refusal(values, **changes)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        (json.dumps({**LLAMA, "rms_norm_eps": float("nan")}), "NaN is not a number of JSON"),
        ("\ud800".encode("utf-8", "surrogatepass"), "not valid JSON"),
    ],
)
@pytest.mark.case(103)
def test_files_that_are_refused(tmp_path: Path, content: str | bytes, complaint: str) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=complaint):
        read_model(tmp_path)


@pytest.mark.case(103)
def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_model(tmp_path)
