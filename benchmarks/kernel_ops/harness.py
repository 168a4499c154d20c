"""What the kernel benchmarks share: timing, figures per row, a table and JSON.

On a CUDA device every row is timed with events, the L2 cache cleared before each call, median
taken. ``--dry-run`` runs tiny shapes once in Triton's interpreter on a CPU, to show that the script
works; it reports no figures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

Call = Callable[[], object]
_L2_BYTES = 2**28  # read between two calls: several times any GPU's L2
_CYCLES_PER_US = 2000  # of the fastest clock; at a slower one the device sleeps longer
_LEAST_SLEEP_US = 150.0
_QUEUED_AT_ONCE = 32  # calls; with a full queue (1,024 launches) the host would wait in a call
_LATE_SHARE = 0.2  # of the calls: so few that the host was late for leave the median alone


@dataclass(frozen=True)
class Row:
    """One measurement: what runs, and what it moves and computes at least."""

    parameters: dict[str, Any]
    call: Call
    num_bytes: int  # read and written once each
    num_flops: int = 0
    baselines: Mapping[str, Call] = field(default_factory=dict)  # the same work by something else


@dataclass(frozen=True)
class Setting:
    """Where rows run and how large they are."""

    device: torch.device
    is_dry: bool
    has_sweep: bool
    is_wanted: Callable[[int, int], bool] = lambda batch, context: True
    """Of the generation attention: (batch, context) that are made at all."""


def run(ops: Sequence[str], description: str | None) -> None:
    """Command line: run the rows of ``bench_<op>.py`` for some ops, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("ops", nargs="*", metavar="op", help=f"of {', '.join(ops)}; default: all")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes, interpreted, no figures"
    )
    parser.add_argument("--sweep", action="store_true", help="try tiles beside the chosen one")
    parser.add_argument("--output", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    if unknown := set(arguments.ops) - set(ops):
        parser.error(f"no such op: {', '.join(sorted(unknown))}")
    if arguments.dry_run:
        # Before the benchmarks import triton: it decides when it decorates its kernels.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        parser.error("no CUDA device here; --dry-run shows that the script works")
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    setting = Setting(device, arguments.dry_run, arguments.sweep)
    torch.manual_seed(0)
    report = {**environment(setting), "ops": {}}
    for op in arguments.ops or ops:
        sys.stdout.write(f"{op}\n")
        rows = importlib.import_module(f"kernel_ops.bench_{op}").rows
        # A map holds no row while the next is made: of some, two do not fit the GPU.
        report["ops"][op] = list(map(partial(_measured, setting), rows(setting)))
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def environment(setting: Setting) -> dict[str, Any]:
    """Versions, the device, and the copy bandwidth it reaches (bytes read plus written)."""
    facts: dict[str, Any] = {
        "dry_run": setting.is_dry,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "device": "cpu" if setting.is_dry else torch.cuda.get_device_name(),
    }
    if not setting.is_dry:
        source = torch.empty(2**32, dtype=torch.uint8, device=setting.device)
        target = torch.empty_like(source)
        microseconds = time_us(lambda: target.copy_(source)).us
        facts["copy_gb_per_s"] = round(2 * source.numel() / microseconds / 1e3, 1)
    return facts


class Timing(NamedTuple):
    """Median microseconds of a call on the device. ``is_hidden`` is False where the host took
    longer to queue calls than the device slept, so that ``us`` may be the host's."""

    us: float
    is_hidden: bool

    @property
    def note(self) -> dict[str, str]:
        """For a row: nothing, or what it should say."""
        return {} if self.is_hidden else {"note": "the host was late: its time may be in us"}


def time_us(call: Call, seconds: float = 0.1, *, clears_by_writing: bool = False) -> Timing:
    """Time a call on the device, L2 cleared before each.

    It is cleared by reading, as the weights of a step leave it. Written lines would go back to
    memory while the call is timed: as many bytes again as a small call reads.

    Before each the device also sleeps until all of its launches are queued: `do_bench` does not,
    and with it a call of two launches and many checked arguments is as long as the host takes. It
    sleeps twice as long as the host has needed in a first round.
    """
    scratch = torch.zeros(_L2_BYTES // 4, dtype=torch.int32, device="cuda")

    sleep_us = _LEAST_SLEEP_US

    def run(count: int) -> tuple[list[float], list[float]]:
        """Microseconds of the device, and of the host to queue, of each call."""
        pairs, queued = [], []
        for _ in range(count):
            start, end = (_timing_event() for _ in range(2))
            scratch.zero_() if clears_by_writing else scratch.amax()
            torch.cuda._sleep(int(sleep_us * _CYCLES_PER_US))  # type: ignore[no-untyped-call]
            began = time.perf_counter()
            start.record()
            call()
            end.record()
            queued.append(1e6 * (time.perf_counter() - began))
            pairs.append((start, end))
            if len(pairs) % _QUEUED_AT_ONCE == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in pairs], queued

    run(1)  # compiles
    began = time.perf_counter()
    _, queued = run(3)
    each = (time.perf_counter() - began) / 3
    sleep_us = max(sleep_us, 2 * statistics.median(queued))
    count = min(max(int(seconds / each), 5), 300)
    run(count // 5)  # clocks rise
    times, queued = run(count)
    num_late = sum(one > sleep_us for one in queued)
    return Timing(statistics.median(times), is_hidden=num_late <= count * _LATE_SHARE)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


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
    sys.stdout.write(f"  {cells}\n")
    sys.stdout.flush()
    return result


def num_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of the elements of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
