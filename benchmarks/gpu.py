"""Everything we claim of a GPU, in one command: checks, ceilings, K1-K3, E1-E4, O1.

    python benchmarks/gpu.py              all parts, at most 9 minutes, made for one H200
    python benchmarks/gpu.py --quick      at most 3 minutes: checks, ceilings, E1 and O1, some of K1
    python benchmarks/gpu.py --parts E3   one part with all the time to itself
    python benchmarks/gpu.py --parts compile/tiles tiles   ranked tiles, for kernel_ops.best_tiles
    python benchmarks/gpu.py --dry-run    every part on a CPU with tiny shapes; reports no figures

Each part has processes of its own and a time limit: one that fails, hangs or breaks the CUDA
context leaves the rows it made and a row that says so, with its stderr. The JSON goes to
``--output``, else to ``$OUT/gpu.json``, else nowhere; the table comes last. The parts append every
row to a file beside it, ``gpu.rows.jsonl``, as soon as they have it: a call that is killed leaves
all it measured there. Needs torch, triton and numpy only. Weights are random (seeded, made on the
device): no checkpoint is read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

_BEGAN = time.monotonic()  # before torch is imported: up to 40 s where its files are not cached yet
ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = ("backend", "scheduler", "kernels", "client", "benchmarks")


class Part(NamedTuple):
    """Module and function of `gpu_parts`, and seconds of a full and a quick run (0: left out)."""

    function: str
    full: int
    quick: int
    num_processes: int = 1
    """Beside one another: for what compiles much and times nothing."""
    named: int = 0
    """What it wants where parts are named, if that is more than `full`."""


# What later work depends on most comes first; time that a part leaves over goes to the parts behind
# it, and the whole run ends in time whatever a part does. An empty Triton cache is allowed for.
# What an error would cost besides itself is a part of its own.
PARTS = {
    "checks": Part("checks.kernels", 55, 40, num_processes=8),
    "engines": Part("checks.engines", 60, 40, num_processes=8),
    "families": Part("family_checks.rows", 0, 0, num_processes=12, named=90),
    "ceilings": Part("ceilings.rows", 30, 18),
    "compile": Part("compiling.rows", 40, 22, num_processes=12),
    "E1/O1": Part("steps.bf16", 40, 35),
    "E1/fp8": Part("steps.fp8", 35, 0),
    "E1/defaults": Part("steps.defaults", 0, 0, named=25),
    "K1": Part("kernel_rows.generation_attention", 40, 15),
    "E3": Part("offline.inflight", 85, 0, named=130),
    "E4": Part("offline.ragged", 40, 0, named=50),
    "K2": Part("kernel_rows.context_attention", 25, 0),
    "E2": Part("offline.static", 55, 0, named=170),
    "K3": Part("kernel_rows.token_kernels", 25, 0, named=70),
    "E4/14B": Part("offline.ragged_14b", 0, 0, named=60),
    "quantized": Part("quantized_checks.rows", 0, 0, num_processes=12, named=70),
    "compile/quantized": Part("compiling.quantized", 0, 0, num_processes=12, named=40),
    "K4": Part("kernel_rows.quantized", 0, 0, named=60),
    "K4/tiles": Part("kernel_rows.quantized_tiles", 0, 0, named=110),
    "compile/tiles": Part("compiling.tiles", 0, 0, num_processes=12, named=60),
    "tiles": Part("kernel_rows.tiles", 0, 0, named=300),
}
_CHECKS = ("checks", "engines")
_KERNELS_FAILED, _ENGINES_FAILED, _ASSEMBLER_MAY_HAVE = 1, 3, 4
"""Exit statuses; the second where the kernels are right, the third where those are wrong that a
fault of Triton's assembler may spoil. (2 is what argparse ends with.)"""
_BY_ASSEMBLER = ("context ", "invariant_linear ")
_FULL_SECONDS, _QUICK_SECONDS = 530, 170
_LEAST_SECONDS = 10  # with less a part would be ended before it has imported torch

Row = dict[str, Any]


def main() -> None:
    """Run the parts, write the JSON, print the table; the exit status is `_status`'s."""
    sys.path[:0] = [str(ROOT / folder) for folder in _FOLDERS]
    options = _parse()
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # as a server
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if options.part:
        _run_as_child(options)
        return
    from gpu_parts.report import describe, write

    facts = describe(options.dry_run)
    report: dict[str, Any] = {**facts, "parts": {}}
    write(report, options.output)
    if options.output:
        options.rows = options.output.with_suffix(".rows.jsonl")
        options.rows.write_text(json.dumps({"part": "run", **facts}) + "\n", encoding="utf-8")
    names = [name for name in options.parts or PARTS if _seconds(name, options) > 0]
    for number, name in enumerate(names):
        start = time.monotonic()
        rows = list(_rows(name, names[number + 1 :], options))
        report["parts"][name] = rows
        if name == "ceilings":
            options.ceilings = _ceilings(rows)
            report["floors_from"] = json.loads(options.ceilings or '{"is_measured": false}')
        print(f"{name}: {len(rows)} rows in {time.monotonic() - start:.0f} s", flush=True)
        write(report, options.output)
    _print(report)
    sys.exit(_status(report["parts"]))


def _status(parts: dict[str, list[Row]]) -> int:
    """0 unless a check failed; what kernels do says nothing where only engines are wrong."""
    failed = {name: sum(map(_is_bad, parts.get(name, []))) for name in _CHECKS}
    if any(failed.values()):
        print(f"{sum(failed.values())} checks failed", file=sys.stderr)
    if failed["checks"]:
        names = [row.get("check", "") for row in parts["checks"] if _is_bad(row)]
        may_have = any(name.startswith(_BY_ASSEMBLER) for name in names)
        return _ASSEMBLER_MAY_HAVE if may_have else _KERNELS_FAILED
    return _ENGINES_FAILED if failed["engines"] else 0


def _run_as_child(options: argparse.Namespace) -> None:
    """What `run_isolated` starts: a part, or this process's share of it."""
    from gpu_parts.isolated import keep_row

    number, _ = _share(options.share)
    for row in run_part(options.part, options, options.until - time.time()):
        keep_row(options.rows, options.part, number, row)


def _rows(name: str, later: list[str], options: argparse.Namespace) -> Iterator[Row]:
    """The rows of a part, which gets all the time that those behind it can spare."""
    seconds = _seconds(name, options)
    if options.dry_run:
        yield from run_part(name, options, seconds)
        return
    left = _all_seconds(options) - (time.monotonic() - _BEGAN)
    spare = left - sum(_seconds(other, options) for other in later)
    if left < _LEAST_SECONDS:
        yield {"error": "no time was left"}
    else:
        yield from run_isolated(name, options, min(left, max(seconds, spare)))


def _is_bad(row: Row) -> bool:
    """Of a check's rows: it failed, or its process did."""
    return not row["ok"] if "ok" in row else "error" in row


def _all_seconds(options: argparse.Namespace) -> float:
    return float(options.seconds or (_QUICK_SECONDS if options.quick else _FULL_SECONDS))


def _seconds(name: str, options: argparse.Namespace) -> float:
    """Time limit of a part, 0 to leave it out. Parts that are named share the whole time."""
    part = PARTS[name]
    if options.parts:
        shares = {other: PARTS[other].named or PARTS[other].full for other in options.parts}
        return _all_seconds(options) * shares[name] / sum(shares.values())
    if options.dry_run:
        return part.full or 1
    if options.quick:
        return part.quick * _all_seconds(options) / _QUICK_SECONDS
    return part.full * _all_seconds(options) / _FULL_SECONDS


def run_part(name: str, options: argparse.Namespace, seconds: float) -> Iterator[Row]:
    """The rows of a part, in this process, until its time is over; an error is the last row."""
    stop_at = time.monotonic() + seconds  # before what it needs is imported
    import torch

    from gpu_parts.common import Ceilings, Setting
    from gpu_parts.report import shorten

    setting = Setting(
        device=torch.device("cpu" if options.dry_run else "cuda"),
        is_dry=options.dry_run,
        is_quick=options.quick,
        stop_at=stop_at,
        ceilings=Ceilings(**json.loads(options.ceilings)) if options.ceilings else Ceilings(),
        share=_share(options.share),
    )
    module, function = PARTS[name].function.split(".")
    try:
        part: Callable[[Setting], Iterator[Row]] = getattr(
            import_module(f"gpu_parts.{module}"), function
        )
        for row in part(setting):
            yield row
            if setting.seconds_left < 0 and not setting.is_dry:
                yield {"error": f"stopped after its {seconds:.0f} seconds"}
                return
    except Exception as error:  # whatever breaks one part must leave the others alone
        traceback.print_exc()  # the row `stderr` will have it
        yield {"error": shorten(f"{type(error).__name__}: {error}", 500)}


def _share(text: str | None) -> tuple[int, int]:
    """Number and count of the processes of the part, as `isolated` gives them."""
    if text is None:
        return 0, 1
    number, count = text.split("/")
    return int(number), int(count)


def run_isolated(name: str, options: argparse.Namespace, seconds: float) -> Iterator[Row]:
    """The rows of a part run in processes of its own, which are ended when its time is over."""
    from gpu_parts import isolated

    arguments = ["--ceilings", options.ceilings] if options.ceilings else []
    arguments += ["--quick"] if options.quick else []
    arguments += ["--dry-run"] if options.dry_run else []
    script, num_processes = Path(__file__).resolve(), PARTS[name].num_processes
    yield from isolated.run_isolated(
        script, name, arguments, seconds, options.rows, num_processes=num_processes
    )


def _parse() -> argparse.Namespace:
    from gpu_parts import isolated

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="only these")
    parser.add_argument("--ceilings", help=argparse.SUPPRESS)
    return isolated.parse(parser, "gpu")


def _ceilings(rows: list[Row]) -> str:
    """The largest measured rates, as JSON for the parts that follow; "" if there are none."""
    reads = [row["gb_per_s"] for row in rows if row.get("what", "").startswith(("copy", "read"))
             and "gb_per_s" in row]  # fmt: skip
    rates = {
        kind: [row["tflop_per_s"] for row in rows
               if row.get("what") == f"square {kind}" and "tflop_per_s" in row]
        for kind in ("bf16", "fp8")
    }  # fmt: skip
    found: dict[str, float | bool] = {"is_measured": bool(reads)}
    if reads:
        found["read_bytes"] = 1e9 * max(reads)
    for kind, values in rates.items():
        if values:
            found[f"{kind}_flops"] = 1e12 * max(values)
    return json.dumps(found) if reads else ""


def _print(report: dict[str, Any]) -> None:
    """A line per row but for good checks; what matters most last, where a tail shows it."""
    from gpu_parts.report import shorten

    for name, rows in reversed(report["parts"].items()):
        good = [row for row in rows if row.get("ok")]
        print(f"\n{name}" + (f": {len(good)} of {len(rows)} good" if good else ""))
        for row in rows:
            if not row.get("ok"):
                print("  " + "  ".join(f"{k}={shorten(str(v), 800)}" for k, v in row.items()))


if __name__ == "__main__":
    main()
