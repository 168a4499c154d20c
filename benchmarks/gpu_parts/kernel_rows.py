"""K1 to K4: the benchmarks of the kernels folder with the ratio to the floor of every row.

The floor of a row is the larger of its bytes over the read bandwidth and its operations over the
bf16 rate; whatever runs on FP8 caches multiplies in bf16 or float16 all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

from gpu_parts.ceilings import time_seconds
from gpu_parts.common import Row, Setting
from gpu_parts.report import shorten

# Batches and contexts of the generation attention that we have targets for.
_TARGETS = {(1, 1024), (64, 1024), (128, 1024), (256, 1024), (32, 4096), (8, 16_384)}
_DRY_ROWS = 2  # of an op: `kernel_ops.run_all` runs them all dry
TILED_OPS = ("paged_attention_generation", "paged_attention_context")
QUANTIZED_OPS = ("quantized_linear",)
# The draw first: the least is known of it. Then what runs once per layer and token.
_TOKEN_OPS = ("sample", "rope_write_kv", "rms_norm", "silu_mul", "quantize_fp8", "copy_blocks")


def generation_attention(setting: Setting) -> Iterator[Row]:
    """K1; a quick run takes the batches and contexts of the targets only."""
    yield from _measured(setting, ["paged_attention_generation"], setting.is_quick)


def context_attention(setting: Setting) -> Iterator[Row]:
    """K2."""
    yield from _measured(setting, ["paged_attention_context"])


def token_kernels(setting: Setting) -> Iterator[Row]:
    """K3."""
    yield from _measured(setting, _TOKEN_OPS)


def quantized(setting: Setting) -> Iterator[Row]:
    """K4: linears of quantised weights."""
    yield from _measured(setting, QUANTIZED_OPS)


def quantized_tiles(setting: Setting) -> Iterator[Row]:
    """Other tiles for them beside the chosen ones."""
    yield from _measured(setting, QUANTIZED_OPS, has_sweep=True)


def tiles(setting: Setting) -> Iterator[Row]:
    """The ranked tiles beside the chosen ones at the shapes of the targets; the report is what
    ``python -m kernel_ops.best_tiles`` reads."""
    yield from _measured(setting, TILED_OPS, only_targets=True, has_sweep=True)


def timed_ops(setting: Setting) -> tuple[str, ...]:
    """What K1, K2 and K3 run; in a quick run there is K1 alone."""
    return TILED_OPS[:1] if setting.is_quick else (*TILED_OPS, *_TOKEN_OPS)


def made_rows(
    setting: Setting, op: str, *, only_targets: bool = False, has_sweep: bool = False
) -> Iterator[Any]:
    """The rows of an op, `kernel_ops.harness.Row`, on the device of ``setting``."""
    harness = import_module("kernel_ops.harness")

    def is_wanted(batch: int, context: int) -> bool:
        return not only_targets or setting.is_dry or (batch, context) in _TARGETS

    where = harness.Setting(setting.device, setting.is_dry, has_sweep, is_wanted)
    rows = import_module(f"kernel_ops.bench_{op}").rows(where)
    return islice(rows, _DRY_ROWS) if setting.is_dry else rows


def _measured(
    setting: Setting, ops: Sequence[str], only_targets: bool = False, *, has_sweep: bool = False
) -> Iterator[Row]:
    """The rows of some ops; an op that fails leaves the others."""
    for op in ops:
        rows = made_rows(setting, op, only_targets=only_targets, has_sweep=has_sweep)
        try:
            # A map holds no row while the next is made: of some, two do not fit the GPU.
            yield from map(partial(_row, setting, op, not has_sweep), rows)
        except Exception as error:  # while a row was made
            yield {"op": op, "error": shorten(f"{type(error).__name__}: {error}", 300)}


def _row(setting: Setting, op: str, has_peers: bool, row: Any) -> Row:
    """Our figures; then a peer's, or why it has none."""
    ceilings = setting.ceilings
    floor = max(row.num_bytes / ceilings.read_bytes, row.num_flops / ceilings.bf16_flops)
    made: Row = {"op": op, **_labels(row.parameters)}
    try:
        seconds, note = time_seconds(setting, row.call)
    except Exception as error:  # a tile that does not compile leaves the others
        return {**made, "error": shorten(f"{type(error).__name__}: {error}", 300)}
    made |= setting.figures(
        us=1e6 * seconds,
        gb_per_s=row.num_bytes / seconds / 1e9,
        tflop_per_s=row.num_flops / seconds / 1e12,
        of_floor=floor / seconds,
    )
    made |= note
    for peer, call in row.baselines.items() if has_peers else ():
        try:
            made |= setting.figures(**{f"{peer}_us": 1e6 * time_seconds(setting, call)[0]})
        except Exception as error:
            made[peer] = shorten(f"{type(error).__name__}: {error}", 300)
    return made


def _labels(parameters: dict[str, Any]) -> Row:
    """As they are where JSON knows them, tiles as lists."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in parameters.items()
        if key != "chosen"
    }
