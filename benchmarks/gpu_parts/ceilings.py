"""What the machine can do: bandwidth of a copy and of reading, bf16 and FP8 matrix products.

Matrix products are also measured at the shapes of the 8B's linears and small batches, where real
steps run: no step is faster than the sum of its own products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from gpu_parts.common import LLAMA_8B, Row, Setting

from inflight_backend.engine.layers import Fp8Linear, Linear, quantize


def rows(setting: Setting) -> Iterator[Row]:
    """Bandwidths, large products, then the linears of a step."""
    yield from _bandwidth(setting)
    size = 64 if setting.is_dry else 8192
    yield from _products(setting, "square", size, size, [size])
    if setting.is_dry:
        return
    hidden, inner = LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size
    qkv = LLAMA_8B.query_size + 2 * LLAMA_8B.kv_size
    # 17: where FP8 products pick another kernel from so many rows on, fewer should be padded to it.
    batches = [1, 64, 256] if setting.is_quick else [1, 8, 16, 17, 32, 64, 128, 256, 1024, 8192]
    for name, rows_, columns in (
        ("gate_up", 2 * inner, hidden),
        ("down", hidden, inner),
        ("qkv", qkv, hidden),
        ("output", hidden, LLAMA_8B.query_size),
    ):
        yield from _products(setting, name, rows_, columns, batches)


def _bandwidth(setting: Setting) -> Iterator[Row]:
    num_bytes = 2**12 if setting.is_dry else 2**32
    source = torch.randn(num_bytes // 4, device=setting.device)
    target = torch.empty_like(source)
    for name, call, moved in (
        ("copy", lambda: target.copy_(source), 2 * num_bytes),
        ("read (sum)", source.sum, num_bytes),
        ("read (max)", source.amax, num_bytes),
    ):
        seconds = time_seconds(setting, call)
        yield {"what": name, **setting.figures(gb_per_s=moved / seconds / 1e9)}
    # As small as what generation attention reads at batch 8. Were the L2 cleared by writing, what
    # is written back would show here: all other rows clear it by reading.
    small = source[: 2**23]
    for name, is_written in (("reading", False), ("writing", True)):
        seconds = time_seconds(setting, small.amax, clears_by_writing=is_written)
        figures = setting.figures(us=1e6 * seconds, gb_per_s=small.nbytes / seconds / 1e9)
        yield {"what": f"33 MB, L2 cleared by {name}", **figures}


def _products(
    setting: Setting, name: str, num_rows: int, columns: int, batches: list[int]
) -> Iterator[Row]:
    weight = torch.randn(num_rows, columns, dtype=torch.bfloat16, device=setting.device)
    plain, quantised = Linear(weight), Fp8Linear(weight)
    for batch in batches:
        x = torch.randn(batch, columns, dtype=torch.bfloat16, device=setting.device)
        x_fp8 = quantize(x)
        for kind, call, width in (
            ("bf16", lambda x=x: plain(x), 2),
            ("fp8", lambda x=x_fp8: quantised(x), 1),
        ):
            seconds = time_seconds(setting, call)
            flops = 2 * batch * num_rows * columns
            moved = (num_rows * columns + batch * columns) * width + 2 * batch * num_rows
            yield {
                "what": f"{name} {kind}",
                "tokens": batch,
                **setting.figures(
                    us=1e6 * seconds,
                    tflop_per_s=flops / seconds / 1e12,
                    gb_per_s=moved / seconds / 1e9,
                ),
            }


def time_seconds(
    setting: Setting, call: Callable[[], object], *, clears_by_writing: bool = False
) -> float:
    """Median time on the device, L2 cleared before each call; a dry run only calls."""
    from benchmarks.harness import time_us

    if setting.is_dry:
        call()
        return 1.0
    return time_us(call, clears_by_writing=clears_by_writing) / 1e6
