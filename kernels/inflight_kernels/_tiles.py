"""Tiles that were measured to be best, if somebody measured: ``tuned_tiles.json`` beside this file.

Without the file, or for a shape that is not in it, the ops choose by rule (their ``choose_tile``).
``python -m benchmarks.best_tiles`` writes it from the report of a sweep on the GPU in question.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from inflight_kernels import _host

PATH = Path(__file__).with_name("tuned_tiles.json")


def tile_key(op: str, capability: int, head_dim: int, group: int, cache_dtype: str) -> str:
    """How a tile is looked up; ``cache_dtype`` as torch names it, ``group`` query heads per KV
    head."""
    return f"{op} sm_{capability} head_dim={head_dim} group={group} {cache_dtype}"


def tuned_tile(op: str, head_dim: int, group: int, cache_dtype: str) -> list[int] | None:
    """The fields of the op's tile for the current GPU, None if nobody measured it."""
    return _table().get(tile_key(op, _host.capability(), head_dim, group, cache_dtype))


@cache
def _table() -> dict[str, list[int]]:
    if not PATH.is_file():
        return {}
    content = json.loads(PATH.read_text(encoding="utf-8"))
    tiles: dict[str, list[int]] = content["tiles"]
    return tiles
