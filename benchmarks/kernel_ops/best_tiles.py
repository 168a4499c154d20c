"""Writes ``tuned_tiles.json`` from reports of sweeps: per shape, the tile that loses least.

python -m kernel_ops.run_all --sweep --output sweep.json      or gpu.py --parts compile/tiles tiles
python -m kernel_ops.best_tiles sweep.json [--write]

Of a gpu.py that was killed, gpu.rows.jsonl is read instead of gpu.json.
A tile is judged by the geometric mean, over all rows of its shape, of its time over the best time
in the row: one that is best here and twice as slow there does not win.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from math import exp, log
from pathlib import Path
from typing import Any

from inflight_kernels.launch import PATH, tile_key
from kernel_ops.paged_batch import LLAMA_8B, LLAMA_13B

Row = dict[str, Any]
_HEADS = {heads.name: heads for heads in (LLAMA_8B, LLAMA_13B)}
_LABELS = ("shape", "cache", "batch", "context", "kind", "work", "block", "layout", "room")


def best_tiles(ops: dict[str, list[Row]], capability: int) -> dict[str, list[int]]:
    """Key of `tile_key` -> tile, for every shape of the attention ops that was measured."""
    losses: dict[str, dict[tuple[int, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for op, rows in ops.items():
        cases: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in rows:
            if "tile" in row and "us" in row and "splits" not in row:  # those compare splits
                cases[tuple(str(row.get(label)) for label in _LABELS)].append(row)
        for (shape, cache, *_), measured in cases.items():
            heads = _HEADS[shape]
            group = heads.num_heads // heads.num_kv_heads
            key = tile_key(op, capability, heads.head_dim, group, cache)
            best = min(row["us"] for row in measured)
            for row in measured:
                losses[key][tuple(row["tile"])].append(log(row["us"] / best))
    return {key: list(_least(tiles)) for key, tiles in sorted(losses.items())}


def _least(tiles: dict[tuple[int, ...], list[float]]) -> tuple[int, ...]:
    """Of the tiles that ran in the most rows (some do not compile for all), the best on average."""
    most = max(map(len, tiles.values()))
    means = {tile: exp(sum(each) / most) for tile, each in tiles.items() if len(each) == most}
    return min(means, key=lambda tile: means[tile])


def main() -> None:
    """Print the tiles, or write them where the ops look."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path, help="JSON of a sweep")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU that was measured")
    parser.add_argument("--write", action="store_true", help=f"write {PATH.name}")
    options = parser.parse_args()
    report = read_report(options.report)
    rows = report["ops"] if "ops" in report else _by_op(report["parts"]["tiles"])
    device = report.get("device") or report.get("gpu", "unknown")
    content = {"measured_on": device, "tiles": best_tiles(rows, options.capability)}
    text = json.dumps(content, indent=1) + "\n"
    sys.stdout.write(text)
    if options.write:
        PATH.write_text(text, encoding="utf-8")


def read_report(path: Path) -> dict[str, Any]:
    """JSON of a run, or the lines that gpu.py wrote: facts about the run first, then rows."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        report: dict[str, Any] = json.loads(text)
        return report
    facts, *rows = map(json.loads, text.splitlines())
    return {**facts, "parts": {"tiles": [row for row in rows if row["part"] == "tiles"]}}


def _by_op(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of gpu.py's part, which names the op in each."""
    ops: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if "op" in row:
            ops[row["op"]].append(row)
    return ops


if __name__ == "__main__":
    main()
