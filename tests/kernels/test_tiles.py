"""Measured tiles: found by a sweep, kept in a file, used by the ops; without the file, the rule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight_kernels import launch
from inflight_kernels.ops import paged_attention_context as context
from inflight_kernels.ops import paged_attention_generation as generation
from kernel_ops.best_tiles import best_tiles, read_report


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Path]:
    """Where the tiles are looked up; there is no file yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "PATH", tmp_path / "tuned_tiles.json")
        launch._table.cache_clear()
        yield launch.PATH
    launch._table.cache_clear()


def row(us: float, tile: list[int], **labels: Any) -> dict[str, Any]:
    return {"shape": "8B", "cache": "bfloat16", "batch": 64, "tile": tile, "us": us, **labels}


def test_the_rule_where_nobody_measured(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not table.exists()
    assert generation.choose_tile(128, torch.bfloat16, 4) == generation.GenerationTile(64, 5, 4)
    fp8 = torch.float8_e4m3fn  # half as large: one tile more ahead
    assert generation.choose_tile(128, fp8, 4) == generation.GenerationTile(64, 7, 4)
    assert context.choose_tile(4, 128, torch.bfloat16, None) == context.ContextTile(128, 64, 5, 8)
    for capability in (89, 120):  # 99 KiB of shared memory: of 55 only one program would fit
        monkeypatch.setattr(launch, "capability", lambda each=capability: each)
        assert generation.choose_tile(128, fp8, 4) == generation.GenerationTile(64, 5, 4)


def test_a_measured_tile_is_used_for_its_shape_only(table: Path) -> None:
    tiles = {
        "paged_attention_generation sm_90 head_dim=128 group=4 float8_e4m3fn": [32, 5, 4],
        "paged_attention_context sm_90 head_dim=128 group=4 bfloat16": [64, 64, 3, 4],
    }
    table.write_text(json.dumps({"tiles": tiles}), encoding="utf-8")
    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    assert generation.choose_tile(128, fp8, 4) == generation.GenerationTile(32, 5, 4)
    for other in ((128, bf16, 4), (128, fp8, 1), (64, fp8, 4)):
        assert generation.choose_tile(*other).block_n == 64
    assert context.choose_tile(4, 128, bf16, None) == context.ContextTile(64, 64, 3, 4)
    assert context.choose_tile(4, 128, bf16, None, fp8).block_m == 128
    assert context.choose_tile(4, 128, bf16, 4).block_m == 16, "short chunks keep their own"


def test_the_tile_that_loses_least_wins() -> None:
    steady, moody, rare = [64, 5, 4], [128, 3, 4], [32, 5, 2]
    rows = [
        row(10.0, steady), row(9.0, moody), row(5.0, rare),
        row(20.0, steady, batch=256), row(40.0, moody, batch=256),
        row(7.0, steady, cache="float8_e4m3fn"), row(6.0, moody, cache="float8_e4m3fn"),
        row(1.0, rare, splits=1), row(1.0, rare, splits=1, batch=256),
        {"shape": "8B", "cache": "bfloat16", "tile": [1, 1, 1], "error": "does not compile"},
    ]  # fmt: skip
    assert best_tiles({"paged_attention_generation": rows}, 90) == {
        "paged_attention_generation sm_90 head_dim=128 group=4 bfloat16": steady,
        "paged_attention_generation sm_90 head_dim=128 group=4 float8_e4m3fn": moody,
    }


def test_the_rows_of_a_killed_run_are_read(tmp_path: Path) -> None:
    measured = row(10.0, [64, 5, 4], part="tiles", process=0)
    lines = [{"part": "run", "gpu": "fast"}, {"part": "K1", "process": 0, "us": 1.0}, measured]
    file = tmp_path / "gpu.rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    report = read_report(file)
    assert report["gpu"] == "fast"
    assert report["parts"] == {"tiles": [measured]}
