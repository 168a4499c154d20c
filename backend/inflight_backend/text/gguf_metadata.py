"""What the metadata of a GGUF file says of texts, as the small files of a checkpoint say it."""

from __future__ import annotations

from typing import Any

from inflight_backend.errors import CheckpointError
from inflight_backend.gguf_files import GgufFile

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_PURPOSES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""A token's purpose in tokenizer_config.json, and in metadata."""

BEGINNING = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
"""Kinds of byte-level tokenizers (``tokenizer.ggml.pre``) whose texts begin with ``bos_token``
unless the file says otherwise; those of SentencePiece do."""

_CONTROL = 3
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<EOT>", "_<EOT>", "<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>", "<|eom_id|>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|user|>", "<|observation|>"),
)
"""Special tokens with which turns end; metadata names one or two of a model's."""

_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
}


def read_texts(file: GgufFile, name: str) -> dict[str, Any]:
    """The content of a JSON file of a checkpoint; empty for one that the metadata says nothing
    of. `CheckpointError` for values of other types than they must have."""
    reader = _READERS.get(name)
    try:
        return {} if reader is None else reader(file)
    except (LookupError, TypeError) as error:
        raise CheckpointError(
            f"{file.name}: a value of tokenizer.ggml has another type than it must have ({error})"
        ) from None


def read_ends(file: GgufFile) -> dict[str, str]:
    """``bos_token`` and ``eos_token``, where the file has them."""
    config = read_texts(file, "tokenizer_config.json")
    return {name: text for name, text in config.items() if name in ("bos_token", "eos_token")}


def adds_bos(file: GgufFile) -> bool:
    """Whether texts begin with ``bos_token``."""
    model, pre = (file.value(f"{_PREFIX}{key}") for key in ("model", "pre"))
    default = pre in BEGINNING if model == "gpt2" else model in ("llama", "gemma4")
    return bool(file.value(f"{_PREFIX}add_bos_token", default))


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    tokens = file.value(f"{_PREFIX}tokens", [])
    found: dict[str, Any] = {}
    for purpose, name in _PURPOSES.items():
        number = file.value(f"{_PREFIX}{name}_token_id")
        if number is not None and number < len(tokens):
            found[f"{purpose}_token"] = tokens[number]
    found["add_bos_token"] = adds_bos(file)
    found["add_eos_token"] = bool(file.value(f"{_PREFIX}add_eos_token", False))
    templates = _templates(file)
    if list(templates) == ["default"]:
        found["chat_template"] = templates["default"]
    elif templates:
        pairs = templates.items()
        found["chat_template"] = [{"name": name, "template": text} for name, text in pairs]
    return found


def _templates(file: GgufFile) -> dict[str, str]:
    found = {"default": file.value(_TEMPLATE)}
    for name in file.value("tokenizer.chat_templates", []):
        found[name] = file.value(f"{_TEMPLATE}.{name}")
    return {name: text for name, text in found.items() if text}


def _generation_config(file: GgufFile) -> dict[str, Any]:
    """The first id is that of ``eos_token``."""
    tokens = file.value(f"{_PREFIX}tokens", [])
    kinds = file.value(f"{_PREFIX}token_type", [])
    ids = [file.value(f"{_PREFIX}{name}_token_id") for name in ("eos", "eot", "eom")]
    ids += [
        number
        for number, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and text in _ENDS
    ]
    known = [each for each in dict.fromkeys(ids) if each is not None and each < len(tokens)]
    found = {new: file.value(old) for old, new in _SAMPLING.items() if file.value(old) is not None}
    return {"eos_token_id": known, "do_sample": bool(found), **found}


def _config(file: GgufFile) -> dict[str, Any]:
    embedding = file.tensors.get("token_embd.weight")
    return {} if embedding is None else {"vocab_size": embedding.shape[0]}


_READERS = {
    "tokenizer_config.json": _tokenizer_config,
    "generation_config.json": _generation_config,
    "config.json": _config,
}
