"""What all ops share: checks that the layers of a step would repeat are made once, and tiles are
measured ones where there are some."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight_kernels import launch
from inflight_kernels.ops.attention import paged_attention_context as context
from inflight_kernels.ops.attention import paged_attention_generation as generation
from kernel_ops.best_tiles import best_tiles, read_report

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
Check = Callable[[torch.Tensor, float | None], None]


def test_the_reference_needs_no_triton() -> None:
    """Nor does the package need torch: it can be imported on a server without either."""
    code = (
        "import sys; sys.modules['triton'] = None; "
        "import inflight_kernels; assert 'torch' not in sys.modules; "
        "from inflight_kernels import reference"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def checked() -> list[torch.Tensor]:
    """The tensors that `check` has looked at."""
    return []


@pytest.fixture
def check(checked: list[torch.Tensor]) -> Check:
    @launch.once_in_a_row
    def check(tensor: torch.Tensor, number: float | None) -> None:
        checked.append(tensor)
        launch.check_shape("tensor", tensor, (None, 4))
        launch.check_rows("tensor", tensor)
        launch.check_positive("number", number)

    return check


def test_what_differs_is_checked(checked: list[torch.Tensor], check: Check) -> None:
    for _ in range(3):
        check(torch.randn(2, 4), 1.0)
    assert len(checked) == 1, "other numbers in other memory do not differ"
    others: list[tuple[torch.Tensor, float | None]] = [
        (torch.zeros(3, 4), 1.0),
        (torch.zeros(2, 8)[:, :4], 1.0),
        (torch.zeros(2, 4).half(), 1.0),
        (torch.zeros(2, 4, device="meta"), 1.0),
        (torch.zeros(2, 4), 2.0),
        (torch.zeros(2, 4), None),
    ]
    for number, other in enumerate(others):
        check(*other)
        assert len(checked) == number + 2


def test_a_few_kinds_may_take_turns(checked: list[torch.Tensor], check: Check) -> None:
    for _ in range(3):
        for rows in (1, 2, 3, 4):
            check(torch.zeros(rows, 4), None)
    assert len(checked) == 4
    for rows in range(9):
        check(torch.zeros(rows, 4), None)
    check(torch.zeros(0, 4), None)
    assert len(checked) == 4 + 9 + 1, "and more are forgotten"


def test_what_was_refused_is_refused_again(checked: list[torch.Tensor], check: Check) -> None:
    for tensor in (torch.zeros(2, 5), torch.zeros(4, 2).t()):
        for _ in range(2):
            with pytest.raises(ValueError, match="tensor: "):
                check(tensor, 1.0)
    assert len(checked) == 4


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


def test_the_rule_where_nothing_was_measured(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not table.exists()
    assert generation.choose_tile(128, BF16, 4) == generation.GenerationTile(64, 5, 4)
    # Half as large: one tile more ahead.
    assert generation.choose_tile(128, FP8, 4) == generation.GenerationTile(64, 7, 4)
    assert context.choose_tile(4, 128, BF16, None) == context.ContextTile(128, 64, 5, 8)
    for capability in (89, 120):  # 99 KiB of shared memory: of 55 only one program would fit
        monkeypatch.setattr(launch, "capability", lambda each=capability: each)
        assert generation.choose_tile(128, FP8, 4) == generation.GenerationTile(64, 5, 4)


def test_a_measured_tile_is_used_for_its_shape_only(table: Path) -> None:
    tiles = {
        "paged_attention_generation sm_90 head_dim=128 group=4 float8_e4m3fn": [32, 5, 4],
        "paged_attention_context sm_90 head_dim=128 group=4 bfloat16": [64, 64, 3, 4],
    }
    table.write_text(json.dumps({"tiles": tiles}), encoding="utf-8")
    assert generation.choose_tile(128, FP8, 4) == generation.GenerationTile(32, 5, 4)
    for other in ((128, BF16, 4), (128, FP8, 1), (64, FP8, 4)):
        assert generation.choose_tile(*other).block_n == 64
    assert context.choose_tile(4, 128, BF16, None) == context.ContextTile(64, 64, 3, 4)
    assert context.choose_tile(4, 128, BF16, None, FP8).block_m == 128
    assert context.choose_tile(4, 128, BF16, 4).block_m == 16, "short chunks keep their own"


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
