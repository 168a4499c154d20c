"""Whether a checkpoint's family is served; if not, which one comes nearest, and what differs."""

from __future__ import annotations

from difflib import SequenceMatcher
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import JsonReader, find_config, list_names
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.families.registry import FAMILIES

_WITHOUT_MEANING = (
    *("architectures", "model_type", "auto_map", "torch_dtype", "dtype", "transformers_version"),
    *("*_token_id", "*dropout*", "*pdrop*", "initializer_*", "use_cache", "_*", "tokenizer_class"),
    *("pretraining_tp", "output_*", "return_dict", "task_specific_params", "vision_config"),
)
"""Patterns of keys that do not change what a model computes from text."""


def check_supported(folder: Path) -> None:
    """`CheckpointError` unless config.json in ``folder`` is that of a model that is served."""
    reader = JsonReader.from_file(find_config(folder))
    names = reader.texts("architectures")
    if names and names[0] not in FAMILIES:
        raise CheckpointError(_describe(names[0], reader))
    ModelConfig.from_reader(reader)


class _Likeness(NamedTuple):
    """How a family reads the config.json of another; the least is the nearest."""

    fails: bool
    num_unread: int
    unlikeness: float  # of the names
    architecture: str
    unread: tuple[str, ...]
    error: str


def _describe(name: str, reader: JsonReader) -> str:
    nearest = min(_read_as(each, name, reader) for each in FAMILIES)
    difference = "reads all of its config.json, which need not be enough"
    if nearest.error:
        difference = f"refuses it: {nearest.error.removeprefix('config.json: ')}"
    elif nearest.unread:
        difference = f"knows nothing of {list_names(nearest.unread)}"
    text = (
        f"config.json: the architecture {name!r} is not supported (`inflight models` lists those "
        f"that are); the nearest, {nearest.architecture}, {difference}"
    )
    if "auto_map" in reader:
        text += "; code that a checkpoint brings (trust_remote_code) is never run"
    return text


def _read_as(architecture: str, name: str, reader: JsonReader) -> _Likeness:
    values = _Noted(reader.values())
    values |= {"architectures": [architecture], "model_type": None}
    unlikeness = 1 - SequenceMatcher(None, architecture, name).ratio()
    try:
        ModelConfig.from_reader(JsonReader(values, "config.json"))
    except CheckpointError as error:
        return _Likeness(True, 0, unlikeness, architecture, (), str(error))
    unread = [
        key
        for key, value in values.items()
        if value and key not in values.read and not any(fnmatch(key, p) for p in _WITHOUT_MEANING)
    ]
    return _Likeness(False, len(unread), unlikeness, architecture, tuple(unread), "")


class _Noted(dict[str, Any]):
    """Notes the keys that are asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)
