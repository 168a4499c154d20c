"""tokenizer.json with the files that speak of it, and without the limits of who trained with it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from inflight_backend.checkpoint_files import find_file, is_lfs_pointer
from inflight_backend.errors import CheckpointError

_NAME = "tokenizer.json"
_CONFIG = "tokenizer_config.json"


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in ``folder``; it cuts and pads nothing, though the file may say so: training
    leaves its limits there.

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
    return tokenizer


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
