"""The small files of a checkpoint that say how text becomes tokens."""

from __future__ import annotations

import json
from pathlib import Path

from inflight_backend.errors import CheckpointError
from inflight_backend.gguf_files import find_gguf, open_gguf
from inflight_backend.models.checkpoint_files import find_file
from inflight_backend.text.gguf_metadata import read_texts

TOKENIZER = "tokenizer.json"
TEKKEN = "tekken.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
VOCAB, MERGES = "vocab.json", "merges.txt"
_NAMES = (TOKENIZER, TEKKEN, "tokenizer.model", "spiece.model", "tiktoken.model", VOCAB)


def find_tokenizer(folder: Path) -> Path | None:
    """The file of the tokenizer in ``folder``: tokenizer.json, else another that `conversion` can
    read, or the GGUF file that has it in its metadata; None if there is none. Errors as of
    `find_file` and `open_gguf`."""
    if (gguf := find_gguf(folder)) is not None:
        return gguf if "tokenizer.ggml.model" in open_gguf(gguf).metadata else None
    for name in _NAMES:
        path = find_file(folder, name)
        if path is not None and (name != VOCAB or find_file(folder, MERGES) is not None):
            return path
    return None


def no_tokenizer(folder: Path) -> CheckpointError:
    """The error where ``folder`` must have one."""
    return CheckpointError(f"the folder '{folder.name}' has no tokenizer ({', '.join(_NAMES)})")


def read_json(folder: Path, name: str) -> dict[str, object]:
    """The JSON object of a file; empty if there is none. Of a GGUF file, what its metadata says of
    the same."""
    if (gguf := find_gguf(folder)) is not None:
        return read_texts(open_gguf(gguf), name)
    path = find_file(folder, name)
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def special_token(folder: Path, kind: str) -> str | None:
    """The text of ``eos_token`` (``kind`` eos), ``bos_token`` or ``pad_token``, if it is told."""
    for name in (TOKENIZER_CONFIG, "special_tokens_map.json"):
        token = read_json(folder, name).get(f"{kind}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None
