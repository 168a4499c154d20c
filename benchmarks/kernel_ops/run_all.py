"""Kernel benchmarks in one process (K1, K2 and K3): a table, and figures per row as JSON.

python -m kernel_ops.run_all [OP ...] --output kernels.json [--sweep | --dry-run]

On a CUDA device every row is timed with events, the L2 cache cleared before each call, median
taken. ``--dry-run`` runs tiny shapes once in Triton's interpreter on a CPU, to show that the script
works; it reports no figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kernel_ops.harness import Row, Setting, time_us

OPS = [
    path.stem.removeprefix("bench_") for path in sorted(Path(__file__).parent.glob("bench_*.py"))
]


def main() -> None:
    """Run the rows, print them, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(OPS)}; default: all")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes, interpreted, no figures"
    )
    parser.add_argument("--sweep", action="store_true", help="try tiles beside the chosen one")
    parser.add_argument("--output", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    if unknown := set(arguments.ops) - set(OPS):
        parser.error(f"no benchmark of {', '.join(sorted(unknown))}")
    if arguments.dry_run:
        # Before anything imports triton: it decides when it decorates its kernels.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        parser.error("no CUDA device here; --dry-run shows that the script works")
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    setting = Setting(device, arguments.dry_run, arguments.sweep)
    torch.manual_seed(0)
    report: dict[str, Any] = {**_environment(setting), "ops": {}}
    for op in arguments.ops or OPS:
        print(op)
        rows = import_module(f"kernel_ops.bench_{op}").rows(setting)
        # A map holds no row while the next is made: of some, two do not fit the GPU.
        report["ops"][op] = list(map(partial(_measured, setting), rows))
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _environment(setting: Setting) -> dict[str, Any]:
    """Versions, the device, and the copy bandwidth it reaches (bytes read plus written)."""
    facts: dict[str, Any] = {
        "dry_run": setting.is_dry,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": import_module("triton").__version__,
        "device": "cpu" if setting.is_dry else torch.cuda.get_device_name(),
    }
    if not setting.is_dry:
        source = torch.empty(2**32, dtype=torch.uint8, device=setting.device)
        target = torch.empty_like(source)
        microseconds = time_us(lambda: target.copy_(source)).us
        facts["copy_gb_per_s"] = round(2 * source.numel() / microseconds / 1e3, 1)
    return facts


def _measured(setting: Setting, row: Row) -> dict[str, Any]:
    """Run a row; figures only where a device was timed."""
    result: dict[str, Any] = dict(row.parameters)
    if setting.is_dry:
        for call in (row.call, *row.baselines.values()):
            call()
    else:
        timing = time_us(row.call)
        microseconds = timing.us
        result |= {"us": round(microseconds, 2), **timing.note}
        result["gb_per_s"] = round(row.num_bytes / microseconds / 1e3, 1)
        if row.num_flops:
            result["tflop_per_s"] = round(row.num_flops / microseconds / 1e6, 1)
        for name, call in row.baselines.items():
            result[f"{name}_us"] = round(time_us(call).us, 2)
    cells = "  ".join(f"{key}={value}" for key, value in result.items())
    print(f"  {cells}", flush=True)
    return result


if __name__ == "__main__":
    main()
