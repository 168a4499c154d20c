"""K1, K2, K3: the benchmarks of the kernels folder with the ratio to the floor of every row.

The floor of a row is the larger of its bytes over the read bandwidth and its operations over the
bf16 rate; whatever runs on FP8 caches multiplies in bf16 or float16 all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from gpu_parts.ceilings import time_seconds
from gpu_parts.common import Row, Setting


def generation_attention(setting: Setting) -> Iterator[Row]:
    """K1; a quick run takes the batches and contexts of the targets only."""
    wanted = {(1, 1024), (64, 1024), (128, 1024), (256, 1024), (32, 4096), (8, 16384)}

    def is_wanted(labels: dict[str, Any]) -> bool:
        return not setting.is_quick or (labels["batch"], labels["context"]) in wanted

    yield from _measured(setting, ["bench_paged_attention_generation"], is_wanted)


def context_attention(setting: Setting) -> Iterator[Row]:
    """K2."""
    yield from _measured(setting, ["bench_paged_attention_context"])


def token_kernels(setting: Setting) -> Iterator[Row]:
    """K3."""
    names = ("rms_norm", "rope_write_kv", "silu_mul", "quantize_fp8", "sample", "copy_blocks")
    yield from _measured(setting, [f"bench_{name}" for name in names])


def tiles(setting: Setting) -> Iterator[Row]:
    """The ranked tiles beside the chosen ones at the shapes of the targets; the report is what
    ``python -m benchmarks.best_tiles`` reads."""

    def is_wanted(labels: dict[str, Any]) -> bool:
        return setting.is_dry or (labels["batch"], labels["context"]) in _TARGETS

    names = ["bench_paged_attention_generation"]
    yield from _measured(setting, names, is_wanted, has_sweep=True)
    yield from _measured(setting, ["bench_paged_attention_context"], has_sweep=True)


_TARGETS = {(8, 16_384), (32, 4096), (64, 1024), (128, 1024), (256, 1024)}


def _measured(
    setting: Setting,
    modules: list[str],
    is_wanted: Callable[[dict[str, Any]], bool] = lambda _: True,
    *,
    has_sweep: bool = False,
) -> Iterator[Row]:
    harness = import_module("benchmarks.harness")
    ceilings = setting.ceilings
    for name in modules:
        module = import_module(f"benchmarks.{name}")
        for row in module.rows(harness.Setting(setting.device, setting.is_dry, has_sweep)):
            if not is_wanted(row.parameters):
                continue
            floor = max(row.num_bytes / ceilings.read_bytes, row.num_flops / ceilings.bf16_flops)
            labels = {"op": name.removeprefix("bench_"), **_labels(row.parameters)}
            try:
                seconds = time_seconds(setting, row.call)
                peers = {
                    f"{peer}_us": 1e6 * time_seconds(setting, call)
                    for peer, call in row.baselines.items()
                    if not has_sweep
                }
            except Exception as error:  # one tile or peer that fails leaves the others
                yield {**labels, "error": f"{type(error).__name__}: {error}"[:200]}
                continue
            yield {
                **labels,
                **setting.figures(
                    us=1e6 * seconds,
                    gb_per_s=row.num_bytes / seconds / 1e9,
                    tflop_per_s=row.num_flops / seconds / 1e12,
                    of_floor=floor / seconds,
                    **peers,
                ),
            }


def _labels(parameters: dict[str, Any]) -> Row:
    """As they are where JSON knows them, tiles as lists."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in parameters.items()
        if key != "chosen"
    }
