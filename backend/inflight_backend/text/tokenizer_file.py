"""tokenizer.json with the files that speak of it, and without the limits of who trained with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import find_file, is_lfs_pointer

_NAME = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_OBEYING_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer")  # and with Fast behind it


def read_tokenizer(folder: Path) -> tuple[Tokenizer, str | None]:
    """The tokenizer in ``folder``; and what its file would have to say, None if it says that.

    * It cuts and pads nothing, though the file may say so: training leaves its limits there.
    * For tokenizers that call themselves Llama's, ``add_bos_token`` and ``add_eos_token`` of
      tokenizer_config.json count, not the file: that of DeepSeek-R1-Distill adds nothing by itself.
      So it is with TensorRT-LLM's clients, that is with transformers 4; 5 leaves the keys unread.

    `CheckpointError` if there is none, or none that can be read.
    """
    path = find_file(folder, _NAME)
    if path is None:
        raise CheckpointError(f"{_NAME} is missing in the folder '{folder.name}'")
    if is_lfs_pointer(path):
        raise CheckpointError(f"{_NAME}: a pointer of Git LFS, not the file; run git lfs pull")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise CheckpointError(f"{_NAME} cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, tokenizer.to_str() if _set_ends(tokenizer, folder) else None


def read_json(folder: Path, name: str) -> dict[str, object]:
    """What a file says; nothing if there is none."""
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
    for name in (_CONFIG, "special_tokens_map.json"):
        token = read_json(folder, name).get(f"{kind}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def _set_ends(tokenizer: Tokenizer, folder: Path) -> bool:
    """Let texts begin and end as tokenizer_config.json says; True if the file says otherwise."""
    config = read_json(folder, _CONFIG)
    is_llama = str(config.get("tokenizer_class")).startswith(_OBEYING_CLASSES)
    if not (is_llama and ("add_bos_token" in config or "add_eos_token" in config)):
        return False
    template = ["$A"]
    special: list[dict[str, Any]] = []
    for kind in ("bos", "eos"):
        if (token := _added_token(tokenizer, folder, config, kind)) is not None:
            template.insert(0 if kind == "bos" else 2, kind)
            special.append({"id": kind, "ids": [token[1]], "tokens": [token[0]]})
    if tokenizer.encode("").ids == [number for each in special for number in each["ids"]]:
        return False
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=special
    )
    return True


def _added_token(
    tokenizer: Tokenizer, folder: Path, config: Mapping[str, object], kind: str
) -> tuple[str, int] | None:
    """The token and its id that ``add_bos_token`` (``kind`` bos) puts before a text.

    Beside ``add_eos_token`` alone it is true: a text begins with the token unless it says no.
    """
    is_added = config.get(f"add_{kind}_token", kind == "bos")
    text = special_token(folder, kind) if is_added else None
    if text is None:
        return None
    number = tokenizer.token_to_id(text)
    if number is None:
        raise CheckpointError(
            f"{_CONFIG}: add_{kind}_token is true, and {_NAME} has no {text!r}, the {kind}_token"
        )
    return text, int(number)
