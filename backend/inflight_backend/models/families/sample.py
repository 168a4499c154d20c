"""A model of each family without a checkpoint, to ask what the family goes with."""

from __future__ import annotations

from typing import Any

from inflight_backend.models.checkpoint_files import REQUIRED, JsonReader
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.families.registry import Family

_SIZE = 64
_SIZES = {"hidden_size": _SIZE * _SIZE}  # heads, as many as all else, divide it


class _SampleReader(JsonReader):
    """A file with nothing in it, whose required keys, all of them numbers, are there when asked."""

    def _get(self, key: str, default: Any) -> Any:
        return super()._get(key, _SIZES.get(key, _SIZE) if default is REQUIRED else default)


def read_sample(family: Family) -> ModelConfig:
    """A model of ``family`` as `Family.read` makes it where config.json has no key but those that
    it must have. Its sizes mean nothing, but they divide one another."""
    return family.read(_SampleReader({}, "a sample"))
