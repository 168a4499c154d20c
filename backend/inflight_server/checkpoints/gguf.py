"""Converts a GGUF file of the Llama family into a checkpoint folder.

Weights are widened to float16, the type of their scales; the tokenizer is the byte-level one that
the file has. What is left out here (other families and tokenizers) is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from inflight_backend.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYERS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # the type of special tokens
_SUPPORTED = {
    "general.architecture": ("llama",),
    "tokenizer.ggml.model": ("gpt2",),
    "tokenizer.ggml.pre": ("smollm",),
}


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the checkpoint in ``file`` to ``folder``, which must not exist.

    `CheckpointError` for a file of another family.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    for key, supported in _SUPPORTED.items():
        if (found := _value(reader, key)) not in supported:
            raise CheckpointError(f"{file.name}: {key} is {found!r}, not {' or '.join(supported)}")
    folder.mkdir(parents=True)
    weights = _read_weights(reader)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    texts = _tokens(reader)
    contents: dict[str, object] = {
        "config.json": _config(reader, is_tied="lm_head.weight" not in weights),
        "generation_config.json": {"eos_token_id": _ends(reader, texts)},
        "tokenizer_config.json": {
            "bos_token": texts["bos"],
            "eos_token": texts["eos"],
            "pad_token": texts["padding"],
            "unk_token": texts["unknown"],
        },
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    _tokenizer(reader).save(str(folder / "tokenizer.json"))
    if template := _value(reader, "tokenizer.chat_template", default=""):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _value(reader: GGUFReader, key: str, **default: Any) -> Any:
    field = reader.get_field(key)
    return default.get("default") if field is None else field.contents()


def _config(reader: GGUFReader, *, is_tied: bool) -> dict[str, object]:
    def number(key: str) -> Any:
        return _value(reader, f"llama.{key}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": number("vocab_size"),
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": number("rope.dimension_count"),
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": round(number("attention.layer_norm_rms_epsilon"), 9),  # was a float32
        "rope_theta": number("rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied,
        "torch_dtype": "float16",
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
    }


def _read_weights(reader: GGUFReader) -> dict[str, npt.NDArray[np.float16]]:
    """By their names in `transformers`; projections are ``[outputs, inputs]``."""
    from gguf.quants import dequantize

    num_heads = {
        "attn_q": _value(reader, "llama.attention.head_count"),
        "attn_k": _value(reader, "llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in reader.tensors:
        kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
        wide = dequantize(tensor.data, tensor.tensor_type)
        if kind in num_heads:  # rows of a head stand in pairs, for another rotary layout
            pairs = wide.reshape(num_heads[kind], -1, 2, wide.shape[-1])
            wide = pairs.swapaxes(1, 2).reshape(wide.shape)
        weights[_name(tensor.name)] = np.ascontiguousarray(wide, dtype=np.float16)
    return weights


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _TENSORS:
        return f"{_TENSORS[stem]}.weight"
    block, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    if block != "blk" or part not in _OF_LAYERS:
        raise CheckpointError(f"the tensor {name} is not one of a Llama")
    return f"model.layers.{number}.{_OF_LAYERS[part]}.weight"


def _tokens(reader: GGUFReader) -> dict[str, str]:
    """The texts of special tokens by what they are for."""
    texts = _value(reader, "tokenizer.ggml.tokens")
    return {
        kind: texts[_value(reader, f"tokenizer.ggml.{kind}_token_id")]
        for kind in ("bos", "eos", "unknown", "padding")
    }


def _ends(reader: GGUFReader, texts: dict[str, str]) -> list[int]:
    """A chat ends with the first, a text with the second, which is also that for unknown words."""
    every = _value(reader, "tokenizer.ggml.tokens")
    return [every.index(texts["eos"]), every.index(texts["unknown"])]


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    """Byte-level pairs; every digit is a token (``smollm``)."""
    texts = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(each.split(" ")) for each in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE({text: number for number, text in enumerate(texts)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _value(reader, "tokenizer.ggml.token_type")
    special = (text for text, kind in zip(texts, kinds, strict=True) if kind == _CONTROL)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return tokenizer
